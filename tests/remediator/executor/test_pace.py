"""Which open episodes a round processes, and what many that wait for a person cost."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from gpuwarden.evidence import WorkerFacts
from gpuwarden.queue import JobStore
from remediator.executor import pace
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.pace import FIRST_AT_ONCE, RARELY_S, WAITING_AT_ONCE, Pace
from remediator.ledger.episodes import OpenEpisode
from remediator.ledger.ledger import Ledger
from remediator.plan import Subject
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order, Orders
from tests.remediator.builders import HOST, alert
from tests.remediator.executor.builders import arm, executor, journal, looping, outcome_of, running
from tests.remediator.world import Box, World
from tests.waiting import eventually

NO_ORDERS = Orders()
ARMED = Orders(given=(Order(act=Act.ARM, at=1.0, who="test", reason="a test"),))


class Clock(SuspendAwareClock):
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at_s = 0.0
        super().__init__()

    def now_s(self) -> float:  # type: ignore[override]
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def episode(
    episode_id: int,
    wait: Reason | None = None,
    *,
    acting: bool = False,
    alert_id: int = 1,
    order_id: int | None = None,
    subject: Subject = Subject.WORKER,
) -> OpenEpisode:
    return OpenEpisode(
        episode_id, subject, f"w{episode_id}", "stall", wait, acting=acting, alert_id=alert_id, order_id=order_id
    )


def due(paced: Pace, *found: OpenEpisode, running: tuple[int, ...] = (), orders: Orders = NO_ORDERS) -> tuple[Any, Any]:
    chosen = paced.due(found, running=running, orders=orders)
    return list(chosen.first), list(chosen.waiting)


def test_new_episodes_and_started_acts_come_first_and_acts_before_new_ones(clock: Clock) -> None:
    waits, new, acts = episode(1, Reason.UNCONFIRMED), episode(2), episode(3, Reason.ENGINE_UNREACHABLE, acting=True)

    assert due(Pace(clock), waits, new, acts) == ([3, 2], [1])


def test_wait_for_a_person_is_read_every_ten_seconds_and_others_in_each_round(clock: Clock) -> None:
    paced = Pace(clock)
    dry, unconfirmed = episode(1, Reason.DRY_RUN), episode(2, Reason.UNCONFIRMED)
    assert due(paced, dry, unconfirmed) == ([], [2, 1])

    clock.at_s = RARELY_S - 1
    assert due(paced, dry, unconfirmed) == ([], [2])
    clock.at_s = RARELY_S
    assert due(paced, dry, unconfirmed) == ([], [2, 1])


@pytest.mark.parametrize("news", [episode(1, Reason.APPROVAL, alert_id=2), episode(1, Reason.APPROVAL, order_id=5)])
def test_new_alert_or_order_of_a_waiting_episode_comes_first(clock: Clock, news: OpenEpisode) -> None:
    paced = Pace(clock)
    due(paced, episode(1, Reason.APPROVAL))

    assert due(paced, news) == ([1], [])
    assert due(paced, news) == ([], [])


def test_new_alert_of_a_running_episode_comes_first_once_it_ended(clock: Clock) -> None:
    paced, changed = Pace(clock), episode(1, Reason.DRY_RUN, alert_id=2)
    due(paced, episode(1, Reason.DRY_RUN))

    assert due(paced, changed, running=(1,)) == ([], [])
    assert due(paced, changed) == ([1], [])


def test_changed_orders_make_every_wait_due(clock: Clock) -> None:
    paced, waits = Pace(clock), [episode(each, Reason.DRY_RUN) for each in range(3)]
    due(paced, *waits)
    assert due(paced, *waits) == ([], [])

    assert due(paced, *waits, orders=ARMED) == ([], [0, 1, 2])


def test_waits_for_a_person_take_a_bounded_share_and_the_longest_unread_comes_first(clock: Clock) -> None:
    paced, waits = Pace(clock), [episode(each, Reason.DRY_RUN) for each in range(WAITING_AT_ONCE)]
    due(paced, *waits)
    for _ in range(50):
        paced.spend(0.01)
    seen = Counter[int]()
    for second in range(200):
        clock.at_s = 20.0 + second
        seen.update(due(paced, *waits)[1])

    assert sum(seen.values()) == pytest.approx(200 * pace.SHARE / 0.01, rel=0.05)
    assert max(seen.values()) - min(seen.values()) <= 1


def test_read_that_costs_more_than_the_share_is_still_done(clock: Clock) -> None:
    paced, wait = Pace(clock), episode(1, Reason.DRY_RUN)
    due(paced, wait)
    for _ in range(50):
        paced.spend(1.0)

    clock.at_s = 20.0
    assert due(paced, wait) == ([], [1])
    clock.at_s = 31.0
    assert due(paced, wait) == ([], []), "the share is used up"
    clock.at_s = 60.0
    assert due(paced, wait) == ([], [1])


def test_threads_get_few_episodes_at_once(clock: Clock) -> None:
    new, waits = [episode(each) for each in range(100)], [episode(each, Reason.UNCONFIRMED) for each in range(200, 400)]
    paced = Pace(clock)
    first = paced.due([*new, *waits], running=(), orders=NO_ORDERS)
    assert (len(first.first), len(first.waiting), first.left) == (FIRST_AT_ONCE, WAITING_AT_ONCE, True)

    running = [*first.first[:-1], *first.waiting[:-1]]
    again = paced.due([*new, *waits], running=running, orders=NO_ORDERS)
    assert (len(again.first), len(again.waiting)) == (1, 1)


def test_hosts_and_runs_have_their_own_pace(clock: Clock) -> None:
    assert due(Pace(clock), episode(1, subject=Subject.HOST), episode(2, subject=Subject.RUN)) == ([], [])


@pytest.mark.both_databases
def test_open_episodes_are_read_in_few_statements(ledger: Ledger) -> None:
    for each in range(20):
        ledger.inbox.accept([alert(f"f{each}", worker=f"w{each}")], [], now=time.time())
    ledger.inbox.take_new(HOST, now=time.time())
    statements: list[str] = []
    event.listen(ledger._engine, "before_cursor_execute", lambda *its: statements.append(its[2]))

    surveyed, read = ledger.episodes.survey(HOST), ledger.episodes.list_open(HOST)

    assert [each.worker for each in surveyed] == [each.worker for each in read] == [f"w{each}" for each in range(20)]
    assert len([each for each in statements if each.startswith("SELECT")]) == 4


class Counting(World):
    """A world that counts the requests about each worker."""

    def __init__(self, *boxes: Box) -> None:
        super().__init__(*boxes)
        self.asked = Counter[str]()

    def worker_evidence(self, worker: str, *, host: str) -> WorkerFacts:
        self.asked[worker] += 1
        return super().worker_evidence(worker, host=host)


def waiting_in_dry_run(ledger: Ledger, store: JobStore) -> Counting:
    job_id = running(store)
    ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
    return Counting(Box(worker="w1", job_id=job_id))


def is_waiting(ledger: Ledger) -> Callable[[], bool]:
    return lambda: bool(ledger.reports.newest()) and "decided wait: dry_run" in journal(ledger)


def test_dry_run_is_not_read_in_each_round_and_is_armed_at_once(ledger: Ledger, store: JobStore) -> None:
    world = waiting_in_dry_run(ledger, store)
    with looping(executor(ledger, store, world, armed=False)):
        eventually(is_waiting(ledger), "it waits")
        before, began_s = world.asked["w1"], time.monotonic()
        time.sleep(1.0)
        assert world.asked["w1"] - before <= 1, "a round takes 0.02 s"
        assert time.monotonic() - began_s < RARELY_S
        arm(ledger)
        eventually(lambda: outcome_of(ledger) == "fixed", "the order is obeyed", within_s=5)


def test_resolved_alert_of_a_dry_run_is_processed_at_once(ledger: Ledger, store: JobStore) -> None:
    world = waiting_in_dry_run(ledger, store)
    with looping(executor(ledger, store, world, armed=False)):
        eventually(is_waiting(ledger), "it waits")
        world.boxes["w1"].hung = False
        ledger.inbox.accept([alert(job_id="1", firing=False)], [], now=time.time())
        eventually(lambda: outcome_of(ledger) == "unconfirmed", "it is closed", within_s=5)
