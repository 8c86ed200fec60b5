"""Which pods may be evicted, and the handle of a container in a pod."""

from typing import Any

import pytest

from gpuwarden.kube import pods
from gpuwarden.kube.pods import Handle

pytestmark = pytest.mark.pure

OWNER = {"kind": "ReplicaSet", "name": "web-5d4f", "uid": "o1", "controller": True}


def metadata(*, owner: dict[str, Any] | None = OWNER, annotations: dict[str, str] | None = None, **labels: str) -> Any:
    """The metadata of a pod in namespace ml; by default it opted in and has a controller."""
    its = {f"gpuwarden/{name.replace('_', '-')}": value for name, value in {"managed": "true", **labels}.items()}
    return {
        "namespace": "ml",
        "name": "web-5d4f-x",
        "labels": its,
        "annotations": annotations,
        "ownerReferences": None if owner is None else [{"kind": "Other", "name": "o"}, owner],
    }


def test_pod_that_opted_in_may_be_evicted() -> None:
    assert pods.refusal(metadata(), {"ml"}) == ""
    assert pods.refusal(metadata(owner=None, without_controller="true"), {"ml"}) == ""


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param(metadata(managed="yes"), "gpuwarden/managed is not true", id="another value"),
        pytest.param(metadata() | {"labels": None}, "gpuwarden/managed is not true", id="no labels"),
        pytest.param(metadata() | {"namespace": "web"}, "does not list its namespace web", id="another namespace"),
        pytest.param(metadata(owner=None), "gpuwarden/without-controller=true", id="no controller"),
        pytest.param(metadata(owner=OWNER | {"kind": "Node"}), "static pod", id="owned by its node"),
        pytest.param(metadata(annotations={"kubernetes.io/config.mirror": "h"}), "static pod", id="mirror pod"),
        pytest.param(
            metadata(owner=None, annotations={"kubernetes.io/config.mirror": "h"}, without_controller="true"),
            "static pod",
            id="mirror pod without an owner",
        ),
    ],
)
def test_pod_is_refused_with_a_reason(changed: dict[str, Any], why: str) -> None:
    assert why in pods.refusal(changed, {"ml"})


@pytest.mark.parametrize(("label", "protected"), [("true", True), ("", True), ("false", False)])
def test_protected_pod_is_not_recycled(label: str, protected: bool) -> None:
    assert pods.is_protected(metadata(vram_protected=label)) is protected
    assert not pods.is_protected(metadata())


def test_handle_survives_its_text_and_names_the_controller_first() -> None:
    handle = Handle("ml", "StatefulSet", "llm", "llm-0", "u1", "server")

    assert str(handle) == "ml/StatefulSet/llm llm-0 u1 server"
    assert Handle.parse(str(handle)) == handle
    assert handle.name == "ml/llm-0/server"
    assert not handle.is_alone


def test_handle_comes_from_the_names_of_the_exporter() -> None:
    handle = Handle.of("ml/llm-0/server", pods.incarnation("u1", "a" * 64, 2))

    assert handle == Handle("ml", "Pod", "llm-0", "llm-0", "u1", "server")
    assert handle.is_alone


@pytest.mark.parametrize(
    ("container", "incarnation"),
    [("c1", "u1@a@0"), ("ml/llm-0/server", ""), ("ml/../server", "u1@a@0"), ("ml/llm 0/server", "u1@a@0")],
)
def test_names_of_no_pod_have_no_handle(container: str, incarnation: str) -> None:
    assert Handle.of(container, incarnation) is None
