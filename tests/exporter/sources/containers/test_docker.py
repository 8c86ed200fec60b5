"""Docker's containers: what an inspection tells, a daemon that hangs or talks nonsense, and a real one."""

import json
import os
import queue
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import docker
import pytest

from exporter.model.container import ContainerEvidence, Health, Server, Tenancy
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import Patience
from exporter.model.unknown import Unknown
from exporter.sampler import Sampler
from exporter.sources.containers import docker as containers
from exporter.sources.containers import docker_events
from exporter.sources.containers.docker import EngineContainers, _container
from exporter.sources.containers.poller import Listing
from exporter.sources.processes import visible_devices
from gpuwarden import cgroup
from gpuwarden.state_file import JobFile
from testbed.docker_engine import Engine
from testbed.worker_image import worker_image
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker
from tests.exporter.sources.test_workers import unprivileged
from tests.waiting import eventually

ALLOCATES = """
import signal
def allocate(*_):
    held.append(b"x" * (64 << 20))
    print("allocated", flush=True)
held = []
signal.signal(signal.SIGUSR1, allocate)
print("ready", flush=True)
while True:
    signal.pause()
"""


def inspected(
    *,
    running: bool = True,
    pid: int = 4001,
    env: list[str] | None = None,
    requests: list[dict[str, Any]] | None = None,
    devices: tuple[str, ...] | None = None,
    started_at: str = "2024-05-01T10:00:00.000000001Z",
    mounts: list[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
    health: dict[str, Any] | None = None,
    check: dict[str, Any] | None = None,
    mode: str = "default",
    networks: dict[str, Any] | None = None,
    paused: bool = False,
) -> dict[str, Any]:
    """What `docker inspect` answers, of the fields that matter here (Docker Engine API, ContainerInspect)."""
    return {
        "Id": build.DOCKER_ID,
        "Name": "/worker-0",
        "State": {"Running": running, "Pid": pid, "StartedAt": started_at, "Health": health, "Paused": paused},
        "Config": {"Image": "worker:1", "Env": env, "Labels": labels, "Healthcheck": check},
        "HostConfig": {
            "DeviceRequests": requests,
            "Devices": None
            if devices is None
            else [
                {"PathOnHost": path, "PathInContainer": "/dev/dri/renderD128", "CgroupPermissions": "rwm"}
                for path in devices
            ],
            "NetworkMode": mode,
        },
        "NetworkSettings": {"Networks": networks},
        "Mounts": mounts,
    }


@pytest.mark.parametrize(
    ("mounts", "folders"),
    [
        pytest.param(None, (), id="nothing"),
        pytest.param([{"Type": "tmpfs", "Source": ""}, {"Source": "/elsewhere/w0"}], (), id="nothing of it"),
        pytest.param([{"Source": "/srv/gw/w0"}, {"Source": "/srv/gw/host"}], ("w0", "host"), id="its own folder"),
        pytest.param([{"Source": "/srv/gw"}, {"Source": "/srv/gw/w0/below"}], (), id="all, or a part of a folder"),
    ],
)
def test_the_folders_that_are_mounted_into_a_container(
    mounts: list[dict[str, Any]] | None, folders: tuple[str, ...]
) -> None:
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
OWN = {"gpuwarden.probe": "docker"}
UNHEALTHY = {
    "Status": "unhealthy",
    "FailingStreak": 4,
    "Log": [
        {"Start": "2024-05-01T10:00:30Z", "End": "2024-05-01T10:00:31Z", "ExitCode": 0, "Output": "ok"},
        {"Start": "2024-05-01T10:01:00Z", "End": "2024-05-01T10:01:01Z", "ExitCode": -1, "Output": "timeout"},
    ],
}


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
    assert found.health == Health(
        status="unhealthy", failing_streak=4, newest="2024-05-01T10:01:00Z", passed=False, fresh_s=90.0
    )


def test_a_health_check_without_a_result_yet_starts() -> None:
    found = server_of(labels=OWN, health={"Status": "starting", "FailingStreak": 0, "Log": None})

    assert found is not None
    assert found.health == Health(status="starting", failing_streak=0, newest="", passed=False, fresh_s=130.0)


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


# Daemons that misbehave

Answer = Callable[[str], Any]

Events = queue.SimpleQueue
"""What a daemon tells of, as it happens; `None` ends it."""


class Unframed(Events[dict[str, Any] | None]):
    """Told without chunks: that they end is seen by the end of the connection alone."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, answer: Answer) -> None:
        self.answer = answer
        super().__init__(str(path), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        answer = self.server.answer(self.path)
        if isinstance(answer, Events):
            self._tell(answer)
            return
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        content = json.dumps(body).encode()
        with suppress(BrokenPipeError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def _tell(self, events: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
        framed = not isinstance(events, Unframed)
        with suppress(OSError):
            self.send_response(200)
            self.send_header(*("Transfer-Encoding", "chunked") if framed else ("Connection", "close"))
            self.end_headers()
            while (event := events.get()) is not None:
                told = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(told), told) if framed else told)
            if framed:
                self.wfile.write(b"0\r\n\r\n")

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing to say."""


@contextmanager
def daemon(folder: Path, answer: Answer) -> Iterator[str]:
    """Something that listens where a Docker daemon would, and answers with what `answer` makes of the path."""
    path = folder / "docker.sock"
    with _Server(path, answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"unix://{path}"
        server.shutdown()
        thread.join()


@contextmanager
def asked(base_url: str, directory: Path | None = None) -> Iterator[EngineContainers]:
    source = EngineContainers(base_url, directory)
    source.start()
    yield source
    source.close()
    assert not source._thread.is_alive()


@contextmanager
def by_hand(base_url: str, directory: Path | None = None) -> Iterator[EngineContainers]:
    """One that lists when it is told to."""
    source = EngineContainers(base_url, directory)
    yield source
    assert source._client is not None
    source._client.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often and give up soon."""
    monkeypatch.setattr(containers, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(containers, "REFRESH_S", 0.02)
    monkeypatch.setattr(containers, "FRESH_S", 0.5)
    monkeypatch.setattr(containers, "INSPECT_S", 0.1)
    monkeypatch.setattr(containers, "INSPECTIONS_S", 0.15)


def because_of(source: EngineContainers) -> str:
    """Why there is no listing; nothing where there is one."""
    try:
        source.latest()
    except OSError as error:
        return str(error)
    return ""


def listing_of(source: EngineContainers) -> Listing | None:
    with suppress(OSError):
        return source.latest()
    return None


def listing_after(source: EngineContainers, seconds: float) -> Callable[[], Listing | None]:
    """The first listing that was taken so long after now."""
    from_s = time.monotonic() + seconds
    return lambda: found if (found := listing_of(source)) and found.taken_s > from_s else None


def a_daemon(*rows: dict[str, Any], inspect: Any = None) -> Answer:
    """Answers for a daemon with these containers."""

    def answer(path: str) -> Any:
        if path.endswith("/version"):
            return {"ApiVersion": "1.41", "Version": "20.10.24"}
        if path.partition("?")[0].endswith("/containers/json"):
            return list(rows)
        if path.partition("?")[0].endswith("/events"):
            return 404, {"message": "page not found"}
        return inspect(path.split("/")[-2]) if callable(inspect) else inspect

    return answer


def row(full_id: str = build.DOCKER_ID, name: str = "worker-0", **told: Any) -> dict[str, Any]:
    return {"Id": full_id, "Names": [f"/{name}"], **told}


BUDGETED = {"gpuwarden.managed": "true", "gpuwarden.vram-budget-mib": "2048"}


@pytest.mark.usefixtures("impatient")
def test_a_daemon_that_accepts_and_never_answers_is_reported_and_the_other_sources_stand(
    short_path: Path, house: Path, start_worker: StartWorker
) -> None:
    silence = threading.Event()
    start_worker("w0")

    with daemon(short_path, lambda _: silence.wait(20)) as url, asked(url) as source:
        because = eventually(lambda: found if "timed out" in (found := because_of(source)) else None)
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )
        snapshot = sampler.sample()
        silence.set()

    assert because.startswith(f"Docker at {url} does not answer: ")
    assert {each.source: each.success for each in snapshot.sources} == {"workers": True, "docker": False}
    assert snapshot.workers is not None
    assert [each.worker.worker for each in snapshot.workers.workers] == ["w0"]
    assert [each.container.kind for each in snapshot.containers] == ["process"]


@pytest.mark.usefixtures("impatient")
def test_a_daemon_that_is_not_there_is_reported_and_found_once_it_comes(short_path: Path) -> None:
    with asked(f"unix://{short_path}/docker.sock") as source:
        assert "No such file" in eventually(
            lambda: found if "not asked yet" not in (found := because_of(source)) else None
        )

        with daemon(short_path, a_daemon()):
            assert eventually(lambda: listing_of(source)).containers == {}


@pytest.mark.usefixtures("impatient")
def test_a_socket_that_may_not_be_opened_is_told_with_who_may(short_path: Path) -> None:
    path = short_path / "docker.sock"
    short_path.chmod(0o755)

    def told() -> str:
        with unprivileged(), asked(f"unix://{path}") as source:
            return eventually(lambda: found if "not asked yet" not in (found := because_of(source)) else None)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o060)  # nor its owner's, where that is whom the tests run as
        if os.geteuid() == 0:
            os.chown(path, -1, 1)
        of_its_group = told()
        path.chmod(0)
        of_nobody = told()

    denied = (
        f"Docker at unix://{path} does not answer: PermissionError: [Errno 13] Permission denied to open the socket: "
    )
    assert of_nobody == f"{denied}run the exporter as root"
    assert of_its_group == f"{of_nobody}, or as one of the group {path.group()}"


@pytest.mark.usefixtures("impatient")
def test_a_listing_that_grows_old_is_no_longer_believed(short_path: Path) -> None:
    hang, silence = threading.Event(), threading.Event()
    whole = a_daemon()

    def answer(path: str) -> Any:
        if hang.is_set():
            silence.wait(20)
        return whole(path)

    with daemon(short_path, answer) as url, asked(url) as source:
        eventually(lambda: listing_of(source))
        hang.set()
        assert "timed out" in eventually(lambda: because_of(source))
        hang.clear()
        silence.set()
        assert eventually(lambda: listing_of(source)).containers == {}


@pytest.mark.usefixtures("impatient")
def test_a_server_is_inspected_again_and_again_and_what_is_none_is_not(short_path: Path) -> None:
    asked_for: list[str] = []
    plain = "cd" * 32
    answers = {"passed": True, "broken": False}

    def inspect(full_id: str) -> Any:
        asked_for.append(full_id)
        if full_id == plain:
            return inspected(pid=os.getpid()) | {"Id": plain, "Name": "/plain"}
        if answers["broken"]:
            return 500, {"message": "broken"}
        log = [{"Start": "t1", "ExitCode": 0 if answers["passed"] else 1}]
        return inspected(pid=os.getpid(), labels=OWN, health={"Status": "healthy", "Log": log})

    def passed() -> bool | None:
        listing = listing_of(source)
        found = listing.containers.get(build.DOCKER_ID) if listing else None
        return found.server.health.passed if found and found.server and found.server.health else None

    with daemon(short_path, a_daemon(row(), row(plain, "plain"), inspect=inspect)) as url, asked(url) as source:
        eventually(passed, "it is healthy")
        answers["passed"] = False
        eventually(lambda: passed() is False, "it is seen to fail")
        answers["broken"] = True
        before = len(asked_for)
        eventually(lambda: len(asked_for) > before + 3, "it cannot be inspected any more")
        assert passed() is False, "it stays as it was"

    assert asked_for.count(plain) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(lambda _: "nonsense", id="a text"),
        pytest.param(lambda _: {"message": "no"}, id="an object"),
        pytest.param(lambda _: (500, {"message": "no"}), id="an error"),
        pytest.param(a_daemon({"nothing": "known"}), id="rows without an id"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_daemon_that_talks_nonsense_is_reported_and_asked_again(nonsense: Answer, short_path: Path) -> None:
    sane = threading.Event()

    def answer(path: str) -> Any:
        return (a_daemon() if sane.is_set() else nonsense)(path)

    with daemon(short_path, answer) as url, asked(url) as source:
        eventually(lambda: "not asked yet" not in because_of(source))
        assert "does not answer" in because_of(source)

        sane.set()

        assert eventually(lambda: listing_of(source)).containers == {}


@pytest.mark.parametrize(
    "inspection",
    [
        pytest.param((404, {"message": "gone"}), id="gone since the listing"),
        pytest.param((500, {"message": "broken"}), id="an error"),
        pytest.param({"Id": "half"}, id="nonsense"),
        pytest.param(inspected(running=False, pid=0), id="exited since the listing"),
        pytest.param(inspected(pid=2**22 + 1), id="its first process is gone"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_container_that_cannot_be_inspected_costs_itself_only(
    inspection: Any, short_path: Path, start_worker: StartWorker
) -> None:
    good, bad = "aa" * 32, "bb" * 32
    whole = inspected(pid=start_worker("w0").pid) | {"Id": good, "Name": "/good"}
    answer = a_daemon(
        row(bad, "bad"), row(good, "good"), inspect=lambda full_id: whole if full_id == good else inspection
    )

    with daemon(short_path, answer) as url, asked(url) as source:
        found = eventually(lambda: found if (found := listing_of(source)) and found.containers else None)

    assert [container.name for container in found.containers.values()] == ["good"]
    assert not found.whole


@pytest.mark.usefixtures("impatient")
def test_containers_whose_inspection_hangs_cost_themselves_only_and_the_listing_stays_fresh(
    short_path: Path, house: Path, start_worker: StartWorker
) -> None:
    silence = threading.Event()
    good, stuck, down = "aa" * 32, ["bb" * 32, "cc" * 32, "dd" * 32], "ee" * 32
    mounts = [{"Source": str(house / "w9")}]
    told = {
        good: inspected(pid=start_worker("w0").pid) | {"Id": good, "Name": "/good"},
        down: inspected(running=False, pid=0, mounts=mounts) | {"Id": down},
    }

    def inspect(full_id: str) -> Any:
        return told[full_id] if full_id in told else silence.wait(20)

    rows = [
        row(stuck[0], "stuck-bb", Labels=BUDGETED),
        row(stuck[1], "stuck-cc", Labels=BUDGETED | {"gpuwarden.vram-protected": "true"}),
        row(stuck[2], "stuck-dd", Labels=BUDGETED, State="paused"),
        row(good, "good", Labels=BUDGETED),
    ]
    answer = a_daemon(*rows, {**row(down, "down"), "State": "exited", "Mounts": mounts}, inspect=inspect)
    with daemon(short_path, answer) as url, asked(url, house) as source:
        eventually(lambda: (found := listing_of(source)) and found.containers.keys() == {good}, "the good one is seen")
        later = eventually(listing_after(source, 1.0))
        missing = because_of(source)
        silence.set()

    assert missing == ""
    assert (set(later.containers), set(later.down)) == ({good}, {down})
    assert later.unseen == ("stuck-bb",)  # of the others nobody would be stopped


@pytest.mark.usefixtures("impatient")
def test_a_server_whose_inspection_hangs_stays_as_it_was(short_path: Path) -> None:
    silence, hang, hung = threading.Event(), threading.Event(), threading.Event()

    def inspect(_: str) -> Any:
        if hang.is_set():
            hung.set()
            silence.wait(20)
        return inspected(pid=os.getpid(), labels=OWN, health=UNHEALTHY)

    with daemon(short_path, a_daemon(row(), inspect=inspect)) as url, asked(url) as source:
        before = eventually(lambda: found if (found := listing_of(source)) and found.containers else None)
        hang.set()
        assert hung.wait(10)
        after = eventually(listing_after(source, 1.0))
        silence.set()

    assert after.containers == before.containers


@pytest.mark.usefixtures("impatient")
def test_a_listing_is_as_old_as_the_daemons_answer_and_not_as_the_last_inspection(short_path: Path) -> None:
    times: dict[str, float] = {}

    def inspect(_: str) -> Any:
        times["inspected"] = time.monotonic()
        return inspected(pid=os.getpid())

    with daemon(short_path, a_daemon(row(), inspect=inspect)) as url, asked(url) as source:
        first = eventually(lambda: source._listing)

    assert first.taken_s < times["inspected"]
    assert first.whole


@pytest.mark.usefixtures("impatient")
def test_a_container_that_is_paused_is_seen_so_without_another_inspection(short_path: Path) -> None:
    inspections: list[str] = []
    state = ["running"]

    def answer(path: str) -> Any:
        def inspect(full_id: str) -> Any:
            inspections.append(full_id)
            return inspected(pid=os.getpid())

        return a_daemon({**row(), "State": state[0]}, inspect=inspect)(path)

    def paused() -> bool | None:
        found = listing_of(source)
        return found.containers[build.DOCKER_ID].paused if found and found.containers else None

    with daemon(short_path, answer) as url, asked(url) as source:
        eventually(lambda: paused() is False)
        state[0] = "paused"
        eventually(paused)
        state[0] = "running"
        eventually(lambda: paused() is False)

    assert len(inspections) == 1


@pytest.mark.usefixtures("impatient")
def test_an_unchanged_container_is_inspected_once_and_a_renamed_one_again(
    short_path: Path, start_worker: StartWorker
) -> None:
    pid = start_worker("w0").pid
    name = ["first"]
    inspections: list[str] = []

    def answer(path: str) -> Any:
        if path.endswith(f"{build.DOCKER_ID}/json"):
            inspections.append(path)
        return a_daemon(row(name=name[0]), inspect=inspected(pid=pid) | {"Name": f"/{name[0]}"})(path)

    def name_seen() -> str | None:
        found = listing_of(source)
        return next(iter(found.containers.values())).name if found else None

    with daemon(short_path, answer) as url, asked(url) as source:
        first = eventually(lambda: listing_of(source))
        eventually(lambda: (found := listing_of(source)) and found.taken_s > first.taken_s)
        assert len(inspections) == 1

        name[0] = "second"

        eventually(lambda: name_seen() == "second")


@pytest.mark.parametrize(
    ("state", "mounted", "inspection", "down"),
    [
        pytest.param("exited", "w0", inspected(running=False, pid=0), ["worker-0"], id="one that holds a folder"),
        pytest.param("exited", "elsewhere", inspected(running=False, pid=0), [], id="one that holds none is not asked"),
        pytest.param("exited", "w0", inspected(), [], id="one that was started since the listing"),
        pytest.param("exited", "w0", (404, {"message": "gone"}), [], id="one that is gone since"),
        pytest.param("exited", "w0", {"Id": "half"}, [], id="one that makes no sense"),
        pytest.param("running", "w0", inspected(pid=2**22 + 1), [], id="one that runs is not down"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_container_that_is_down_is_listed_where_it_holds_a_workers_folder(
    state: str, mounted: str, inspection: Any, down: list[str], short_path: Path, house: Path
) -> None:
    source_of_it = str(house / mounted) if mounted == "w0" else "/elsewhere/w0"
    if isinstance(inspection, dict) and "State" in inspection:
        inspection = {**inspection, "Mounts": [{"Source": source_of_it}]}
    answer = a_daemon({**row(), "State": state, "Mounts": [{"Source": source_of_it}]}, inspect=inspection)

    with daemon(short_path, answer) as url, asked(url, house) as source:
        found = eventually(lambda: listing_of(source))

    assert found.containers == {}
    assert [each.name for each in found.down.values()] == down
    assert [each.folders for each in found.down.values()] == [("w0",)] * len(down)


@pytest.mark.parametrize("slow_s", [0.0, 0.6], ids=["its list comes at once", "its list comes late, too"])
def test_a_daemon_that_is_slow_to_inspect_whatever_there_is_makes_no_listing_too_old_to_believe(
    slow_s: float, short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FRESH_S", "REFRESH_S", "INSPECT_S", "INSPECTIONS_S"):
        monkeypatch.setattr(containers, name, getattr(containers, name) / 2)
    silence = threading.Event()
    mounts = [{"Source": str(tmp_path / "w0")}]
    states = ("running", "exited")
    rows = [row(f"{n}{s}" * 32, f"{s}-{n}", State=s, Mounts=mounts) for s in states for n in range(2)]
    whole = a_daemon(*rows, inspect=lambda _: silence.wait(20))

    def answer(path: str) -> Any:
        if "/containers/json" in path:
            silence.wait(slow_s)
        return whole(path)

    with daemon(short_path, answer) as url, by_hand(url, tmp_path) as source:
        first, second = source.list_now(), source.list_now()
        replaced_s = time.monotonic() + containers.REFRESH_S
        silence.set()

    assert (first.containers, second.down) == ({}, {})
    assert replaced_s - first.taken_s < containers.FRESH_S
    assert slow_s or second.duration_s < (containers.FRESH_S - containers.REFRESH_S) / 2


# None


def test_where_no_engine_is_asked_none_of_their_client_is_loaded(tmp_path: Path) -> None:
    program = "import sys; from exporter import main; from exporter.settings import Settings\n"
    program += "print(main.engines_of(Settings(_cli_parse_args=sys.argv[1:])), *sys.modules)"
    common = [sys.executable, "-P", "-c", program, "--dir", str(tmp_path)]

    def told(*arguments: str) -> list[str]:
        return subprocess.run([*common, *arguments], capture_output=True, text=True, check=True).stdout.split()

    none, one = told("--docker", "none"), told("--docker", "none", "--podman", "unix:///run/podman/podman.sock")
    assert none[0] == "{}"
    assert {"docker", "requests"}.isdisjoint(none)
    assert one[0] == "{'podman':"
    assert {"docker", "requests"} <= set(one)


# A daemon that tells of what changes


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often, but hardly ever one who tells by itself of what changes."""
    monkeypatch.setattr(containers, "REFRESH_S", 0.02)
    monkeypatch.setattr(containers, "CALM_S", 60.0)
    monkeypatch.setattr(containers, "FRESH_S", 60.0)


STARTED = {"Type": "container", "Action": "start", "id": build.DOCKER_ID}


class Telling:
    """One that tells its events: which listings it was asked for, and who follows."""

    def __init__(self, *rows: dict[str, Any], inspect: Any = None) -> None:
        self.listings: list[str] = []
        self.followed: list[str] = []
        self.events: queue.SimpleQueue[dict[str, Any] | None] = Events()
        self._whole = a_daemon(*rows, inspect=inspect)

    def __call__(self, path: str) -> Any:
        if "/events" in path:
            self.followed.append(path)
            return self.events
        if "/containers/json" in path:
            self.listings.append(path)
        return self._whole(path)

    def is_left_alone(self) -> bool:
        """Whether nobody asks for half a second, in which it would be asked some twenty times."""
        before = len(self.listings)
        time.sleep(0.5)
        return len(self.listings) == before


@pytest.mark.usefixtures("calm")
def test_one_that_tells_of_what_changes_is_asked_when_something_has(short_path: Path) -> None:
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, telling) as url, asked(url) as source:
        eventually(telling.is_left_alone)
        before = len(telling.listings)
        telling.events.put(STARTED)
        eventually(lambda: len(telling.listings) > before)
        assert listing_of(source)
        eventually(telling.is_left_alone)

    (path,) = telling.followed
    assert {"start", "die", "destroy", "rename", "pause", "unpause"} <= set(re.findall("[a-z]+", unquote(path)))


def test_after_a_calm_a_listing_is_believed_for_as_long_as_the_next_answer_may_take() -> None:
    longest_s = containers.SWIFT_S + containers.CALM_S + containers.TIMEOUT_S

    assert longest_s <= containers.FRESH_S


@pytest.mark.usefixtures("calm")
def test_one_whose_listing_takes_long_is_not_left_alone(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))
    monkeypatch.setattr(containers, "SWIFT_S", 0.0)

    with daemon(short_path, telling) as url, asked(url):
        eventually(lambda: telling.followed)
        before = len(telling.listings)

        eventually(lambda: len(telling.listings) > before + 10)


