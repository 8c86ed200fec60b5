"""Servers in one sample: probed or not, their workers, the log; and the same in a snapshot of the sampler."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

import exporter.sources.servers.monitor
from exporter.model.container import Container, ServerEvidence
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import WorkerReadings
from exporter.sampler import Sampler
from exporter.sources.containers.poller import Listing
from exporter.sources.servers.http_probe import Prober
from exporter.sources.servers.monitor import Servers
from tests.exporter import builders as build

OWN_CHECK = build.probe(kind="docker", restart_after_s=60.0)


def by_health(**changes: Any) -> Container:
    """A container with its own health check as the probe."""
    health = build.health(**changes)
    return build.container(name="llm", server=build.server(probe=OWN_CHECK, address=None, health=health))


@pytest.fixture
def servers() -> Iterator[Servers]:
    with closing(Servers(Prober())) as found:
        yield found


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    capture = LogCapture()
    monkeypatch.setattr(exporter.sources.servers.monitor, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


def look(servers: Servers, *containers: Container, now_s: float = 100.0, workers: Any = build.NO_WORKERS) -> Any:
    found = servers.observe(containers, workers, now_s=now_s)
    return found[0] if len(found) == 1 else found


def test_container_without_a_probe_is_not_a_server(servers: Servers) -> None:
    assert look(servers, build.container()) == ()


def test_server_missing_from_one_listing_stays_armed_and_restarts_its_time(servers: Servers) -> None:
    look(servers, by_health())
    for number, now_s in enumerate((130.0, 160.0), start=2):
        failing = by_health(status="unhealthy", passed=False, newest=str(number), failing_streak=number)
        before = look(servers, failing, now_s=now_s)
    look(servers, now_s=161.0)

    after = look(servers, failing, now_s=162.0)

    assert (before.answered, before.probe_failing_s) == (True, 30.0)
    assert (after.answered, after.probe_failing_s) == (True, None)


@pytest.mark.parametrize("alive", [True, False, None])
def test_container_with_a_live_or_dead_worker_belongs_to_the_worker(servers: Servers, alive: bool | None) -> None:
    workers = WorkerReadings(workers=(build.sighting(alive=alive),))

    found = look(servers, by_health(), workers=workers)

    assert (found.workers, found.probe_failing_s) == (1, None)
    assert found.probe.reason == "holds_workers"


def test_unreadable_workers_make_the_worker_count_unknown(servers: Servers) -> None:
    assert look(servers, by_health(), workers=None).workers is None


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(None, id="no worker file readable"),
        pytest.param(WorkerReadings(workers=(), unread=frozenset({"f0"})), id="one file of its folder unreadable"),
        pytest.param(
            WorkerReadings(workers=(build.sighting(alive=None, container_id=None, folder="f0"),)),
            id="one lock of its folder untested",
        ),
    ],
)
def test_server_that_may_hold_a_worker_has_no_unanswered_time(servers: Servers, workers: WorkerReadings | None) -> None:
    failing = replace(by_health(passed=False, newest="2", failing_streak=1), folders=("f0",))
    look(servers, replace(by_health(), folders=("f0",)))

    found = look(servers, failing, now_s=130.0, workers=workers)
    known = look(servers, failing, now_s=131.0)

    assert (found.workers, found.answered, found.probe_failing_s) == (None, True, None)
    assert found.unknown.reason == "workers_unknown"
    assert (known.workers, known.probe_failing_s, known.unknown) == (0, 0.0, None)


def test_missing_health_check_result_is_unknown(servers: Servers) -> None:
    look(servers, by_health())
    silent = by_health()
    assert silent.server is not None

    found = look(servers, replace(silent, server=replace(silent.server, health=None)), now_s=101.0)

    assert (found.answered, found.probe_failing_s, found.unknown.reason) == (True, None, "not_asked")


def test_invalid_labels_are_logged_once(servers: Servers, logged: LogCapture) -> None:
    problem = Unknown(reason="other_host", message="no other place is called")
    wrong = build.container(name="llm", server=build.server(probe=problem))

    found: ServerEvidence = [look(servers, wrong) for _ in range(3)][-1]

    assert (found.probe, found.answered, found.probe_failing_s) == (problem, None, None)
    assert logged.entries == [
        {"event": "server cannot be probed", "log_level": "warning", "container": "llm", "reason": problem.message}
    ]


def test_silence_and_its_end_are_logged_once(servers: Servers, logged: LogCapture) -> None:
    for number, now_s in enumerate((100.0, 130.0, 160.0, 190.0)):
        look(servers, by_health(passed=not number, newest=str(number), failing_streak=number), now_s=now_s)
    look(servers, by_health(newest="9"), now_s=220.0)

    assert [entry["event"] for entry in logged.entries] == [
        "server does not answer",
        "server answers again or has stopped",
    ]


class Docker:
    """A listing, or an error instead."""

    def __init__(self, *containers: Container) -> None:
        self.listing: Listing | None = Listing(
            containers={each.id: each for each in containers}, taken_s=0.0, duration_s=0.0
        )

    def latest(self) -> Listing:
        if self.listing is None:
            raise OSError("the daemon hangs")
        return self.listing


def test_sample_has_the_servers_and_counts_unknown_probes(house: Path, servers: Servers) -> None:
    engine = Docker(by_health())
    sampler = Sampler(
        host="box-1",
        directory=house,
        containers={"docker": engine},
        gpus=None,
        thresholds=Thresholds(),
        servers=servers,
    )

    snapshot = sampler.sample()

    assert snapshot.servers is not None
    assert [each.container.name for each in snapshot.servers] == ["llm"]
    assert snapshot.unknown["llm", "probe", "not_asked"] == 1


def test_failed_server_source_affects_no_other(house: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    sampler = Sampler(
        host="box-1", directory=house, containers={"docker": Docker(by_health())}, gpus=None, thresholds=Thresholds(),
        servers=servers,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(servers, "observe", refuse)
        snapshot = sampler.sample()

    assert snapshot.servers is None
    assert [each.container.name for each in snapshot.containers] == ["llm"]
    assert {each.source: each.success for each in snapshot.sources} == {
        "workers": True,
        "docker": True,
        "servers": False,
    }
    assert sampler.sample().servers is not None


def test_missing_listing_makes_servers_unknown_and_keeps_their_state(house: Path, servers: Servers) -> None:
    engine = Docker(by_health())
    listing = engine.listing
    sampler = Sampler(
        host="box-1",
        directory=house,
        containers={"docker": engine},
        gpus=None,
        thresholds=Thresholds(),
        servers=servers,
    )
    sampler.sample()

    engine.listing = None
    assert sampler.sample().servers is None

    engine.listing = listing
    (found,) = sampler.sample().servers or ()
    assert found.answered


def test_unlisted_pods_do_not_affect_servers(house: Path, servers: Servers) -> None:
    pods = Docker()
    pods.listing = None
    sampler = Sampler(
        host="box-1", directory=house, containers={"docker": Docker(by_health()), "kubernetes": pods}, gpus=None,
        thresholds=Thresholds(), servers=servers,
    )  # fmt: skip

    found = sampler.sample().servers

    assert found is not None
    assert [each.container.name for each in found] == ["llm"]
