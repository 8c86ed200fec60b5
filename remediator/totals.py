"""What one host's share of the ledger comes to, for the metrics page: counted by the database, in one transaction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, and_, case, func, or_, select

from remediator.safety import Orders
from remediator.schema import ALERTS, EPISODES, EXECUTORS, INTENTS, JOURNAL

TOOK_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
"""The upper bounds of the histogram of how long episodes took, seconds."""


@dataclass(frozen=True, kw_only=True)
class Took:
    """How long episodes took: how many within each bound of `TOOK_S`, how many in all, and the sum, seconds."""

    within: tuple[int, ...]
    count: int
    sum_s: float


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts for the metrics page. `executor` is (armed, beat_at, errors), `None` before one ever ran.

    `took` is by outcome, from the arrival of an episode's first alert to its close. `oldest_new_at` is when the oldest
    alert arrived that no executor has taken yet, Unix seconds. `duplicates` are alerts that came while the episode of
    their subject was open already.
    """

    alerts: Mapping[tuple[str, str], int]
    duplicates: int
    oldest_new_at: float | None
    episodes_open: int
    held: Mapping[str, int]
    outcomes: Mapping[tuple[str, str], int]
    took: Mapping[str, Took]
    intents: Mapping[tuple[str, str], int]
    steps: Mapping[tuple[str, str], int]
    executor: tuple[bool, float, int] | None
    orders: Orders


def count_up(connection: Connection, host: str, *, held: Mapping[str, int], orders: Orders) -> Totals:
    """Count all the rest of them.

    An alert that was refused counts for the host that received it.
    """
    state = func.coalesce(ALERTS.c.reason, "")
    outcome = case((ALERTS.c.state == "refused", "refused"), else_="accepted")
    here = or_(ALERTS.c.host == host, ALERTS.c.host.is_(None))  # the second: from before hosts were noted
    alerts = connection.execute(select(outcome, state, func.count()).where(here).group_by(outcome, state))
    waits = select(func.min(ALERTS.c.received_at)).where(ALERTS.c.state == "new", ALERTS.c.host == host)

    its = EPISODES.c.host == host
    ended = select(EPISODES.c.outcome, EPISODES.c.trip, func.count()).where(EPISODES.c.closed_at.is_not(None))
    outcomes = connection.execute(ended.where(its).group_by(EPISODES.c.outcome, EPISODES.c.trip))
    opened = connection.scalar(select(func.count()).select_from(EPISODES).where(its)) or 0
    is_open = select(func.count()).select_from(EPISODES).where(its, EPISODES.c.closed_at.is_(None))

    acts = and_(JOURNAL.c.act.in_(("did", "failed", "would")), func.coalesce(JOURNAL.c.host, EPISODES.c.host) == host)
    told = and_(JOURNAL.c.act == "saw", JOURNAL.c.step == "alert firing", its)
    lines = select(JOURNAL.c.act, JOURNAL.c.step, func.count()).join(EPISODES).where(or_(acts, told))
    steps = {(row[0], row[1]): row[2] for row in connection.execute(lines.group_by(JOURNAL.c.act, JOURNAL.c.step))}
    # Each firing alert that was tied to an episode has its line, and each episode was opened by one of them.
    tied = steps.pop(("saw", "alert firing"), 0)

    owed = select(INTENTS.c.kind, INTENTS.c.stage, func.count()).where(INTENTS.c.host == host)
    intents = connection.execute(owed.group_by(INTENTS.c.kind, INTENTS.c.stage))
    executor = connection.execute(select(EXECUTORS).where(EXECUTORS.c.host == host)).one_or_none()
    return Totals(
        alerts={(row[0], row[1]): row[2] for row in alerts},
        duplicates=max(0, tied - opened),
        oldest_new_at=connection.scalar(waits),
        episodes_open=connection.scalar(is_open) or 0,
        held=held,
        outcomes={(row[0], row[1]): row[2] for row in outcomes},
        took=_took(connection, its),
        intents={(row[0], row[1]): row[2] for row in intents},
        steps=steps,
        executor=None if executor is None else (executor.armed, executor.beat_at, executor.errors),
        orders=orders,
    )


def _took(connection: Connection, its: Any) -> dict[str, Took]:
    # Joined, for SQLite would look a scalar up anew for each of the sums.
    tied = select(func.min(ALERTS.c.alert_id)).where(ALERTS.c.episode_id == EPISODES.c.episode_id)
    is_first = ALERTS.c.alert_id == tied.correlate(EPISODES).scalar_subquery()
    span_s = EPISODES.c.closed_at - func.coalesce(ALERTS.c.received_at, EPISODES.c.opened_at)
    took_s = case((span_s < 0, 0.0), else_=span_s)  # it was closed by a clock that was set back meanwhile
    within = [func.sum(case((took_s <= bound, 1), else_=0)) for bound in TOOK_S]
    counted = select(EPISODES.c.outcome, func.count(), func.sum(took_s), *within).outerjoin(ALERTS, is_first)
    closed = counted.where(its, EPISODES.c.closed_at.is_not(None)).group_by(EPISODES.c.outcome)
    return {
        row[0]: Took(count=row[1], sum_s=row[2], within=tuple(int(each) for each in row[3:]))
        for row in connection.execute(closed)
    }
