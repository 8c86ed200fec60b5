"""What an inspection of a container says: folders, GPUs, servers and memory. Pure."""

from typing import Any

import pytest

from exporter.model.container import HealthCheck, Server, VramBudget
from exporter.model.unknown import Unknown
from exporter.sources.containers.docker import _container
from exporter.sources.processes import visible_devices
from tests.exporter import builders as build
from tests.exporter.sources.containers.docker_daemon import OWN, UNHEALTHY, inspected


@pytest.mark.parametrize(
    ("mounts", "folders"),
    [
        pytest.param(None, (), id="nothing"),
        pytest.param([{"Type": "tmpfs", "Source": ""}, {"Source": "/elsewhere/w0"}], (), id="nothing of it"),
        pytest.param([{"Source": "/srv/gw/w0"}, {"Source": "/srv/gw/host"}], ("w0", "host"), id="its own folder"),
        pytest.param([{"Source": "/srv/gw"}, {"Source": "/srv/gw/w0/below"}], (), id="all, or a part of a folder"),
    ],
)
def test_mounted_folders_are_read(mounts: list[dict[str, Any]] | None, folders: tuple[str, ...]) -> None:
    found = _container(inspected(mounts=mounts), "/srv/gw")

    assert found is not None
    assert found.folders == folders


def test_an_inspection_names_the_container_its_incarnation_and_its_first_process() -> None:
    assert _container(inspected()) == build.container(gpu_request=None, managed=False)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(inspected(running=False, pid=0), id="exited"),
        pytest.param(inspected(running=True, pid=0), id="started, without a process yet"),
    ],
)
def test_a_container_that_does_not_run_is_none(found: dict[str, Any]) -> None:
    assert _container(found) is None


GPUS_ALL = {"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
GPUS_TWO = {"Driver": "", "Count": 2, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
GPUS_NAMED = {"Driver": "nvidia", "Count": 0, "DeviceIDs": ["0", "GPU-1"], "Capabilities": [["gpu", "utility"]]}
CDI_NAMED = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-1"]}
CDI_ALL = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=all"], "Capabilities": None}
CDI_OTHER = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["example.com/card=0"], "Capabilities": None}
NO_GPU = {"Driver": "", "Count": 1, "DeviceIDs": ["7"], "Capabilities": [["tpu"]]}


@pytest.mark.parametrize(
    ("found", "request_"),
    [
        pytest.param(inspected(), None, id="nothing asked for"),
        pytest.param(inspected(requests=[GPUS_ALL]), ("all",), id="--gpus all"),
        pytest.param(
            inspected(requests=[GPUS_TWO]), ("all",), id="--gpus 2: which two is not told, so all are looked at"
        ),
        pytest.param(inspected(requests=[GPUS_NAMED]), ("0", "GPU-1"), id="--gpus device=0,GPU-1"),
        pytest.param(inspected(requests=[CDI_NAMED]), ("0", "GPU-1"), id="--device nvidia.com/gpu=0, by CDI"),
        pytest.param(inspected(requests=[CDI_ALL]), ("all",), id="--device nvidia.com/gpu=all, by CDI"),
        pytest.param(inspected(requests=[CDI_OTHER]), None, id="another maker's device by CDI"),
        pytest.param(inspected(requests=[NO_GPU]), None, id="a device that is no GPU"),
        pytest.param(inspected(env=["A=1", "NVIDIA_VISIBLE_DEVICES=1"]), ("1",), id="the NVIDIA runtime's variable"),
        pytest.param(
            inspected(requests=[GPUS_NAMED], env=["NVIDIA_VISIBLE_DEVICES=all"]),
            ("0", "GPU-1"),
            id="the request outdoes the variable that every CUDA image sets",
        ),
        pytest.param(inspected(devices=("/dev/kfd", "/dev/dri")), ("dri",), id="--device /dev/kfd --device /dev/dri"),
        pytest.param(
            inspected(devices=("/dev/dri/renderD129", "/dev/dri/card1")), ("renderD129",), id="--device of one node"
        ),
        pytest.param(inspected(devices=("/dev/kfd", "/dev/fuse", "/x/renderD128")), None, id="--device of no GPU"),
        pytest.param(
            inspected(requests=[GPUS_ALL], devices=("/dev/dri",)), ("all", "dri"), id="--gpus all --device /dev/dri"
        ),
    ],
)
def test_the_gpus_that_docker_was_asked_to_give(found: dict[str, Any], request_: tuple[str, ...] | None) -> None:
    container = _container(found)

    assert container is not None
    assert container.gpu_request == request_


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("all", ("all",)),
        ("0", ("0",)),
        ("0,1", ("0", "1")),
        (" 0 , GPU-1 ,", ("0", "GPU-1")),
        ("none", None),
        ("void", None),
        ("", None),
        (" , ", None),
    ],
)
def test_the_forms_of_nvidia_visible_devices(value: str, names: tuple[str, ...] | None) -> None:
    assert visible_devices(value) == names


