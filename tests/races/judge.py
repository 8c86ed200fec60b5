"""What must hold, judged from a record of its own: who really ran what, and what each commit and act changed.

The judge looks at the queue's rows after every commit, knows which program made it, and keeps from that and from the
world's truth who holds each attempt. It never asks the code under test. Rules are named by the design's invariants.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuwarden.job import ATTEMPTS_MAX, FINAL, RECLAIMS_MAX, State
from remediator.plan import OVER, Kind, Limits, Stage, Step
from tests.races.clocks import DATABASE
from tests.races.databases import Databases
from tests.races.world import SILENT, Exporter, Process, Slot, World

ONCE: Final = "1: one free an incarnation, one settle an attempt"
LOST: Final = "2: nothing accepted is lost"
ALONE: Final = "3: no attempt runs while another may"
CAPS: Final = "4: no cap is exceeded"
HEALTHY: Final = "4: a healthy target is never touched"
UNLOCKED: Final = "5: resolved is not recovery"
DRY: Final = "7: a dry run does nothing"
IDENTITY: Final = "what is over is refused, what is current is not"
TERMINAL: Final = "terminal is terminal"
OUTBOX: Final = "one failed event a failed job"
AHEAD: Final = "write ahead, then act"
OWN: Final = "an intent is moved by its own host alone"


class BrokenError(AssertionError):
    """A rule does not hold."""

    def __init__(self, rule: str, because: str) -> None:
        super().__init__(f"{rule}: {because}")
        self.rule = rule


@dataclass(eq=False, kw_only=True)
class Acting:
    """One host's remediator as the judge knows it: what it may do, and what it is at."""

    host: str
    armed: bool = True
    step: Step | None = None
    episode_id: int | None = None
    tends: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job as the queue has it."""

    job_id: int
    state: State
    attempt: int
    attempts_max: int
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    lease_expires_at: float | None


@dataclass(frozen=True, kw_only=True)
class _Promised:
    stage: str
    host: str


@dataclass(frozen=True, kw_only=True)
class _Look:
    process: Process | None
    wedged: bool


@dataclass(kw_only=True)
class _Holding:
    process: Process
    attempt: int
    fenced_s: float | None = None


@dataclass(kw_only=True)
class Judge:
    """Told of everything, it collects what is broken."""

    world: World
    databases: Databases
    limits: Limits
    broken: list[BrokenError] = field(default_factory=list)
    holding: dict[int, _Holding] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    newest: dict[Slot, Process] = field(default_factory=dict)
    condemned: set[Process] = field(default_factory=set)
    """What an executor fenced or tried to stop: it may be refused."""

    settled: set[tuple[int, int]] = field(default_factory=set)
    intents: dict[int, _Promised] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    stops: defaultdict[str, set[int | None]] = field(default_factory=lambda: defaultdict(set))
    wedged_at: dict[str, _Look] = field(default_factory=dict)
    looked_at: dict[str, str] = field(default_factory=dict)
    ended: dict[str, Process] = field(default_factory=dict)
    """By container incarnation: the process that an executor's stop ended."""

    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often each thing happened, so that a run can show that it got anywhere."""

    def must(self, holds: object, rule: str, because: str) -> None:
        if not holds:
            self.broken.append(BrokenError(rule, because))

    # --- what the remediator looks at and does on the host

    def told(self, worker: str, host: str) -> None:
        """The exporter has just been asked about a worker."""
        slot = self.world.slot(host, worker)
        fresh = self.world.exporters[host] is Exporter.FRESH
        wedged = fresh and slot.process is not None and self.world.is_wedged(slot.process)
        self.wedged_at[slot.handle] = _Look(process=slot.process, wedged=wedged)

    def looked(self, slot: Slot) -> None:
        """The engine has just been asked about a container."""
        self.looked_at[slot.handle] = slot.incarnation

    def stops_now(self, slot: Slot, by: Acting) -> None:
        """An executor's stop is about to reach a container."""
        self.counts["stop"] += 1
        seen, look, process = self.looked_at.get(slot.handle), self.wedged_at.get(slot.handle), slot.process
        self.must(by.armed, DRY, f"a stop of {slot}")
        self.must(by.host == slot.host, HEALTHY, f"{by.host} stops {slot}")
        promised = self._free_stages(seen)
        self.must(Stage.STOPPING in promised, AHEAD, f"{slot} is stopped and the ledger has its free at {promised}")
        if not slot.running or process is None or seen != slot.incarnation:
            return  # it ended since it was looked at: nobody could have known
        again = bool(self.stops[slot.incarnation])
        self.stops[slot.incarnation].add(by.episode_id)
        episodes = self.stops[slot.incarnation]
        self.must(len(episodes) == 1, ONCE, f"{slot.incarnation} is stopped by episodes {episodes}")
        confirmed = look is not None and look.process is process and look.wedged
        over = again and process in self.condemned and not self.holds(process)
        self.must(confirmed or over, HEALTHY, f"a stop of {process}")
        self.condemned.add(process)

    def stopped(self, slot: Slot) -> None:
        """A stop has returned."""
        if slot.process is not None and not slot.process.lives:
            self.ended[slot.incarnation] = slot.process

    def starts_now(self, slot: Slot, by: Acting) -> None:
        """An executor's start is about to reach a container."""
        self.counts["start"] += 1
        # In dry run it gives back what it took: what it stopped, and what its fence may have made to end by itself.
        ours = slot.incarnation in self.ended or slot.process in self.condemned
        self.must(by.armed or ours, DRY, f"a start of {slot}, which nobody here stopped or fenced")
        promised = self._free_stages(f"{slot.handle}@%")
        self.must(Stage.STARTING in promised or slot.running, AHEAD, f"{slot} is started; its free is {promised}")
        process = self.ended.get(slot.incarnation)
        if slot.running or process is None or process.job is None:
            return
        job_id, attempt = process.job
        row = self.rows[job_id]
        unsettled = row.attempt == attempt and row.state in (State.FENCING, State.RUNNING, State.HOST_LOST)
        self.must(not unsettled, ONCE, f"{slot} is started in one breath: job {job_id} is {row.state}")

    def _free_stages(self, incarnation: str | None) -> list[str]:
        found = self.databases.see_ledger.execute(
            f"SELECT stage FROM intents WHERE kind = 'free' AND key LIKE '{incarnation}'"  # noqa: S608 - our own handle
        )
        return [stage for (stage,) in found.fetchall()]

    def holds(self, process: Process) -> bool:
        """Whether a process holds a running job."""
        return any(
            each.process is process and self.rows[job_id].state is State.RUNNING
            for job_id, each in self.holding.items()
        )

    # --- what a worker hears

    def is_newest(self, process: Process) -> bool:
        """Whether no newer incarnation of its worker has registered."""
        return self.newest.get(process.slot) is process

    def heard(self, process: Process, call: str, *, newest: bool, accepted: bool) -> None:
        """What a worker's own incarnation was told; `newest` is whether it was before it asked."""
        if accepted:
            self.must(newest, IDENTITY, f"{call} of {process} was accepted, and {self.newest[process.slot]} is newer")
        else:
            self.counts["refused"] += 1
            known = not self.is_newest(process) or process in self.condemned
            self.must(known, IDENTITY, f"{call} of {process} was refused and it is the newest, and nobody ended it")

    def answered(self, process: Process, call: str, *, held: bool, accepted: bool) -> None:
        """What a worker was told of the attempt that it believes to hold; `held` is whether it did before it asked."""
        self.must(accepted == held, IDENTITY, f"{call} of {process}: accepted {accepted}, and it held it: {held}")

    # --- what the queue's commits changed

    def committed(self, actor: Any) -> None:
        """Compare the queue with what it was before this commit."""
        see = self.databases.see_queue
        found = see.execute(
            "SELECT job_id, state, attempt, attempts_max, watchdog_retries, reclaims, claimed_by, lease_expires_at "
            "FROM jobs ORDER BY job_id"
        ).fetchall()
        names = ("job_id", "state", "attempt", "attempts_max", "watchdog_retries", "reclaims", "claimed_by",
                 "lease_expires_at")  # fmt: skip
        rows = {}
        for figures in found:
            row = Row(**{**dict(zip(names, figures, strict=True)), "state": State(figures[1])})
            rows[row.job_id] = row
        workers = see.execute("SELECT host, worker, incarnation FROM workers").fetchall()
        self._workers(workers, rows, actor)
        gpus = {gpu for (gpu,) in see.execute("SELECT gpu FROM quarantined_gpus").fetchall()}
        before, self.rows = self.rows, rows
        for job_id, row in rows.items():
            if job_id in before and before[job_id] != row:
                self._changed(before[job_id], row, actor)
        self._gpus(gpus, actor)
        events: dict[int, list[str]] = {}
        for job_id, kind in see.execute("SELECT job_id, kind FROM dispatch_events").fetchall():
            if not kind.startswith("run_"):
                events.setdefault(job_id, []).append(kind)
        for job_id, row in rows.items():
            wanted = [row.state] if row.state in FINAL else []
            self.must(events.get(job_id, []) == wanted, OUTBOX, f"job {job_id} is {row.state}: {events.get(job_id)}")

    def _workers(self, found: Iterable[tuple[str, str, str]], rows: Mapping[int, Row], actor: Any) -> None:
        for host, worker, incarnation in found:
            slot = self.world.slot(host, worker)
            known = self.newest.get(slot)
            if known is not None and known.incarnation == incarnation:
                continue
            ours = isinstance(actor, Process) and actor.slot is slot and actor.incarnation == incarnation
            self.must(ours, IDENTITY, f"{slot}'s row becomes {incarnation}'s by {actor}")
            if isinstance(actor, Process):
                newer = known is None or actor.number > known.number
                self.must(newer, IDENTITY, f"{slot}'s row goes from {known} back to {actor}")
                self.newest[slot] = actor
                older = [
                    row
                    for row in rows.values()
                    if row.state is State.RUNNING
                    and row.claimed_by != incarnation
                    and self.holding[row.job_id].process.slot is slot
                ]
                self.must(not older, LOST, f"{actor} has registered, and the one before it still holds {older}")

    def _gpus(self, gpus: set[str], actor: Any) -> None:
        for gpu in gpus - self.quarantined:
            self.counts["quarantine"] += 1
            if isinstance(actor, Acting):
                self.must(actor.armed, DRY, f"{gpu} is put in quarantine")
                there = [each for slot in self.world.slots if gpu in slot.gpus for each in slot.processes]
                stuck = [each for each in there if each in self.condemned or each in each.slot.strays]
                self.must(stuck, HEALTHY, f"{gpu} in quarantine, and nothing stuck")
        for gpu in self.quarantined - gpus:
            self.must(actor == "person", UNLOCKED, f"{gpu} is released by {actor}")
        self.quarantined = gpus

    def _changed(self, before: Row, row: Row, actor: Any) -> None:
        what = f"job {row.job_id}: {before} to {row} by {actor}"
        self.must(before.state not in FINAL, TERMINAL, what)
        self.must(row.attempt <= min(row.attempts_max, ATTEMPTS_MAX), CAPS, what)
        self.must(row.watchdog_retries <= self.limits.retries_max, CAPS, what)
        self.must(row.reclaims <= RECLAIMS_MAX, CAPS, what)
        self.must(row.attempt - before.attempt in (0, 1), IDENTITY, what)
        condition = isinstance(actor, Acting) and not actor.tends
        if condition and before.state is row.state is State.FENCING:
            return  # its fence was lengthened
        if condition:
            # Disarmed in the middle it takes nothing more; what is dead by then is given back.
            self.must(actor.armed or self._given_back(before, row), DRY, what)
        match before.state, row.state:
            case State.QUEUED, State.RUNNING:
                self._claimed(row, actor, what)
            case (State.RUNNING, State.RUNNING) | (State.RUNNING, State.COMPLETED):
                self._by_its_holder(before, row, actor, what)
            case State.RUNNING, State.FAILED if isinstance(actor, Process) and before.claimed_by == actor.incarnation:
                self._by_its_holder(before, row, actor, what)
            case State.RUNNING, State.FENCING:
                self._fenced(row, actor, what)
            case State.FENCING, (State.QUEUED | State.FAILED) if condition:
                self._settled(before, row, actor, what)
            case ((State.RUNNING | State.FENCING), (State.QUEUED | State.FAILED)):
                self._given_away(before, row, actor, what)
            case _, State.CANCELLED:
                pass
            case _:
                self.must(False, TERMINAL, what)

    def _given_back(self, before: Row, row: Row) -> bool:
        gone = not self.holding[row.job_id].process.lives or not self.is_newest(self.holding[row.job_id].process)
        return before.state is State.FENCING and gone

    def _claimed(self, row: Row, actor: Any, what: str) -> None:
        self.counts["claim"] += 1
        ours = isinstance(actor, Process) and actor.incarnation == row.claimed_by
        self.must(ours, IDENTITY, what)
        if isinstance(actor, Process):
            self.must(actor.lives and self.newest.get(actor.slot) is actor, IDENTITY, what)
            self.must(actor not in self.condemned or not self._was_fenced(actor), IDENTITY, what)
            self.must(not self.quarantined.intersection(actor.slot.gpus), UNLOCKED, what)
            self.holding[row.job_id] = _Holding(process=actor, attempt=row.attempt)

    def _was_fenced(self, process: Process) -> bool:
        return any(each.process is process and each.fenced_s is not None for each in self.holding.values())

    def _by_its_holder(self, before: Row, row: Row, actor: Any, what: str) -> None:
        self.counts[row.state] += row.state is not State.RUNNING
        held = self.holding[row.job_id]
        self.must(held.process is actor and held.attempt == before.attempt, IDENTITY, what)
        self.must(row.watchdog_retries == before.watchdog_retries, CAPS, what)

    def _fenced(self, row: Row, actor: Any, what: str) -> None:
        self.counts["fence"] += 1
        held = self.holding[row.job_id]
        process = held.process
        held.fenced_s = self.world.clocks.steady_s
        look = self.wedged_at.get(process.slot.handle)
        confirmed = look is not None and look.process is process and look.wedged
        over = not process.slot.running or process.slot.incarnation != process.container
        self.must(isinstance(actor, Acting) and actor.host == process.slot.host, HEALTHY, what)
        self.must(confirmed or over, HEALTHY, f"a fence of {process}: {what}")
        self.condemned.add(process)

    def _settled(self, before: Row, row: Row, actor: Acting, what: str) -> None:
        """A trip's settle: after its death, or after the bound, and once."""
        self.counts[f"condition {row.state}"] += 1
        held = self.holding[row.job_id]
        key = (row.job_id, before.attempt)
        self.must(key not in self.settled, ONCE, what)
        self.settled.add(key)
        self.must(row.attempt == before.attempt == held.attempt, IDENTITY, what)
        raised = row.watchdog_retries - before.watchdog_retries
        self.must(raised == int(row.state is State.QUEUED), CAPS, what)
        waited_s = self.world.clocks.steady_s - (held.fenced_s or self.world.clocks.steady_s)
        process = held.process
        dead = not process.lives or not self.is_newest(process)
        said = "" if actor.step is None else actor.step.message
        self.must(dead or waited_s >= self.limits.settle_timeout_s, ALONE, f"{process} lives: {what}")
        self.must(dead or "not seen dead" in said, ALONE, f"{process} lives, and the ledger says {said}")
        if row.state is State.FAILED:
            spent = (before.watchdog_retries >= self.limits.retries_max, before.attempt >= before.attempts_max)
            self.must(any(spent), CAPS, f"failed too early: {what}")

    def _given_away(self, before: Row, row: Row, actor: Any, what: str) -> None:
        """By its own worker, by the worker's next incarnation, or by a sweep once its lease or fence has run out."""
        self.counts["given away"] += 1
        held = self.holding[row.job_id]
        self.must(row.attempt == before.attempt and row.watchdog_retries == before.watchdog_retries, CAPS, what)
        if isinstance(actor, Process):
            its_own = actor is held.process and before.state is State.RUNNING
            newer = actor.slot is held.process.slot and actor.number > held.process.number
            self.must(its_own or (newer and before.state is State.RUNNING), ALONE, what)
            return
        now = self.world.clocks.wall(DATABASE)
        ran_out = before.lease_expires_at is not None and before.lease_expires_at < now
        self.must(ran_out and (actor == "sweep" or isinstance(actor, Acting)), ALONE, f"at {now}: {what}")

    # --- what the ledger's commits changed, and what it says

    def promised(self, actor: Any) -> None:
        """Compare the ledger's intents with what they were before this commit."""
        found = self.databases.see_ledger.execute("SELECT intent_id, stage, host FROM intents").fetchall()
        before, self.intents = self.intents, {each[0]: _Promised(stage=each[1], host=each[2]) for each in found}
        for intent_id, now in self.intents.items():
            was = before.get(intent_id)
            if was is None or was == now or not isinstance(actor, Acting):
                continue
            what = f"intent {intent_id}: {was} to {now} by {actor.host}"
            self.must(was.stage not in OVER, TERMINAL, what)
            self.must(was.host == actor.host, OWN, what)

    def ledger(self) -> None:
        """Between two steps: what is promised is unique, and nothing that was promised is dropped."""
        see = self.databases.see_ledger
        intents = see.execute(
            "SELECT i.kind, i.key, i.stage, e.closed_at, e.episode_id FROM intents i JOIN episodes e USING (episode_id)"
        ).fetchall()
        owed: set[str] = set()
        for kind, key, stage, closed_at, episode_id in intents:
            if kind == Kind.SETTLE and Stage(stage) not in OVER:
                owed.add(key)
            dropped = closed_at is not None and Stage(stage) not in OVER
            self.must(not dropped, LOST, f"episode {episode_id} is closed and its {kind} is {stage}")
        for row in self.rows.values():
            stuck = row.state is State.FENCING and f"{row.job_id}/{row.attempt}" not in owed
            self.must(not stuck, LOST, f"job {row.job_id} is fenced, and nobody owes its settle")


