"""What is decided and done about runs whose items fail, and about their workers."""

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.transactions import reading, writing
from remediator.ledger.counters import Tally
from remediator.ledger.database import LedgerPart
from remediator.ledger.episodes import CLOSED_MEANWHILE, is_open
from remediator.ledger.journal import write
from remediator.ledger.orders import trip_breaker, wait_for_others
from remediator.ledger.recent import WRANGLING, orders_in_force, recent_activity
from remediator.ledger.schema import EPISODES, LEDGER, RUN_DECISIONS
from remediator.plan import BlockRun, Close, Episode, Subject, Wait, Wrangle
from remediator.remedies.guards import Latch, Safeguards, may_wrangle, wish


class RunDecisions(LedgerPart):
    """What is decided and done about runs whose items fail, and about their workers."""

    def begin(self, episode: Episode, step: Wrangle, *, safeguards: Safeguards, now: float) -> Wait | Close | None:
        """Write ahead what is to be done about a run. What is to be done instead where that may not be: see `begin`.

        What was decided last, was not done and has not waited since, is promised already: it is not written again.
        """
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            wait_for_others(connection)
            if not is_open(connection, episode.episode_id):
                return CLOSED_MEANWHILE
            orders = orders_in_force(connection, now)
            wanted = wish(episode, step)
            recent = recent_activity(connection, wanted, orders, safeguards, now=now)
            verdict = may_wrangle(wanted, orders, recent, safeguards, now=now)
            if isinstance(verdict, Latch):
                return trip_breaker(connection, self._host, verdict, now)
            if verdict is None and not _is_promised(connection, episode, step):
                about = {"kind": WRANGLING[type(step)], **_worker_of(step)}
                decided = insert(RUN_DECISIONS).values(episode_id=episode.episode_id, decided_at=now, **about)
                connection.execute(decided)
                message = f"{step.deed}: {step.message}"
                write(connection, self._host, episode.episode_id, "decided", WRANGLING[type(step)], message, now)
            return verdict

    def finish(self, episode: Episode, step: Wrangle, message: str, *, now: float) -> None:
        """What was decided about a run, or about a worker, is done."""
        its = _decisions_like(episode, step), RUN_DECISIONS.c.done_at.is_(None)
        newest = select(func.max(RUN_DECISIONS.c.decision_id)).where(*its).scalar_subquery()
        tally = Tally()
        with writing(self._engine) as connection:
            done = update(RUN_DECISIONS).where(RUN_DECISIONS.c.decision_id == newest)
            connection.execute(done.values(done_at=now))
            write(connection, self._host, episode.episode_id, "did", WRANGLING[type(step)], message, now, tally)
            tally.keep(connection)

    def state_of(self, episode: Episode) -> tuple[bool, bool]:
        """Whether anything was decided in an episode about a run, and whether anything was done.

        Where the run was to be blocked it is done once any episode about that run has blocked it.
        """
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
    """Whom a decision is about; none where it is the whole run."""
    if isinstance(step, BlockRun):
        return {"host": None, "worker": None}
    return {"host": step.host, "worker": step.worker}


def _decisions_like(episode: Episode, step: Wrangle) -> ColumnElement[bool]:
    """The decisions of an episode to do the same to the same."""
    about = [RUN_DECISIONS.c[name] == value for name, value in _worker_of(step).items()]  # `== None` is IS NULL
    kind = RUN_DECISIONS.c.kind == WRANGLING[type(step)]
    return and_(RUN_DECISIONS.c.episode_id == episode.episode_id, kind, *about)


def _is_promised(connection: Connection, episode: Episode, step: Wrangle) -> bool:
    """Whether it is what the episode decided last, still to be done, and nothing was waited for since."""
    ours = RUN_DECISIONS.c.episode_id == episode.episode_id
    newest = select(func.max(RUN_DECISIONS.c.decision_id)).where(ours).scalar_subquery()
    same = _decisions_like(episode, step), RUN_DECISIONS.c.decision_id == newest, RUN_DECISIONS.c.done_at.is_(None)
    waits = select(EPISODES.c.wait_reason).where(EPISODES.c.episode_id == episode.episode_id)
    found = connection.scalar(select(RUN_DECISIONS.c.decision_id).where(*same))
    return found is not None and connection.scalar(waits) is None