@pytest.mark.usefixtures("calm")
def test_one_that_ends_what_it_told_is_asked_often_again(short_path: Path) -> None:
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, telling) as url, asked(url):
        eventually(telling.is_left_alone)
        telling.events.put(None)
        eventually(lambda: not telling.is_left_alone())
        assert not telling.is_left_alone()

    assert len(telling.followed) == 1


@pytest.mark.usefixtures("calm")
def test_one_that_ended_and_tells_again_is_left_alone_again(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_events, "RETRY_S", 0.1)
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, telling) as url, asked(url):
        eventually(telling.is_left_alone)
        telling.events.put(None)
        eventually(lambda: len(telling.followed) == 2)
        eventually(telling.is_left_alone)


@pytest.mark.parametrize(
    ("state", "inspection"),
    [
        pytest.param("running", inspected(pid=os.getpid(), labels=OWN, health=UNHEALTHY), id="a server's health"),
        pytest.param("running", (500, {"message": "broken"}), id="one that runs and cannot be inspected"),
        pytest.param("exited", (500, {"message": "broken"}), id="one that is down and cannot be inspected"),
    ],
)
@pytest.mark.usefixtures("calm")
def test_where_a_listing_leaves_something_open_it_is_asked_often(
    state: str, inspection: Any, short_path: Path, house: Path
) -> None:
    mounts = [{"Source": str(house / "w0")}]
    telling = Telling({**row(), "State": state, "Mounts": mounts}, inspect=inspection)

    with daemon(short_path, telling) as url, asked(url, house):
        eventually(lambda: telling.followed)
        time.sleep(0.2)
        assert not telling.is_left_alone()


