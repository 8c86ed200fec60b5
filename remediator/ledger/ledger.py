"""What was seen, decided and done, and what is still owed. Write ahead, then act.

An accepted alert is here before Alertmanager hears 202. An intent is here before anything is done for it, at most one
per container incarnation and one per job attempt, and stays until it is done or abandoned with a reason. Who works on
an intent holds it: a lease, taken and lengthened with each change of it, keeps every other executor's hands off.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Engine,
    Integer,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    false,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from gpuwarden.db.changes import Changes, notify_after_commit, watch
from gpuwarden.db.clock import DatabaseClock
from gpuwarden.db.engine import DatabaseError, is_shared
from gpuwarden.db.locks import ProcessLock, advisory_lock, lock_for_one, try_advisory_lock
from gpuwarden.db.migrate import open_database, refuse_other_revisions
from gpuwarden.db.transactions import autocommit, reading, upsert, writing
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import Trip
from remediator.alert import Alert, Refusal, subject
from remediator.capture.capture import Captured
from remediator.ledger import export_rows, retention
from remediator.ledger.counters import Tally, Totals, count_up
from remediator.ledger.schema import (
    ALERTS,
    CAPTURES,
    EPISODES,
    EXECUTORS,
    INTENTS,
    JOURNAL,
    LEDGER,
    ORDERS,
    RUN_DECISIONS,
)
from remediator.plan import (
    OVER,
    Begin,
    BlockRun,
    Close,
    Episode,
    Intent,
    Kind,
    LockWorker,
    Migrate,
    Outcome,
    Stage,
    Subject,
    Wait,
    Wrangle,
)
from remediator.reasons import Reason
from remediator.remedies.guards import (
    RATE_WINDOW_S,
    TOPIC,
    Act,
    Latch,
    Order,
    Orders,
    Recent,
    Safeguards,
    Wish,
    condemned_run,
    condemned_worker,
    may_begin,
    may_wrangle,
    target,
    wish,
)

TAKE_MAX: Final = 500
"""Alerts taken from the inbox in one go."""

ROOM_MIN_BYTES: Final = 2**20
"""With less room on the ledger's disk, nothing more is expected to be kept there; a payload's usual need."""

WRANGLING: Final[Mapping[type[Wrangle], str]] = {LockWorker: "lock", Migrate: "move", BlockRun: "block"}
"""What is done about runs and their workers, as the journal and `run_decisions` name it."""

MESSAGE_MAX: Final = 2000
"""Characters kept of a sentence in the journal, or of what an episode waits for."""

CAPTURES_MAX: Final = 1000
"""So many captures are kept, the newest; at 256 KiB each that is 250 MiB."""


class NotAskedError(GpuwardenError):
    """A person answered what an episode does not ask, or not any more; the message says which."""


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
        more = self.reason if self.step == _WAIT else self.state
        return self.step if more is None else f"{self.step}: {more}"


@dataclass(frozen=True, kw_only=True)
class Story:
    """One episode with its whole account, for people."""

    episode_id: int
    remedy: str
    trip: str
    host: str
    worker: str
    job_id: int | None
    attempt: int | None
    opened_at: float
    closed_at: float | None
    outcome: str | None
    reason: str | None
    message: str | None
    wait_reason: str | None = None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was captured before one stop; `document` is as `remediator.capture.capture` has it. `at` is Unix seconds."""

    at: float
    host: str | None
    document: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Executing:
    """One host's executor: its process, its newest sign of life, what it counts. Times are Unix seconds."""

    host: str
    pid: int
    armed: bool
    started_at: float
    beat_at: float
    errors: int
    workers: int | None


@dataclass(frozen=True, kw_only=True)
class Held:
    """What an open episode waits for, and since when.

    While it is at work, or was not looked at yet, `reason` and `message` are "", and `since` is when it was opened.
    """

    episode_id: int
    host: str
    worker: str
    remedy: str
    opened_at: float
    reason: str
    message: str
    since: float


