"""Listings of a Docker daemon, also of a faulty one."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources.containers import docker as containers
from exporter.sources.containers.docker import EngineContainers
from exporter.sources.containers.poller import Listing
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker
from tests.exporter.sources.containers.docker_daemon import (
    OWN,
    UNHEALTHY,
    Answer,
    a_daemon,
    daemon,
    inspected,
    listing_of,
    polling,
    row,
)
from tests.exporter.sources.test_workers import unprivileged
from tests.waiting import eventually


@contextmanager
def by_hand(base_url: str, directory: Path | None = None) -> Iterator[EngineContainers]:
    """A source that lists on demand."""
    source = EngineContainers(base_url, directory)
    yield source
    assert source._client is not None
    source._client.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """List often, with short timeouts."""
    monkeypatch.setattr(containers, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(containers, "REFRESH_S", 0.02)
    monkeypatch.setattr(containers, "FRESH_S", 0.5)
    monkeypatch.setattr(containers, "INSPECT_S", 0.1)
    monkeypatch.setattr(containers, "INSPECTIONS_S", 0.15)


def message_of(source: EngineContainers) -> str:
    """The reason for a missing listing; empty if it exists."""
    try:
        source.latest()
    except OSError as error:
        return str(error)
    return ""


def listing_after(source: EngineContainers, seconds: float) -> Callable[[], Listing | None]:
    """The first listing that is taken so many seconds from now."""
    from_s = time.monotonic() + seconds
    return lambda: found if (found := listing_of(source)) and found.taken_s > from_s else None


BUDGETED = {"gpuwarden.managed": "true", "gpuwarden.vram-budget-mib": "2048"}


@pytest.mark.usefixtures("impatient")
def test_silent_daemon_does_not_affect_other_sources(short_path: Path, house: Path, start_worker: StartWorker) -> None:
    silence = threading.Event()
    start_worker("w0")

    with daemon(short_path, lambda _: silence.wait(20)) as url, polling(url) as source:
        message = eventually(lambda: found if "timed out" in (found := message_of(source)) else None)
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )
        snapshot = sampler.sample()
        silence.set()

    assert message.startswith(f"Docker at {url} does not answer: ")
    assert {each.source: each.success for each in snapshot.sources} == {"workers": True, "docker": False}
    assert snapshot.workers is not None
    assert [each.worker.worker for each in snapshot.workers.workers] == ["w0"]
    assert [each.container.kind for each in snapshot.containers] == ["process"]


@pytest.mark.usefixtures("impatient")
def test_missing_daemon_is_reported_and_listed_once_it_starts(short_path: Path) -> None:
    with polling(f"unix://{short_path}/docker.sock") as source:
        assert "No such file" in eventually(
            lambda: found if "not asked yet" not in (found := message_of(source)) else None
        )

        with daemon(short_path, a_daemon()):
            assert eventually(lambda: listing_of(source)).containers == {}


@pytest.mark.usefixtures("impatient")
def test_forbidden_socket_is_reported_with_its_group(short_path: Path) -> None:
    path = short_path / "docker.sock"
    short_path.chmod(0o755)

    def reason() -> str:
        with unprivileged(), polling(f"unix://{path}") as source:
            return eventually(lambda: found if "not asked yet" not in (found := message_of(source)) else None)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o060)  # also not for its owner, who may run the tests
        if os.geteuid() == 0:
            os.chown(path, -1, 1)
        with_a_group = reason()
        path.chmod(0)
        without_a_group = reason()

    denied = (
        f"Docker at unix://{path} does not answer: PermissionError: [Errno 13] Permission denied to open the socket: "
    )
    assert without_a_group == f"{denied}run the exporter as root"
    assert with_a_group == f"{without_a_group}, or as one of the group {path.group()}"


@pytest.mark.usefixtures("impatient")
def test_old_listing_expires(short_path: Path) -> None:
    hang, silence = threading.Event(), threading.Event()
    whole = a_daemon()

    def answer(path: str) -> Any:
        if hang.is_set():
            silence.wait(20)
        return whole(path)

    with daemon(short_path, answer) as url, polling(url) as source:
        eventually(lambda: listing_of(source))
        hang.set()
        assert "timed out" in eventually(lambda: message_of(source))
        hang.clear()
        silence.set()
        assert eventually(lambda: listing_of(source)).containers == {}


@pytest.mark.usefixtures("impatient")
def test_server_is_inspected_repeatedly_and_other_containers_once(short_path: Path) -> None:
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

    with daemon(short_path, a_daemon(row(), row(plain, "plain"), inspect=inspect)) as url, polling(url) as source:
        eventually(passed, "it is healthy")
        answers["passed"] = False
        eventually(lambda: passed() is False, "its failure is seen")
        answers["broken"] = True
        before = len(asked_for)
        eventually(lambda: len(asked_for) > before + 3, "its inspection fails")
        assert passed() is False, "keeps its last state"

    assert asked_for.count(plain) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(lambda _: "nonsense", id="text"),
        pytest.param(lambda _: {"message": "no"}, id="object"),
        pytest.param(lambda _: (500, {"message": "no"}), id="error"),
        pytest.param(a_daemon({"nothing": "known"}), id="rows without an id"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_daemon_with_invalid_answers_is_reported_and_listed_again(nonsense: Answer, short_path: Path) -> None:
    sane = threading.Event()

    def answer(path: str) -> Any:
        return (a_daemon() if sane.is_set() else nonsense)(path)

    with daemon(short_path, answer) as url, polling(url) as source:
        eventually(lambda: "not asked yet" not in message_of(source))
        assert "does not answer" in message_of(source)

        sane.set()

        assert eventually(lambda: listing_of(source)).containers == {}


@pytest.mark.parametrize(
    "inspection",
    [
        pytest.param((404, {"message": "gone"}), id="removed since the listing"),
        pytest.param((500, {"message": "broken"}), id="error"),
        pytest.param({"Id": "half"}, id="incomplete"),
        pytest.param(inspected(running=False, pid=0), id="exited since the listing"),
        pytest.param(inspected(pid=2**22 + 1), id="first process ended"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_failed_inspection_drops_only_its_container(
    inspection: Any, short_path: Path, start_worker: StartWorker
) -> None:
    good, bad = "aa" * 32, "bb" * 32
    whole = inspected(pid=start_worker("w0").pid) | {"Id": good, "Name": "/good"}
    answer = a_daemon(
        row(bad, "bad"), row(good, "good"), inspect=lambda full_id: whole if full_id == good else inspection
    )

    with daemon(short_path, answer) as url, polling(url) as source:
        found = eventually(lambda: found if (found := listing_of(source)) and found.containers else None)

    assert [container.name for container in found.containers.values()] == ["good"]
    assert not found.whole


@pytest.mark.usefixtures("impatient")
def test_hanging_inspection_drops_only_its_container(short_path: Path, house: Path, start_worker: StartWorker) -> None:
    silence = threading.Event()
    good, stuck, down = "aa" * 32, ["bb" * 32, "cc" * 32, "dd" * 32], "ee" * 32
    mounts = [{"Source": str(house / "w9")}]
    inspections = {
        good: inspected(pid=start_worker("w0").pid) | {"Id": good, "Name": "/good"},
        down: inspected(running=False, pid=0, mounts=mounts) | {"Id": down},
    }

    def inspect(full_id: str) -> Any:
        return inspections[full_id] if full_id in inspections else silence.wait(20)

    rows = [
        row(stuck[0], "stuck-bb", Labels=BUDGETED),
        row(stuck[1], "stuck-cc", Labels=BUDGETED | {"gpuwarden.vram-protected": "true"}),
        row(stuck[2], "stuck-dd", Labels=BUDGETED, State="paused"),
        row(good, "good", Labels=BUDGETED),
    ]
    answer = a_daemon(*rows, {**row(down, "down"), "State": "exited", "Mounts": mounts}, inspect=inspect)
    with daemon(short_path, answer) as url, polling(url, house) as source:
        eventually(lambda: (found := listing_of(source)) and found.containers.keys() == {good}, "the good one is seen")
        later = eventually(listing_after(source, 1.0))
        missing = message_of(source)
        silence.set()

    assert missing == ""
    assert (set(later.containers), set(later.down)) == ({good}, {down})
    assert later.unseen == ("stuck-bb",)  # the only one with a VRAM budget


@pytest.mark.usefixtures("impatient")
def test_server_with_a_hanging_inspection_keeps_its_state(short_path: Path) -> None:
    silence, hang, hung = threading.Event(), threading.Event(), threading.Event()

    def inspect(_: str) -> Any:
        if hang.is_set():
            hung.set()
            silence.wait(20)
        return inspected(pid=os.getpid(), labels=OWN, health=UNHEALTHY)

    with daemon(short_path, a_daemon(row(), inspect=inspect)) as url, polling(url) as source:
        before = eventually(lambda: found if (found := listing_of(source)) and found.containers else None)
        hang.set()
        assert hung.wait(10)
        after = eventually(listing_after(source, 1.0))
        silence.set()

    assert after.containers == before.containers


@pytest.mark.usefixtures("impatient")
def test_age_of_a_listing_starts_at_the_answer_not_at_the_last_inspection(short_path: Path) -> None:
    times: dict[str, float] = {}

    def inspect(_: str) -> Any:
        times["inspected"] = time.monotonic()
        return inspected(pid=os.getpid())

    with daemon(short_path, a_daemon(row(), inspect=inspect)) as url, polling(url) as source:
        first = eventually(lambda: source._listing)

    assert first.taken_s < times["inspected"]
    assert first.whole


@pytest.mark.usefixtures("impatient")
def test_paused_state_needs_no_inspection(short_path: Path) -> None:
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

    with daemon(short_path, answer) as url, polling(url) as source:
        eventually(lambda: paused() is False)
        state[0] = "paused"
        eventually(paused)
        state[0] = "running"
        eventually(lambda: paused() is False)

    assert len(inspections) == 1


@pytest.mark.usefixtures("impatient")
def test_renamed_container_is_inspected_again(short_path: Path, start_worker: StartWorker) -> None:
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

    with daemon(short_path, answer) as url, polling(url) as source:
        first = eventually(lambda: listing_of(source))
        eventually(lambda: (found := listing_of(source)) and found.taken_s > first.taken_s)
        assert len(inspections) == 1

        name[0] = "second"

        eventually(lambda: name_seen() == "second")


@pytest.mark.parametrize(
    ("state", "mounted", "inspection", "down"),
    [
        pytest.param("exited", "w0", inspected(running=False, pid=0), ["worker-0"], id="mounts a folder of a worker"),
        pytest.param("exited", "elsewhere", inspected(running=False, pid=0), [], id="mounts no folder: not inspected"),
        pytest.param("exited", "w0", inspected(), [], id="started since the listing"),
        pytest.param("exited", "w0", (404, {"message": "gone"}), [], id="removed since the listing"),
        pytest.param("exited", "w0", {"Id": "half"}, [], id="incomplete"),
        pytest.param("running", "w0", inspected(pid=2**22 + 1), [], id="running"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_stopped_container_is_listed_if_it_mounts_a_folder_of_a_worker(
    state: str, mounted: str, inspection: Any, down: list[str], short_path: Path, house: Path
) -> None:
    source_of_it = str(house / mounted) if mounted == "w0" else "/elsewhere/w0"
    if isinstance(inspection, dict) and "State" in inspection:
        inspection = {**inspection, "Mounts": [{"Source": source_of_it}]}
    answer = a_daemon({**row(), "State": state, "Mounts": [{"Source": source_of_it}]}, inspect=inspection)

    with daemon(short_path, answer) as url, polling(url, house) as source:
        found = eventually(lambda: listing_of(source))

    assert found.containers == {}
    assert [each.name for each in found.down.values()] == down
    assert [each.folders for each in found.down.values()] == [("w0",)] * len(down)


@pytest.mark.parametrize("slow_s", [0.0, 0.6], ids=["fast listing", "slow listing"])
def test_slow_inspections_do_not_make_listings_too_old(
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


# No engine


def test_disabled_engine_loads_no_client(tmp_path: Path) -> None:
    program = "import sys; from exporter import main; from exporter.settings import Settings\n"
    program += "print(main.configured_engines(Settings(_cli_parse_args=sys.argv[1:])), *sys.modules)"
    common = [sys.executable, "-P", "-c", program, "--runtime-dir", str(tmp_path)]

    def output_of(*arguments: str) -> list[str]:
        return subprocess.run([*common, *arguments], capture_output=True, text=True, check=True).stdout.split()

    none, one = (
        output_of("--docker", "none"),
        output_of("--docker", "none", "--podman", "unix:///run/podman/podman.sock"),
    )
    assert none[0] == "{}"
    assert {"docker", "requests"}.isdisjoint(none)
    assert one[0] == "{'podman':"
    assert {"docker", "requests"} <= set(one)