@pytest.mark.usefixtures("calm")
def test_one_that_is_down_and_was_inspected_leaves_nothing_open(short_path: Path, house: Path) -> None:
    mounts = [{"Source": str(house / "w0")}]
    down = inspected(running=False, pid=0, mounts=mounts)
    telling = Telling({**row(), "State": "exited", "Mounts": mounts}, inspect=down)

    with daemon(short_path, telling) as url, asked(url, house):
        eventually(telling.is_left_alone)


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("ends", [True, False], ids=["and end", "and never end"])
def test_one_whose_events_do_not_come_in_chunks_is_asked_often(short_path: Path, ends: bool) -> None:
    whole, endless = Telling(row(), inspect=inspected(pid=os.getpid())), Unframed()
    told = [STARTED] if ends else endless
    answer: Answer = lambda path: told if "/events" in path else whole(path)  # noqa: E731

    with daemon(short_path, answer) as url, asked(url) as source:
        eventually(lambda: len(whole.listings) > 3)
        assert not whole.is_left_alone()
        assert source._events is not None
        assert source._events._stream is None


@pytest.mark.usefixtures("calm")
def test_what_follows_a_daemon_that_says_nothing_at_all_holds_up_no_end(short_path: Path) -> None:
    silence = threading.Event()
    whole = a_daemon(row(), inspect=inspected(pid=os.getpid()))
    answer: Answer = lambda path: silence.wait(20) if "/events" in path else whole(path)  # noqa: E731

    with daemon(short_path, answer) as url:
        with asked(url) as source:
            eventually(lambda: listing_of(source))
            began_s = time.monotonic()
        took_s = time.monotonic() - began_s
        silence.set()

    assert took_s < 2


