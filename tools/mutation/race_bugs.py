"""Bugs of the product, each with the rule that must find it. Each function plants one with pytest's `monkeypatch`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
from sqlalchemy import and_, select, true, update

from gpuwarden.db.transactions import writing
from gpuwarden.job import MOVES, Condition, Move, State
from gpuwarden.queue import sql
from gpuwarden.queue.claims import Claims
from gpuwarden.queue.schema import JOBS, WORKERS
from gpuwarden.queue.sweeps import Sweeps
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor import clock, process_episode
from remediator.executor.housekeeping import Housekeeping
from remediator.executor.perform import Performer
from remediator.ledger import intents
from remediator.ledger.schema import INTENTS
from remediator.plan import Begin, Close, Episode, Facts, Fence, Intent, Kind, Outcome, Stage, Start, Step
from remediator.reasons import Finding, Reason
from remediator.remedies import REMEDIES, guards, job_conditions, restart_worker
from remediator.remedies.guards import Act, Order, Orders
from tests.races import judge

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug and the rules that may find it."""

    plant: Plant
    rules: Sequence[str]
    ends: bool = False
    """Whether only the final state shows the bug."""


def start_before_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a container directly after its stop, before the settle."""
    free = Performer._restart

    def stop_and_start(self: Performer, episode: Any, step: Any) -> None:
        free(self, episode, step)
        now = self._ledger.episodes.get_open(episode.episode_id)
        if not isinstance(step, Start) and now is not None and now.free is not None:
            free(self, now, Start(message="in one breath"))

    monkeypatch.setattr(Performer, "_restart", stop_and_start)


def ignore_attempt_in_fencing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeue and fail any fenced attempt of a job; the remedy does not compare attempts either."""
    for name in ("requeue", "fail"):
        monkeypatch.setattr(BuiltinQueue, name, _of_any_attempt(getattr(BuiltinQueue, name)))
    monkeypatch.setattr(BuiltinQueue, "fence", _fence_any_attempt)
    settle = restart_worker._settle

    def careless(facts: Facts, free: Intent, intent: Intent) -> Step | None:
        if facts.job is not None and facts.episode.attempt is not None:
            claimed = intent.data["incarnation"]
            facts = replace(facts, job=replace(facts.job, attempt=facts.episode.attempt, claimed_by=claimed))
        return settle(facts, free, intent)

    monkeypatch.setattr(restart_worker, "_settle", careless)
    monkeypatch.setattr(restart_worker, "_fence_if_confirmed", lambda *_: Fence(message="planned"))


def _of_any_attempt(act: Callable[..., bool]) -> Callable[..., bool]:
    def any_attempt(self: BuiltinQueue, job_id: int, *, attempt: int, **how: Any) -> bool:
        job = self.job(job_id)
        return act(self, job_id, attempt=attempt if job is None else job.attempt, **how)

    return any_attempt


def _fence_any_attempt(
    self: BuiltinQueue, job_id: int, *, attempt: int, incarnation: str, condition: Condition, now: float
) -> bool:
    job = self._store.job(job_id)
    holder = job.claimed_by or incarnation
    return attempt > 0 and self._store.fencing.fence(
        job_id, attempt=job.attempt, incarnation=holder, condition=condition, now=now
    )


def ignore_attempt_in_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept results and renewals from any worker while the job runs."""
    monkeypatch.setattr(sql, "is_held", lambda job_id, *_: and_(JOBS.c.job_id == job_id, JOBS.c.state == State.RUNNING))


def lock_worker_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retire a worker by name, which locks its next incarnation."""
    retired = WORKERS.c.retired_incarnation.is_not(None)

    def over(host: str, worker: str, incarnation: str) -> Any:
        replaced = WORKERS.c.incarnation != incarnation
        return select(replaced | retired).where(WORKERS.c.host == host, WORKERS.c.worker == worker)

    monkeypatch.setattr(sql, "is_over", over)