class Ledger:
    """The ledger in one database. Safe to share between threads.

    Args:
        engine: the database.
        host: whose remediator writes; `None` for a reader.
    """

    def __init__(self, engine: Engine, *, host: str | None = None) -> None:
        self._engine = engine
        self._host = host
        self._clock = DatabaseClock(engine)
        self.shared = is_shared(engine)
        """Whether several hosts' remediators may work on it."""

    @classmethod
    def open(cls, url: str, *, host: str | None = None, migrate: bool = True) -> Self:
        """Open the ledger at an SQLAlchemy URL; `migrate` as `open_database` has it.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, LEDGER, migrate=migrate), host=host)

    def now(self) -> float:
        """The time that the ledger goes by, Unix seconds: the server's on PostgreSQL, this host's on SQLite.

        Raises:
            DatabaseError: the server's time is not known.
        """
        return self._clock.now()

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def changes(self) -> Changes:
        """A cheap watch on the ledger, for one thread."""
        return watch(self._engine, LEDGER.channel)

    def lock_executor(self, host: str) -> ProcessLock:
        """Be the one executor of a host, and on SQLite of the whole ledger.

        Raises:
            LockHeldElsewhereError: another one is; the message says which process.
            DatabaseError: the lock cannot be asked for.
        """
        return lock_for_one(self._engine, f"executor of {host}")

    # --- the inbox

    def accept(self, alerts: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        """Make them durable: all of them, or DatabaseError and none."""
        rows = [*(_row(alert, now) for alert in alerts), *self._refused(refusals, now)]
        if not rows:
            return
        # One row that nothing else is written with needs no transaction around it: two round trips less.
        with autocommit(self._engine) if len(rows) == 1 and not refusals else writing(self._engine) as connection:
            self._insert(connection, rows)

    def newest_alert(self) -> int:
        """The number of the newest alert that is durable; 0 before the first."""
        with reading(self._engine) as connection:
            return connection.scalar(select(func.max(ALERTS.c.alert_id))) or 0

    def accept_listed(
        self, alerts: Sequence[Alert], refusals: Sequence[Refusal], *, asked_after: int, now: float
    ) -> Sequence[Alert]:
        """Make durable what an Alertmanager has listed, but for what was resolved since it was asked; those are told.

        A list is from before its arrival, and no order of arrival tells which is newer: a firing one that is written
        behind its own resolved would never be resolved again. One that fires anew is delivered.

        Args:
            alerts: which fire.
            refusals: which cannot be taken up.
            asked_after: the newest alert that was durable before it was asked.
            now: Unix seconds.
        """
        resolved = select(ALERTS.c.fingerprint).where(ALERTS.c.alert_id > asked_after, ALERTS.c.firing == false())
        with writing(self._engine) as connection:
            if is_shared(self._engine):  # whoever is writing alerts has written them; writers of SQLite take turns
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
        tally, refused = Tally(), [row["reason"] for row in rows if row["state"] == "refused"]
        for reason in refused:
            tally.refused(self._host or "", reason)
        connection.execute(insert(ALERTS), rows)
        if refused:
            retention.keep_newest(connection, "refused")
        tally.keep(connection)
        notify_after_commit(connection, LEDGER.channel)

    def take_new(self, host: str, *, now: float) -> int:
        """Tie each new alert for `host` to its subject's open episode, or open one; how many were taken.

        A resolved alert opens nothing. In one transaction, so that an alert is tied once; whoever else takes for this
        host waits, for two that open the same episodes in different orders would wait for one another. Those about
        hosts that are silent are taken up by whoever comes first, one at a time: to another, one that is being taken up
        is not there, and what resolves it would find nothing open.
        """
        tally = Tally()
        with writing(self._engine) as connection:
            advisory_lock(connection, f"alerts of {host}")
            new = _NEW_OF_ANYBODY if try_advisory_lock(connection, "alerts about hosts") else _NEW
            rows = connection.execute(new, {"of": host, "at_most": TAKE_MAX}).all()
            taken: list[Row[Any]] = []
            for row in rows:
                episode_id = _open_episode_of(connection, row.labels)
                if row.firing and episode_id is None:
                    episode_id = _open_episode(connection, row.labels, alerted_at=row.received_at, now=now)
                    if episode_id is None:
                        break  # another's was open, and is closed by now: the next look opens one, before what follows
                elif row.firing:
                    tally.duplicate(host)
                state = "idle" if episode_id is None else "linked"
                connection.execute(
                    update(ALERTS)
                    .where(ALERTS.c.alert_id == row.alert_id)
                    .values(
                        state=state, episode_id=episode_id, message=None if episode_id else "nothing was open for it"
                    )
                )
                if episode_id is not None:
                    state = "firing" if row.firing else "resolved"
                    message = row.annotations.get("summary") or row.labels.get("alertname", "")
                    self._write(connection, episode_id, "saw", "alert", message, now, state=state)
                taken.append(row)
            if any(not row.firing for row in taken):
                retention.keep_newest(connection, "idle")
            if taken:
                tally.taken(host, len(taken))
                tally.keep(connection)
            return len(taken)

    # --- episodes

    def open_episodes(self, host: str | None = None) -> list[Episode]:
        """Every episode that is not closed, or those of one host; oldest first."""
        found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
        if host is not None:
            found = found.where(EPISODES.c.host == host)
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(EPISODES.c.episode_id)).all()
            return [_episode(connection, row) for row in rows]

    def silent_hosts(self) -> list[Episode]:
        """The open episodes about hosts that are said to be silent, whoever's, oldest first."""
        its = EPISODES.c.closed_at.is_(None), EPISODES.c.subject == Subject.HOST
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.episode_id)).all()
            return [_episode(connection, row) for row in rows]

    def episode(self, episode_id: int) -> Episode | None:
        """One open episode; `None` once it is closed."""
        with reading(self._engine) as connection:
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
            row = connection.execute(found).one_or_none()
            return None if row is None else _episode(connection, row)

    def begin(self, episode: Episode, step: Begin, *, safeguards: Safeguards, now: float) -> Wait | Close | None:
        """Write the two intents. What is to be done instead when that may not be, and then nothing is written.

        Whether it may is decided here too, in the transaction that begins: of many episodes at once, and hosts at
        once, none begins what the one before it has made one too many, or an order has just forbidden. A storm latches
        the brake. A settle that another episode already owes stays with it: the free stands on its own.
        """
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            self._alone(connection)
            this = EPISODES.c.episode_id == episode.episode_id
            if not _is_open(connection, episode.episode_id):
                return _CLOSED_MEANWHILE
            if retention.is_spent(connection, Kind.FREE, step.free_key):
                return _FREED_ALREADY
            orders = _orders(connection, now)
            wanted = wish(episode, step)
            recent = _recent(connection, wanted, orders, safeguards, now=now)
            verdict = may_begin(wanted, orders, recent, safeguards, now=now)
            if isinstance(verdict, Latch):
                return self._latch(connection, verdict, now)
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
            if not _promise(connection, episode, Kind.FREE, step.free_key, data, now):
                return _FREED_ALREADY
            if step.settle_key is not None and not retention.is_spent(connection, Kind.SETTLE, step.settle_key):
                claimed = {"incarnation": step.worker_incarnation}
                _promise(connection, episode, Kind.SETTLE, step.settle_key, claimed, now)
            connection.execute(update(EPISODES).where(this).values(trip=step.trip))
            self._write(connection, episode.episode_id, "decided", "begin", step.message, now)
            return None

    def set_about(self, episode: Episode, step: Wrangle, *, safeguards: Safeguards, now: float) -> Wait | Close | None:
        """Write ahead what is to be done about a run. What is to be done instead where that may not be: see `begin`.

        What was decided last, was not done and has not waited since, is promised already: it is not written again.
        """
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            self._alone(connection)
            if not _is_open(connection, episode.episode_id):
                return _CLOSED_MEANWHILE
            orders = _orders(connection, now)
            wanted = wish(episode, step)
            recent = _recent(connection, wanted, orders, safeguards, now=now)
            verdict = may_wrangle(wanted, orders, recent, safeguards, now=now)
            if isinstance(verdict, Latch):
                return self._latch(connection, verdict, now)
            if verdict is None and not _is_promised(connection, episode, step):
                about = {"kind": WRANGLING[type(step)], **_worker_of(step)}
                decided = insert(RUN_DECISIONS).values(episode_id=episode.episode_id, decided_at=now, **about)
                connection.execute(decided)
                message = f"{step.deed}: {step.message}"
                self._write(connection, episode.episode_id, "decided", WRANGLING[type(step)], message, now)
            return verdict

    def run_done(self, episode: Episode, step: Wrangle, message: str, *, now: float) -> None:
        """What was decided about a run, or about a worker, is done."""
        its = _decisions_like(episode, step), RUN_DECISIONS.c.done_at.is_(None)
        newest = select(func.max(RUN_DECISIONS.c.decision_id)).where(*its).scalar_subquery()
        tally = Tally()
        with writing(self._engine) as connection:
            done = update(RUN_DECISIONS).where(RUN_DECISIONS.c.decision_id == newest)
            connection.execute(done.values(done_at=now))
            self._write(connection, episode.episode_id, "did", WRANGLING[type(step)], message, now, tally)
            tally.keep(connection)

    def run_decisions(self, episode: Episode) -> tuple[bool, bool]:
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

    def _latch(self, connection: Connection, found: Latch, now: float) -> Wait:
        who = f"the executor of {self._host}"
        self._give(connection, Order(act=Act.BRAKE, at=now, who=who, because=found.message))
        return Wait(reason=Reason.CIRCUIT_BREAKER, message=f"the brake was latched here: {found.message}")

    # --- orders

    def order(self, order: Order) -> int:
        """Keep an order; every open episode that it is about tells of it. Its number."""
        with writing(self._engine) as connection:
            return self._give(connection, order)

    def arm_at_first(self, *, host: str, who: str, now: float) -> bool:
        """Arm every remedy of a host about which nobody has ordered anything yet; whether that was so."""
        with writing(self._engine) as connection:
            self._alone(connection)
            about = ORDERS.c.topic == TOPIC[Act.ARM], or_(ORDERS.c.host.is_(None), ORDERS.c.host == host)
            if connection.scalar(select(ORDERS.c.order_id).where(*about).limit(1)) is not None:
                return False
            because = "as it was started, before anybody ordered otherwise"
            self._give(connection, Order(act=Act.ARM, at=now, who=who, because=because, host=host))
            return True

    def orders(self) -> Orders:
        """The orders that may still matter."""
        now = self.now()
        with reading(self._engine) as connection:
            return _orders(connection, now)

    def standing(self, wanted: Wish, safeguards: Safeguards, *, now: float) -> tuple[Orders, Recent]:
        """What decides whether a free may be begun."""
        with reading(self._engine) as connection:
            orders = _orders(connection, now)
            return orders, _recent(connection, wanted, orders, safeguards, now=now)

    def answer(
        self, episode_id: int, act: Act, *, who: str, because: str, now: float, until: float | None = None
    ) -> tuple[Order, str]:
        """Keep a person's yes or no to what an open episode asks, for the incarnation that it asks about.

        With it comes what was asked.

        Raises:
            NotAskedError: it asks nothing, and why.
        """
        with writing(self._engine) as connection:
            self._alone(connection)
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id).with_for_update()
            row = connection.execute(found).one_or_none()
            if row is None:
                raise NotAskedError(f"the ledger has no episode {episode_id}: `gpuwarden status` names those that ask")
            if row.closed_at is not None:
                raise NotAskedError(f"episode {episode_id} is over ({row.outcome}: {row.message}): nothing is asked")
            (held,) = (each for each in _held(connection, row.host) if each.episode_id == episode_id)
            free = _episode(connection, row).free
            if row.asked is None or (free is not None and free.stage is not Stage.PLANNED):
                waits = f"waits for something else ({held.reason}): {held.message}" if held.reason else "is at work"
                raise NotAskedError(f"episode {episode_id} asks nobody: it {waits}")
            order = Order(
                act=act,
                at=now,
                who=who,
                because=because,
                host=row.host,
                remedy=row.remedy,
                until=until,
                episode_id=episode_id,
                key=row.asked,
            )
            self._give(connection, order)
            return order, held.message

    def orders_given(self, *, since: float) -> list[Order]:
        """Every order since then, oldest first: who armed what, and when."""
        with reading(self._engine) as connection:
            found = select(ORDERS).where(ORDERS.c.at >= since).order_by(ORDERS.c.order_id)
            return [_order(row) for row in connection.execute(found)]

    def freed_since(self, since: float, *, host: str | None = None) -> list[tuple[str, str, float]]:
        """The containers freed since then: host, name, and when, Unix seconds; oldest first."""
        with reading(self._engine) as connection:
            rows = [row for row in _frees(connection, since=since) if row.stage not in _NOT_FREED]
            return [(row.host, row.data["name"], row.entered_at) for row in rows if host in (None, row.host)]

    def _alone(self, connection: Connection) -> None:
        """Let no other begin or order anything until this transaction is over; writers of SQLite take turns anyway."""
        if is_shared(self._engine):
            connection.execute(text(f"LOCK TABLE {ORDERS.name} IN SHARE ROW EXCLUSIVE MODE"))

    def _give(self, connection: Connection, order: Order) -> int:
        who, because = _storable(order.who), _storable(order.because[:1000])
        names = ("at", "act", "host", "remedy", "until", "episode_id", "key", "since", "ends")
        row = {name: getattr(order, name) for name in names}
        given = insert(ORDERS).values(**row, topic=TOPIC[order.act], who=who, because=because)
        order_id: int = connection.execute(given.returning(ORDERS.c.order_id)).scalar_one()
        about: list[ColumnElement[bool]] = [EPISODES.c.closed_at.is_(None)]
        about += [] if order.host is None else [EPISODES.c.host == order.host]
        about += [] if order.remedy is None else [EPISODES.c.remedy == order.remedy]
        about += [] if order.episode_id is None else [EPISODES.c.episode_id == order.episode_id]
        for episode_id in connection.scalars(select(EPISODES.c.episode_id).where(*about)).all():
            self._write(connection, episode_id, "ordered", order.act, f"by {who}: {because}", order.at)
        notify_after_commit(connection, LEDGER.channel)
        return order_id

    def advance(
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
        """Move an intent from the stage it was read at; false when another process moved it first.

        One that is abandoned while it was only planned, or of which nothing has come (`unspent`), gives its key back:
        the same target may come to need it after all.
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
        tally = Tally()
        with writing(self._engine) as connection:
            if connection.execute(move).rowcount != 1:
                return False
            self._write(connection, episode_id, act, step, message, now, tally, state=state, reason=reason)
            if stage in OVER and intent.stage not in OVER:
                whose = select(INTENTS.c.host).where(INTENTS.c.intent_id == intent.intent_id)
                tally.over(connection.scalars(whose).one(), intent.kind, stage)
            tally.keep(connection)
            return True

    def withdraw(self, episode_id: int, reason: Reason, message: str, *, now: float) -> None:
        """Take back an episode's intents that are only planned: the keys are free, and the episode has neither."""
        planned = and_(INTENTS.c.episode_id == episode_id, INTENTS.c.stage == Stage.PLANNED)
        found = select(INTENTS.c.host, INTENTS.c.kind).where(planned)
        with writing(self._engine) as connection:
            taken = connection.execute(found.with_for_update()).all()
            if not taken:
                return
            retire = update(INTENTS).where(planned).values(stage=Stage.WITHDRAWN, retired="withdrawn", entered_at=now)
            connection.execute(retire)
            self._write(connection, episode_id, "decided", "withdraw", message, now, reason=reason)
            tally = Tally()
            for row in taken:
                tally.over(row.host, Kind(row.kind), Stage.WITHDRAWN)
            tally.keep(connection)

    def record(self, episode_id: int, act: str, step: str, message: str, *, now: float) -> None:
        """Add a line to an episode's account."""
        tally = Tally()
        with writing(self._engine) as connection:
            self._write(connection, episode_id, act, step, message, now, tally)
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
            self._write(connection, episode_id, "decided", step, message, now)
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
        message = _storable(step.message[:MESSAGE_MAX])
        waits: dict[str, Any] = {"wait_reason": step.reason, "wait_message": message, "wait_since": now}
        if step.asks is not None:
            waits["asked"] = step.asks
        with writing(self._engine) as connection:
            if connection.execute(its.values(waits)).rowcount or not once:
                self._write(connection, episode_id, "decided", _WAIT, step.message, now, reason=step.reason)

    def would_act(self, episode_id: int, message: str, *, now: float) -> None:
        """A dry run's record: the only thing that a dry run does."""
        tally = Tally()
        with writing(self._engine) as connection:
            connection.execute(update(EPISODES).where(EPISODES.c.episode_id == episode_id).values(would_act=True))
            self._write(connection, episode_id, "would", "act", message, now, tally)
            tally.keep(connection)

    def is_captured(self, episode: Episode) -> bool:
        """Whether something was captured for its free, or while nothing is promised, for what a dry run would do."""
        with reading(self._engine) as connection:
            return connection.scalar(select(CAPTURES.c.capture_id).where(*_captured_for(episode))) is not None

    def keep(self, episode: Episode, captured: Captured, *, now: float) -> bool:
        """Keep what was captured with its episode; false, and nothing of it, where something is kept already."""
        row = {"episode_id": episode.episode_id, "at": now, "host": self._host, "document": captured.document}
        row["intent_id"] = None if episode.free is None else episode.free.intent_id
        with writing(self._engine) as connection:
            keep = upsert(connection, CAPTURES).values(**row).on_conflict_do_nothing()
            if connection.scalar(keep.returning(CAPTURES.c.capture_id)) is None:
                return False
            # Of an episode that is open none goes: it is what keeps another from being taken.
            closed = exists().where(EPISODES.c.episode_id == CAPTURES.c.episode_id, EPISODES.c.closed_at.is_not(None))
            newest = select(CAPTURES.c.capture_id).order_by(CAPTURES.c.capture_id.desc()).limit(CAPTURES_MAX)
            connection.execute(delete(CAPTURES).where(CAPTURES.c.capture_id.not_in(newest), closed))
            self._write(connection, episode.episode_id, "saw", "capture", captured.message, now)
            return True

    def close_episode(self, episode_id: int, outcome: Outcome, reason: Reason, message: str, *, now: float) -> None:
        """The episode is over. Firing alerts that accuse another attempt than its own, a host or a run go back.

        They came while it was open, and Alertmanager does not send them again within hours: the inbox has them again.
        """
        with writing(self._engine) as connection:
            closed = (
                update(EPISODES)
                .where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
                .values(closed_at=now, outcome=outcome, reason=reason, message=_storable(message))
            )
            if connection.execute(closed).rowcount != 1:
                return
            row = connection.execute(select(EPISODES).where(EPISODES.c.episode_id == episode_id)).one()
            self._write(connection, episode_id, "decided", "close", message, now, state=outcome, reason=reason)
            began_at = row.opened_at if row.alerted_at is None else row.alerted_at
            tally = Tally()
            tally.closed(row.host, outcome, trip=row.trip, took_s=now - began_at)
            handed_back = _hand_back(connection, row)
            if handed_back and row.subject != Subject.HOST:  # who had taken those up is not known: they count again
                tally.taken(row.host, -handed_back)
            tally.keep(connection)
            notify_after_commit(connection, LEDGER.channel)

    def _write(
        self,
        connection: Connection,
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
        connection.execute(insert(JOURNAL).values(**entry, message=_storable(message[:MESSAGE_MAX]), host=self._host))
        if act != "ordered" and step not in (_WAIT, "alert"):
            connection.execute(_WAITS_NO_MORE, {"of": episode_id})
        if tally is not None and self._host is not None:
            tally.step(self._host, act, step)

    def abandon(self, *, before: float, now: float) -> Mapping[str, int]:
        """Give up a bite of the alerts that were accepted before then, Unix seconds, and taken up by nobody since.

        How many of each host. Each stays on record with that as its reason (`retention.ABANDONED_S`).
        """
        with reading(self._engine) as connection:
            if not retention.untaken(connection, before=before):
                return {}
        with writing(self._engine) as connection:
            gone = retention.abandon_some(connection, before=before, now=now)
            tally = Tally()
            for host, count in gone.items():
                tally.taken(host, count)
            tally.keep(connection)
            return gone

    def forget(self, *, before: float) -> bool:
        """Forget a bite of what was over before then, Unix seconds; false once nothing is left, or another is at it."""
        with reading(self._engine) as connection:
            if not retention.is_due(connection, before=before):
                return False
        with writing(self._engine) as connection:
            return try_advisory_lock(connection, "forgetting") and retention.forget_some(connection, before=before) > 0

    # --- for people and metrics

    def stories(self, *, last: int = 50) -> list[Story]:
        """The newest episodes, oldest first, without their entries."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).order_by(EPISODES.c.episode_id.desc()).limit(last)).all()
            return [_story(row) for row in reversed(rows)]

    def story(self, episode_id: int) -> Story | None:
        """One episode with every line of its account."""
        with reading(self._engine) as connection:
            row = connection.execute(select(EPISODES).where(EPISODES.c.episode_id == episode_id)).one_or_none()
            if row is None:
                return None
            lines = select(JOURNAL).where(JOURNAL.c.episode_id == episode_id).order_by(JOURNAL.c.entry_id)
            return _story(row, tuple(_entry(line) for line in connection.execute(lines)))

    def whole(
        self, *, since: float = 0.0, until: float | None = None, captures: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Every episode that was open between two times, with all that the ledger holds of it, oldest first.

        A page at a time, each from a snapshot of its own: a long look keeps no old pages or rows from being let go of.
        `remediator.ledger.export_rows` says what an episode holds.
        """
        after = 0
        while True:
            with reading(self._engine) as connection:
                page = export_rows.page(connection, after=after, since=since, until=until, captures=captures)
            if not page:
                return
            yield from page
            after = page[-1]["episode_id"]

    def captures(self, episode_id: int) -> list[Kept]:
        """What was captured of an episode, oldest first."""
        found = select(CAPTURES.c.at, CAPTURES.c.host, CAPTURES.c.document).where(CAPTURES.c.episode_id == episode_id)
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(CAPTURES.c.capture_id))
            return [Kept(at=row.at, host=row.host, document=row.document) for row in rows]

    def refused(self, *, last: int = 50) -> list[tuple[float, str, str, Mapping[str, str]]]:
        """The newest alerts that were refused or abandoned: when, the reason's word, the reason, the labels."""
        its = ALERTS.c.state.in_(("refused", "abandoned"))
        with reading(self._engine) as connection:
            rows = connection.execute(select(ALERTS).where(its).order_by(ALERTS.c.alert_id.desc()).limit(last))
            return [(row.received_at, row.reason, row.message, row.labels) for row in rows]

    def totals(self, host: str) -> Totals:
        """Counts of one host's share of the ledger."""
        now = self.now()
        with reading(self._engine) as connection:
            return count_up(connection, host, orders=_orders(connection, now), now=now)

    def beat(
        self,
        *,
        host: str,
        pid: int,
        armed: bool,
        started_at: float,
        errors: int,
        now: float,
        workers: int | None = None,
    ) -> None:
        """The executor lives, and sees so many workers.

        Raises:
            NewerTablesError: a newer gpuwarden has taken the tables over.
            DatabaseError: it could not be written.
        """
        row: dict[str, float | None] = {"pid": pid, "armed": armed, "started_at": started_at, "beat_at": now}
        row |= {"errors": errors, "workers": workers}
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            connection.execute(
                upsert(connection, EXECUTORS)
                .values(host=host, **row)
                .on_conflict_do_update(index_elements=[EXECUTORS.c.host], set_=row)
            )

    def executors(self) -> dict[str, float]:
        """Every host whose executor has ever worked this ledger, and when it last said so, Unix seconds."""
        return {each.host: each.beat_at for each in self.executing()}

    def executing(self) -> list[Executing]:
        """The newest sign of life of every host's executor, by host."""
        names = [EXECUTORS.c[name] for name in Executing.__dataclass_fields__]
        with reading(self._engine) as connection:
            rows = connection.execute(select(*names).order_by(EXECUTORS.c.host)).mappings()
            return [Executing(**row) for row in rows]

    def held(self, *, host: str | None = None) -> list[Held]:
        """What each open episode waits for, oldest first."""
        with reading(self._engine) as connection:
            return _held(connection, host)

    def last_alert_at(self) -> float | None:
        """When the webhook last took or refused an alert, Unix seconds."""
        with reading(self._engine) as connection:
            newest = select(ALERTS.c.received_at).order_by(ALERTS.c.alert_id.desc()).limit(1)
            at: float | None = connection.scalar(newest)
            return at

    def stories_since(self, since: float, *, host: str | None = None) -> list[Story]:
        """The episodes that were open at any time since then, oldest first, each with its whole account."""
        its = [or_(EPISODES.c.closed_at.is_(None), EPISODES.c.closed_at >= since)]
        if host is not None:
            its.append(EPISODES.c.host == host)
        lines = select(JOURNAL).where(JOURNAL.c.episode_id.in_(select(EPISODES.c.episode_id).where(*its)))
        entries: dict[int, list[Entry]] = {}
        with reading(self._engine) as connection:
            for line in connection.execute(lines.order_by(JOURNAL.c.entry_id)):
                entries.setdefault(line.episode_id, []).append(_entry(line))
            rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.episode_id))
            return [_story(row, tuple(entries.get(row.episode_id, ()))) for row in rows]

    def check_usable(self) -> None:
        """Read of every table, be a writer for a moment, see that its disk has room, and change nothing.

        Raises:
            DatabaseError: it cannot be read, or not written: another process holds the write lock, it is read-only, or
                its disk is full.
        """
        with reading(self._engine) as connection:
            for table in LEDGER.tables.sorted_tables:
                connection.execute(select(table).limit(1))
        with writing(self._engine) as connection:
            # Of no row: a server that only reads, a standby for one, refuses it all the same.
            connection.execute(update(EXECUTORS).where(false()).values(errors=EXECUTORS.c.errors))
        if self.shared:
            self._check_servers_room()
        else:
            self._check_room()

    def _check_servers_room(self) -> None:
        """Have the server write so much to a file of its own, beside its tables, and remove it.

        It does not tell how much room it has, and what is written to the tables and taken back would be left in them.
        """
        with reading(self._engine) as connection:
            connection.execute(text("SET LOCAL work_mem = '64kB'"))
            connection.execute(text("SET LOCAL temp_tablespaces = ''"))
            rows = func.unnest(func.array_fill(func.repeat("x", 1024), [ROOM_MIN_BYTES // 1024]))
            connection.execute(select(func.count()).select_from(rows.alias()))

    def _check_room(self) -> None:
        file = self._engine.url.database or ""
        try:
            free_bytes = shutil.disk_usage(Path(file).parent).free
        except OSError as error:
            raise DatabaseError(f"the room on the disk of {file} is not known: {error.strerror}") from None
        if free_bytes < ROOM_MIN_BYTES:
            raise DatabaseError(f"only {free_bytes // 1024} KiB are free on the disk of {file}: make room")

    def check_writable(self) -> None:
        """Be the one writer for a moment, and write nothing.

        Raises:
            DatabaseError: another process holds the write lock, or the database cannot be written.
        """
        with writing(self._engine):
            pass


_CLOSED_MEANWHILE: Final = Close(
    outcome=Outcome.SUPERSEDED, reason=Reason.CLOSED_MEANWHILE, message="it was closed meanwhile"
)

_FREED_ALREADY: Final = Close(
    outcome=Outcome.SUPERSEDED,
    reason=Reason.RESTARTED_ALREADY,
    message="that incarnation of the container was freed already",
)

_NOT_FREED: Final = frozenset({Stage.PLANNED, Stage.WITHDRAWN})
"""Stages of a free at which nothing was done to its container."""

FLEET_FRESH_S: Final = 600.0
"""An executor that has shown no life for longer counts no workers into the fleet, seconds."""


def _is_open(connection: Connection, episode_id: int) -> bool:
    """Whether an episode is open, and stays so until this transaction is over.

    What another executor has closed meanwhile owes nothing, and nobody would look at it again.
    """
    its = EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None)
    return connection.scalar(select(EPISODES.c.episode_id).where(*its).with_for_update()) is not None


def _warned_before(connection: Connection, episode: Episode, key: str) -> Mapping[str, Any] | None:
    """How this attempt of a job was warned under the newest promise for its container that was taken back."""
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


# What each look of an executor asks is put together once: to do so each time took longer than to ask.
_ORDERS: Final = select(ORDERS).where(retention.matters(bindparam("at_now"))).order_by(ORDERS.c.order_id)


def _orders(connection: Connection, now: float) -> Orders:
    rows = connection.execute(_ORDERS, {"at_now": now})
    return Orders(given=tuple(_order(row) for row in rows))


def _order(row: Row[Any]) -> Order:
    return Order(
        act=Act(row.act),
        at=row.at,
        who=row.who,
        because=row.because,
        host=row.host,
        remedy=row.remedy,
        until=row.until,
        episode_id=row.episode_id,
        key=row.key,
        order_id=row.order_id,
        since=row.since,
        ends=row.ends,
    )


def _recent(connection: Connection, wanted: Wish, orders: Orders, safeguards: Safeguards, *, now: float) -> Recent:
    longest_s = max(safeguards.storm_window_s, safeguards.cooldown_s, safeguards.vram_cooldown_s, RATE_WINDOW_S)
    frees = _frees(connection, since=now - longest_s)
    released_at = orders.released_at() or 0.0
    # A release that seems yet to come is one before the clock was set back: it excuses nothing.
    released_at = released_at if released_at <= now else 0.0
    storm_since = max(now - safeguards.storm_window_s, released_at)
    rate_since = max(now - RATE_WINDOW_S, released_at)
    # Nor does a free that seems yet to come count for longer than it would have.
    storm_until, rate_until = now + safeguards.storm_window_s, now + RATE_WINDOW_S
    targets = {target(row.host, row.data["handle"]) for row in frees if storm_since < row.created_at < storm_until}
    freed_at = [
        row.entered_at
        for row in frees
        if (row.host, row.data["handle"]) == (wanted.host, wanted.handle) and row.stage not in _NOT_FREED
    ]
    beside = [
        row.entered_at if row.stage in OVER else now
        for row in frees
        if row.host == wanted.host
        and row.episode_id != wanted.episode_id
        and not wanted.gpus.isdisjoint(row.data.get("gpus", ()))
    ]
    answers = select(ORDERS).where(ORDERS.c.episode_id == wanted.episode_id).order_by(ORDERS.c.order_id.desc())
    answer = connection.execute(answers.limit(1)).one_or_none()
    fleet = select(func.sum(EXECUTORS.c.workers)).where(EXECUTORS.c.beat_at > now - FLEET_FRESH_S)
    return Recent(
        targets=frozenset(targets),
        frees=sum(rate_since < row.created_at < rate_until for row in frees),
        # The nearest to now, either way: one that seems yet to come is of before the clock was set back.
        freed_s_ago=min((now - at for at in freed_at), key=abs, default=None),
        gpu_freed_s_ago=min((now - at for at in beside), key=abs, default=None),
        fleet=connection.scalar(fleet),
        condemned=_condemned(connection, since=storm_since, until=storm_until),
        answer=None if answer is None else _order(answer),
    )


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


def _condemned(connection: Connection, *, since: float, until: float) -> frozenset[str]:
    """The workers that were to be locked, and the runs to be blocked, by what was decided between two times."""
    found = (
        select(RUN_DECISIONS, EPISODES.c.worker.label("run"))
        .join(EPISODES, EPISODES.c.episode_id == RUN_DECISIONS.c.episode_id)
        .where(RUN_DECISIONS.c.kind.in_([WRANGLING[LockWorker], WRANGLING[BlockRun]]))
        .where(RUN_DECISIONS.c.decided_at > since, RUN_DECISIONS.c.decided_at < until)
    )
    return frozenset(
        condemned_run(row.run) if row.worker is None else condemned_worker(row.host, row.worker)
        for row in connection.execute(found)
    )


def _frees(connection: Connection, *, since: float) -> Sequence[Row[Any]]:
    """The frees that were begun or came further since then, without those for which nothing was ever done."""
    its = INTENTS.c.kind == Kind.FREE, INTENTS.c.entered_at > since, INTENTS.c.retired.is_(None)
    return connection.execute(select(INTENTS).where(*its).order_by(INTENTS.c.entered_at)).all()


_WAIT: Final = "wait"
"""What the journal calls it that an episode waits."""

_WAITS_NO_MORE: Final = (
    update(EPISODES)
    .where(EPISODES.c.episode_id == bindparam("of"), EPISODES.c.wait_reason.is_not(None))
    .values(wait_reason=None, wait_message=None, wait_since=None)
)


def _held(connection: Connection, host: str | None) -> list[Held]:
    found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
    if host is not None:
        found = found.where(EPISODES.c.host == host)
    return [
        Held(
            episode_id=row.episode_id,
            host=row.host,
            worker=row.worker,
            remedy=row.remedy,
            opened_at=row.opened_at,
            reason=row.wait_reason or "",
            message=row.wait_message or "",
            since=row.opened_at if row.wait_since is None else row.wait_since,
        )
        for row in connection.execute(found.order_by(EPISODES.c.episode_id))
    ]


def _row(alert: Alert, now: float) -> dict[str, Any]:
    return {
        "received_at": now,
        "host": None if subject(alert.labels)[0] is Subject.HOST else alert.labels["host"],
        "fingerprint": alert.fingerprint,
        "firing": alert.firing,
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "starts_at": alert.starts_at,
        "state": "new",
        "reason": None,
        "message": None,
    }


def _new(its: ColumnElement[bool]) -> Select[Any]:
    new = select(ALERTS).where(ALERTS.c.state == "new", its).order_by(ALERTS.c.alert_id)
    return new.limit(bindparam("at_most", type_=Integer)).with_for_update(skip_locked=True)


_NEW: Final = _new(ALERTS.c.host == bindparam("of"))
_NEW_OF_ANYBODY: Final = _new(or_(ALERTS.c.host == bindparam("of"), ALERTS.c.host.is_(None)))


def _open_episode_of(connection: Connection, labels: Mapping[str, str]) -> int | None:
    """The open episode of a subject, kept open until this is committed: what is tied to a closed one would be lost."""
    kind, name = subject(labels)
    about = and_(EPISODES.c.subject == kind, EPISODES.c.worker == name)
    its = and_(EPISODES.c.host == labels["host"], about, EPISODES.c.closed_at.is_(None))
    return connection.scalar(select(EPISODES.c.episode_id).where(its).with_for_update(read=True))


def _open_episode(connection: Connection, labels: Mapping[str, str], *, alerted_at: float, now: float) -> int | None:
    """The episode that is opened, or that another host has opened at this moment."""
    kind, name = subject(labels)
    opened: int | None = connection.scalar(
        upsert(connection, EPISODES)
        .values(
            remedy=labels["remedy"],
            trip=labels["trip"],
            host=labels["host"],
            subject=kind,
            worker=name,
            **_accused(labels),
            alerted_at=alerted_at,
            opened_at=now,
            would_act=False,
        )
        .on_conflict_do_nothing()
        .returning(EPISODES.c.episode_id)
    )
    return opened if opened is not None else _open_episode_of(connection, labels)


def _accused(labels: Mapping[str, str]) -> dict[str, str | int | None]:
    """Which incarnation and attempt an alert speaks of; the names are those of the columns."""
    return {
        "incarnation": labels.get("incarnation") or None,
        "job_id": _number(labels.get("job_id")),
        "attempt": _number(labels.get("attempt")),
    }


def _hand_back(connection: Connection, episode: Row[Any]) -> int:
    """Give the firing alerts that accuse another attempt back to the inbox; how many.

    An episode about a host or a run closes only where none fires: one that does came since.
    """
    newest = ALERTS.c.alert_id.in_(_newest(episode.episode_id))
    others = [
        alert.alert_id
        for alert in connection.execute(select(ALERTS).where(newest, ALERTS.c.firing))
        if episode.subject in (Subject.HOST, Subject.RUN)
        or any(getattr(episode, name) != value for name, value in _accused(alert.labels).items())
    ]
    if others:
        connection.execute(update(ALERTS).where(ALERTS.c.alert_id.in_(others)).values(state="new", episode_id=None))
    return len(others)


def _newest(episode_id: int | BindParameter[int]) -> Select[tuple[int]]:
    """The newest alert of each series that is tied to an episode."""
    newest = select(func.max(ALERTS.c.alert_id)).where(ALERTS.c.episode_id == episode_id)
    return newest.group_by(ALERTS.c.fingerprint)


def _storable(text: str) -> str:
    """What errors and answers say may hold half a surrogate pair, or a NUL, which no database takes."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


def _promise(
    connection: Connection, episode: Episode, kind: Kind, key: str, data: Mapping[str, Any], now: float
) -> bool:
    promised = (
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
        .returning(INTENTS.c.intent_id)  # not its row count, which PostgreSQL's driver does not tell of such an INSERT
    )
    return connection.scalar(promised) is not None


_INTENTS: Final = select(INTENTS).where(INTENTS.c.episode_id == bindparam("of"), INTENTS.c.stage != Stage.WITHDRAWN)
_NEWEST_ALERTS: Final = select(ALERTS.c.labels, ALERTS.c.firing, ALERTS.c.fingerprint).where(
    ALERTS.c.alert_id.in_(_newest(bindparam("of")))
)


def _episode(connection: Connection, row: Row[Any]) -> Episode:
    intents = {
        Kind(found.kind): Intent(
            intent_id=found.intent_id,
            kind=Kind(found.kind),
            key=found.key,
            stage=Stage(found.stage),
            created_at=found.created_at,
            entered_at=found.entered_at,
            data=found.data,
        )
        for found in connection.execute(_INTENTS, {"of": row.episode_id})
    }
    alerts = connection.execute(_NEWEST_ALERTS, {"of": row.episode_id}).all()
    firing = [alert for alert in alerts if alert.firing]
    return Episode(
        episode_id=row.episode_id,
        remedy=row.remedy,
        trip=Trip(row.trip),
        host=row.host,
        worker=row.worker,
        opened_at=row.opened_at,
        firing=bool(firing),
        trips=frozenset(Trip(each.labels["trip"]) for each in firing),
        incarnation=row.incarnation,
        job_id=row.job_id,
        attempt=row.attempt,
        free=intents.get(Kind.FREE),
        settle=intents.get(Kind.SETTLE),
        would_act=row.would_act,
        subject=Subject(row.subject),
        fingerprints=frozenset(each.fingerprint for each in firing),
        rules=frozenset(alert.labels.get("alertname", "") for alert in alerts) - {""},
    )


def _captured_for(episode: Episode) -> list[ColumnElement[bool]]:
    if episode.free is not None:
        return [CAPTURES.c.intent_id == episode.free.intent_id]
    return [CAPTURES.c.episode_id == episode.episode_id, CAPTURES.c.intent_id.is_(None)]


def _entry(line: Row[Any]) -> Entry:
    return Entry(**{name: getattr(line, name) for name in Entry.__dataclass_fields__})


def _story(row: Row[Any], entries: tuple[Entry, ...] = ()) -> Story:
    return Story(
        episode_id=row.episode_id,
        remedy=row.remedy,
        trip=row.trip,
        host=row.host,
        worker=row.worker,
        job_id=row.job_id,
        attempt=row.attempt,
        opened_at=row.opened_at,
        closed_at=row.closed_at,
        outcome=row.outcome,
        reason=row.reason,
        message=row.message,
        wait_reason=row.wait_reason,
        entries=entries,
    )
