"""Servers at one look: asked or not, whose they are, what is logged; and all of it in a snapshot of the sampler."""

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
    """A container that is asked by its own health check."""
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


def test_a_container_that_asks_for_nothing_is_no_server(servers: Servers) -> None:
    assert look(servers, build.container()) == ()


def test_what_was_not_listed_once_has_answered_and_its_silence_begins_anew(servers: Servers) -> None:
    look(servers, by_health())
    for number, now_s in enumerate((130.0, 160.0), start=2):
        failing = by_health(status="unhealthy", passed=False, newest=str(number), failing_streak=number)
        before = look(servers, failing, now_s=now_s)
    look(servers, now_s=161.0)

    after = look(servers, failing, now_s=162.0)

    assert (before.answered, before.probe_failing_s) == (True, 30.0)
    assert (after.answered, after.probe_failing_s) == (True, None)


@pytest.mark.parametrize("alive", [True, False, None])
def test_a_container_in_which_a_worker_lives_or_died_is_the_workers(servers: Servers, alive: bool | None) -> None:
    workers = WorkerReadings(workers=(build.sighting(alive=alive),))

    found = look(servers, by_health(), workers=workers)

    assert (found.workers, found.probe_failing_s) == (1, None)
    assert found.probe.reason == "holds_workers"


def test_whether_workers_live_in_it_is_unknown_where_their_files_cannot_be_read(servers: Servers) -> None:
    assert look(servers, by_health(), workers=None).workers is None


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(None, id="none of their files can be read"),
        pytest.param(WorkerReadings(workers=(), unread=frozenset({"f0"})), id="one file of its folder cannot"),
        pytest.param(
            WorkerReadings(workers=(build.sighting(alive=None, container_id=None, folder="f0"),)),
            id="a lock of its folder cannot be tested",
        ),
    ],
)
def test_a_server_in_which_a_worker_may_live_is_not_accused(servers: Servers, workers: WorkerReadings | None) -> None:
    failing = replace(by_health(passed=False, newest="2", failing_streak=1), folders=("f0",))
    look(servers, replace(by_health(), folders=("f0",)))

    found = look(servers, failing, now_s=130.0, workers=workers)
    known = look(servers, failing, now_s=131.0)

    assert (found.workers, found.answered, found.probe_failing_s) == (None, True, None)
    assert found.unknown.reason == "workers_unknown"
    assert (known.workers, known.probe_failing_s, known.unknown) == (0, 0.0, None)


def test_a_health_check_that_tells_nothing_any_more_is_an_asking_that_is_overdue(servers: Servers) -> None:
    look(servers, by_health())
    silent = by_health()
    assert silent.server is not None

    found = look(servers, replace(silent, server=replace(silent.server, health=None)), now_s=101.0)

    assert (found.answered, found.probe_failing_s, found.unknown.reason) == (True, None, "not_asked")


def test_labels_that_cannot_be_used_are_told_once_and_accuse_nobody(servers: Servers, logged: LogCapture) -> None:
    problem = Unknown(reason="other_host", because="no other place is called")
    wrong = build.container(name="llm", server=build.server(probe=problem))

    found: ServerEvidence = [look(servers, wrong) for _ in range(3)][-1]

    assert (found.probe, found.answered, found.probe_failing_s) == (problem, None, None)
    assert logged.entries == [
        {"event": "server cannot be probed", "log_level": "warning", "container": "llm", "because": problem.because}
    ]


def test_a_silence_and_its_end_are_told_once(servers: Servers, logged: LogCapture) -> None:
    for number, now_s in enumerate((100.0, 130.0, 160.0, 190.0)):
        look(servers, by_health(passed=not number, newest=str(number), failing_streak=number), now_s=now_s)
    look(servers, by_health(newest="9"), now_s=220.0)

    assert [entry["event"] for entry in logged.entries] == [
        "server does not answer",
        "server answers again or has stopped",
    ]


class Docker:
    """A listing, or an error in its place."""

    def __init__(self, *containers: Container) -> None:
        self.listing: Listing | None = Listing(
            containers={each.id: each for each in containers}, taken_s=0.0, duration_s=0.0
        )

    def latest(self) -> Listing:
        if self.listing is None:
            raise OSError("the daemon hangs")
        return self.listing


def test_a_sample_holds_the_servers_and_counts_what_is_unknown_of_them(house: Path, servers: Servers) -> None:
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


def test_an_unreadable_server_costs_itself(house: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_a_listing_nothing_is_known_of_servers_and_what_was_is_kept(house: Path, servers: Servers) -> None:
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


def test_pods_that_cannot_be_listed_cost_no_server(house: Path, servers: Servers) -> None:
    pods = Docker()
    pods.listing = None
    sampler = Sampler(
        host="box-1", directory=house, containers={"docker": Docker(by_health()), "kubernetes": pods}, gpus=None,
        thresholds=Thresholds(), servers=servers,
    )  # fmt: skip

    found = sampler.sample().servers

    assert found is not None
    assert [each.container.name for each in found] == ["llm"]