def identify_worker_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify a worker by name in heartbeats and claims, so that an old incarnation continues."""

    def update_worker(host: str, worker: str, _: str) -> Any:
        return update(WORKERS).where(WORKERS.c.host == host, WORKERS.c.worker == worker)

    monkeypatch.setattr(sql, "update_worker", update_worker)
    monkeypatch.setattr(
        sql, "is_over", lambda host, worker, _: select(WORKERS.c.host != host).where(WORKERS.c.worker == worker)
    )


def requeue_before_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeue a fenced job at once."""
    settle = restart_worker._settle

    def at_once(facts: Facts, free: Intent, intent: Intent) -> Step | None:
        return settle(replace(facts, settle_for_s=facts.limits.settle_timeout_s), free, intent)

    monkeypatch.setattr(restart_worker, "_settle", at_once)


def treat_resolved_as_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close an episode whose alert resolved, despite its intents."""
    decide = REMEDIES["restart_worker"].decide

    def trusting(facts: Facts) -> Step:
        if not facts.episode.firing:
            return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message="the alert ended")
        return decide(facts)

    remedy = replace(REMEDIES["restart_worker"], decide=trusting)
    monkeypatch.setattr(process_episode, "REMEDIES", {"restart_worker": remedy})


def allow_second_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a second restart intent for an incarnation."""
    begin = intents.Intents.begin

    def again(self: intents.Intents, episode: Episode, step: Begin, **how: Any) -> Any:
        old = update(INTENTS).where(INTENTS.c.kind == Kind.FREE, INTENTS.c.key == step.free_key)
        with writing(self._engine) as connection:
            connection.execute(old.values(key=f"{step.free_key} (before {episode.episode_id})"))
        return begin(self, episode, step, **how)

    monkeypatch.setattr(intents.Intents, "begin", again)


def key_restart_by_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key a restart intent by container, so that a second hang finds the key used."""
    promise = intents._insert_intent

    def by_name(connection: Any, episode: Any, kind: Kind, key: str, data: Any, now: float) -> bool:
        if kind is Kind.FREE:
            taken = INTENTS.c.key.startswith(key.partition("@")[0]) & (INTENTS.c.kind == kind)
            if connection.scalar(select(INTENTS.c.intent_id).where(taken).limit(1)) is not None:
                return False
        return promise(connection, episode, kind, key, data, now)

    monkeypatch.setattr(intents, "_insert_intent", by_name)


def fence_in_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write both intents and fence the job in a dry run, without touching the container."""
    for name in ("_consider", "_fence_if_confirmed"):
        decide = getattr(restart_worker, name)
        monkeypatch.setattr(
            restart_worker, name, lambda facts, *rest, decide=decide: decide(replace(facts, armed=True), *rest)
        )
    may_begin = guards.may_begin

    def as_if_armed(action: guards.ProposedAction, orders: Orders, *rest: Any, now: float) -> Any:
        armed = Order(act=Act.ARM, at=now, who="nobody", reason="planted", host=action.host)
        return may_begin(action, Orders(given=(*orders.given, armed)), *rest, now=now)

    for module in (guards, intents):
        monkeypatch.setattr(module, "may_begin", as_if_armed)


def claim_without_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim a job without comparing its state."""
    move = sql.transition

    def careless(kind: Move, *where: Any, **values: Any) -> Any:
        if kind is not Move.CLAIM:
            return move(kind, *where, **values)
        return update(JOBS).where(*where).values(state=State.RUNNING, **values)

    monkeypatch.setattr(sql, "transition", careless)
    monkeypatch.setattr(sql, "MOVES", {**MOVES, Move.CLAIM: MOVES[Move.CANCEL]})


def reclaim_without_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeue an expired job even if its lease was renewed since."""

    def reclaim(self: Sweeps, *, now: float, among: Any = None) -> list[Any]:
        with writing(self._engine) as connection:
            where = true() if among is None else JOBS.c.job_id.in_(sorted(among))
            return sql.requeue_or_fail(connection, Move.RECLAIM, where, "lease expired", now)

    monkeypatch.setattr(Sweeps, "reclaim_expired", reclaim)


