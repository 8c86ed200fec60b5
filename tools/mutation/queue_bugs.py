"""Bugs of the queue that its machine must find. Each function plants one with pytest's `monkeypatch`."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from sqlalchemy import ColumnElement, Connection, and_, false, func, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import upsert, writing
from gpuwarden.job import FINAL, JobId, Kind, Move, State
from gpuwarden.queue import Event, claims, runs, sql
from gpuwarden.queue.admin import Admin
from gpuwarden.queue.claiming import parts
from gpuwarden.queue.fencing import Fencing
from gpuwarden.queue.hosts.lost_hosts import LostHosts
from gpuwarden.queue.outbox import Outbox
from gpuwarden.queue.schema import CONSUMERS, DEPENDENCIES, JOBS, QUARANTINED_GPUS, QUEUE

Plant = Callable[[pytest.MonkeyPatch], None]


def queue_only_first_dependent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue only the first of the jobs that waited for one job."""
    queue_dependents, transition = runs.queue_dependents, sql.transition

    def first_alone(connection: Connection, run_id: str, job_id: int, now: float) -> None:
        dependent = select(func.min(DEPENDENCIES.c.job_id)).where(DEPENDENCIES.c.needs_job_id == job_id)
        first = JOBS.c.job_id == connection.scalar(dependent)

        def narrow(move: Move, *where: ColumnElement[bool], **values: Any) -> Any:
            return transition(move, *where, *([first] if move is Move.READY else []), **values)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(sql, "transition", narrow)
            queue_dependents(connection, run_id, job_id, now)

    monkeypatch.setattr(runs, "queue_dependents", first_alone)


def queue_after_first_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue a job as soon as one of its dependencies has completed."""
    queue_dependents = runs.queue_dependents

    def any_will_do(connection: Connection, run_id: str, job_id: int, now: float) -> None:
        waiting = select(DEPENDENCIES.c.job_id).where(DEPENDENCIES.c.needs_job_id == job_id)
        connection.execute(update(JOBS).where(JOBS.c.job_id.in_(waiting)).values(pending=1))
        queue_dependents(connection, run_id, job_id, now)

    monkeypatch.setattr(runs, "queue_dependents", any_will_do)


def keep_waiting_for_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep jobs waiting for a cancelled job."""
    monkeypatch.setattr(runs, "cancel_what_needs", lambda *_: None)


def unblock_with_open_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue an unblocked job without its dependencies."""

    def unblock(self: Admin, job_id: int, **_: object) -> bool:
        with writing(self._engine) as connection:
            freed = sql.transition(Move.UNBLOCK, JOBS.c.job_id == job_id)
            return connection.execute(freed).rowcount == 1

    monkeypatch.setattr(Admin, "unblock", unblock)


def end_run_with_blocked_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a run while one of its jobs is blocked."""
    monkeypatch.setattr(runs, "FINAL", FINAL | {State.BLOCKED})


def ignore_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim the oldest job without regard to priority."""
    claimable = parts.claimable

    def by_age(its: Any, job: Any, *where: Any) -> Any:
        return claimable(its, job, *where).order_by(None).order_by(job.c.job_id)

    monkeypatch.setattr(parts, "claimable", by_age)


def always_prefer_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker take only jobs of its loaded model while there are any."""
    monkeypatch.setattr(claims, "AFFINITY_S", 1e9)


def keep_budget_of_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the queue's budget at the submission."""
    monkeypatch.setattr(parts, "budget_s", lambda: JOBS.c.budget_s)


def ignore_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a locked worker claim."""
    monkeypatch.setattr(sql, "is_locked", lambda *_: false())


def quarantine_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quarantine a GPU only for one worker."""
    slot = QUARANTINED_GPUS.c
    monkeypatch.setattr(sql, "match_quarantines", lambda host, worker: and_(slot.host == host, slot.worker == worker))


def use_gpu_of_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other workers use the GPU of a lost host's job."""
    monkeypatch.setattr(sql, "is_held_by_lost", lambda *_: false())


def requeue_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeue the job of a lost host at once."""
    lose = LostHosts.mark_lost

    def give_away(self: LostHosts, job_id: int, *, attempt: int, now: float) -> bool:
        lost = lose(self, job_id, attempt=attempt, now=now)
        with writing(self._engine) as connection:
            its = update(JOBS).where(JOBS.c.job_id == job_id, JOBS.c.state == State.HOST_LOST)
            connection.execute(its.values(lease_expires_at=now))
        return lost

    monkeypatch.setattr(LostHosts, "mark_lost", give_away)


def return_to_failed_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a requeued job return to the slot where it failed."""
    monkeypatch.setattr(sql, "is_better_elsewhere", lambda *_: false())


