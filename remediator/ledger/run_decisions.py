"""Decisions about runs with failing items, and about their workers."""

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.transactions import reading, writing
from remediator.ledger.counters import CounterDelta
from remediator.ledger.database import LedgerPart
from remediator.ledger.episodes import CLOSED_MEANWHILE, is_open
from remediator.ledger.journal import write
from remediator.ledger.orders import open_breaker, wait_for_others
from remediator.ledger.recent import WRANGLING, orders_in_force, recent_activity
from remediator.ledger.schema import EPISODES, LEDGER, RUN_DECISIONS
from remediator.plan import BlockRun, Close, Episode, Subject, Wait, Wrangle
from remediator.remedies.guards import SafetyLimits, TripBreaker, may_wrangle, proposed_action


class RunDecisions(LedgerPart):
    """Decisions about runs with failing items, and about their workers."""

    def begin(self, episode: Episode, step: Wrangle, *, safety_limits: SafetyLimits, now: float) -> Wait | Close | None:
        """Record a decision before it is carried out. Returns a wait or close if it is not allowed, as `Intents.begin`.

        If the same decision is already open and nothing has been waited for since, it is not recorded again.
        """
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            wait_for_others(connection)
            if not is_open(connection, episode.episode_id):
                return CLOSED_MEANWHILE
            orders = orders_in_force(connection, now)
            action = proposed_action(episode, step)
            recent = recent_activity(connection, action, orders, safety_limits, now=now)
            verdict = may_wrangle(action, orders, recent, safety_limits, now=now)
            if isinstance(verdict, TripBreaker):
                return open_breaker(connection, self._host, verdict, now)
            if verdict is None and not _is_open_decision(connection, episode, step):
                about = {"kind": WRANGLING[type(step)], **_worker_of(step)}
                decided = insert(RUN_DECISIONS).values(episode_id=episode.episode_id, decided_at=now, **about)
                connection.execute(decided)
                message = f"{step.deed}: {step.message}"
                write(connection, self._host, episode.episode_id, "decided", WRANGLING[type(step)], message, now)
            return verdict

    def finish(self, episode: Episode, step: Wrangle, message: str, *, now: float) -> None:
        """Record that a decision was carried out."""
        its = _decisions_like(episode, step), RUN_DECISIONS.c.done_at.is_(None)
        newest = select(func.max(RUN_DECISIONS.c.decision_id)).where(*its).scalar_subquery()
        delta = CounterDelta()
        with writing(self._engine) as connection:
            done = update(RUN_DECISIONS).where(RUN_DECISIONS.c.decision_id == newest)
            connection.execute(done.values(done_at=now))
            write(connection, self._host, episode.episode_id, "did", WRANGLING[type(step)], message, now, delta)
            delta.save(connection)

    def state_of(self, episode: Episode) -> tuple[bool, bool]:
        """Whether an episode about a run has decided anything, and whether it is done, by any episode for a block."""
        ours = RUN_DECISIONS.c.episode_id == episode.episode_id
        blocks = RUN_DECISIONS.c.kind == WRANGLING[BlockRun]
        lately = or_(EPISODES.c.closed_at.is_(None), EPISODES.c.closed_at > episode.opened_at)
        blocked = (
            select(RUN_DECISIONS.c.decision_id)
            .join(EPISODES, EPISODES.c.episode_id == RUN_DECISIONS.c.episode_id)
            .where(EPISODES.c.subject == Subject.RUN, EPISODES.c.worker == episode.worker, lately)
            .where(blocks, RUN_DECISIONS.c.done_at > episode.opened_at)
        )
        with reading(self._engine) as connection:
            decided = connection.execute(select(RUN_DECISIONS).where(ours)).all()
            if any(row.done_at is not None for row in decided):
                return True, True
            to_block = any(row.kind == WRANGLING[BlockRun] for row in decided)
            return bool(decided), to_block and connection.scalar(blocked.limit(1)) is not None


def _worker_of(step: Wrangle) -> dict[str, str | None]:

    if isinstance(step, BlockRun):
        return {"host": None, "worker": None}
    return {"host": step.host, "worker": step.worker}


def _decisions_like(episode: Episode, step: Wrangle) -> ColumnElement[bool]:
    """Select the episode's decisions with the same action and worker."""
    about = [RUN_DECISIONS.c[name] == value for name, value in _worker_of(step).items()]  # `== None` is IS NULL
    kind = RUN_DECISIONS.c.kind == WRANGLING[type(step)]
    return and_(RUN_DECISIONS.c.episode_id == episode.episode_id, kind, *about)


def _is_open_decision(connection: Connection, episode: Episode, step: Wrangle) -> bool:
    """Whether this is the episode's last decision, not done, without a wait since."""
    ours = RUN_DECISIONS.c.episode_id == episode.episode_id
    newest = select(func.max(RUN_DECISIONS.c.decision_id)).where(ours).scalar_subquery()
    same = _decisions_like(episode, step), RUN_DECISIONS.c.decision_id == newest, RUN_DECISIONS.c.done_at.is_(None)
    waits = select(EPISODES.c.wait_reason).where(EPISODES.c.episode_id == episode.episode_id)
    found = connection.scalar(select(RUN_DECISIONS.c.decision_id).where(*same))
    return found is not None and connection.scalar(waits) is None
