"""The journal: one entry for each observation, decision and action."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, and_, bindparam, insert, or_, select, update

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.rows import converted
from gpuwarden.db.transactions import reading, writing
from gpuwarden.fields import made_from
from remediator.ledger.counters import CounterDelta
from remediator.ledger.database import LedgerPart
from remediator.ledger.schema import EPISODES, JOURNAL, LEDGER
from remediator.plan import Wait
from remediator.reasons import Reason

MESSAGE_MAX: Final = 2000
"""Maximum length of a message, characters."""

WAIT: Final = "wait"
"""Journal name of a wait."""

_WAITS_NO_MORE: Final = (
    update(EPISODES)
    .where(EPISODES.c.episode_id == bindparam("of"), EPISODES.c.wait_reason.is_not(None))
    .values(wait_reason=None, wait_message=None, wait_since=None)
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One journal entry. `host` is the writing host.

    `state` is the result: stage of an intent, outcome of a close, or whether an alert fires. `reason` is from
    `remediator.reasons`.
    """

    at: float
    act: str
    step: str
    message: str
    host: str | None = None
    state: str | None = None
    reason: str | None = None

    @property
    def what(self) -> str:
        """The step with its state or reason."""
        more = self.reason if self.step == WAIT else self.state
        return self.step if more is None else f"{self.step}: {more}"


class TaintEntry(NamedTuple):
    """A decided or done taint of an open episode. `worker` is its GPU, `state` is `fatal` if only a reset ends it."""

    episode_id: int
    host: str
    worker: str
    act: str
    state: str | None
    at: float


TAINT: Final = "taint"
"""Journal name of the step that taints a node."""

TAINTS: Final = (
    select(EPISODES.c.episode_id, EPISODES.c.host, EPISODES.c.worker, JOURNAL.c.act, JOURNAL.c.state, JOURNAL.c.at)
    .join(JOURNAL, JOURNAL.c.episode_id == EPISODES.c.episode_id)
    .where(EPISODES.c.closed_at.is_(None), EPISODES.c.remedy == "taint_node")
    .where(JOURNAL.c.step == TAINT, JOURNAL.c.act.in_(("decided", "did")))
    .order_by(JOURNAL.c.entry_id)
)


class Journal(LedgerPart):
    """The journal: one entry for each observation, decision and action."""

    def record(
        self, episode_id: int, act: str, step: str, message: str, *, now: float, state: str | None = None
    ) -> None:
        """Add an entry."""
        delta = CounterDelta()
        with writing(self._engine) as connection:
            write(connection, self._host, episode_id, act, step, message, now, delta, state=state)
            delta.save(connection)

    def taints(self) -> list[TaintEntry]:
        """What open episodes recorded about taints, oldest first."""
        with reading(self._engine) as connection:
            return [TaintEntry(*row) for row in connection.execute(TAINTS)]

    def record_once_per(self, episode_id: int, step: str, message: str, *, now: float, for_s: float) -> bool:
        """Record a decision that any host may carry out, unless another host did within `for_s` seconds.

        Returns whether it was recorded; false also if the episode is closed.
        """
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            this = and_(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
            if connection.scalar(select(EPISODES.c.episode_id).where(this).with_for_update()) is None:
                return False
            theirs = and_(
                JOURNAL.c.episode_id == episode_id,
                JOURNAL.c.act == "decided",
                JOURNAL.c.step == step,
                JOURNAL.c.host != self._host,
                JOURNAL.c.at > now - for_s,
            )
            if connection.scalar(select(JOURNAL.c.entry_id).where(theirs).limit(1)) is not None:
                return False
            write(connection, self._host, episode_id, "decided", step, message, now)
            return True

    def has_decided(self, episode_id: int, step: str) -> bool:
        """Whether the journal has a decision for this step."""
        its = JOURNAL.c.episode_id == episode_id, JOURNAL.c.act == "decided", JOURNAL.c.step == step
        with reading(self._engine) as connection:
            return connection.scalar(select(JOURNAL.c.entry_id).where(*its).limit(1)) is not None

    def wait(self, episode_id: int, step: Wait, *, now: float, once: bool = False) -> None:
        """Record what an episode waits for, and the incarnation that approval is asked for.

        With `once`, nothing is recorded if another host recorded the same reason.
        """
        its = update(EPISODES).where(EPISODES.c.episode_id == episode_id)
        if once:
            its = its.where(or_(EPISODES.c.wait_reason.is_(None), EPISODES.c.wait_reason != step.reason))
        message = storable(step.message[:MESSAGE_MAX])
        waits: dict[str, Any] = {"wait_reason": step.reason, "wait_message": message, "wait_since": now}
        if step.asks is not None:
            waits["approval_asked_for"] = step.asks
        with writing(self._engine) as connection:
            if connection.execute(its.values(waits)).rowcount or not once:
                write(connection, self._host, episode_id, "decided", WAIT, step.message, now, reason=step.reason)

    def record_dry_run(self, episode_id: int, message: str, *, now: float) -> None:
        """Record what a dry run would do."""
        delta = CounterDelta()
        with writing(self._engine) as connection:
            connection.execute(
                update(EPISODES).where(EPISODES.c.episode_id == episode_id).values(dry_run_recorded=True)
            )
            write(connection, self._host, episode_id, "would", "act", message, now, delta)
            delta.save(connection)


def storable(text: str) -> str:
    """Escape lone surrogates and NUL, which databases refuse."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def read_entry(line: Row[Any]) -> Entry:
    """Build an entry from its row."""
    return converted(line, JOURNAL, lambda line: made_from(line, Entry))


def write(
    connection: Connection,
    host: str | None,
    episode_id: int,
    act: str,
    step: str,
    message: str,
    now: float,
    delta: CounterDelta | None = None,
    *,
    state: str | None = None,
    reason: Reason | None = None,
) -> None:
    """Add an entry. Any entry except a wait, an alert or an order ends the episode's wait."""
    entry = {"at": now, "episode_id": episode_id, "act": act, "step": step, "state": state, "reason": reason}
    connection.execute(insert(JOURNAL).values(**entry, message=storable(message[:MESSAGE_MAX]), host=host))
    if act != "ordered" and step not in (WAIT, "alert"):
        connection.execute(_WAITS_NO_MORE, {"of": episode_id})
    if delta is not None and host is not None:
        delta.add_step(host, act, step)
