"""Parse the inspection of a container: folders, GPUs, servers and memory. Pure."""

from typing import Any

import pytest

from exporter.model.container import HealthCheck, Server, VramBudget
from exporter.model.unknown import Unknown
from exporter.sources.containers.docker import _container
from tests.exporter import builders as build
from tests.exporter.sources.containers.docker_daemon import OWN, UNHEALTHY, inspected


@pytest.mark.parametrize(
    ("mounts", "folders"),
    [
        pytest.param(None, (), id="no mounts"),
        pytest.param([{"Type": "tmpfs", "Source": ""}, {"Source": "/elsewhere/w0"}], (), id="other mounts"),
        pytest.param([{"Source": "/srv/gw/w0"}, {"Source": "/srv/gw/host"}], ("w0", "host"), id="its folder"),
        pytest.param(
            [{"Source": "/srv/gw"}, {"Source": "/srv/gw/w0/below"}], (), id="parent folder, or part of a folder"
        ),
    ],
)
def test_mounted_folders_are_read(mounts: list[dict[str, Any]] | None, folders: tuple[str, ...]) -> None:
    found = _container(inspected(mounts=mounts), "/srv/gw")

    assert found is not None
    assert found.folders == folders


def test_inspection_has_name_incarnation_and_first_process() -> None:
    assert _container(inspected()) == build.container(gpu_request=None, managed=False)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(inspected(running=False, pid=0), id="exited"),
        pytest.param(inspected(running=True, pid=0), id="no process yet"),
    ],
)
def test_container_that_does_not_run_is_ignored(found: dict[str, Any]) -> None:
    assert _container(found) is None


GPUS_ALL = {"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
GPUS_ONE = {"Driver": "", "Count": 1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
GPUS_NAMED = {"Driver": "nvidia", "Count": 0, "DeviceIDs": ["0", "GPU-1"], "Capabilities": [["gpu", "utility"]]}
CDI_NAMED = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-1"]}
CDI_ALL = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=all"], "Capabilities": None}
CDI_AMD = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["amd.com/gpu=all"], "Capabilities": None}
CDI_OTHER = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["example.com/card=0"], "Capabilities": None}
OTHER = {"Type": "bind", "Source": "/srv", "Destination": "/srv"}


def mount(name: str) -> dict[str, str]:
    return {"Type": "bind", "Source": "/dev/null", "Destination": f"/var/run/nvidia-container-devices/{name}"}


NO_GPU = {"Driver": "", "Count": 1, "DeviceIDs": ["7"], "Capabilities": [["tpu"]]}


@pytest.mark.parametrize(
    ("found", "request_"),
    [
        pytest.param(inspected(), None, id="no request"),
        pytest.param(inspected(requests=[GPUS_ALL]), ("all",), id="--gpus all"),
        pytest.param(inspected(requests=[GPUS_ONE]), ("0",), id="--gpus 1, Compose count: 1"),
        pytest.param(inspected(requests=[{**GPUS_ONE, "Count": 2}]), ("0", "1"), id="--gpus 2: Docker gives the first"),
        pytest.param(inspected(requests=[{**GPUS_ONE, "Count": 0}]), None, id="Compose count: 0"),
        pytest.param(inspected(requests=[GPUS_NAMED]), ("0", "GPU-1"), id="--gpus device=0,GPU-1"),
        pytest.param(inspected(requests=[CDI_NAMED]), ("0", "GPU-1"), id="--device nvidia.com/gpu=0, by CDI"),
        pytest.param(inspected(requests=[CDI_ALL]), ("all",), id="--device nvidia.com/gpu=all, by CDI"),
        pytest.param(inspected(requests=[CDI_OTHER]), None, id="CDI device of another vendor"),
        pytest.param(inspected(requests=[GPUS_NAMED, CDI_AMD]), ("0", "GPU-1", "dri"), id="requests of two vendors"),
        pytest.param(
            inspected(env=["NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices"], mounts=[mount("GPU-1"), OTHER]),
            ("GPU-1",),
            id="mounts",
        ),
        pytest.param(
            inspected(env=["DOCKER_RESOURCE_GPU=GPU-1", "NVIDIA_VISIBLE_DEVICES=all"]), ("GPU-1",), id="Swarm"
        ),
        pytest.param(inspected(devices=("/dev/nvidia1", "/dev/nvidiactl")), ("1",), id="--device /dev/nvidia1"),
        pytest.param(
            inspected(devices=("/dev/nvidia1",), env=["NVIDIA_VISIBLE_DEVICES=all"]),
            ("1",),
            id="--device of an NVIDIA image",
        ),
        pytest.param(inspected(requests=[NO_GPU]), None, id="other device"),
        pytest.param(inspected(env=["A=1", "NVIDIA_VISIBLE_DEVICES=1"]), ("1",), id="variable of the NVIDIA runtime"),
        pytest.param(
            inspected(requests=[GPUS_NAMED], env=["NVIDIA_VISIBLE_DEVICES=all"]),
            ("0", "GPU-1"),
            id="request overrides the variable of CUDA images",
        ),
        pytest.param(inspected(devices=("/dev/kfd", "/dev/dri")), ("dri",), id="--device /dev/kfd --device /dev/dri"),
        pytest.param(
            inspected(devices=("/dev/dri/renderD129", "/dev/dri/card1")), ("renderD129",), id="--device of one node"
        ),
        pytest.param(
            inspected(devices=("/dev/kfd", "/dev/fuse", "/x/renderD128")), None, id="--device of another device"
        ),
        pytest.param(
            inspected(requests=[GPUS_ALL], devices=("/dev/dri",)), ("all", "dri"), id="--gpus all --device /dev/dri"
        ),
    ],
)
def test_requested_gpus_are_read(found: dict[str, Any], request_: tuple[str, ...] | None) -> None:
    container = _container(found)

    assert container is not None
    assert container.gpu_request == request_


