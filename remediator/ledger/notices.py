"""Notices: events that people are notified of, their recipients, and what was sent.

A notice is written once per event and recipient. One process claims a recipient by compare-and-set, sends one message
with all waiting notices, and records the result. If it ends in between, another process sends the message again.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Row, case, delete, func, literal_column, or_, select, update

from gpuwarden.db.locks import advisory_lock
from gpuwarden.db.transactions import reading, upsert, writing
from remediator.alert import DRILL
from remediator.ledger.database import LedgerPart
from remediator.ledger.journal import storable
from remediator.ledger.schema import NOTICE_RECIPIENTS, NOTICES, WAITING

ADMINISTRATORS: Final = "administrators"
"""The recipient of a notice for each administrator of the notify file."""

GATHER_S: Final = 5.0
"""A notice waits this long for others, seconds: a blocked run is one message."""

STORM: Final = 20
"""With more waiting notices than this, they wait for `STORM_S` and become one digest."""

STORM_S: Final = 65.0
"""Age of the oldest notice of a digest, seconds."""

REST_S: Final = 60.0
"""After the nth message of an hour, a recipient gets none for n times as long, seconds."""

HOUR_S: Final = 3600.0
RETRY_S: Final = 3600.0
"""A notice is dropped when its message has failed for this long, seconds."""

BACKOFF_S: Final = 10.0
BACKOFF_MAX_S: Final = 300.0
"""Pause after the first failure, doubled by each further one up to the second number, seconds."""

CLAIM_S: Final = 120.0
"""How long a claim holds, seconds; a message's timeout is shorter."""

UNADDRESSED_S: Final = 86400.0
"""A notice for administrators is dropped if no process has their addresses for this long, seconds."""

LOST_SHOWN_S: Final = 3600.0
LOST_TO_ADMINISTRATOR_SHOWN_S: Final = 3 * 86400.0
"""How long an address of a job, or of an administrator, fails after its last message, seconds."""

KEPT_S: Final = 90 * 86400.0
"""How long a sent or dropped notice is kept, seconds."""

TEXT_MAX: Final = 2000
TITLE_MAX: Final = 200
DELETE_BATCH: Final = 100
EXPAND_BATCH: Final = 500

Where: TypeAlias = tuple[ColumnElement[bool], ...]

_LOCK: Final = "recipients of notices"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One event for one recipient. `address` is `None` for administrators. `at`: Unix seconds."""

    key: str
    kind: str
    title: str
    text: str
    at: float
    address: str | None = None


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """The waiting notices of one recipient, claimed by this process.

    `administrator` is the number of the administrator, if it has no address. `counts` counts all notices by kind,
    `notices` are the oldest.
    """

    claim: str
    recipient: str
    address: str | None
    administrator: int | None
    counts: dict[str, int]
    notices: list[Notice]


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What became of a notice for one recipient. `next_at`: the recipient gets no message before, Unix seconds."""

    recipient: str
    state: str
    error: str | None
    next_at: float


@dataclass(frozen=True, kw_only=True)
class Unsent:
    """The waiting notices. Times are Unix seconds."""

    waiting: int
    oldest_at: float | None
    failing_since: float | None
    failing: tuple[tuple[str | None, str], ...] = ()
    """Addresses that fail, `None` for an administrator, with their last errors."""


