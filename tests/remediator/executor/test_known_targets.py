"""Alerts about workers, containers and runs that do not exist."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from gpuwarden.db.errors import DatabaseError
from gpuwarden.queue import JobStore, Submission
from remediator.clients.exporter import Targets
from remediator.clients.exporter_access import ExporterError
from remediator.clients.job_queue import KnownNames
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.executor import Pools
from remediator.executor.known_targets import KNOWN_S, REFRESH_S, KnownTargets
from remediator.executor.pace import Pace
from remediator.ledger.episodes import OpenEpisode
from remediator.ledger.inbox import TAKE_MAX, UNKNOWN_MAX
from remediator.ledger.ledger import Ledger
from remediator.plan import Subject
from remediator.reasons import Reason
from remediator.remedies.guards import Orders
from tests.races.remediators import ImmediatePool
from tests.remediator.builders import HOST, alert, run_alert, server_alert
from tests.remediator.executor.builders import executor, looping, running, sql, stalled_job
from tests.remediator.world import Box, World
from tests.waiting import eventually

POOLS = Pools(*[ImmediatePool()] * 4)  # type: ignore[arg-type]  # the methods that the executor uses


class Clock(SuspendAwareClock):
    """A clock that a test sets."""

    at_s = 0.0

    def now_s(self) -> float:  # type: ignore[override]
        return self.at_s


class Exporter:
    """Lists names, or fails."""

    def __init__(self, *names: str) -> None:
        self.names: tuple[str, ...] | None = names
        self.asked = 0

    def list_targets(self) -> Targets:
        self.asked += 1
        if self.names is None:
            raise ExporterError("no answer")
        return Targets(containers=len(self.names), names=frozenset(self.names))


class Queue:
    """Knows names, or fails."""

    def __init__(self, *, workers: Collection[str] = (), runs: Collection[str] = (), fails: bool = False) -> None:
        self._known = KnownNames(workers=workers, runs=runs)
        self._fails = fails

    def known(self, host: str, *, workers: Sequence[str], runs: Sequence[str]) -> KnownNames:
        assert host == HOST
        assert set(workers) | set(runs)
        if self._fails:
            raise DatabaseError("locked")
        return self._known


def known_targets(exporter: Exporter, queue: Queue, clock: Clock | None = None) -> KnownTargets:
    return KnownTargets(exporter, queue, host=HOST, clock=clock or Clock())  # type: ignore[arg-type]  # the methods it uses


WORKER, SERVER, RUN = (Subject.WORKER, "a"), (Subject.SERVER, "a"), (Subject.RUN, "a")
ALL = {WORKER, SERVER, RUN, (Subject.HOST, "a")}


@pytest.mark.parametrize(
    ("exporter", "queue", "unknown"),
    [
        (Exporter(), Queue(), {WORKER, SERVER, RUN}),
        (Exporter("a"), Queue(), {RUN}),
        (Exporter(), Queue(workers=["a"], runs=["a"]), {SERVER}),
        (Exporter(), Queue(fails=True), {WORKER, SERVER}),
        (Exporter("a"), Queue(fails=True), set()),
    ],
    ids=["nothing knows it", "the exporter", "the queue", "the queue fails", "the exporter, and the queue fails"],
)
def test_target_is_unknown_if_exporter_and_queue_do_not_know_it(
    exporter: Exporter, queue: Queue, unknown: set[Any]
) -> None:
    assert known_targets(exporter, queue).unknown(ALL) == unknown


def test_without_an_exporter_that_answered_no_worker_or_container_is_unknown() -> None:
    exporter = Exporter()
    exporter.names = None

    assert known_targets(exporter, Queue()).unknown(ALL) == {RUN}
    assert known_targets(exporter, Queue(fails=True)).unknown(ALL) == set()


def test_listed_name_is_remembered_for_an_hour() -> None:
    exporter, clock = Exporter("a"), Clock()
    known = known_targets(exporter, Queue(), clock)
    known.refresh()
    exporter.names = ("b",)

    clock.at_s = KNOWN_S - 1
    assert known.unknown([SERVER]) == set()
    known.refresh()
    clock.at_s = KNOWN_S + REFRESH_S
    assert known.is_listed("a")
    known.refresh()
    assert known.unknown([SERVER]) == {SERVER}


def test_exporter_that_fails_is_remembered_too() -> None:
    exporter, clock = Exporter("b"), Clock()
    known = known_targets(exporter, Queue(), clock)
    known.refresh()
    exporter.names = None

    clock.at_s = 60.0
    assert known.unknown([SERVER]) == {SERVER}
    clock.at_s = KNOWN_S
    assert known.unknown([SERVER]) == set(), "an answer of an hour ago is none"


def test_exporter_is_asked_about_new_names_and_not_too_often() -> None:
    exporter, clock = Exporter(), Clock()
    known = known_targets(exporter, Queue(), clock)
    assert known.unknown([SERVER]) == {SERVER}
    exporter.names = ("a",)

    assert known.unknown([SERVER]) == {SERVER}
    clock.at_s = REFRESH_S
    assert known.unknown([SERVER]) == set()
    assert exporter.asked == 2


# --- the executor


def forged(count: int, first: int = 0, condition: str = "stall") -> list[Any]:
    numbers = range(first, first + count)
    return [alert(f"x{each}", worker=f"forged-{each}", job_id=str(900 + each), condition=condition) for each in numbers]


def outcomes(ledger: Ledger) -> Counter[str]:
    """How many alerts were linked and refused."""
    return Counter(state for (state,) in sql(ledger, "SELECT state FROM alerts"))


@pytest.mark.both_databases
def test_few_episodes_of_unknown_workers_open_and_a_real_hang_is_fixed(ledger: Ledger, store: JobStore) -> None:
    ledger.inbox.accept(forged(TAKE_MAX + 50), [], now=time.time())
    world = stalled_job(ledger, store)

    with looping(executor(ledger, store, world)):
        eventually(lambda: world.boxes["w1"].calls == ["stop", "start"], "the real hang is fixed")
        eventually(lambda: outcomes(ledger)["new"] == 0, "every alert is taken")

    assert len([each for each in ledger.episodes.list_open() if each.worker != "w1"]) == UNKNOWN_MAX
    assert outcomes(ledger) == {"linked": UNKNOWN_MAX + 1, "refused": TAKE_MAX + 50 - UNKNOWN_MAX}
    (_, reason, message, _) = ledger.inbox.refused(last=1)[0]
    assert reason == Reason.UNKNOWN_TARGET
    assert "10 episodes of unknown targets with condition stall are open" in message
    counted = ledger.reports.totals(HOST).alerts
    assert counted["refused", Reason.UNKNOWN_TARGET] == TAKE_MAX + 50 - UNKNOWN_MAX
    assert counted["accepted", ""] == TAKE_MAX + 51


def test_each_condition_has_room_of_its_own_until_an_episode_closes(ledger: Ledger, store: JobStore) -> None:
    works = executor(ledger, store, World())
    ledger.inbox.accept([*forged(20), *forged(20, 100, condition="health")], [], now=time.time())
    works.reconcile(POOLS)
    assert len(ledger.episodes.list_open()) == 2 * UNKNOWN_MAX

    ended = alert("x0", worker="forged-0", job_id="900", firing=False)
    ledger.inbox.accept([ended, *forged(1, 50)], [], now=time.time())
    works.reconcile(POOLS)
    assert "forged-50" not in {each.worker for each in ledger.episodes.list_open()}, "the other is open until it closes"
    works.reconcile(POOLS)
    ledger.inbox.accept(forged(1, 51), [], now=time.time())
    works.reconcile(POOLS)

    assert "forged-51" in {each.worker for each in ledger.episodes.list_open()}


def test_known_targets_are_never_refused(ledger: Ledger, store: JobStore) -> None:
    running(store, worker="w1")
    run_id = "r1"
    store.runs.submit(Submission(queue="q", run_id=run_id), now=time.time())
    containers = [f"c{each}" for each in range(2 * UNKNOWN_MAX)]
    world = World(*(Box(worker=each) for each in containers))
    works = executor(ledger, store, world, armed=False)
    floods = [*forged(UNKNOWN_MAX)]
    floods += [server_alert(f"s{each}", container=f"forged-{each}") for each in range(UNKNOWN_MAX)]
    floods += [run_alert(f"r{each}", run=f"forged-{each}") for each in range(UNKNOWN_MAX)]
    ledger.inbox.accept(floods, [], now=time.time())
    real = [server_alert(each, container=each) for each in containers]
    ledger.inbox.accept([*real, alert("w"), run_alert("r", run=run_id), run_alert("no", run="forged-x")], [], now=1.0)

    works.reconcile(POOLS)

    found = {each.worker for each in ledger.reports.newest(last=100)}
    assert {*containers, "w1", run_id} <= found
    assert "forged-x" not in found


def test_alert_that_arrived_after_the_question_stays_for_the_next_round(ledger: Ledger) -> None:
    ledger.inbox.accept([alert("a", worker="w1"), alert("b", worker="w2")], [], now=1.0)

    assert ledger.inbox.take_new(HOST, now=1.0, asked={(Subject.WORKER, "w1")}) == 1
    assert ledger.inbox.new_targets(HOST) == [(Subject.WORKER, "w2")]


@pytest.mark.both_databases
def test_queue_knows_workers_of_the_host_and_runs(store: JobStore) -> None:
    running(store, worker="w1")
    store.runs.submit(Submission(queue="q", run_id="r1"), now=time.time())
    queue = BuiltinQueue(store)

    found = queue.known(HOST, workers=["w1", "w2"], runs=["r1", "r2"])
    elsewhere = queue.known("box9", workers=["w1"], runs=[])

    assert (found.workers, found.runs) == ({"w1"}, {"r1"})
    assert (elsewhere.workers, elsewhere.runs) == (set(), set())


# --- what comes first


def waits(episode_id: int, wait: Reason | None) -> OpenEpisode:
    return OpenEpisode(episode_id, Subject.WORKER, f"w{episode_id}", "stall", wait, False, 1, None)


def test_listed_targets_come_first_and_a_newly_listed_one_at_once() -> None:
    paced, listed = Pace(Clock()), {"w2"}

    def due(*found: OpenEpisode) -> tuple[list[int], list[int]]:
        chosen = paced.due(found, running=(), orders=Orders(), is_listed=listed.__contains__)
        return list(chosen.first), list(chosen.waiting)

    assert due(waits(1, None), waits(2, None)) == ([2, 1], [])
    assert due(waits(1, Reason.NO_EVIDENCE), waits(2, Reason.NO_EVIDENCE)) == ([], [])
    listed.add("w1")
    assert due(waits(1, Reason.NO_EVIDENCE), waits(2, Reason.NO_EVIDENCE)) == ([1], [])