def accept_result_of_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a result from any worker while the job runs."""
    monkeypatch.setattr(sql, "is_held", lambda job_id, *_: and_(JOBS.c.job_id == job_id, JOBS.c.state == State.RUNNING))


def write_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no event for a job without attempts left."""
    end_failed = sql.end_failed

    def silently(connection: Connection, move: Move, where: Any, job_id: int, reason: str, now: float) -> bool:
        if move is not Move.EXHAUST:
            return end_failed(connection, move, where, job_id, reason, now)
        ended = sql.transition(move, where, reason=reason, ended_at=now, **sql.UNCLAIMED)
        return connection.execute(ended).rowcount == 1

    monkeypatch.setattr(sql, "end_failed", silently)


def write_event_at_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the event of a failure at the fence."""
    fence = Fencing.fence

    def tell_of(self: Fencing, job_id: int, **how: Any) -> bool:
        fenced = fence(self, job_id, **how)
        if fenced:
            with writing(self._engine) as connection:
                connection.execute(*sql.write_event(kind=Kind.FAILED, now=how["now"], job_id=job_id))
        return fenced

    monkeypatch.setattr(Fencing, "fence", tell_of)


def write_event_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two events for a cancelled job."""
    write = sql.write_untimed

    def twice(connection: Connection, kind: Kind, job_ids: Sequence[int], now: float) -> None:
        write(connection, kind, job_ids, now)
        write(connection, kind, job_ids, now)

    monkeypatch.setattr(sql, "write_untimed", twice)


def continue_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the jobs of a failed run continue."""
    cancel = runs.cancel

    def spare(connection: Connection, which: Any, reason: str, now: float) -> list[JobId]:
        return [] if reason.endswith("of its run failed") else cancel(connection, which, reason, now)

    monkeypatch.setattr(runs, "cancel", spare)


def acknowledge_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a consumer acknowledge an older event and see later ones again."""

    def acknowledge(self: Outbox, consumer: str, event: Event, *, now: float) -> None:
        with writing(self._engine) as connection:
            row = {"position": event.position, "moved_at": now}
            moved = upsert(connection, CONSUMERS).values(consumer=consumer, **row)
            connection.execute(moved.on_conflict_do_update(index_elements=["consumer"], set_=row))

    monkeypatch.setattr(Outbox, "acknowledge", acknowledge)


def share_consumer_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the position of consumers."""
    acknowledge = Outbox.acknowledge

    def for_all(self: Outbox, consumer: str, event: Event, *, now: float) -> None:
        for each in {consumer, *self.consumers()}:
            acknowledge(self, each, event, now=now)

    monkeypatch.setattr(Outbox, "acknowledge", for_all)


def requeue_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeue without a limit."""

    def requeue(self: Fencing, job_id: int, *, attempt: int, now: float, **_: Any) -> bool:
        this = (JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        values = {
            "priority": sql.least(JOBS.c.priority, 10),
            "watchdog_retries": JOBS.c.watchdog_retries + 1,
            "queued_at": now,
            **sql.UNCLAIMED,
        }
        with writing(self._engine) as connection:
            notify_after_commit(connection, QUEUE.channel)
            return connection.execute(sql.transition(Move.REQUEUE, *this, **values)).rowcount == 1

    monkeypatch.setattr(Fencing, "requeue", requeue)


MUTANTS: Final[dict[str, Plant]] = {
    plant.__name__: plant
    for plant in (
        queue_only_first_dependent,
        queue_after_first_dependency,
        keep_waiting_for_cancelled,
        unblock_with_open_dependencies,
        end_run_with_blocked_job,
        ignore_priority,
        always_prefer_loaded_model,
        keep_budget_of_submission,
        ignore_lock,
        quarantine_one_slot,
        use_gpu_of_lost_host,
        requeue_lost_at_once,
        return_to_failed_slot,
        accept_result_of_any_worker,
        write_no_event,
        write_event_at_fence,
        write_event_twice,
        continue_failed_run,
        acknowledge_backwards,
        share_consumer_position,
        requeue_without_limit,
    )
}