class Notices(LedgerPart):
    """Notices and their recipients."""

    def notify_administrators(self, *, key: str, kind: str, title: str, text: str, now: float) -> None:
        """Notify every administrator of the notify file of an event, once per `key`.

        `remediator serve` sends it within seconds. Any process with the ledger may call this.
        """
        self.add([Notice(key=key, kind=kind, title=title, text=text, at=now)])

    def add(self, notices: Sequence[Notice]) -> None:
        """Store notices that are not there yet."""
        if notices:
            with writing(self._engine) as connection:
                advisory_lock(connection, _LOCK)
                _insert(connection, [_row(each) for each in notices])

    def expand(self, administrators: int, *, now: float) -> None:
        """Give each of the `administrators` of this process its own row. The message of a drill is sent at once."""
        new: Where = NOTICES.c.recipient == ADMINISTRATORS, literal_column(WAITING)
        with reading(self._engine) as connection:
            if connection.scalar(select(NOTICES.c.notice_id).where(*new).limit(1)) is None:
                return
        names = ("key", "kind", "at", "title", "text", "state")
        with writing(self._engine) as connection:
            if administrators:
                first = select(NOTICES).where(*new).limit(EXPAND_BATCH).with_for_update(skip_locked=True)
                found = connection.execute(first).all()
                rows = [{name: getattr(row, name) for name in names} for row in found]
                _insert(
                    connection,
                    [{**row, "recipient": f"administrator {n}"} for row in rows for n in range(administrators)],
                )
                its = NOTICES.c.notice_id.in_([row.notice_id for row in found])
                connection.execute(update(NOTICES).where(its).values(state="expanded", ended_at=now))
                if any(row.kind == DRILL for row in found):  # an operator waits for it
                    people = NOTICE_RECIPIENTS.c.address.is_(None)
                    connection.execute(update(NOTICE_RECIPIENTS).where(people).values(next_at=now))
            else:
                old = NOTICES.c.at < now - UNADDRESSED_S
                connection.execute(update(NOTICES).where(*new, old).values(state="dropped", ended_at=now))

    def due(self, administrators: int, *, now: float) -> list[str]:
        """Recipients with notices that may be sent now. An hour later, also administrators unknown here."""
        known = {f"administrator {n}" for n in range(administrators)}
        oldest = func.min(NOTICES.c.at)
        waiting = (
            select(NOTICES.c.recipient, func.count().label("size"), oldest.label("oldest"))
            .where(literal_column(WAITING), NOTICES.c.recipient != ADMINISTRATORS)
            .group_by(NOTICES.c.recipient)
            .subquery("per_recipient")
        )
        joined = select(waiting, NOTICE_RECIPIENTS.c.address).join(
            NOTICE_RECIPIENTS, NOTICE_RECIPIENTS.c.recipient == waiting.c.recipient
        )
        # Addresses that hang delay no administrator.
        first = NOTICE_RECIPIENTS.c.address.is_not(None), NOTICE_RECIPIENTS.c.failures
        with reading(self._engine) as connection:
            rows = connection.execute(joined.where(*_is_free(now)).order_by(*first, waiting.c.oldest)).all()
        found = []
        for row in rows:
            wait_s = STORM_S if row.size > STORM else GATHER_S
            if row.address is None and row.recipient not in known:
                wait_s = HOUR_S
            if now - row.oldest >= wait_s or row.oldest > now + HOUR_S:
                found.append(row.recipient)
        return found

    def claim(self, recipient: str, *, now: float) -> Parcel | None:
        """Claim all waiting notices of a recipient; `None` if another process has."""
        claim = uuid4().hex
        its = NOTICE_RECIPIENTS.c.recipient == recipient
        mine: Where = NOTICES.c.recipient == recipient, literal_column(WAITING)
        with writing(self._engine) as connection:
            taken = update(NOTICE_RECIPIENTS).where(its, *_is_free(now))
            taken = taken.values(claim=claim, claimed_until=now + CLAIM_S)
            row = connection.execute(taken.returning(NOTICE_RECIPIENTS.c.address)).one_or_none()
            if row is None or not connection.execute(update(NOTICES).where(*mine).values(claim=claim)).rowcount:
                return None
            mine = *mine, NOTICES.c.claim == claim
            counted = select(NOTICES.c.kind, func.count()).where(*mine).group_by(NOTICES.c.kind)
            counts = {kind: int(count) for kind, count in connection.execute(counted.order_by(NOTICES.c.kind))}
            oldest = connection.execute(select(NOTICES).where(*mine).order_by(NOTICES.c.notice_id).limit(STORM)).all()
        return Parcel(
            claim=claim,
            recipient=recipient,
            address=row.address,
            administrator=None if row.address is not None else int(recipient.rpartition(" ")[2]),
            counts=counts,
            notices=[_notice(each, row.address) for each in oldest],
        )

    def mark_sent(self, parcel: Parcel, *, now: float) -> None:
        """Record that the message was accepted."""
        with writing(self._engine) as connection:
            _end(connection, parcel, "sent", now)
            recent = NOTICE_RECIPIENTS.c.messages_since.between(now - HOUR_S, now)
            row = connection.execute(
                select(NOTICE_RECIPIENTS.c.messages, NOTICE_RECIPIENTS.c.messages_since, recent.label("recent")).where(
                    NOTICE_RECIPIENTS.c.recipient == parcel.recipient
                )
            ).one()
            messages = row.messages + 1 if row.recent else 1
            _release(
                connection,
                parcel,
                messages=messages,
                messages_since=row.messages_since if row.recent else now,
                next_at=now + REST_S * messages,
                failures=0,
                failing_since=None,
                error=None,
            )

    def mark_failed(self, parcel: Parcel, error: str, *, now: float) -> int:
        """Record a failure, and drop notices that have failed for an hour. Returns their number."""
        mine: Where = NOTICES.c.claim == parcel.claim, literal_column(WAITING)
        with writing(self._engine) as connection:
            tried = update(NOTICES).where(*mine, NOTICES.c.tried_at.is_(None))
            connection.execute(tried.values(tried_at=now))
            dropped = _end(connection, parcel, "dropped", now, NOTICES.c.tried_at <= now - RETRY_S)
            its = NOTICE_RECIPIENTS.c.recipient == parcel.recipient
            failures = connection.scalar(select(NOTICE_RECIPIENTS.c.failures).where(its)) or 0
            _release(
                connection,
                parcel,
                next_at=now + min(BACKOFF_MAX_S, BACKOFF_S * 2 ** min(failures, 10)),
                failures=failures + 1,
                failing_since=func.coalesce(NOTICE_RECIPIENTS.c.failing_since, now),
                error=storable(error),
            )
            return dropped

    def drop(self, parcel: Parcel, *, now: float) -> None:
        """Drop notices without an address: an administrator that was removed from the notify file."""
        with writing(self._engine) as connection:
            _end(connection, parcel, "dropped", now)
            _release(connection, parcel, next_at=now, failing_since=None)

    def deliveries(self, key: str) -> list[Delivery]:
        """What became of an event's notices, without those that were given to each administrator."""
        names = NOTICES.c.recipient, NOTICES.c.state, NOTICE_RECIPIENTS.c.error, NOTICE_RECIPIENTS.c.next_at
        both = NOTICES.outerjoin(NOTICE_RECIPIENTS, NOTICE_RECIPIENTS.c.recipient == NOTICES.c.recipient)
        found = select(*names).select_from(both).where(NOTICES.c.key == key, NOTICES.c.state != "expanded")
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(NOTICES.c.recipient)).all()
        return [
            Delivery(recipient=row.recipient, state=row.state, error=row.error, next_at=row.next_at or 0.0)
            for row in rows
        ]

    def withdraw(self, key: str, *, now: float) -> None:
        """Drop the notices of an event that were not sent."""
        with writing(self._engine) as connection:
            its: Where = NOTICES.c.key == key, literal_column(WAITING)
            connection.execute(update(NOTICES).where(*its).values(state="dropped", ended_at=now))

    def unsent(self) -> Unsent:
        """The waiting notices, and the addresses that fail, also those whose notices were dropped."""
        with reading(self._engine) as connection:
            count, oldest = connection.execute(
                select(func.count(), func.min(NOTICES.c.at)).where(literal_column(WAITING))
            ).one()
            rows = connection.execute(
                select(NOTICE_RECIPIENTS)
                .where(NOTICE_RECIPIENTS.c.failing_since.is_not(None))
                .order_by(NOTICE_RECIPIENTS.c.failing_since)
            ).all()
        since = rows[0].failing_since if rows else None
        failing = tuple((row.address, row.error or "") for row in rows)
        return Unsent(waiting=int(count), oldest_at=oldest, failing_since=since, failing=failing)

    def delete_old(self, *, now: float) -> None:
        """Delete some old notices, and the recipients without waiting notices."""
        old = select(NOTICES.c.notice_id).where(NOTICES.c.ended_at < now - KEPT_S)
        old = old.order_by(NOTICES.c.ended_at).limit(DELETE_BATCH)
        waiting = select(NOTICES.c.recipient).where(literal_column(WAITING))
        unused = NOTICE_RECIPIENTS.c.messages_since < now - HOUR_S, NOTICE_RECIPIENTS.c.recipient.not_in(waiting)
        is_administrator = NOTICE_RECIPIENTS.c.address.is_(None)
        shown_s = case((is_administrator, LOST_TO_ADMINISTRATOR_SHOWN_S), else_=LOST_SHOWN_S)
        over = or_(NOTICE_RECIPIENTS.c.failing_since.is_(None), NOTICE_RECIPIENTS.c.next_at < now - shown_s)
        with writing(self._engine) as connection:
            advisory_lock(connection, _LOCK)  # a new notice keeps its recipient
            connection.execute(delete(NOTICES).where(NOTICES.c.notice_id.in_(old)))
            connection.execute(delete(NOTICE_RECIPIENTS).where(*unused, over, NOTICE_RECIPIENTS.c.next_at < now))


