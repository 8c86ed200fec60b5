"""Intents: at most one restart per container incarnation and one settle per job attempt."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import Connection, and_, func, or_, select, update

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.transactions import reading, upsert, writing
from remediator.ledger import retention
from remediator.ledger.counters import CounterDelta
from remediator.ledger.database import LedgerPart
from remediator.ledger.episodes import CLOSED_MEANWHILE, is_open
from remediator.ledger.journal import TAINT, TAINTS, write
from remediator.ledger.orders import open_breaker, wait_for_others
from remediator.ledger.recent import orders_in_force, recent_activity
from remediator.ledger.schema import EPISODES, INTENTS, JOURNAL, LEDGER
from remediator.plan import (
    OVER,
    Begin,
    Close,
    Episode,
    Intent,
    Kind,
    NodeFacts,
    Outcome,
    Scale,
    Stage,
    Subject,
    Taint,
    Wait,
)
from remediator.reasons import Reason
from remediator.remedies.guards import SafetyLimits, TripBreaker, may_begin, may_scale, may_taint, proposed_action

SCALINGS: Final = {True: "scale_up", False: "scale_down"}
"""Journal names of scalings."""

_RESTARTED_ALREADY: Final = Close(
    outcome=Outcome.SUPERSEDED,
    reason=Reason.RESTARTED_ALREADY,
    message="this incarnation of the container was already restarted",
)


class Intents(LedgerPart):
    """Intents: at most one restart per container incarnation and one settle per job attempt."""

    def begin(self, episode: Episode, step: Begin, *, safety_limits: SafetyLimits, now: float) -> Wait | Close | None:
        """Write the restart and settle intents. If not allowed, write nothing and return a wait or close.

        The guards run again in this transaction, so that concurrent episodes and hosts cannot exceed a limit together.
        Too many restarts trip the breaker. A settle that another episode already has stays with that episode.
        """
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            wait_for_others(connection)
            this = EPISODES.c.episode_id == episode.episode_id
            if not is_open(connection, episode.episode_id):
                return CLOSED_MEANWHILE
            if retention.is_used(connection, Kind.FREE, step.free_key):
                return _RESTARTED_ALREADY
            orders = orders_in_force(connection, now)
            action = proposed_action(episode, step)
            recent = recent_activity(connection, action, orders, safety_limits, now=now)
            verdict = may_begin(action, orders, recent, safety_limits, now=now)
            if isinstance(verdict, TripBreaker):
                return open_breaker(connection, self._host, verdict, now)
            if verdict is not None:
                return verdict
            data: dict[str, Any] = {
                "kind": step.container_kind,
                "handle": step.container_handle,
                "name": step.container_name,
                "gpus": list(step.gpus),
                "pids": sorted(step.pids),
                "cgroup": step.cgroup,
            }
            if (warned := _warned_before(connection, episode, step.free_key)) is not None:
                data["warned"] = {**warned, "done": True, "before": True}
            if not _insert_intent(connection, episode, Kind.FREE, step.free_key, data, now):
                return _RESTARTED_ALREADY
            if step.settle_key is not None and not retention.is_used(connection, Kind.SETTLE, step.settle_key):
                claimed = {"incarnation": step.worker_incarnation}
                _insert_intent(connection, episode, Kind.SETTLE, step.settle_key, claimed, now)
            connection.execute(update(EPISODES).where(this).values(condition=step.condition))
            write(connection, self._host, episode.episode_id, "decided", "begin", step.message, now)
            return None

    def begin_scaling(
        self, episode: Episode, step: Scale, *, safety_limits: SafetyLimits, now: float
    ) -> Wait | Close | None:
        """Record a scaling before it is carried out, as `begin`. It needs no intent: repeated, it changes nothing."""
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            wait_for_others(connection)
            if not is_open(connection, episode.episode_id):
                return CLOSED_MEANWHILE
            orders, action = orders_in_force(connection, now), proposed_action(episode, step)
            recent = recent_activity(connection, action, orders, safety_limits, now=now)
            started_s_ago = _started_s_ago(connection, episode, safety_limits, now) if step.on else None
            held = may_scale(action, orders, recent, safety_limits, started_s_ago=started_s_ago, now=now)
            if held is None:
                write(connection, self._host, episode.episode_id, "decided", SCALINGS[step.on], step.message, now)
            return held

    def begin_taint(
        self,
        episode: Episode,
        step: Taint,
        *,
        state: str | None,
        fleet: Collection[str],
        safety_limits: SafetyLimits,
        now: float,
    ) -> Wait | Close | None:
        """Record a taint before it is set, as `begin`: of two hosts, the second counts the first."""
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            wait_for_others(connection)
            if not is_open(connection, episode.episode_id):
                return CLOSED_MEANWHILE
            orders, action = orders_in_force(connection, now), proposed_action(episode, step)
            recent = recent_activity(connection, action, orders, safety_limits, now=now)
            others = {row.host for row in connection.execute(TAINTS) if row.host in fleet} - {episode.host}
            node = NodeFacts(tainted_nodes=len(others), nodes=len(fleet))
            held = may_taint(action, orders, recent, safety_limits, node, now=now)
            if held is None:
                write(connection, self._host, episode.episode_id, "decided", TAINT, step.message, now, state=state)
            return held

    def last_scaling(self, episode_id: int) -> bool | None:
        """Whether an episode last decided to start its tenant, or to stop it."""
        its = JOURNAL.c.episode_id == episode_id, JOURNAL.c.act == "decided", JOURNAL.c.step.in_(SCALINGS.values())
        with reading(self._engine) as connection:
            found = connection.scalar(select(JOURNAL.c.step).where(*its).order_by(JOURNAL.c.entry_id.desc()).limit(1))
        return None if found is None else found == SCALINGS[True]

    def advance(  # noqa: PLR0913 - named arguments, each with its own meaning
        self,
        intent: Intent,
        stage: Stage,
        *,
        episode_id: int,
        act: str,
        step: str,
        message: str,
        now: float,
        data: Mapping[str, Any] | None = None,
        unspent: bool = False,
        state: str | None = None,
        reason: Reason | None = None,
    ) -> bool:
        """Move an intent from the stage at which it was read; false if another process moved it first.

        An intent that is abandoned before any effect (`unspent`) releases its key: the target may need one later.
        """
        unused = stage is Stage.ABANDONED and (unspent or intent.stage is Stage.PLANNED)
        move = (
            update(INTENTS)
            .where(INTENTS.c.intent_id == intent.intent_id, INTENTS.c.stage == intent.stage)
            .values(
                stage=stage,
                retired="unused" if unused else None,
                entered_at=INTENTS.c.entered_at if stage is intent.stage else now,
                data={**intent.data, **(data or {})},
            )
        )
        delta = CounterDelta()
        with writing(self._engine) as connection:
            if connection.execute(move).rowcount != 1:
                return False
            write(connection, self._host, episode_id, act, step, message, now, delta, state=state, reason=reason)
            if stage in OVER and intent.stage not in OVER:
                whose = select(INTENTS.c.host).where(INTENTS.c.intent_id == intent.intent_id)
                delta.add_closed_intents(connection.scalars(whose).one(), intent.kind, stage)
            delta.save(connection)
            return True

    def withdraw(self, episode_id: int, reason: Reason, message: str, *, now: float) -> None:
        """Withdraw the planned intents of an episode. Their keys become free."""
        planned = and_(INTENTS.c.episode_id == episode_id, INTENTS.c.stage == Stage.PLANNED)
        found = select(INTENTS.c.host, INTENTS.c.kind).where(planned)
        with writing(self._engine) as connection:
            taken = connection.execute(found.with_for_update()).all()
            if not taken:
                return
            retire = update(INTENTS).where(planned).values(stage=Stage.WITHDRAWN, retired="withdrawn", entered_at=now)
            connection.execute(retire)
            write(connection, self._host, episode_id, "decided", "withdraw", message, now, reason=reason)
            delta = CounterDelta()
            for row in taken:
                delta.add_closed_intents(row.host, Kind(row.kind), Stage.WITHDRAWN)
            delta.save(connection)


def _started_s_ago(connection: Connection, episode: Episode, safety_limits: SafetyLimits, now: float) -> float | None:
    """Time since another tenant on demand of the host was started: its memory is not in use yet."""
    since = now - safety_limits.start_cooldown_s
    lately = or_(EPISODES.c.closed_at.is_(None), EPISODES.c.closed_at > since)
    others = (
        select(EPISODES.c.episode_id)
        .where(EPISODES.c.host == episode.host, EPISODES.c.subject == Subject.ON_DEMAND, lately)
        .where(EPISODES.c.episode_id != episode.episode_id)
    )
    its = JOURNAL.c.episode_id.in_(others), JOURNAL.c.act == "decided", JOURNAL.c.step == SCALINGS[True]
    at = connection.scalar(select(func.max(JOURNAL.c.at)).where(*its))
    return None if at is None else now - at


def _warned_before(connection: Connection, episode: Episode, key: str) -> Mapping[str, Any] | None:
    """How this job attempt was warned under its last withdrawn intent."""
    if episode.job_id is None:
        return None
    found = (
        select(INTENTS.c.data)
        .join(EPISODES, EPISODES.c.episode_id == INTENTS.c.episode_id)
        .where(
            INTENTS.c.kind == Kind.FREE,
            INTENTS.c.key == key,
            INTENTS.c.retired.is_not(None),
            EPISODES.c.job_id == episode.job_id,
            EPISODES.c.attempt == episode.attempt,
        )
    )
    data = connection.scalar(found.order_by(INTENTS.c.intent_id.desc()).limit(1))
    warned: Mapping[str, Any] | None = None if data is None else data.get("warned")
    return warned


def _insert_intent(
    connection: Connection, episode: Episode, kind: Kind, key: str, data: Mapping[str, Any], now: float
) -> bool:
    inserted = (
        upsert(connection, INTENTS)
        .values(
            episode_id=episode.episode_id,
            kind=kind,
            key=key,
            host=episode.host,
            stage=Stage.PLANNED,
            created_at=now,
            entered_at=now,
            data=dict(data),
        )
        .on_conflict_do_nothing()
        .returning(INTENTS.c.intent_id)  # PostgreSQL's driver gives no row count for this INSERT
    )
    return connection.scalar(inserted) is not None
