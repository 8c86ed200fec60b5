"""Counts of one host's part of the ledger for the metrics page, at a cost independent of its history.

Each transaction that ends something adds to `counts` as its last statement. Open episodes and intents are counted on
request.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, func, or_, select

from gpuwarden.db.transactions import upsert
from remediator.ledger.chain import ExecutorHeartbeat, last_passed, open_drills
from remediator.ledger.schema import ALERTS, COUNTERS, EPISODES, EXECUTORS, INTENTS, JOURNAL
from remediator.plan import OVER, Kind, Outcome, Stage, Subject
from remediator.reasons import Reason
from remediator.remedies.guards import Orders

DURATION_BOUNDS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
"""Upper bounds of the histogram of episode durations, seconds."""

LONGER: Final = "longer"
"""The bucket of longer episodes."""

COUNTED_ACTS: Final = frozenset({"did", "failed", "would"})
"""Journal entry types that are counted."""


@dataclass(frozen=True, kw_only=True)
class DurationHistogram:
    """Histogram of episode durations: counts within each bound of `DURATION_BOUNDS_S`, total count and sum, seconds."""

    within: tuple[int, ...]
    count: int
    sum_s: float


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts for the metrics page.

    Args:
        duplicates: alerts that came while the episode of their target was open.
        oldest_new_at: arrival of the oldest alert that no executor has taken.
        given_up: target of each restart that was given up, and since when.
        took: durations by outcome.
        owed_since: creation of the oldest open intent by kind and stage.
        executor: the last heartbeat of this host's executor, if any.
        drills: number and host of each drill that waits for its alert, of every host.
        drill_passed_at: when this host's executor last took the alert of a drill.
    """

    alerts: Mapping[tuple[str, str], int]
    duplicates: int
    oldest_new_at: float | None
    episodes_open: int
    held: Mapping[str, int]
    given_up: Sequence[tuple[Subject, str, float]]
    outcomes: Mapping[tuple[str, str], int]
    took: Mapping[str, DurationHistogram]
    intents: Mapping[tuple[str, str], int]
    owed_since: Mapping[tuple[str, str], float]
    quarantines_refused: int
    steps: Mapping[tuple[str, str], int]
    executor: ExecutorHeartbeat | None
    drills: Sequence[tuple[int, str]]
    drill_passed_at: float | None
    orders: Orders
    now: float = field(compare=False)  # ledger time of the count