def _row(notice: Notice) -> dict[str, Any]:
    row = asdict(notice)
    address = row.pop("address")
    known = ADMINISTRATORS if address is None else f"address {hashlib.sha256(address.encode()).hexdigest()[:32]}"
    title, text = storable(notice.title)[:TITLE_MAX], storable(notice.text)[:TEXT_MAX]
    return {**row, "recipient": known, "address": address, "title": title, "text": text, "state": "waiting"}


def _insert(connection: Connection, rows: Iterable[dict[str, Any]]) -> None:
    notices, recipients = [], {}
    for row in rows:
        recipients[row["recipient"]] = row.get("address")
        notices.append({name: value for name, value in row.items() if name != "address"})
    if not notices:
        return
    connection.execute(upsert(connection, NOTICES).on_conflict_do_nothing(), notices)
    new = {"next_at": 0.0, "failures": 0, "messages": 0, "messages_since": 0.0}
    recipients.pop(ADMINISTRATORS, None)
    if recipients:
        first = [{"recipient": name, "address": address, **new} for name, address in recipients.items()]
        connection.execute(upsert(connection, NOTICE_RECIPIENTS).on_conflict_do_nothing(), first)


def _notice(row: Row[Any], address: str | None) -> Notice:
    return Notice(key=row.key, kind=row.kind, title=row.title, text=row.text, at=row.at, address=address)


def _is_free(now: float) -> Where:
    # A wrong clock wrote later times.
    until, next_at = NOTICE_RECIPIENTS.c.claimed_until, NOTICE_RECIPIENTS.c.next_at
    unclaimed = or_(until.is_(None), until < now, until > now + HOUR_S)
    return or_(next_at <= now, next_at > now + HOUR_S), unclaimed


def _end(connection: Connection, parcel: Parcel, state: str, now: float, *where: Any) -> int:
    its: Where = NOTICES.c.claim == parcel.claim, NOTICES.c.recipient == parcel.recipient, literal_column(WAITING)
    return connection.execute(update(NOTICES).where(*its, *where).values(state=state, ended_at=now)).rowcount


def _release(connection: Connection, parcel: Parcel, **values: Any) -> None:
    its = NOTICE_RECIPIENTS.c.recipient == parcel.recipient, NOTICE_RECIPIENTS.c.claim == parcel.claim
    connection.execute(update(NOTICE_RECIPIENTS).where(*its).values(claim=None, claimed_until=None, **values))