def left_open(judge: Judge) -> list[str]:
    """What is not at its end, where everything has answered for long enough."""
    see = judge.databases.see_ledger
    found: list[str] = []
    for what in ("episode", "alert"):
        where = "closed_at IS NULL" if what == "episode" else "state = 'new'"
        rows = see.execute(f"SELECT {what}_id FROM {what}s WHERE {where}").fetchall()  # noqa: S608 - our own names
        found += [f"{what} {number} is open" for (number,) in rows]
    intents = see.execute("SELECT intent_id, kind, key, stage FROM intents").fetchall()
    found += [f"intent {each[0]} ({each[1]} {each[2]}) is {each[3]}" for each in intents if each[3] not in OVER]
    untold = see.execute(
        "SELECT intent_id FROM intents WHERE NOT EXISTS (SELECT 1 FROM journal WHERE journal.message <> '' "
        "AND journal.episode_id = intents.episode_id AND journal.act NOT IN ('saw', 'ordered'))"
    ).fetchall()
    found += [f"intent {number} has no account" for (number,) in untold]
    for row in judge.rows.values():
        held = judge.holding.get(row.job_id)
        runs = held is not None and held.process.lives and held.process.does not in SILENT
        rests = row.state in FINAL or row.state in (State.QUEUED, State.BLOCKED)
        if not rests and not (row.state is State.RUNNING and runs):
            found.append(f"{row} is held by {held}")
    return found


def totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What happened in several runs together."""
    summed: defaultdict[str, int] = defaultdict(int)
    for each in counts:
        for name, count in each.items():
            summed[name] += count
    return dict(summed)
