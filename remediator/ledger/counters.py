"""What one host's share of the ledger comes to, for the metrics page, at a cost that does not grow with its history.

What is over never changes, so it is counted as it ends: each transaction that ends something adds to `counts` last of
all, and nothing is ever taken away there when old rows are. What is open is counted as it is asked for.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, func, or_, select

from gpuwarden.db.transactions import upsert
from remediator.ledger.schema import ALERTS, COUNTS, EPISODES, EXECUTORS, INTENTS, JOURNAL
from remediator.plan import OVER, Kind, Outcome, Stage
from remediator.remedies.guards import Orders

TOOK_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
"""The upper bounds of the histogram of how long episodes took, seconds."""

LONGER: Final = "longer"
"""Where an episode is counted that took longer than all of them."""

COUNTED_ACTS: Final = frozenset({"did", "failed", "would"})
"""The acts of the journal whose steps are counted."""


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
    their subject was open already. `owed_since` is when the oldest intent of each kind and stage was promised, of those
    of which anything is owed, Unix seconds. `quarantines_refused` are open episodes that were to put GPUs out of use,
    and the queue has refused that since it last took it; less those whose remedy is disarmed.
    """

    alerts: Mapping[tuple[str, str], int]
    duplicates: int
    oldest_new_at: float | None
    episodes_open: int
    held: Mapping[str, int]
    outcomes: Mapping[tuple[str, str], int]
    took: Mapping[str, Took]
    intents: Mapping[tuple[str, str], int]
    owed_since: Mapping[tuple[str, str], float]
    quarantines_refused: int
    steps: Mapping[tuple[str, str], int]
    executor: tuple[bool, float, int] | None
    orders: Orders
    now: float = field(compare=False)  # when it was counted, by the clock that the ledger goes by