class CounterDelta:
    """Counter changes of one transaction."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def add_taken(self, host: str, count: int) -> None:
        """Count taken alerts; negative if they were returned."""
        self._add(host, "alerts", "accepted", "", count)

    def add_refused(self, host: str, reason: str) -> None:
        """Count a refused alert."""
        self._add(host, "alerts", "refused", reason)

    def add_duplicate(self, host: str) -> None:
        """Count an alert of an open episode."""
        self._add(host, "duplicates", "", "")

    def add_closed(self, host: str, outcome: Outcome, *, condition: str, took_s: float) -> None:
        """Count a closed episode."""
        took_s = max(0.0, took_s)
        self._add(host, "episodes", outcome, condition)
        bound = next((f"{each}" for each in DURATION_BOUNDS_S if took_s <= each), LONGER)
        self._add(host, "took", outcome, bound, sum_s=took_s)

    def add_closed_intents(self, host: str, kind: Kind, stage: Stage, count: int = 1) -> None:
        """Count closed intents."""
        self._add(host, "intents", kind, stage, count)

    def add_step(self, host: str, act: str, step: str) -> None:
        """Count a journal entry."""
        if act in COUNTED_ACTS:
            self._add(host, "steps", act, step)

    def save(self, connection: Connection) -> None:
        """Add the changes to the stored counters.

        Must be the last statement of its transaction. Rows are locked in one order, so that no two deadlock.
        """
        if not self._found:
            return
        adds = upsert(connection, COUNTERS)
        known = {name: COUNTERS.c[name] + adds.excluded[name] for name in ("value", "sum_s")}
        connection.execute(
            adds.on_conflict_do_update(index_elements=list(COUNTERS.primary_key), set_=known),
            [
                {"host": host, "name": what, "label_1": one, "label_2": two, "value": count, "sum_s": sum_s}
                for (host, what, one, two), (count, sum_s) in sorted(self._found.items())
            ],
        )

    def _add(self, host: str, what: str, one: str, two: str, count: int = 1, *, sum_s: float = 0.0) -> None:
        before = self._found[host, what, one, two]
        self._found[host, what, one, two] = (before[0] + count, before[1] + sum_s)


def count_totals(connection: Connection, host: str, *, orders: Orders, now: float) -> Totals:
    """Read the counters and count open episodes and intents."""
    over = _read_counters(connection, host)
    its = or_(ALERTS.c.host == host, ALERTS.c.host.is_(None))  # alerts without a host wait for every host
    # Alerts without a host are counted by the host that takes them.
    new = select(func.count(ALERTS.c.host), func.min(ALERTS.c.received_at)).where(ALERTS.c.state == "new", its)
    waiting, oldest_new_at = connection.execute(new).one()
    alerts = {pair: count for pair, (count, _) in over["alerts"].items()}
    if waiting:
        alerts["accepted", ""] = alerts.get(("accepted", ""), 0) + waiting

    is_open = select(func.count()).select_from(EPISODES).where(EPISODES.c.host == host, EPISODES.c.closed_at.is_(None))
    is_owed = INTENTS.c.kind.in_(Kind), INTENTS.c.stage.in_(set(Stage) - OVER), INTENTS.c.host == host
    # By creation, so that an intent that changes stages without end ages too.
    owed = select(INTENTS.c.kind, INTENTS.c.stage, func.count(), func.min(INTENTS.c.created_at)).where(*is_owed)
    owing = connection.execute(owed.group_by(INTENTS.c.kind, INTENTS.c.stage)).all()
    intents = {pair: count for pair, (count, _) in over["intents"].items()}
    intents |= {(kind, stage): count for kind, stage, count, _ in owing}
    beat = connection.execute(select(EXECUTORS).where(EXECUTORS.c.host == host)).mappings().one_or_none()
    return Totals(
        alerts=alerts,
        duplicates=over["duplicates"].get(("", ""), (0, 0.0))[0],
        oldest_new_at=oldest_new_at,
        episodes_open=connection.scalar(is_open) or 0,
        held=_count_held(connection, host),
        given_up=_given_up(connection, host),
        outcomes={pair: count for pair, (count, _) in over["episodes"].items()},
        took=_duration_histograms(over["took"]),
        intents=intents,
        owed_since={(kind, stage): since for kind, stage, _, since in owing},
        quarantines_refused=_quarantines_refused(connection, host, orders),
        steps={pair: count for pair, (count, _) in over["steps"].items()},
        executor=None if beat is None else ExecutorHeartbeat(**beat),
        drills=open_drills(connection, now),
        drill_passed_at=last_passed(connection, host),
        orders=orders,
        now=now,
    )


def _count_held(connection: Connection, host: str) -> dict[str, int]:

    its = EPISODES.c.host == host, EPISODES.c.closed_at.is_(None), EPISODES.c.wait_reason.is_not(None)
    found = select(EPISODES.c.wait_reason, func.count()).where(*its).group_by(EPISODES.c.wait_reason)
    return {row.wait_reason: row[1] for row in connection.execute(found)}


def _given_up(connection: Connection, host: str) -> list[tuple[Subject, str, float]]:

    its = EPISODES.c.host == host, EPISODES.c.closed_at.is_(None), EPISODES.c.wait_reason == Reason.GIVEN_UP
    found = connection.execute(select(EPISODES.c.subject, EPISODES.c.worker, EPISODES.c.wait_since).where(*its))
    return [(Subject(row.subject), row.worker, row.wait_since) for row in found]


def _quarantines_refused(connection: Connection, host: str, orders: Orders) -> int:
    """Count the open episodes whose last quarantine entry is a refusal by the queue.

    Not counted: a restart that has changed its stage since, and disarmed remedies, which retry nothing.
    """
    its = JOURNAL.c.episode_id == EPISODES.c.episode_id, JOURNAL.c.step == "quarantine"
    newest = select(func.max(JOURNAL.c.entry_id)).where(*its).correlate(EPISODES).scalar_subquery()
    free = INTENTS.c.episode_id == EPISODES.c.episode_id, INTENTS.c.kind == Kind.FREE
    since = select(INTENTS.c.intent_id).where(*free, INTENTS.c.entered_at > JOURNAL.c.at).correlate(EPISODES, JOURNAL)
    refused = (
        select(EPISODES.c.remedy)
        .select_from(EPISODES)
        .join(JOURNAL, JOURNAL.c.entry_id == newest)
        .where(EPISODES.c.host == host, EPISODES.c.closed_at.is_(None), JOURNAL.c.act == "failed", ~since.exists())
    )
    return sum(orders.armed(host=host, remedy=remedy) for remedy in connection.scalars(refused))


_Counted = Mapping[tuple[str, str], tuple[int, float]]


def _read_counters(connection: Connection, host: str) -> Mapping[str, _Counted]:

    # An empty host has the alerts refused before the host was recorded.
    counted = select(COUNTERS).where(COUNTERS.c.host.in_((host, "")))
    found: dict[str, dict[tuple[str, str], tuple[int, float]]] = defaultdict(dict)
    for row in connection.execute(counted):
        count, sum_s = found[row.name].get((row.label_1, row.label_2), (0, 0.0))
        found[row.name][row.label_1, row.label_2] = (count + row.value, sum_s + row.sum_s)
    return found


def _duration_histograms(counted: _Counted) -> dict[str, DurationHistogram]:
    took = {}
    for outcome in {each for each, _ in counted}:
        its = {float(bound) if bound != LONGER else float("inf"): of for (each, bound), of in counted.items()
               if each == outcome}  # fmt: skip
        took[outcome] = DurationHistogram(
            within=tuple(sum(count for at, (count, _) in its.items() if at <= bound) for bound in DURATION_BOUNDS_S),
            count=sum(count for count, _ in its.values()),
            sum_s=sum(sum_s for _, sum_s in its.values()),
        )
    return took
