"""The journal: one line for each thing that was seen, decided or done."""

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, bindparam, insert, or_, select, update

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.transactions import reading, writing
from gpuwarden.fields import made_from
from remediator.ledger.counters import Tally
from remediator.ledger.database import LedgerPart
from remediator.ledger.schema import EPISODES, JOURNAL, LEDGER
from remediator.plan import Wait
from remediator.reasons import Reason

MESSAGE_MAX: Final = 2000
"""Characters kept of a sentence in the journal, or of what an episode waits for."""

WAIT: Final = "wait"
"""What the journal calls it that an episode waits."""

_WAITS_NO_MORE: Final = (
    update(EPISODES)
    .where(EPISODES.c.episode_id == bindparam("of"), EPISODES.c.wait_reason.is_not(None))
    .values(wait_reason=None, wait_message=None, wait_since=None)
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of an episode's account. `host` is whose remediator wrote it.

    `state` is what a step came to: the stage of an intent, the outcome of a close, whether an alert fires. `reason` is
    why, as `remediator.reasons` has it.
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
        """The step, with what it came to or waits for."""
        more = self.reason if self.step == WAIT else self.state
        return self.step if more is None else f"{self.step}: {more}"


class Journal(LedgerPart):
    """The journal: one line for each thing that was seen, decided or done."""

    def record(self, episode_id: int, act: str, step: str, message: str, *, now: float) -> None:
        """Add a line to an episode's account."""
        tally = Tally()
        with writing(self._engine) as connection:
            write(connection, self._host, episode_id, act, step, message, now, tally)
            tally.keep(connection)

    def announce(self, episode_id: int, step: str, message: str, *, now: float, for_s: float) -> bool:
        """Write ahead what is to be done for an episode that any host may work on, as whoever comes first.

        False, and nothing is written, where another host announced the same within `for_s` seconds, or it is closed.
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
        """Whether an episode's account says that this step was decided."""
        its = JOURNAL.c.episode_id == episode_id, JOURNAL.c.act == "decided", JOURNAL.c.step == step
        with reading(self._engine) as connection:
            return connection.scalar(select(JOURNAL.c.entry_id).where(*its).limit(1)) is not None

    def wait(self, episode_id: int, step: Wait, *, now: float, once: bool = False) -> None:
        """What an episode waits for; where a person is asked, also about which incarnation.

        With `once` nothing is told where it waits for that already: each of the hosts that look at it would tell it.
        """
        its = update(EPISODES).where(EPISODES.c.episode_id == episode_id)
        if once:
            its = its.where(or_(EPISODES.c.wait_reason.is_(None), EPISODES.c.wait_reason != step.reason))
        message = storable(step.message[:MESSAGE_MAX])
        waits: dict[str, Any] = {"wait_reason": step.reason, "wait_message": message, "wait_since": now}
        if step.asks is not None:
            waits["asked"] = step.asks
        with writing(self._engine) as connection:
            if connection.execute(its.values(waits)).rowcount or not once:
                write(connection, self._host, episode_id, "decided", WAIT, step.message, now, reason=step.reason)

    def would_act(self, episode_id: int, message: str, *, now: float) -> None:
        """A dry run's record: the only thing that a dry run does."""
        tally = Tally()
        with writing(self._engine) as connection:
            connection.execute(update(EPISODES).where(EPISODES.c.episode_id == episode_id).values(would_act=True))
            write(connection, self._host, episode_id, "would", "act", message, now, tally)
            tally.keep(connection)


def storable(text: str) -> str:
    """What errors and answers say may hold half a surrogate pair, or a NUL, which no database takes."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def read_entry(line: Row[Any]) -> Entry:
    """An entry of a row."""
    return made_from(line, Entry)


def write(
    connection: Connection,
    host: str | None,
    episode_id: int,
    act: str,
    step: str,
    message: str,
    now: float,
    tally: Tally | None = None,
    *,
    state: str | None = None,
    reason: Reason | None = None,
) -> None:
    """Add a line to the journal. All but waits, alerts and orders end what the episode waits for."""
    entry = {"at": now, "episode_id": episode_id, "act": act, "step": step, "state": state, "reason": reason}
    connection.execute(insert(JOURNAL).values(**entry, message=storable(message[:MESSAGE_MAX]), host=host))
    if act != "ordered" and step not in (WAIT, "alert"):
        connection.execute(_WAITS_NO_MORE, {"of": episode_id})
    if tally is not None and host is not None:
        tally.step(host, act, step)