class Tally:
    """What one transaction has ended."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def taken(self, host: str, count: int) -> None:
        """So many new alerts were taken; less than none: given back."""
        self._add(host, "alerts", "accepted", "", count)

    def refused(self, host: str, reason: str) -> None:
        """An alert was refused."""
        self._add(host, "alerts", "refused", reason)

    def duplicate(self, host: str) -> None:
        """An alert came while the episode of its subject was open already."""
        self._add(host, "duplicates", "", "")

    def closed(self, host: str, outcome: Outcome, *, trip: str, took_s: float) -> None:
        """An episode was closed; one that a clock was set back under took no time."""
        took_s = max(0.0, took_s)
        self._add(host, "episodes", outcome, trip)
        bound = next((f"{each}" for each in TOOK_S if took_s <= each), LONGER)
        self._add(host, "took", outcome, bound, sum_s=took_s)

    def over(self, host: str, kind: Kind, stage: Stage, count: int = 1) -> None:
        """Of so many intents nothing is owed any more."""
        self._add(host, "intents", kind, stage, count)

    def step(self, host: str, act: str, step: str) -> None:
        """A line of the journal; most acts are not counted."""
        if act in COUNTED_ACTS:
            self._add(host, "steps", act, step)

    def keep(self, connection: Connection) -> None:
        """Add it to what was counted before.

        The last statement of its transaction, its rows in one order for everyone: on PostgreSQL each stays locked until
        the commit, and so nobody who has one waits for anything but the next.
        """
        if not self._found:
            return
        adds = upsert(connection, COUNTS)
        known = {name: COUNTS.c[name] + adds.excluded[name] for name in ("times", "sum_s")}
        connection.execute(
            adds.on_conflict_do_update(index_elements=list(COUNTS.primary_key), set_=known),
            [
                {"host": host, "what": what, "one": one, "two": two, "times": count, "sum_s": sum_s}
                for (host, what, one, two), (count, sum_s) in sorted(self._found.items())
            ],
        )

    def _add(self, host: str, what: str, one: str, two: str, count: int = 1, *, sum_s: float = 0.0) -> None:
        before = self._found[host, what, one, two]
        self._found[host, what, one, two] = (before[0] + count, before[1] + sum_s)


def count_up(connection: Connection, host: str, *, orders: Orders, now: float) -> Totals:
    """Count what is open, and read what is over."""
    over = _over(connection, host)
    its = or_(ALERTS.c.host == host, ALERTS.c.host.is_(None))  # what anybody may take up waits for this host too
    # It counts those that have a host: of the others only whoever takes them.
    new = select(func.count(ALERTS.c.host), func.min(ALERTS.c.received_at)).where(ALERTS.c.state == "new", its)
    waiting, oldest_new_at = connection.execute(new).one()
    alerts = {pair: count for pair, (count, _) in over["alerts"].items()}
    if waiting:
        alerts["accepted", ""] = alerts.get(("accepted", ""), 0) + waiting

    is_open = select(func.count()).select_from(EPISODES).where(EPISODES.c.host == host, EPISODES.c.closed_at.is_(None))
    is_owed = INTENTS.c.kind.in_(Kind), INTENTS.c.stage.in_(set(Stage) - OVER), INTENTS.c.host == host
    # By when they were promised: one that goes from stage to stage and comes to no end grows old, too.
    owed = select(INTENTS.c.kind, INTENTS.c.stage, func.count(), func.min(INTENTS.c.created_at)).where(*is_owed)
    owing = connection.execute(owed.group_by(INTENTS.c.kind, INTENTS.c.stage)).all()
    intents = {pair: count for pair, (count, _) in over["intents"].items()}
    intents |= {(kind, stage): count for kind, stage, count, _ in owing}
    executor = connection.execute(select(EXECUTORS).where(EXECUTORS.c.host == host)).one_or_none()
    return Totals(
        alerts=alerts,
        duplicates=over["duplicates"].get(("", ""), (0, 0.0))[0],
        oldest_new_at=oldest_new_at,
        episodes_open=connection.scalar(is_open) or 0,
        held=_held(connection, host),
        outcomes={pair: count for pair, (count, _) in over["episodes"].items()},
        took=_took(over["took"]),
        intents=intents,
        owed_since={(kind, stage): since for kind, stage, _, since in owing},
        quarantines_refused=_quarantines_refused(connection, host, orders),
        steps={pair: count for pair, (count, _) in over["steps"].items()},
        executor=None if executor is None else (executor.armed, executor.beat_at, executor.errors),
        orders=orders,
        now=now,
    )


def _held(connection: Connection, host: str) -> dict[str, int]:
    """Open episodes that wait, by what they wait for."""
    its = EPISODES.c.host == host, EPISODES.c.closed_at.is_(None), EPISODES.c.wait_reason.is_not(None)
    found = select(EPISODES.c.wait_reason, func.count()).where(*its).group_by(EPISODES.c.wait_reason)
    return {row.wait_reason: row[1] for row in connection.execute(found)}


def _quarantines_refused(connection: Connection, host: str, orders: Orders) -> int:
    """Open episodes whose last word about a quarantine is that the queue refused it: each refusal is told once a stage.

    One whose free has come to another stage since is not meant by that: what was wanted then may be wanted no more, as
    where the process died after all, or the GPU came back. Nor is one whose remedy is disarmed: nobody asks the queue
    for it then, and whoever disarmed it knows. Armed again it is asked for again. A pause holds up nothing that
    was begun.
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


def _over(connection: Connection, host: str) -> Mapping[str, _Counted]:
    """What is over, by what it is and the two words that tell it from its like."""
    # Under no name stand the alerts that were refused before it was noted who had received them.
    counted = select(COUNTS).where(COUNTS.c.host.in_((host, "")))
    found: dict[str, dict[tuple[str, str], tuple[int, float]]] = defaultdict(dict)
    for row in connection.execute(counted):
        count, sum_s = found[row.what].get((row.one, row.two), (0, 0.0))
        found[row.what][row.one, row.two] = (count + row.times, sum_s + row.sum_s)
    return found


def _took(counted: _Counted) -> dict[str, Took]:
    took = {}
    for outcome in {each for each, _ in counted}:
        its = {float(bound) if bound != LONGER else float("inf"): of for (each, bound), of in counted.items()
               if each == outcome}  # fmt: skip
        took[outcome] = Took(
            within=tuple(sum(count for at, (count, _) in its.items() if at <= bound) for bound in TOOK_S),
            count=sum(count for count, _ in its.values()),
            sum_s=sum(sum_s for _, sum_s in its.values()),
        )
    return took