# A real daemon


@pytest.mark.needs_docker
def test_a_real_daemon_tells_of_what_changes(
    engine: Engine, client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "CALM_S", 60.0)
    monkeypatch.setattr(containers, "FRESH_S", 60.0)
    image = worker_image(client, extra={})
    name = "gpuwarden-watched"

    def states() -> dict[str, bool]:
        found = listing_of(source)
        return {} if found is None else {each.name: each.paused for each in found.containers.values()}

    with asked(engine.base_url) as source:
        eventually(lambda: source._is_calm)
        real = client.containers.run(image, ["sleep", "60"], detach=True, network_mode="none", name=name)
        try:
            eventually(lambda: states().get(name) is False)
            real.pause()
            eventually(lambda: states().get(name))
            real.unpause()
            eventually(lambda: states().get(name) is False)
            real.rename("gpuwarden-renamed")
            eventually(lambda: "gpuwarden-renamed" in states())
            real.kill()
            eventually(lambda: "gpuwarden-renamed" not in states())
        finally:
            real.remove(force=True)


@pytest.mark.needs_docker
def test_a_real_container_is_listed_restarted_as_another_incarnation_and_its_ram_read(
    engine: Engine, client: docker.DockerClient, house: Path
) -> None:
    image = worker_image(client, extra={})
    command = ["python3", "-c", ALLOCATES]
    real = client.containers.run(image, command, detach=True, network_mode="none", environment={"A": "1"})
    with asked(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def seen(*, started_at: str) -> ContainerEvidence | None:
            for each in sampler.sample().containers:
                if each.container.incarnation == f"{real.id}@{started_at}" and each.ram_bytes is not None:
                    return each
            return None

        try:
            eventually(lambda: b"ready" in real.logs())
            real.reload()
            first = eventually(lambda: seen(started_at=real.attrs["State"]["StartedAt"]))
            real.kill(signal.SIGUSR1)
            eventually(lambda: b"allocated" in real.logs())
            grown = eventually(lambda: seen(started_at=real.attrs["State"]["StartedAt"]))
            real.restart(timeout=0)
            real.reload()
            second = eventually(lambda: seen(started_at=real.attrs["State"]["StartedAt"]))
        finally:
            real.remove(force=True)

    assert (first.container.kind, first.container.id, first.container.name) == ("docker", real.id, real.name)
    assert first.container.image == image
    assert re.fullmatch(rf"{real.id}@20\d\d-.*Z", first.container.incarnation)
    assert first.container.gpu_request is None
    assert grown.ram_bytes is not None
    assert first.ram_bytes is not None
    assert 60 * build.MIB < grown.ram_bytes - first.ram_bytes < 80 * build.MIB
    assert second.container.id == first.container.id
    assert second.container.incarnation != first.container.incarnation
    assert second.container.pid != first.container.pid
    assert second.ram_still_s == 0.0


def in_a_slot(client: docker.DockerClient, house: Path, script: str) -> Any:
    """A container that runs this, with our package in it and the folder `slot` of the house where it reports."""
    (house / "slot").mkdir()
    return client.containers.run(
        worker_image(client, extra={"/app/gpuwarden": Path(cgroup.__file__).parent}),
        ["python3", "-c", script],
        detach=True,
        network_mode="none",
        volumes={str(house / "slot"): {"bind": "/run/gpuwarden/slot", "mode": "rw"}},
    )


@pytest.mark.needs_docker
def test_a_worker_in_a_real_container_is_tied_to_it_by_the_kernel(
    engine: Engine, client: docker.DockerClient, house: Path
) -> None:
    script = (
        "import sys, time; from pathlib import Path; from gpuwarden.reporter import Reporter\n"
        "Reporter(Path('/run/gpuwarden'), worker='w0', queue='gpu', subdirectory='slot').open()\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    real = in_a_slot(client, house, script)
    with asked(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def place() -> ContainerEvidence | None:
            snapshot = sampler.sample()
            assert snapshot.workers is not None
            return next(filter(None, map(snapshot.container_of, snapshot.workers.workers)), None)

        try:
            eventually(lambda: b"ready" in real.logs())
            found = eventually(place)
            real.kill(signal.SIGKILL)
            eventually(
                lambda: [each.alive for each in (sampler.sample().workers or build.NO_WORKERS).workers] == [False]
            )
        finally:
            real.remove(force=True)

    assert found.container.id == real.id


@pytest.mark.needs_docker
def test_a_real_container_that_is_paused_has_no_durations_until_it_goes_on(
    engine: Engine, client: docker.DockerClient, house: Path
) -> None:
    real = client.containers.run(worker_image(client, extra={}), ["sleep", "600"], detach=True, network_mode="none")
    with asked(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def still_s(*, paused: bool) -> float | None:
            found = [each for each in sampler.sample().containers if each.container.id == real.id]
            assert all(each.ram_still_s is None for each in found if each.container.paused)
            return next((each.ram_still_s or 0.0 for each in found if each.container.paused is paused), None)

        try:
            eventually(lambda: (still_s(paused=False) or 0.0) > 0.5)
            real.pause()
            eventually(lambda: still_s(paused=True) is not None)
            real.unpause()
            first_s = eventually(lambda: None if (found := still_s(paused=False)) is None else (found,))
        finally:
            real.remove(force=True)

    assert first_s == (0.0,)


@pytest.mark.needs_docker
def test_the_pause_of_a_real_container_is_no_part_of_the_step_that_it_fell_into(
    engine: Engine, client: docker.DockerClient, house: Path
) -> None:
    script = (
        "import time; from pathlib import Path; from gpuwarden.job import JobClass\n"
        "from gpuwarden.reporter import Reporter\n"
        "report = Reporter(Path('/run/gpuwarden'), worker='w0', queue='gpu', subdirectory='slot').open()\n"
        "report.start_job(job_id=7, attempt=1, job_class=JobClass.GPU, model=None, budget_s=600, stall_timeout_s=0.5)\n"
        "report.arm()\n"
        "while True: time.sleep(0.02); report.step()\n"
    )
    real = in_a_slot(client, house, script)
    by_its_steps = Patience(stuck_floor_s=0.001, stuck_steps=1.0)
    with asked(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def seen() -> tuple[JobFile, tuple[tuple[float, float], ...]] | None:
            snapshot = sampler.sample()
            sighting = next(iter((snapshot.workers or build.NO_WORKERS).workers), None)
            place = None if sighting is None else snapshot.container_of(sighting)
            return (sighting.job, place.pauses) if sighting and sighting.job and place else None

        def paused_s() -> float:
            return sum(until_s - since_s for since_s, until_s in (seen() or (None, ()))[1])

        try:
            before = eventually(lambda: found if (found := seen()) and found[0].step > 100 else None)
            real.pause()
            eventually(lambda: paused_s() > 5.0)  # by more than the silence that it is allowed
            real.unpause()
            job, pauses = eventually(
                lambda: found if (found := seen()) and (found[0].step_max_s or 0.0) > 4.0 else None
            )
        finally:
            real.remove(force=True)

    took_s, left_s = by_its_steps.stuck_after_s(job), by_its_steps.stuck_after_s(job, pauses)
    assert before[1] == ()
    assert took_s == job.step_max_s
    assert took_s is not None
    assert left_s is not None
    assert 0.5 <= left_s <= took_s - 4.0


def test_what_a_container_may_hold_of_a_gpus_memory_is_read_from_its_labels() -> None:
    found = _container(inspected(labels={"gpuwarden.vram-budget-mib": "3000", "gpuwarden.managed": "true"}))
    silent = _container(inspected())

    assert found is not None
    assert (found.managed, found.tenancy) == (True, Tenancy(budget_bytes=3000 * 2**20, recyclable=True))
    assert silent is not None
    assert (silent.managed, silent.tenancy) == (False, Tenancy())
