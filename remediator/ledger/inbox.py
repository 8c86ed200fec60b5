"""The inbox: all accepted and refused alerts, until an episode takes them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    and_,
    bindparam,
    false,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.engine import is_shared
from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.db.locks import advisory_lock, try_advisory_lock
from gpuwarden.db.rows import report
from gpuwarden.db.transactions import autocommit, reading, upsert, writing
from remediator.alert import Alert, Refusal, is_drill, subject
from remediator.ledger import chain, retention
from remediator.ledger.counters import CounterDelta
from remediator.ledger.database import LedgerPart
from remediator.ledger.journal import write
from remediator.ledger.schema import ALERTS, EPISODES, LEDGER
from remediator.plan import Subject
from remediator.reasons import Reason

TAKE_MAX: Final = 500
"""Maximum alerts taken in one transaction."""

UNKNOWN_MAX: Final = 10
"""Maximum open episodes of unknown targets, for each host and condition."""

Target = tuple[str, str]
"""Subject and name."""


class Inbox(LedgerPart):
    """The inbox: all accepted and refused alerts, until an episode takes them."""

    def accept(self, alerts: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        """Store all of them, or raise DatabaseError and store none."""
        rows = [*(_row(alert, now) for alert in alerts), *self._refused(refusals, now)]
        if not rows:
            return
        # A single row needs no transaction: two round trips fewer.
        with autocommit(self._engine) if len(rows) == 1 and not refusals else writing(self._engine) as connection:
            self._insert(connection, rows)

    def newest_alert(self) -> int:
        """The id of the newest stored alert; 0 if there is none."""
        with reading(self._engine) as connection:
            return connection.scalar(select(func.max(ALERTS.c.alert_id))) or 0

    def accept_listed(
        self, alerts: Sequence[Alert], refusals: Sequence[Refusal], *, asked_after: int, now: float
    ) -> Sequence[Alert]:
        """Store the alerts that an Alertmanager listed, except those resolved since the request. Returns the latter.

        A list is older than its arrival. A firing alert stored after its own resolution would never be resolved.

        Args:
            alerts: firing alerts.
            refusals: alerts that cannot be processed.
            asked_after: the newest alert stored before the request.
            now: Unix seconds.
        """
        resolved = select(ALERTS.c.fingerprint).where(ALERTS.c.alert_id > asked_after, ALERTS.c.firing == false())
        with writing(self._engine) as connection:
            if is_shared(self._engine):  # wait for concurrent writers; SQLite has one writer
                connection.execute(text(f"LOCK TABLE {ALERTS.name} IN SHARE ROW EXCLUSIVE MODE"))
            over = set(connection.scalars(resolved.where(ALERTS.c.state != "refused")))
            listed = [_row(alert, now) for alert in alerts if alert.fingerprint not in over]
            if rows := [*listed, *self._refused(refusals, now)]:
                self._insert(connection, rows)
        return [alert for alert in alerts if alert.fingerprint in over]

    def _refused(self, refusals: Sequence[Refusal], now: float) -> list[dict[str, Any]]:
        return [
            {
                "received_at": now,
                "host": self._host,
                "fingerprint": refusal.fingerprint,
                "firing": False,
                "labels": dict(refusal.labels),
                "annotations": {},
                "starts_at": "",
                "state": "refused",
                "reason": refusal.reason,
                "message": refusal.message,
            }
            for refusal in refusals
        ]

    def _insert(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        delta, refused = CounterDelta(), [row["reason"] for row in rows if row["state"] == "refused"]
        for reason in refused:
            delta.add_refused(self._host or "", reason)
        connection.execute(insert(ALERTS), rows)
        if refused:
            retention.keep_newest(connection, "refused")
        delta.save(connection)
        notify_after_commit(connection, LEDGER.channel)

    def new_targets(self, host: str) -> list[Target]:
        """The targets of the new alerts that `take_new` may take next."""
        with reading(self._engine) as connection:
            found = connection.scalars(_NEW_LABELS, {"of": host, "at_most": TAKE_MAX})
            return [subject(labels) for labels in found if _are_labels(labels)]

    def take_new(
        self, host: str, *, now: float, asked: Collection[Target] | None = None, unknown: Collection[Target] = ()
    ) -> int:
        """Link each new alert for `host` to the open episode of its target, or open one. Returns the number taken.

        A resolved alert opens no episode. Alerts of `unknown` targets open at most `UNKNOWN_MAX`. With `asked`, alerts
        of other targets stay. A lock per host avoids deadlocks between transactions that open the same episodes in
        another order. Alerts about silent hosts have no owner: one executor at a time takes them, so that a resolution
        is never processed before its alert.
        """
        with writing(self._engine) as connection:
            advisory_lock(connection, f"alerts of {host}")
            new = _NEW_OF_ANY_HOST if try_advisory_lock(connection, "alerts about hosts") else _NEW
            rows = connection.execute(new, {"of": host, "at_most": TAKE_MAX}).all()
            rows = [row for row in rows if _is_readable(connection, row)]
            rows = [row for row in rows if asked is None or subject(row.labels) in asked]
            taking = _Taking(connection, rows, host=host, by=self._host, unknown=unknown, now=now)
            for row in rows:
                if not taking.take(row):
                    break  # another host's episode closed now: the next tick opens one
            return taking.finish()

    def abandon(self, *, before: float, now: float) -> Mapping[str, int]:
        """Abandon a batch of alerts that were accepted before a time, Unix seconds, and not taken. Counts by host.

        Each is kept with that reason for `retention.ABANDONED_S`.
        """
        with reading(self._engine) as connection:
            if not retention.untaken_alerts(connection, before=before):
                return {}
        with writing(self._engine) as connection:
            gone = retention.abandon_batch(connection, before=before, now=now)
            delta = CounterDelta()
            for host, count in gone.items():
                delta.add_taken(host, count)
            delta.save(connection)
            return gone

    def refused(self, *, last: int = 50) -> list[tuple[float, str, str, Mapping[str, str]]]:
        """The newest refused or abandoned alerts: time, reason, message and labels."""
        its = ALERTS.c.state.in_(("refused", "abandoned"))
        with reading(self._engine) as connection:
            rows = connection.execute(select(ALERTS).where(its).order_by(ALERTS.c.alert_id.desc()).limit(last))
            return [(row.received_at, row.reason, row.message, row.labels) for row in rows]

    def last_alert_at(self) -> float | None:
        """When the last alert arrived, Unix seconds."""
        with reading(self._engine) as connection:
            newest = select(ALERTS.c.received_at).order_by(ALERTS.c.alert_id.desc()).limit(1)
            at: float | None = connection.scalar(newest)
            return at


def _row(alert: Alert, now: float) -> dict[str, Any]:
    of_any = subject(alert.labels)[0] is Subject.HOST and not is_drill(alert.labels)
    return {
        "received_at": now,
        "host": None if of_any else alert.labels["host"],
        "fingerprint": alert.fingerprint,
        "firing": alert.firing,
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "starts_at": alert.starts_at,
        "state": "new",
        "reason": None,
        "message": None,
    }


def _are_labels(found: Any) -> bool:
    """Whether a column has the labels that each stored alert has."""
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        return False
    return found.keys() >= {"host", "remedy", "condition"}


def _is_readable(connection: Connection, row: Row[Any]) -> bool:
    """Whether an alert can be read. Another is ignored from now on."""
    its = row.annotations
    if _are_labels(row.labels) and isinstance(its, dict) and all(isinstance(each, str) for each in its.values()):
        return True
    report(UnreadableRowError(ALERTS.name, str(row.alert_id), "its labels or annotations are unknown"))
    this = update(ALERTS).where(ALERTS.c.alert_id == row.alert_id)
    connection.execute(this.values(state="ignored", message="its row is unreadable"))
    return False


def _new(its: ColumnElement[bool]) -> Select[Any]:
    new = select(ALERTS).where(ALERTS.c.state == "new", its).order_by(ALERTS.c.alert_id)
    return new.limit(bindparam("at_most", type_=Integer)).with_for_update(skip_locked=True)


def _open_episodes_of(connection: Connection, alerts: Sequence[Mapping[str, str]]) -> dict[tuple[str, str, str], int]:
    """The open episodes of the targets, locked as by `_open_episode_of`: by host, subject and name."""
    names: dict[str, set[str]] = defaultdict(set)
    for labels in alerts:
        names[labels["host"]].add(subject(labels)[1])
    found: dict[tuple[str, str, str], int] = {}
    for host, its in names.items():
        about = and_(EPISODES.c.host == host, EPISODES.c.worker.in_(its), EPISODES.c.closed_at.is_(None))
        columns = EPISODES.c.host, EPISODES.c.subject, EPISODES.c.worker, EPISODES.c.episode_id
        rows = connection.execute(select(*columns).where(about).with_for_update(read=True))
        found |= {(row.host, row.subject, row.worker): row.episode_id for row in rows}
    return found


class _Taking:
    """Takes alerts from the inbox in one transaction."""

    def __init__(
        self,
        connection: Connection,
        rows: Sequence[Row[Any]],
        *,
        host: str,
        by: str | None,
        unknown: Collection[Target],
        now: float,
    ) -> None:
        self._connection = connection
        self._host = host
        self._by = by
        self._unknown = unknown
        self._now = now
        self._delta = CounterDelta()
        self._taken = 0
        self._ignored: list[int] = []
        self._drills: list[Row[Any]] = []
        self._refused: dict[str, list[int]] = defaultdict(list)
        self._open = _open_episodes_of(connection, [row.labels for row in rows])
        self._held = self._count_unknown() if unknown else Counter[str]()

    def take(self, row: Row[Any]) -> bool:
        """Link, ignore or refuse one alert. False if its episode cannot be opened now."""
        labels, target = row.labels, subject(row.labels)
        if is_drill(labels):
            self._drills.append(row)
            return True
        about = (labels["host"], *target)
        episode_id = self._open.get(about)
        if row.firing and episode_id is None:
            if target in self._unknown and not self._has_room(labels["condition"]):
                self._refused[labels["condition"]].append(row.alert_id)
                return True
            episode_id = _open_episode(self._connection, labels, alerted_at=row.received_at, now=self._now)
            if episode_id is None:
                return False
            self._open[about] = episode_id
        elif row.firing:
            self._delta.add_duplicate(self._host)
        if episode_id is None:
            self._ignored.append(row.alert_id)
        else:
            self._link(row, episode_id)
        return True

    def finish(self) -> int:
        """Write the refused and ignored ones. Returns the number of alerts taken."""
        for condition, its in self._refused.items():
            message = (
                f"exporter and queue do not know the target, and {UNKNOWN_MAX} episodes of unknown targets with "
                f"condition {condition} are open"
            )
            self._set(its, state="refused", reason=Reason.UNKNOWN_TARGET, message=message)
            for _ in its:
                self._delta.add_refused(self._host, Reason.UNKNOWN_TARGET)
            import structlog  # noqa: PLC0415 - slow to import, and rarely needed

            structlog.get_logger("executor").warning("alerts refused", reason=message, count=len(its))
        self._set(self._ignored, state="ignored", message="no open episode")
        self._set([row.alert_id for row in self._drills], state="ignored", message="drill: nothing to do")
        firing = [(row.labels, row.received_at) for row in self._drills if row.firing]
        chain.decide(self._connection, firing, host=self._host, now=self._now)
        count = self._taken + len(self._drills) + len(self._ignored) + sum(len(its) for its in self._refused.values())
        if count:
            self._delta.add_taken(self._host, count)
            self._delta.save(self._connection)
        return count

    def _link(self, row: Row[Any], episode_id: int) -> None:
        linked = update(ALERTS).where(ALERTS.c.alert_id == row.alert_id)
        self._connection.execute(linked.values(state="linked", episode_id=episode_id, message=None))
        state = "firing" if row.firing else "resolved"
        message = row.annotations.get("summary") or row.labels.get("alertname", "")
        write(self._connection, self._by, episode_id, "saw", "alert", message, self._now, state=state)
        self._taken += 1

    def _set(self, alerts: Sequence[int], **values: str) -> None:
        if alerts:
            self._connection.execute(update(ALERTS).where(ALERTS.c.alert_id.in_(alerts)).values(**values))
            retention.keep_newest(self._connection, values["state"])

    def _has_room(self, condition: str) -> bool:
        self._held[condition] += 1
        return self._held[condition] <= UNKNOWN_MAX

    def _count_unknown(self) -> Counter[str]:
        """Count the open episodes of unknown targets by condition."""
        columns = EPISODES.c.subject, EPISODES.c.worker, EPISODES.c.condition
        its = EPISODES.c.host == self._host, EPISODES.c.closed_at.is_(None)
        rows = self._connection.execute(select(*columns).where(*its))
        return Counter(row.condition for row in rows if (row.subject, row.worker) in self._unknown)


def _open_episode_of(connection: Connection, labels: Mapping[str, str]) -> int | None:
    """The open episode of a target, locked until the commit: an alert linked to a closed one would be lost."""
    kind, name = subject(labels)
    about = and_(EPISODES.c.subject == kind, EPISODES.c.worker == name)
    its = and_(EPISODES.c.host == labels["host"], about, EPISODES.c.closed_at.is_(None))
    return connection.scalar(select(EPISODES.c.episode_id).where(its).with_for_update(read=True))


def _open_episode(connection: Connection, labels: Mapping[str, str], *, alerted_at: float, now: float) -> int | None:
    """Open an episode, or return the one that another host opened now."""
    kind, name = subject(labels)
    opened: int | None = connection.scalar(
        upsert(connection, EPISODES)
        .values(
            remedy=labels["remedy"],
            condition=labels["condition"],
            host=labels["host"],
            subject=kind,
            worker=name,
            **attempt_in(labels),
            alerted_at=alerted_at,
            opened_at=now,
            dry_run_recorded=False,
        )
        .on_conflict_do_nothing()
        .returning(EPISODES.c.episode_id)
    )
    return opened if opened is not None else _open_episode_of(connection, labels)


def attempt_in(labels: Mapping[str, str]) -> dict[str, str | int | None]:
    """The incarnation and attempt in an alert's labels, by column name."""
    return {
        "incarnation": labels.get("incarnation") or None,
        "job_id": _number(labels.get("job_id")),
        "attempt": _number(labels.get("attempt")),
    }


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


_NEW: Final = _new(ALERTS.c.host == bindparam("of"))


_NEW_OF_ANY_HOST: Final = _new(or_(ALERTS.c.host == bindparam("of"), ALERTS.c.host.is_(None)))


_NEW_LABELS: Final = (
    select(ALERTS.c.labels)
    .where(ALERTS.c.state == "new", or_(ALERTS.c.host == bindparam("of"), ALERTS.c.host.is_(None)))
    .order_by(ALERTS.c.alert_id)
    .limit(bindparam("at_most", type_=Integer))
)
