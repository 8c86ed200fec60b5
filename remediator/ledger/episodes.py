"""Episodes: read, close and delete them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, func, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.locks import try_advisory_lock
from gpuwarden.db.rows import converted, readable
from gpuwarden.db.transactions import reading, writing
from gpuwarden.fields import made_from
from gpuwarden.job import Condition
from remediator.ledger import retention
from remediator.ledger.counters import CounterDelta
from remediator.ledger.database import LedgerPart
from remediator.ledger.inbox import attempt_in
from remediator.ledger.journal import storable, write
from remediator.ledger.schema import ALERTS, EPISODES, INTENTS, LEDGER, ORDERS
from remediator.plan import OVER, Close, Episode, Intent, Kind, Outcome, Stage, Subject
from remediator.reasons import Reason

CLOSED_MEANWHILE: Final = Close(
    outcome=Outcome.SUPERSEDED, reason=Reason.CLOSED_MEANWHILE, message="the episode was closed by another executor"
)

READ_MAX: Final = 500
"""Maximum episodes in one statement."""


@dataclass(frozen=True, slots=True)
class OpenEpisode:
    """What the executor needs to know of an open episode to decide when to read it.

    `acting`: it has an open intent. `alert_id` and `order_id`: its newest alert and order.
    """

    episode_id: int
    subject: str
    worker: str
    condition: str
    wait_reason: str | None
    acting: bool
    alert_id: int | None
    order_id: int | None


class Episodes(LedgerPart):
    """Episodes: read, close and delete them."""

    def list_open(self, host: str | None = None) -> list[Episode]:
        """List the open episodes of all hosts or of one, oldest first."""
        found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
        return self._read(found if host is None else found.where(EPISODES.c.host == host))

    def about_silent_hosts(self) -> list[Episode]:
        """List the open episodes about silent hosts, oldest first."""
        return self._read(select(EPISODES).where(EPISODES.c.closed_at.is_(None), EPISODES.c.subject == Subject.HOST))

    def get_open(self, episode_id: int) -> Episode | None:
        """Read an open episode; `None` if closed."""
        return next(iter(self.read_open([episode_id])), None)

    def read_open(self, episode_ids: Sequence[int]) -> list[Episode]:
        """Read those episodes that are open, oldest first."""
        found: list[Episode] = []
        for first in range(0, len(episode_ids), READ_MAX):
            some = EPISODES.c.episode_id.in_(episode_ids[first : first + READ_MAX])
            found += self._read(select(EPISODES).where(some, EPISODES.c.closed_at.is_(None)))
        return found

    def survey(self, host: str) -> list[OpenEpisode]:
        """List the open episodes of a host in short, oldest first. One statement."""
        with reading(self._engine) as connection:
            return [OpenEpisode(*row) for row in connection.execute(_SURVEY, {"of": host})]

    def _read(self, found: Select[Any]) -> list[Episode]:
        with reading(self._engine) as connection:
            return read_episodes(connection, connection.execute(found.order_by(EPISODES.c.episode_id)).all())

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
    newest = ALERTS.c.alert_id.in_(_newest([episode.episode_id]))
    others = [
        alert.alert_id
        for alert in connection.execute(select(ALERTS).where(newest, ALERTS.c.firing))
        if not isinstance(alert.labels, dict)
        or episode.subject in (Subject.HOST, Subject.RUN)
        or any(getattr(episode, name) != value for name, value in attempt_in(alert.labels).items())
    ]
    if others:
        connection.execute(update(ALERTS).where(ALERTS.c.alert_id.in_(others)).values(state="new", episode_id=None))
    return len(others)


def _newest(episode_ids: Collection[int]) -> Select[tuple[int]]:
    """Select the newest alert of each fingerprint of each episode."""
    newest = select(func.max(ALERTS.c.alert_id)).where(ALERTS.c.episode_id.in_(episode_ids))
    return newest.group_by(ALERTS.c.episode_id, ALERTS.c.fingerprint)


def read_episodes(connection: Connection, rows: Sequence[Row[Any]]) -> list[Episode]:
    """Build episodes from their rows, intents and alerts. Two statements for all. Unreadable ones are left out."""
    if not rows:
        return []
    its = [row.episode_id for row in rows]
    intents: dict[int, list[Any]] = defaultdict(list)
    found = select(INTENTS).where(INTENTS.c.episode_id.in_(its), INTENTS.c.stage != Stage.WITHDRAWN)
    for each in connection.execute(found):
        intents[each.episode_id].append(each)
    alerts: dict[int, list[Any]] = defaultdict(list)
    columns = ALERTS.c.episode_id, ALERTS.c.labels, ALERTS.c.firing, ALERTS.c.fingerprint
    for alert in connection.execute(select(*columns).where(ALERTS.c.alert_id.in_(_newest(its)))):
        alerts[alert.episode_id].append(alert)
    return list(readable(rows, lambda row: _episode(row, intents[row.episode_id], alerts[row.episode_id])))


def _episode(row: Row[Any], intents: Sequence[Any], alerts: Sequence[Any]) -> Episode:
    kinds = {each.kind: each for each in (converted(found, INTENTS, _intent) for found in intents)}
    firing = [alert for alert in alerts if alert.firing]
    return converted(
        row,
        EPISODES,
        lambda row: made_from(
            row,
            Episode,
            condition=Condition(row.condition),
            firing=bool(firing),
            conditions=frozenset(Condition(each.labels["condition"]) for each in firing),
            free=kinds.get(Kind.FREE),
            settle=kinds.get(Kind.SETTLE),
            subject=Subject(row.subject),
            fingerprints=frozenset(each.fingerprint for each in firing),
            rules=frozenset(alert.labels.get("alertname", "") for alert in alerts) - {""},
        ),
    )


def _intent(row: Row[Any]) -> Intent:
    return made_from(row, Intent, kind=Kind(row.kind), stage=Stage(row.stage))


def _survey() -> Select[Any]:
    its = INTENTS.c.episode_id == EPISODES.c.episode_id
    newest_alert = select(func.max(ALERTS.c.alert_id)).where(ALERTS.c.episode_id == EPISODES.c.episode_id)
    newest_order = select(func.max(ORDERS.c.order_id)).where(ORDERS.c.episode_id == EPISODES.c.episode_id)
    return (
        select(
            *(EPISODES.c[name] for name in ("episode_id", "subject", "worker", "condition", "wait_reason")),
            select(INTENTS.c.intent_id).where(its, INTENTS.c.stage.not_in(OVER)).exists(),
            newest_alert.scalar_subquery(),
            newest_order.scalar_subquery(),
        )
        .where(EPISODES.c.host == bindparam("of"), EPISODES.c.closed_at.is_(None))
        .order_by(EPISODES.c.episode_id)
    )


_SURVEY: Final = _survey()
