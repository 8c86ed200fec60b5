"""An executor with a real ledger and a real queue, alerts in its inbox, and its journal.

Only the host's containers and its exporter are fakes: see `world`.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from gpuwarden.db import transactions as db_transactions
from gpuwarden.job import State
from gpuwarden.queue import JobStore, Submission
from remediator.clients.alertmanager import Silences
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor, LoopSettings
from remediator.executor.lock import ExecutorLock
from remediator.ledger.database import LedgerPart
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.plan import Episode, Limits
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order, SafetyLimits
from remediator.settings.policy_file import PolicyFile
from tests.remediator.builders import HOST, alert, server_alert
from tests.remediator.world import Box, World

LIMITS = Limits(evidence_fresh_s=5.0, settle_timeout_s=60.0, restart_timeout_s=120.0, retries_max=3, start_seen_s=0.0)
BOUNDLESS = SafetyLimits(cooldown_s=0.0, breaker_targets=1000, breaker_restarts=1000)
PACE = LoopSettings(limits=LIMITS, safety_limits=BOUNDLESS, interval_s=0.02, sweep_interval_s=0.02, stop_grace_s=0.0)
ROUNDS_MAX = 60


def running(store: JobStore, *, worker: str = "w1", incarnation: str = "i1", **submission: Any) -> int:
    """Submit a job and let a worker claim it. Returns its id."""
    job_id = store.runs.submit(Submission(queue=worker, **submission), now=time.time())
    assert store.claims.claim(worker, host=HOST, worker=worker, incarnation=incarnation, now=time.time())
    return job_id


def executor(
    ledger: Any,
    store: Any,
    world: Any,
    *,
    settings: LoopSettings = PACE,
    host: str = HOST,
    lock: ExecutorLock | None = None,
    armed: bool = True,
    policy: PolicyFile | None = None,
    silences: Silences | None = None,
) -> Executor:
    """An executor, after its host was armed or disarmed."""
    arm(next((part for part in vars(ledger).values() if isinstance(part, Ledger)), ledger), host=host, armed=armed)
    queue = BuiltinQueue(store) if isinstance(store, JobStore) else store
    clients = Clients(exporter=world, queue=queue, actuators={"docker": world}, policy=policy, silences=silences)
    return Executor(ledger, host=host, clients=clients, settings=settings, lock=lock)


def arm(ledger: Ledger, *, host: str = HOST, armed: bool = True) -> None:
    """Arm or disarm a host that is not so already."""
    if ledger.orders.current().armed(host=host, remedy="restart_worker") is not armed:
        act = Act.ARM if armed else Act.DISARM
        ledger.orders.give(Order(act=act, at=time.time(), who="test", reason="a test", host=host))


def turn(works: Executor, ledger: Ledger) -> None:
    """One iteration of the loop: take the inbox and process every open episode once."""
    works.clock.tick()
    while ledger.inbox.take_new(HOST, now=time.time()):
        pass
    for episode in ledger.episodes.list_open(HOST):
        works.process_episode(episode)


def sql(store: JobStore | Ledger, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement in the database. Returns its rows."""
    with db_transactions.writing(store._engine) as connection:
        found = connection.exec_driver_sql(statement)
        return [tuple(row) for row in found] if found.returns_rows else []


def to_the_end(works: Executor, ledger: Ledger) -> None:
    """Run until every episode is closed, or waits for an operator because its restart was given up."""
    for _ in range(ROUNDS_MAX):
        turn(works, ledger)
        if all(each.reason == Reason.GIVEN_UP for each in ledger.reports.list_held()):
            return
    pytest.fail(f"still open after {ROUNDS_MAX} rounds: {journal(ledger)}")


def journal(ledger: Ledger, episode_id: int = 1) -> list[str]:
    """The journal of an episode, each entry as act and step."""
    return [f"{entry.act} {entry.what}" for entry in history(ledger, episode_id).entries]


def history(ledger: Ledger, episode_id: int = 1) -> EpisodeHistory:
    found = ledger.reports.get(episode_id)
    assert found is not None
    return found


