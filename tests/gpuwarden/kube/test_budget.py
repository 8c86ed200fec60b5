"""The VRAM budget of a pod, as the scheduler counts it."""

from typing import Any

import pytest

from gpuwarden.kube.budget import RESOURCE, BudgetSources, declared_mib

pytestmark = pytest.mark.pure

GPUMEM = "nvidia.com/gpumem"
ALL = BudgetSources(resources=(RESOURCE, GPUMEM), annotations=("gpu-memory",))


def container(said: str | None = None, *, resource: str = RESOURCE, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {} if said is None else {"limits": {resource: said}}, **more}


def pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"annotations": annotations}, "spec": {"containers": list(containers), **spec}}


@pytest.mark.parametrize(
    ("said", "mib"),
    [
        ("1800", 1800),
        ("3k", 3000),
        ("15M", 15_000_000),
        ("2Ki", 2048),
        ("1Mi", 2**20),
        ("3e3", 3000),
        ("99999999", 99999999),
    ],
)
def test_limit_is_read_in_any_notation(said: str, mib: int) -> None:
    assert declared_mib(pod(container(said)), ALL) == mib


SIDECAR = {"restartPolicy": "Always"}
SUMS: dict[str, tuple[dict[str, Any], int]] = {
    "containers add up": (pod(container("1k"), container(), container("500")), 1500),
    "a larger init container counts alone": (pod(container("1k"), initContainers=[container("4k")]), 4000),
    "a smaller init container does not count": (pod(container("2k"), initContainers=[container("1500")]), 2000),
    "sidecars stay": (pod(container("2k"), initContainers=[container("1k", **SIDECAR)]), 3000),
    "an init container runs beside earlier sidecars": (
        pod(container("1k"), initContainers=[container("1k", **SIDECAR), container("3k"), container("10", **SIDECAR)]),
        4000,
    ),
    "overhead is added": (pod(container("1k"), overhead={RESOURCE: "24"}), 1024),
    "requests count without limits": (pod({"name": "c", "resources": {"requests": {RESOURCE: "7"}}}), 7),
}


@pytest.mark.parametrize(("its", "mib"), SUMS.values(), ids=SUMS)
def test_budget_is_what_the_scheduler_counts(its: dict[str, Any], mib: int) -> None:
    assert declared_mib(its, ALL) == mib


def test_pod_without_a_declaration_has_no_budget() -> None:
    assert declared_mib(pod(container(), container("1", resource="nvidia.com/gpu")), ALL) is None
    assert (
        declared_mib(pod(container("3000", resource=GPUMEM), annotations={"gpu-memory": "1"}), BudgetSources()) is None
    )


def test_first_source_that_the_pod_has_counts() -> None:
    annotations = {"gpu-memory": "2000"}

    assert declared_mib(pod(container(), annotations=annotations), ALL) == 2000
    assert declared_mib(pod(container("3000", resource=GPUMEM), annotations=annotations), ALL) == 3000
    both = pod(container("3000", resource=GPUMEM), container("1000"), annotations=annotations)
    assert declared_mib(both, ALL) == 1000


@pytest.mark.parametrize("said", ["", "0", "-1", "1.5", "100m", "1G", "1e9", "100M", " 3", "3\n", "٣", "123456789"])
def test_invalid_budget_is_an_error_that_says_what_is_expected(said: str) -> None:
    for its, what in (
        (pod(container(said)), f"the limit of {RESOURCE}"),
        (pod(container(), annotations={"gpu-memory": said}), "the annotation gpu-memory"),
    ):
        with pytest.raises(ValueError, match=f"^{what} is .*; expected whole MiB, 1 to 99999999$"):
            declared_mib(its, ALL)
