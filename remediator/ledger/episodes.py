"""Episodes: open, read and close one; forget what is over."""

from typing import Any, Final

from sqlalchemy import BindParameter, Connection, Row, Select, bindparam, func, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.locks import try_advisory_lock
from gpuwarden.db.transactions import reading, writing
from gpuwarden.fields import made_from
from gpuwarden.job import Trip
from remediator.ledger import retention
from remediator.ledger.counters import Tally
from remediator.ledger.database import LedgerPart
from remediator.ledger.inbox import accused
from remediator.ledger.journal import storable, write
from remediator.ledger.schema import ALERTS, EPISODES, INTENTS, LEDGER
from remediator.plan import Close, Episode, Intent, Kind, Outcome, Stage, Subject
from remediator.reasons import Reason

CLOSED_MEANWHILE: Final = Close(
    outcome=Outcome.SUPERSEDED, reason=Reason.CLOSED_MEANWHILE, message="it was closed meanwhile"
)

_INTENTS: Final = select(INTENTS).where(INTENTS.c.episode_id == bindparam("of"), INTENTS.c.stage != Stage.WITHDRAWN)


class Episodes(LedgerPart):
    """Episodes: open, read and close one; forget what is over."""

    def list_open(self, host: str | None = None) -> list[Episode]:
        """Every episode that is not closed, or those of one host; oldest first."""
        found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
        if host is not None:
            found = found.where(EPISODES.c.host == host)
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(EPISODES.c.episode_id)).all()
            return [read_episode(connection, row) for row in rows]

    def about_silent_hosts(self) -> list[Episode]:
        """The open episodes about hosts that are said to be silent, whoever's, oldest first."""
        its = EPISODES.c.closed_at.is_(None), EPISODES.c.subject == Subject.HOST
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.episode_id)).all()
            return [read_episode(connection, row) for row in rows]

    def get_open(self, episode_id: int) -> Episode | None:
        """One open episode; `None` once it is closed."""
        with reading(self._engine) as connection:
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
            row = connection.execute(found).one_or_none()
            return None if row is None else read_episode(connection, row)

    def close(self, episode_id: int, outcome: Outcome, reason: Reason, message: str, *, now: float) -> None:
        """The episode is over. Firing alerts that accuse another attempt than its own, a host or a run go back.

        They came while it was open, and Alertmanager does not send them again within hours: the inbox has them again.
        """
        with writing(self._engine) as connection:
            closed = (
                update(EPISODES)
                .where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
                .values(closed_at=now, outcome=outcome, reason=reason, message=storable(message))
            )
            if connection.execute(closed).rowcount != 1:
                return
            row = connection.execute(select(EPISODES).where(EPISODES.c.episode_id == episode_id)).one()
            write(connection, self._host, episode_id, "decided", "close", message, now, state=outcome, reason=reason)
            began_at = row.opened_at if row.alerted_at is None else row.alerted_at
            tally = Tally()
            tally.closed(row.host, outcome, trip=row.trip, took_s=now - began_at)
            handed_back = _hand_back(connection, row)
            if handed_back and row.subject != Subject.HOST:  # who had taken those up is not known: they count again
                tally.taken(row.host, -handed_back)
            tally.keep(connection)
            notify_after_commit(connection, LEDGER.channel)

    def forget(self, *, before: float) -> bool:
        """Forget a bite of what was over before then, Unix seconds; false once nothing is left, or another is at it."""
        with reading(self._engine) as connection:
            if not retention.is_due(connection, before=before):
                return False
        with writing(self._engine) as connection:
            return try_advisory_lock(connection, "forgetting") and retention.forget_some(connection, before=before) > 0


def is_open(connection: Connection, episode_id: int) -> bool:
    """Whether an episode is open, and stays so until this transaction is over.

    What another executor has closed meanwhile owes nothing, and nobody would look at it again.
    """
    its = EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None)
    return connection.scalar(select(EPISODES.c.episode_id).where(*its).with_for_update()) is not None


def _hand_back(connection: Connection, episode: Row[Any]) -> int:
    """Give the firing alerts that accuse another attempt back to the inbox; how many.

    An episode about a host or a run closes only where none fires: one that does came since.
    """
    newest = ALERTS.c.alert_id.in_(_newest(episode.episode_id))
    others = [
        alert.alert_id
        for alert in connection.execute(select(ALERTS).where(newest, ALERTS.c.firing))
        if episode.subject in (Subject.HOST, Subject.RUN)
        or any(getattr(episode, name) != value for name, value in accused(alert.labels).items())
    ]
    if others:
        connection.execute(update(ALERTS).where(ALERTS.c.alert_id.in_(others)).values(state="new", episode_id=None))
    return len(others)


def _newest(episode_id: int | BindParameter[int]) -> Select[tuple[int]]:
    """The newest alert of each series that is tied to an episode."""
    newest = select(func.max(ALERTS.c.alert_id)).where(ALERTS.c.episode_id == episode_id)
    return newest.group_by(ALERTS.c.fingerprint)


def read_episode(connection: Connection, row: Row[Any]) -> Episode:
    """An episode of a row, with its intents and what its alerts say."""
    intents = {
        Kind(found.kind): made_from(found, Intent, kind=Kind(found.kind), stage=Stage(found.stage))
        for found in connection.execute(_INTENTS, {"of": row.episode_id})
    }
    alerts = connection.execute(_NEWEST_ALERTS, {"of": row.episode_id}).all()
    firing = [alert for alert in alerts if alert.firing]
    return made_from(
        row,
        Episode,
        trip=Trip(row.trip),
        firing=bool(firing),
        trips=frozenset(Trip(each.labels["trip"]) for each in firing),
        free=intents.get(Kind.FREE),
        settle=intents.get(Kind.SETTLE),
        subject=Subject(row.subject),
        fingerprints=frozenset(each.fingerprint for each in firing),
        rules=frozenset(alert.labels.get("alertname", "") for alert in alerts) - {""},
    )


_NEWEST_ALERTS: Final = select(ALERTS.c.labels, ALERTS.c.firing, ALERTS.c.fingerprint).where(
    ALERTS.c.alert_id.in_(_newest(bindparam("of")))
)
