"""What was seen, decided and done, and what is still owed. Write ahead, then act.

An accepted alert is here before Alertmanager hears 202. An intent is here before anything is done for it, at most one
per container incarnation and one per job attempt, and stays until it is done or abandoned with a reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, Row, Select, String, and_, cast, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from gpuwarden.database import Changes, open_database, reading, writing
from gpuwarden.job import Trip
from remediator.alert import Alert, Refusal
from remediator.plan import Begin, Episode, Intent, Kind, Outcome, Stage
from remediator.schema import ALERTS, EPISODES, EXECUTORS, INTENTS, JOURNAL, METADATA

TAKE_MAX: Final = 500
"""Alerts taken from the inbox in one go."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of an episode's account."""

    at: float
    act: str
    step: str
    because: str


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
    because: str | None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts for the metrics page. `executor` is (armed, beat_at, errors), `None` before one ever ran."""

    alerts: Mapping[tuple[str, str], int]
    episodes_open: int
    outcomes: Mapping[tuple[str, str], int]
    steps: Mapping[tuple[str, str], int]
    executor: tuple[bool, float, int] | None


class Ledger:
    """The ledger in one database. Safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the ledger at an SQLAlchemy URL.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, METADATA))

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def changes(self) -> Changes:
        """A cheap watch on the ledger, for one thread."""
        return Changes(self._engine)

    # --- the inbox

    def accept(self, alerts: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        """Make a payload durable: all of it, or DatabaseError and none."""
        rows = [_row(alert, now) | {"state": "new", "reason": None, "because": None} for alert in alerts]
        rows += [
            {
                "received_at": now,
                "fingerprint": refusal.fingerprint,
                "firing": False,
                "labels": dict(refusal.labels),
                "annotations": {},
                "starts_at": "",
                "state": "refused",
                "reason": refusal.reason,
                "because": refusal.because,
            }
            for refusal in refusals
        ]
        with writing(self._engine) as connection:
            if rows:
                connection.execute(insert(ALERTS), rows)

    def take_new(self, *, now: float) -> int:
        """Tie each new alert to its worker's open episode, or open one; how many were taken.

        A resolved alert opens nothing. In one transaction, so that an alert is tied once.
        """
        with writing(self._engine) as connection:
            new = select(ALERTS).where(ALERTS.c.state == "new").order_by(ALERTS.c.alert_id).limit(TAKE_MAX)
            rows = connection.execute(new).all()
            for row in rows:
                episode_id = _open_episode_of(connection, row.labels) or (
                    _open_episode(connection, row.labels, now) if row.firing else None
                )
                state = "idle" if episode_id is None else "linked"
                connection.execute(
                    update(ALERTS)
                    .where(ALERTS.c.alert_id == row.alert_id)
                    .values(
                        state=state, episode_id=episode_id, because=None if episode_id else "nothing was open for it"
                    )
                )
                if episode_id is not None:
                    status = "firing" if row.firing else "resolved"
                    because = row.annotations.get("summary") or row.labels.get("alertname", "")
                    _write(connection, episode_id, "saw", f"alert {status}", because, now)
            return len(rows)

    # --- episodes

    def open_episodes(self) -> list[Episode]:
        """Every episode that is not closed, oldest first."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).where(EPISODES.c.closed_at.is_(None))).all()
            return [_episode(connection, row) for row in rows]

    def episode(self, episode_id: int) -> Episode | None:
        """One open episode; `None` once it is closed."""
        with reading(self._engine) as connection:
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
            row = connection.execute(found).one_or_none()
            return None if row is None else _episode(connection, row)

    def begin(self, episode: Episode, step: Begin, *, now: float) -> bool:
        """Write the two intents; false, and nothing written, when that incarnation was freed or is being freed.

        A settle that another episode already owes stays with it: the free stands on its own.
        """
        with writing(self._engine) as connection:
            data = {
                "kind": step.container_kind,
                "handle": step.container_handle,
                "name": step.container_name,
                "gpus": list(step.gpus),
            }
            if not _promise(connection, episode, Kind.FREE, step.free_key, data, now):
                return False
            if step.settle_key is not None:
                holder = {"incarnation": step.worker_incarnation}
                _promise(connection, episode, Kind.SETTLE, step.settle_key, holder, now)
            _write(connection, episode.episode_id, "decided", "begin", step.because, now)
            return True

    def advance(
        self,
        intent: Intent,
        stage: Stage,
        *,
        episode_id: int,
        act: str,
        step: str,
        because: str,
        now: float,
        data: Mapping[str, Any] | None = None,
    ) -> bool:
        """Move an intent from the stage it was read at; false when somebody else moved it first.

        One that is abandoned while it was only planned gives its key back: nothing was done under it, and the same
        target may come to need it after all.
        """
        unused = stage is Stage.ABANDONED and intent.stage is Stage.PLANNED
        move = (
            update(INTENTS)
            .where(INTENTS.c.intent_id == intent.intent_id, INTENTS.c.stage == intent.stage)
            .values(
                stage=stage,
                key=f"{intent.key} (unused {intent.intent_id})" if unused else intent.key,
                entered_at=INTENTS.c.entered_at if stage is intent.stage else now,
                data={**intent.data, **(data or {})},
            )
        )
        with writing(self._engine) as connection:
            if connection.execute(move).rowcount != 1:
                return False
            _write(connection, episode_id, act, step, because, now)
            return True

    def withdraw(self, episode_id: int, because: str, *, now: float) -> None:
        """Take back an episode's intents that are only planned: the keys are free, and the episode has neither."""
        planned = and_(INTENTS.c.episode_id == episode_id, INTENTS.c.stage == Stage.PLANNED)
        unused = INTENTS.c.key + " (withdrawn " + cast(INTENTS.c.intent_id, String) + ")"
        with writing(self._engine) as connection:
            taken = connection.execute(
                update(INTENTS).where(planned).values(stage=Stage.WITHDRAWN, key=unused, entered_at=now)
            )
            if taken.rowcount:
                _write(connection, episode_id, "decided", "withdraw", because, now)

    def record(self, episode_id: int, act: str, step: str, because: str, *, now: float) -> None:
        """Add a line to an episode's account."""
        with writing(self._engine) as connection:
            _write(connection, episode_id, act, step, because, now)

    def would_act(self, episode_id: int, because: str, *, now: float) -> None:
        """A dry run's record: the only thing that a dry run does."""
        with writing(self._engine) as connection:
            connection.execute(update(EPISODES).where(EPISODES.c.episode_id == episode_id).values(would_act=True))
            _write(connection, episode_id, "would", "act", because, now)

    def close_episode(self, episode_id: int, outcome: Outcome, because: str, *, now: float) -> None:
        """The episode is over. Firing alerts that accuse another attempt than its own go back to the inbox.

        They came while it was open, and Alertmanager does not send them again within hours.
        """
        with writing(self._engine) as connection:
            closed = (
                update(EPISODES)
                .where(EPISODES.c.episode_id == episode_id, EPISODES.c.closed_at.is_(None))
                .values(closed_at=now, outcome=outcome, because=because)
            )
            if connection.execute(closed).rowcount == 1:
                _write(connection, episode_id, "decided", f"close: {outcome}", because, now)
                _hand_back(connection, episode_id)

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
            entries = tuple(
                Entry(at=line.at, act=line.act, step=line.step, because=line.because)
                for line in connection.execute(lines)
            )
            return _story(row, entries)

    def refused(self, *, last: int = 50) -> list[tuple[float, str, str, Mapping[str, str]]]:
        """The newest alerts that were refused: when, the reason's word, the reason, the labels."""
        with reading(self._engine) as connection:
            rows = connection.execute(
                select(ALERTS).where(ALERTS.c.state == "refused").order_by(ALERTS.c.alert_id.desc()).limit(last)
            )
            return [(row.received_at, row.reason, row.because, row.labels) for row in rows]

    def totals(self, host: str) -> Totals:
        """Counts over the whole ledger; they only grow, but for the open episodes."""
        with reading(self._engine) as connection:
            state = func.coalesce(ALERTS.c.reason, "")
            refused = ALERTS.c.state == "refused"
            outcome = func.iif(refused, "refused", "accepted")
            alerts = connection.execute(select(outcome, state, func.count()).group_by(outcome, state))
            ended = select(EPISODES.c.outcome, EPISODES.c.trip, func.count()).where(EPISODES.c.closed_at.is_not(None))
            outcomes = connection.execute(ended.group_by(EPISODES.c.outcome, EPISODES.c.trip))
            acts = and_(JOURNAL.c.act.in_(("did", "failed", "would")))
            steps = select(JOURNAL.c.act, JOURNAL.c.step, func.count()).where(acts)
            is_open = select(func.count()).select_from(EPISODES).where(EPISODES.c.closed_at.is_(None))
            executor = connection.execute(select(EXECUTORS).where(EXECUTORS.c.host == host)).one_or_none()
            return Totals(
                alerts={(row[0], row[1]): row[2] for row in alerts},
                outcomes={(row[0], row[1]): row[2] for row in outcomes},
                steps={
                    (row[0], row[1]): row[2]
                    for row in connection.execute(steps.group_by(JOURNAL.c.act, JOURNAL.c.step))
                },
                episodes_open=connection.scalar(is_open) or 0,
                executor=None if executor is None else (executor.armed, executor.beat_at, executor.errors),
            )

    def beat(self, *, host: str, pid: int, armed: bool, started_at: float, errors: int, now: float) -> None:
        """The executor lives."""
        row = {"pid": pid, "armed": armed, "started_at": started_at, "beat_at": now, "errors": errors}
        with writing(self._engine) as connection:
            connection.execute(
                upsert(EXECUTORS)
                .values(host=host, **row)
                .on_conflict_do_update(index_elements=[EXECUTORS.c.host], set_=row)
            )


def _row(alert: Alert, now: float) -> dict[str, Any]:
    return {
        "received_at": now,
        "fingerprint": alert.fingerprint,
        "firing": alert.firing,
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "starts_at": alert.starts_at,
    }


def _open_episode_of(connection: Connection, labels: Mapping[str, str]) -> int | None:
    return connection.scalar(
        select(EPISODES.c.episode_id).where(
            EPISODES.c.host == labels["host"], EPISODES.c.worker == labels["worker"], EPISODES.c.closed_at.is_(None)
        )
    )


def _open_episode(connection: Connection, labels: Mapping[str, str], now: float) -> int | None:
    opened: int | None = connection.scalar(
        insert(EPISODES)
        .values(
            remedy=labels["remedy"],
            trip=labels["trip"],
            host=labels["host"],
            worker=labels["worker"],
            **_accused(labels),
            opened_at=now,
            would_act=False,
        )
        .returning(EPISODES.c.episode_id)
    )
    return opened


def _accused(labels: Mapping[str, str]) -> dict[str, str | int | None]:
    """Which incarnation and attempt an alert speaks of; the names are those of the columns."""
    return {
        "incarnation": labels.get("incarnation") or None,
        "job_id": _number(labels.get("job_id")),
        "attempt": _number(labels.get("attempt")),
    }


def _hand_back(connection: Connection, episode_id: int) -> None:
    episode = connection.execute(select(EPISODES).where(EPISODES.c.episode_id == episode_id)).one()
    for alert in connection.execute(select(ALERTS).where(ALERTS.c.alert_id.in_(_newest(episode_id)), ALERTS.c.firing)):
        if any(getattr(episode, name) != value for name, value in _accused(alert.labels).items()):
            connection.execute(
                update(ALERTS).where(ALERTS.c.alert_id == alert.alert_id).values(state="new", episode_id=None)
            )


def _newest(episode_id: int) -> Select[tuple[int]]:
    """The newest alert of each series that is tied to an episode."""
    newest = select(func.max(ALERTS.c.alert_id)).where(ALERTS.c.episode_id == episode_id)
    return newest.group_by(ALERTS.c.fingerprint)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


def _promise(
    connection: Connection, episode: Episode, kind: Kind, key: str, data: Mapping[str, Any], now: float
) -> bool:
    promised = (
        upsert(INTENTS)
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
    )
    return connection.execute(promised).rowcount == 1


def _write(connection: Connection, episode_id: int, act: str, step: str, because: str, now: float) -> None:
    connection.execute(
        insert(JOURNAL).values(at=now, episode_id=episode_id, act=act, step=step, because=because[:2000])
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
        for found in connection.execute(
            select(INTENTS).where(INTENTS.c.episode_id == row.episode_id, INTENTS.c.stage != Stage.WITHDRAWN)
        )
    }
    newest = ALERTS.c.alert_id.in_(_newest(row.episode_id))
    firing = connection.scalar(select(func.count()).where(newest, ALERTS.c.firing))
    return Episode(
        episode_id=row.episode_id,
        remedy=row.remedy,
        trip=Trip(row.trip),
        host=row.host,
        worker=row.worker,
        opened_at=row.opened_at,
        firing=bool(firing),
        incarnation=row.incarnation,
        job_id=row.job_id,
        attempt=row.attempt,
        free=intents.get(Kind.FREE),
        settle=intents.get(Kind.SETTLE),
        would_act=row.would_act,
    )


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
        because=row.because,
        entries=entries,
    )