# Servers

BRIDGE = {"bridge": {"IPAddress": "172.17.0.2", "GlobalIPv6Address": ""}}
URL = {"gpuwarden.probe": "http://localhost:8000/health"}


def server_of(**given: Any) -> Server | None:
    found = _container(inspected(**given))
    assert found is not None
    return found.server


def test_container_without_the_label_is_not_a_server() -> None:
    assert server_of(networks=BRIDGE, health=UNHEALTHY) is None


@pytest.mark.parametrize(
    ("mode", "networks", "address"),
    [
        pytest.param("default", BRIDGE, "172.17.0.2", id="address on the bridge"),
        pytest.param(
            "default",
            {"z": {"IPAddress": "10.0.0.9"}, "a": {"IPAddress": "10.1.0.9"}},
            "10.1.0.9",
            id="first of two networks",
        ),
        pytest.param("six", {"six": {"IPAddress": "", "GlobalIPv6Address": "fd00::2"}}, "fd00::2", id="IPv6 only"),
        pytest.param("host", {"host": {"IPAddress": ""}}, "127.0.0.1", id="host network: loopback"),
    ],
)
def test_address_of_a_server(mode: str, networks: dict[str, Any], address: str) -> None:
    found = server_of(labels=URL, mode=mode, networks=networks)

    assert found == Server(probe=build.probe(), address=address)


@pytest.mark.parametrize(
    ("mode", "networks"), [("none", {"none": {"IPAddress": ""}}), ("container:abc", {}), ("container:abc", None)]
)
def test_server_without_an_address_cannot_be_probed_by_url(mode: str, networks: Any) -> None:
    found = server_of(labels=URL, mode=mode, networks=networks)

    assert found is not None
    assert isinstance(found.probe, Unknown)
    assert found.probe.reason == "no_address"


def test_health_check_has_its_newest_result_and_lifetime() -> None:
    found = server_of(labels=OWN, health=UNHEALTHY, check={"Interval": 10 * 10**9, "Timeout": 0})

    assert found is not None
    assert found.probe == build.probe(kind="docker", port=0, target="")
    assert found.health == HealthCheck(
        status="unhealthy", failing_streak=4, newest="2024-05-01T10:01:00Z", passed=False, fresh_s=90.0
    )


def test_health_check_without_a_result_is_starting() -> None:
    found = server_of(labels=OWN, health={"Status": "starting", "FailingStreak": 0, "Log": None})

    assert found is not None
    assert found.health == HealthCheck(status="starting", failing_streak=0, newest="", passed=False, fresh_s=130.0)


@pytest.mark.parametrize(
    "health", [None, {}, {"Status": "none", "FailingStreak": 0}], ids=["none", "empty", "disabled"]
)
def test_missing_or_disabled_health_check_is_reported(health: dict[str, Any] | None) -> None:
    found = server_of(labels=OWN, health=health)

    assert found is not None
    assert isinstance(found.probe, Unknown)
    assert found.probe.reason == "no_health_check"


def test_invalid_labels_are_reported() -> None:
    found = server_of(labels={"gpuwarden.probe": "http://example.com/"}, networks=BRIDGE)

    assert found is not None
    assert isinstance(found.probe, Unknown)
    assert found.probe.reason == "other_host"


def test_vram_budget_is_read_from_labels() -> None:
    found = _container(inspected(labels={"gpuwarden.vram-budget-mib": "3000", "gpuwarden.managed": "true"}))
    silent = _container(inspected())

    assert found is not None
    assert (found.managed, found.vram_budget) == (True, VramBudget(budget_bytes=3000 * 2**20, recyclable=True))
    assert silent is not None
    assert (silent.managed, silent.vram_budget) == (False, VramBudget())
