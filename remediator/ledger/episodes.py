"""Episodes: read, close and delete them."""

from typing import Any, Final

from sqlalchemy import BindParameter, Connection, Row, Select, bindparam, func, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.locks import try_advisory_lock
from gpuwarden.db.transactions import reading, writing
from gpuwarden.fields import made_from
from gpuwarden.job import Condition
from remediator.ledger import retention
from remediator.ledger.counters import CounterDelta
from remediator.ledger.database import LedgerPart
from remediator.ledger.inbox import attempt_in
from remediator.ledger.journal import storable, write
from remediator.ledger.schema import ALERTS, EPISODES, INTENTS, LEDGER
from remediator.plan import Close, Episode, Intent, Kind, Outcome, Stage, Subject
from remediator.reasons import Reason

CLOSED_MEANWHILE: Final = Close(
    outcome=Outcome.SUPERSEDED, reason=Reason.CLOSED_MEANWHILE, message="the episode was closed by another executor"
)

_INTENTS: Final = select(INTENTS).where(INTENTS.c.episode_id == bindparam("of"), INTENTS.c.stage != Stage.WITHDRAWN)


class Episodes(LedgerPart):
    """Episodes: read, close and delete them."""

    def list_open(self, host: str | None = None) -> list[Episode]:
        """List the open episodes of all hosts or of one, oldest first."""
        found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
        if host is not None:
            found = found.where(EPISODES.c.host == host)
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(EPISODES.c.episode_id)).all()
            return [read_episode(connection, row) for row in rows]

    def about_silent_hosts(self) -> list[Episode]:
        """List the open episodes about silent hosts, oldest first."""
        its = EPISODES.c.closed_at.is_(None), EPISODES.c.subject == Subject.HOST
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.episode_id)).all()
            return [read_episode(connection, row) for row in rows]

    def get_open(self, episode_id: int) -> Episode | None:
        """Read an open episode; `None` if closed."""
        with reading(self._engine) as connection:
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
            row = connection.execute(found).one_or_none()
            return None if row is None else read_episode(connection, row)

    def close(self, episode_id: int, outcome: Outcome, reason: Reason, message: str, *, now: float) -> None:
        """Close an episode. Firing alerts about another attempt, or about a host or run, return to the inbox.

        They arrived while it was open, and Alertmanager repeats them only after hours.
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
            delta = CounterDelta()
            delta.add_closed(row.host, outcome, condition=row.condition, took_s=now - began_at)
            returned = _return_alerts(connection, row)
            if returned and row.subject != Subject.HOST:  # for hosts the taker is unknown, so they count again
                delta.add_taken(row.host, -returned)
            delta.save(connection)
            notify_after_commit(connection, LEDGER.channel)

    def delete_old(self, *, before: float) -> bool:
        """Delete a batch of rows older than a time, Unix seconds; false if none is left or another host deletes."""
        with reading(self._engine) as connection:
            if not retention.has_old_rows(connection, before=before):
                return False
        with writing(self._engine) as connection:
            return try_advisory_lock(connection, "forgetting") and retention.delete_batch(connection, before=before) > 0


def is_open(connection: Connection, episode_id: int) -> bool:
    """Whether an episode is open. It stays open until this transaction ends."""
    its = EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None)
    return connection.scalar(select(EPISODES.c.episode_id).where(*its).with_for_update()) is not None


def _return_alerts(connection: Connection, episode: Row[Any]) -> int:
    """Return firing alerts about another attempt to the inbox. Returns their number.

    An episode about a host or run closes only when no alert fires: one that fires came later.
    """
    newest = ALERTS.c.alert_id.in_(_newest(episode.episode_id))
    others = [
        alert.alert_id
        for alert in connection.execute(select(ALERTS).where(newest, ALERTS.c.firing))
        if episode.subject in (Subject.HOST, Subject.RUN)
        or any(getattr(episode, name) != value for name, value in attempt_in(alert.labels).items())
    ]
    if others:
        connection.execute(update(ALERTS).where(ALERTS.c.alert_id.in_(others)).values(state="new", episode_id=None))
    return len(others)


def _newest(episode_id: int | BindParameter[int]) -> Select[tuple[int]]:
    """Select the newest alert of each fingerprint of an episode."""
    newest = select(func.max(ALERTS.c.alert_id)).where(ALERTS.c.episode_id == episode_id)
    return newest.group_by(ALERTS.c.fingerprint)


def read_episode(connection: Connection, row: Row[Any]) -> Episode:
    """Build an episode from its row, intents and alerts."""
    intents = {
        Kind(found.kind): made_from(found, Intent, kind=Kind(found.kind), stage=Stage(found.stage))
        for found in connection.execute(_INTENTS, {"of": row.episode_id})
    }
    alerts = connection.execute(_NEWEST_ALERTS, {"of": row.episode_id}).all()
    firing = [alert for alert in alerts if alert.firing]
    return made_from(
        row,
        Episode,
        condition=Condition(row.condition),
        firing=bool(firing),
        conditions=frozenset(Condition(each.labels["condition"]) for each in firing),
        free=intents.get(Kind.FREE),
        settle=intents.get(Kind.SETTLE),
        subject=Subject(row.subject),
        fingerprints=frozenset(each.fingerprint for each in firing),
        rules=frozenset(alert.labels.get("alertname", "") for alert in alerts) - {""},
    )


_NEWEST_ALERTS: Final = select(ALERTS.c.labels, ALERTS.c.firing, ALERTS.c.fingerprint).where(
    ALERTS.c.alert_id.in_(_newest(bindparam("of")))
)