def sweep_by_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare leases with the wall clock of the sweeping host."""
    monkeypatch.setattr(
        Housekeeping,
        "sweep",
        lambda self: self._queue.sweep(now=clock.time.time()),  # type: ignore[attr-defined]
    )


def register_in_two_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register an incarnation and requeue its old jobs in two transactions."""
    register = Claims.register

    def in_two(self: Claims, queue: str, *, host: str, worker: str, incarnation: str, **how: Any) -> list[Any]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(sql, "requeue_or_fail", lambda *_: [])
            register(self, queue, host=host, worker=worker, incarnation=incarnation, **how)
        held = and_(JOBS.c.host == host, JOBS.c.worker == worker, JOBS.c.claimed_by != incarnation)
        with writing(self._engine) as connection:
            return sql.requeue_or_fail(connection, Move.SUPERSEDE, held, "its worker restarted", how["now"])

    monkeypatch.setattr(Claims, "register", in_two)


def stop_before_ledger_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a container before the ledger entry."""
    free = Performer._restart

    def act_first(self: Performer, episode: Any, step: Any) -> None:
        if not isinstance(step, Start) and episode.free.stage is Stage.PLANNED:
            self._actuators["docker"].stop(episode.free.data["handle"], grace_s=0.0)
        free(self, episode, step)

    monkeypatch.setattr(Performer, "_restart", act_first)


def stop_without_fresh_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act on the alert without the exporter's evidence."""
    monkeypatch.setattr(job_conditions, "confirm", lambda *_: Finding.of(confirmed=True, message="alert"))


def ignore_retry_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeue after every condition."""
    decide = restart_worker._requeue_or_fail
    monkeypatch.setattr(
        restart_worker,
        "_requeue_or_fail",
        lambda facts, job, ground, **how: decide(facts, replace(job, watchdog_retries=0), ground, **how),
    )


MUTANTS: Final[Mapping[str, Mutant]] = {
    "start_before_settle": Mutant(plant=start_before_settle, rules=[judge.ONCE]),
    "ignore_attempt_in_fencing": Mutant(
        plant=ignore_attempt_in_fencing, rules=[judge.HEALTHY, judge.ALONE, judge.ONCE, judge.IDENTITY]
    ),
    "ignore_attempt_in_results": Mutant(plant=ignore_attempt_in_results, rules=[judge.IDENTITY, judge.ALONE]),
    "lock_worker_by_name": Mutant(plant=lock_worker_by_name, rules=[judge.IDENTITY]),
    "identify_worker_by_name": Mutant(plant=identify_worker_by_name, rules=[judge.IDENTITY]),
    "requeue_before_exit": Mutant(plant=requeue_before_exit, rules=[judge.ALONE]),
    "treat_resolved_as_fixed": Mutant(plant=treat_resolved_as_fixed, rules=[judge.LOST], ends=True),
    "allow_second_intent": Mutant(plant=allow_second_intent, rules=[judge.ONCE]),
    "key_restart_by_container": Mutant(plant=key_restart_by_container, rules=[judge.LOST], ends=True),
    "fence_in_dry_run": Mutant(plant=fence_in_dry_run, rules=[judge.DRY]),
    "claim_without_compare": Mutant(plant=claim_without_compare, rules=[judge.TERMINAL, judge.IDENTITY]),
    "reclaim_without_compare": Mutant(plant=reclaim_without_compare, rules=[judge.ALONE]),
    "sweep_by_host_clock": Mutant(plant=sweep_by_host_clock, rules=[judge.ALONE]),
    "register_in_two_transactions": Mutant(plant=register_in_two_transactions, rules=[judge.LOST]),
    "stop_before_ledger_entry": Mutant(plant=stop_before_ledger_entry, rules=[judge.AHEAD]),
    "stop_without_fresh_evidence": Mutant(plant=stop_without_fresh_evidence, rules=[judge.HEALTHY]),
    "ignore_retry_limit": Mutant(plant=ignore_retry_limit, rules=[judge.CAPS]),
}