def stalled_job(ledger: Ledger, store: JobStore, **submission: Any) -> World:
    """A stalled job on w1, and its alert in the inbox."""
    job_id = running(store, **submission)
    ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
    return World(Box(worker="w1", job_id=job_id))


def on_a_lost_gpu(ledger: Ledger, store: JobStore, *, unkillable: bool = False, **submission: Any) -> World:
    """A job on w1 that hangs on a lost GPU, and its alert in the inbox."""
    job_id = running(store, **submission)
    lost = alert(job_id=str(job_id), alertname="GpuwardenJobGpuLost", condition="health")
    ledger.inbox.accept([lost], [], now=time.time())
    world = World(Box(worker="w1", job_id=job_id, unkillable=unkillable))
    world.gpu_lost = True
    return world


def take_up(ledger: Ledger) -> Episode:
    """Take the alert from the inbox. Returns its episode."""
    ledger.inbox.take_new(HOST, now=time.time())
    (episode,) = ledger.episodes.list_open(HOST)
    return episode


def after_begin(ledger: Ledger, happens: Callable[[], object]) -> None:
    """Call `happens` right after an intent is written."""
    begin = ledger.intents.begin

    def begin_and_then(*promised: Any, **how: Any) -> Any:
        done = begin(*promised, **how)
        happens()
        return done

    ledger.intents.begin = begin_and_then  # type: ignore[method-assign]


def silent_server(ledger: Ledger, **box: Any) -> World:
    """A hung server in a container, and its alert in the inbox."""
    found = Box(worker="w1", job_id=None, attempt=None, **box)
    ledger.inbox.accept([server_alert(container="w1", incarnation=found.incarnation)], [], now=time.time())
    return World(found)


def claims(store: JobStore, worker: str, *, incarnation: str = "new", gpu: str = "", host: str = HOST) -> int | None:
    """Let a worker of queue w1 claim a job. Returns its id, if any."""
    store.claims.register(
        "w1", host=host, worker=worker, incarnation=incarnation, now=store.now(), gpus=[gpu] if gpu else []
    )
    job = store.claims.claim("w1", host=host, worker=worker, incarnation=incarnation, now=store.now())
    return None if job is None else job.job_id


class Crash(BaseException):
    """The process ended here."""


UNCOUNTED = frozenset({"now", "current", "with_activity"})
"""Calls that only read, and after which the process need not end."""


class Crashing:
    """Wraps a part and ends the process after its n-th call. Nested parts share the count."""

    def __init__(self, part: Any, *, after: int, calls: Iterator[int] | None = None) -> None:
        self._part = part
        self._after = after
        self._calls = itertools.count(1) if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._part, name)
        if isinstance(attribute, LedgerPart):
            return Crashing(attribute, after=self._after, calls=self._calls)

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return attribute(*arguments, **named)
            finally:
                if next(self._calls) == self._after:
                    raise Crash

        return call if callable(attribute) and name not in UNCOUNTED else attribute


def assert_fixed_once(ledger: Ledger, store: JobStore, world: World, *, failed: bool = False) -> None:
    box, job, lines = world.boxes["w1"], store.job(1), journal(ledger)
    assert box.stops == 1, lines
    assert box.starts == 1, lines
    assert box.running, lines
    assert history(ledger).outcome == "fixed", lines
    assert lines.count("did requeue") + lines.count("did fail") + lines.count("saw settle: done") == 1, lines
    if failed:
        assert (job.state, job.attempt, job.watchdog_retries) == (State.FAILED, 1, 0), lines
        assert store.outbox.events_of(1) == ["failed"], lines
    else:
        assert (job.state, job.attempt, job.watchdog_retries) == (State.QUEUED, 1, 1), lines
        assert claims(store, "w9") == 1
        assert claims(store, "w8") is None


@contextmanager
def looping(works: Executor) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=works.run)
    thread.start()
    try:
        yield thread
    finally:
        works.close()
        thread.join(20)
        assert not thread.is_alive()


def outcome_of(ledger: Ledger) -> str | None:
    found = ledger.reports.get(1)
    return found.outcome if found else None


def lock(url: str) -> None:
    with closing(Ledger.open(url, host=HOST)) as ledger:
        ExecutorLock(ledger, host=HOST).close()