# Servers

BRIDGE = {"bridge": {"IPAddress": "172.17.0.2", "GlobalIPv6Address": ""}}
URL = {"gpuwarden.probe": "http://localhost:8000/health"}


def server_of(**given: Any) -> Server | None:
    found = _container(inspected(**given))
    assert found is not None
    return found.server


def test_a_container_without_the_label_is_no_server() -> None:
    assert server_of(networks=BRIDGE, health=UNHEALTHY) is None


@pytest.mark.parametrize(
    ("mode", "networks", "address"),
    [
        pytest.param("default", BRIDGE, "172.17.0.2", id="its address on the bridge"),
        pytest.param(
            "default",
            {"z": {"IPAddress": "10.0.0.9"}, "a": {"IPAddress": "10.1.0.9"}},
            "10.1.0.9",
            id="the first of two",
        ),
        pytest.param("six", {"six": {"IPAddress": "", "GlobalIPv6Address": "fd00::2"}}, "fd00::2", id="IPv6 alone"),
        pytest.param("host", {"host": {"IPAddress": ""}}, "127.0.0.1", id="the host's loopback in the host's network"),
    ],
)
def test_where_a_server_is_asked(mode: str, networks: dict[str, Any], address: str) -> None:
    found = server_of(labels=URL, mode=mode, networks=networks)

    assert found == Server(probe=build.probe(), address=address)


@pytest.mark.parametrize(
    ("mode", "networks"), [("none", {"none": {"IPAddress": ""}}), ("container:abc", {}), ("container:abc", None)]
)
def test_a_server_without_an_address_of_its_own_cannot_be_asked_by_url(mode: str, networks: Any) -> None:
    found = server_of(labels=URL, mode=mode, networks=networks)

    assert found is not None
    assert isinstance(found.probe, Unknown)
    assert found.probe.reason == "no_address"


def test_its_own_health_check_is_read_with_how_long_its_newest_result_can_stand() -> None:
    found = server_of(labels=OWN, health=UNHEALTHY, check={"Interval": 10 * 10**9, "Timeout": 0})

    assert found is not None
    assert found.probe == build.probe(kind="docker", port=0, target="")
    assert found.health == HealthCheck(
        status="unhealthy", failing_streak=4, newest="2024-05-01T10:01:00Z", passed=False, fresh_s=90.0
    )


def test_a_health_check_without_a_result_yet_starts() -> None:
    found = server_of(labels=OWN, health={"Status": "starting", "FailingStreak": 0, "Log": None})

    assert found is not None
    assert found.health == HealthCheck(status="starting", failing_streak=0, newest="", passed=False, fresh_s=130.0)


@pytest.mark.parametrize(
    "health", [None, {}, {"Status": "none", "FailingStreak": 0}], ids=["none", "empty", "disabled"]
)
def test_a_health_check_that_is_not_there_or_disabled_is_told(health: dict[str, Any] | None) -> None:
    found = server_of(labels=OWN, health=health)

    assert found is not None
    assert isinstance(found.probe, Unknown)
    assert found.probe.reason == "no_health_check"


def test_labels_that_cannot_be_used_are_told() -> None:
    found = server_of(labels={"gpuwarden.probe": "http://example.com/"}, networks=BRIDGE)

    assert found is not None
    assert isinstance(found.probe, Unknown)
    assert found.probe.reason == "other_host"


def test_what_a_container_may_hold_of_a_gpus_memory_is_read_from_its_labels() -> None:
    found = _container(inspected(labels={"gpuwarden.vram-budget-mib": "3000", "gpuwarden.managed": "true"}))
    silent = _container(inspected())

    assert found is not None
    assert (found.managed, found.vram_budget) == (True, VramBudget(budget_bytes=3000 * 2**20, recyclable=True))
    assert silent is not None
    assert (silent.managed, silent.vram_budget) == (False, VramBudget())
