"""Which GPUs a container has whose request names none of them."""

from dataclasses import replace
from typing import Any

import pytest

from exporter.evidence import gpu_attribution
from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import attribute_gpus
from exporter.model.gpu import Gpu, MigInstance
from tests.exporter import builders as build
from tests.exporter.evidence.values import OWN, THRESHOLDS, ram

pytestmark = pytest.mark.pure

AMD = build.gpu(0, build.process(4001, 0.25), uuid="GPU-amd", node="renderD128")

UNNAMED = ("nvidia.com/gpu",)
OURS, FREE = build.gpu(0, build.process(4001, 0.25)), build.gpu(1)


def placed(*found: Gpu, request: tuple[str, ...] | None = UNNAMED, **readings: Any) -> gpu_attribution.GpuAttribution:
    return attribute_gpus(
        build.container(gpu_request=request), OWN, replace(build.gpus(*found), **readings), THRESHOLDS
    )


@pytest.mark.parametrize("request_", [UNNAMED, None], ids=["no known name", "no request"])
def test_without_a_name_a_container_has_the_gpus_that_list_its_processes(request_: tuple[str, ...] | None) -> None:
    found = placed(OURS, FREE, request=request_)

    assert (found.gpus, found.utilization_ratio, found.unknown) == (("GPU-0",), 0.25, None)
    assert (found.nameless, found.may_be_elsewhere) == ((), False)


def test_unknown_name_adds_to_known_ones() -> None:
    assert placed(OURS, FREE, request=("1", *UNNAMED)).gpus == ("GPU-0", "GPU-1")


def test_container_without_a_name_and_on_no_gpu_is_idle() -> None:
    found = placed(FREE)

    assert (found.gpus, found.utilization_ratio, found.unknown) == ((), 0.0, None)


MIG_PARENT = build.gpu(2, processes=None)
INSTANCE = build.gpu(2, uuid="MIG-a", mig=MigInstance(parent="GPU-2", number=0, gpu_instance=3, compute_instance=0))


@pytest.mark.parametrize(
    ("others", "failing", "reason"),
    [
        pytest.param((build.gpu(1, processes=None),), {}, "not_listed", id="lists no processes"),
        pytest.param((build.gpu(1, utilization_ratio=0.5),), {}, "not_listed", id="works for no listed process"),
        pytest.param((build.gpu(1, utilization_ratio=None),), {}, None, id="lists others, unmeasured"),
        pytest.param((build.gpu(1, processes=None, lost=True),), {}, None, id="is lost"),
        pytest.param((MIG_PARENT, INSTANCE), {}, None, id="has instances that list processes"),
        pytest.param((), {"failed": ("drm",)}, "source_failed", id="its source fails"),
        pytest.param((), {"nvidia_unread": True}, "source_failed", id="its driver does not answer"),
    ],
)
def test_container_without_a_name_is_unknown_if_another_gpu(
    others: tuple[Gpu, ...], failing: dict[str, Any], reason: str | None
) -> None:
    found = placed(OURS, *others, **failing)

    assert (found.unknown.reason if found.unknown else None) == reason
    assert found.nameless == (UNNAMED if reason else ())
    assert found.may_be_elsewhere is (reason is not None)


def test_container_without_a_name_is_unknown_if_its_processes_are() -> None:
    found = attribute_gpus(build.container(gpu_request=UNNAMED), None, build.gpus(OURS), THRESHOLDS)

    assert (found.unknown, found.nameless) == (gpu_attribution.NO_PIDS, UNNAMED)


def test_number_shows_no_gpu_on_a_host_without_nvidia_hardware() -> None:
    found = placed(AMD, request=("0",))

    assert (found.gpus, found.utilization_ratio, found.unknown) == (("GPU-amd",), 0.25, None)


def test_instance_has_the_name_of_gkes_plugin() -> None:
    assert placed(MIG_PARENT, INSTANCE, request=("2/gi3",)).gpus == ("MIG-a",)


def test_lost_gpu_of_a_container_without_a_name_stays_its_own() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=UNNAMED)
    history.observe(container, history.attribute(container, OWN, build.gpus(OURS, FREE)), ram(1), now_s=0.0)

    lost = replace(OURS, processes=None, lost=True)
    use = history.attribute(container, OWN, build.gpus(lost, FREE))
    found = history.observe(container, use, ram(1), now_s=1.0, lost=("GPU-0",))

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0",), ("GPU-0",), 0.0)
