"""Checks the invariants of the design against a separate record of processes, commits and actions.

The judge reads the rows of the queue after every commit and knows the program that made it. From these and from the
simulated world it derives which process holds each attempt. It never uses the code under test.
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

ONCE: Final = "1: one restart per incarnation, one settle per attempt"
LOST: Final = "2: nothing accepted is lost"
ALONE: Final = "3: two attempts of a job never run at the same time"
CAPS: Final = "4: no cap is exceeded"
HEALTHY: Final = "4: a healthy target is never touched"
UNLOCKED: Final = "5: resolved is not recovery"
DRY: Final = "7: a dry run does nothing"
IDENTITY: Final = "only the current incarnation is accepted"
TERMINAL: Final = "terminal is terminal"
OUTBOX: Final = "one failed event for each failed job"
AHEAD: Final = "write ahead, then act"
OWN: Final = "only the host of an intent moves it"


class BrokenError(AssertionError):
    """A rule does not hold."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule


@dataclass(eq=False, kw_only=True)
class RemediatorState:
    """The remediator of one host: whether it is armed, and its current step."""

    host: str
    armed: bool = True
    step: Step | None = None
    episode_id: int | None = None
    is_sweeping: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the queue."""

    job_id: int
    state: State
    attempt: int
    attempts_max: int
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    lease_expires_at: float | None


@dataclass(frozen=True, kw_only=True)
class _IntentState:
    stage: str
    host: str


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    process: Process | None
    stalled: bool


@dataclass(kw_only=True)
class _Claim:
    process: Process
    attempt: int
    fenced_s: float | None = None


@dataclass(kw_only=True)
class Judge:
    """Observes every event and collects the broken rules."""

    world: World
    databases: Databases
    limits: Limits
    broken: list[BrokenError] = field(default_factory=list)
    holding: dict[int, _Claim] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    newest: dict[Slot, Process] = field(default_factory=dict)
    condemned: set[Process] = field(default_factory=set)
    """Processes that an executor fenced or tried to stop: the queue may refuse them."""

    settled: set[tuple[int, int]] = field(default_factory=set)
    intents: dict[int, _IntentState] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    stops: defaultdict[str, set[int | None]] = field(default_factory=lambda: defaultdict(set))
    evidence: dict[str, _Evidence] = field(default_factory=dict)
    inspected: dict[str, str] = field(default_factory=dict)
    ended: dict[str, Process] = field(default_factory=dict)
    """The process that an executor stopped, by container incarnation."""

    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often each event happened: a test checks that its histories cover the events."""

    def must(self, holds: object, rule: str, reason: str) -> None:
        if not holds:
            self.broken.append(BrokenError(rule, reason))

    # --- what the remediator reads and does on the host

    def record_evidence(self, worker: str, host: str) -> None:
        """Record the evidence that the exporter gives about a worker."""
        slot = self.world.slot(host, worker)
        fresh = self.world.exporters[host] is Exporter.FRESH
        stalled = fresh and slot.process is not None and self.world.is_stalled(slot.process)
        self.evidence[slot.handle] = _Evidence(process=slot.process, stalled=stalled)

    def record_inspection(self, slot: Slot) -> None:
        """Record the incarnation that the engine reports."""
        self.inspected[slot.handle] = slot.incarnation

    def check_stop(self, slot: Slot, by: RemediatorState) -> None:
        """Check a stop before it reaches a container."""
        self.counts["stop"] += 1
        seen, look, process = self.inspected.get(slot.handle), self.evidence.get(slot.handle), slot.process
        self.must(by.armed, DRY, f"a stop of {slot}")
        self.must(by.host == slot.host, HEALTHY, f"{by.host} stops {slot}")
        stages = self._restart_stages(seen)
        self.must(Stage.STOPPING in stages, AHEAD, f"{slot} is stopped, and its restart intent is {stages}")
        if not slot.running or process is None or seen != slot.incarnation:
            return  # the container ended after the check, which the executor cannot know
        again = bool(self.stops[slot.incarnation])
        self.stops[slot.incarnation].add(by.episode_id)
        episodes = self.stops[slot.incarnation]
        self.must(len(episodes) == 1, ONCE, f"{slot.incarnation} is stopped by episodes {episodes}")
        confirmed = look is not None and look.process is process and look.stalled
        over = again and process in self.condemned and not self.holds(process)
        self.must(confirmed or over, HEALTHY, f"a stop of {process}")
        self.condemned.add(process)

    def record_stop(self, slot: Slot) -> None:
        """Record the process that a stop ended."""
        if slot.process is not None and not slot.process.lives:
            self.ended[slot.incarnation] = slot.process

    def check_start(self, slot: Slot, by: RemediatorState) -> None:
        """Check a start before it reaches a container."""
        self.counts["start"] += 1
        # In a dry run the executor restores containers that it stopped, or whose worker exited after its fence.
        is_own = slot.incarnation in self.ended or slot.process in self.condemned
        self.must(by.armed or is_own, DRY, f"a start of {slot}, which the executor has not stopped or fenced")
        stages = self._restart_stages(f"{slot.handle}@%")
        self.must(
            Stage.STARTING in stages or slot.running, AHEAD, f"{slot} is started, and its restart intent is {stages}"
        )
        process = self.ended.get(slot.incarnation)
        if slot.running or process is None or process.job is None:
            return
        job_id, attempt = process.job
        row = self.rows[job_id]
        unsettled = row.attempt == attempt and row.state in (State.FENCING, State.RUNNING, State.HOST_LOST)
        self.must(not unsettled, ONCE, f"{slot} is started before the settle: job {job_id} is {row.state}")

    def _restart_stages(self, incarnation: str | None) -> list[str]:
        found = self.databases.see_ledger.execute(
            f"SELECT stage FROM intents WHERE kind = 'free' AND key LIKE '{incarnation}'"  # noqa: S608 - a handle of the world
        )
        return [stage for (stage,) in found.fetchall()]

    def holds(self, process: Process) -> bool:
        """Whether a process holds a running job."""
        return any(
            each.process is process and self.rows[job_id].state is State.RUNNING
            for job_id, each in self.holding.items()
        )

    # --- answers of the queue to a worker

    def is_newest(self, process: Process) -> bool:
        """Whether no newer incarnation of its worker has registered."""
        return self.newest.get(process.slot) is process

    def check_incarnation_answer(self, process: Process, call: str, *, newest: bool, accepted: bool) -> None:
        """Check the answer about an incarnation; `newest`: whether it was the newest before the call."""
        if accepted:
            self.must(newest, IDENTITY, f"{call} of {process} was accepted, and {self.newest[process.slot]} is newer")
        else:
            self.counts["refused"] += 1
            known = not self.is_newest(process) or process in self.condemned
            self.must(
                known, IDENTITY, f"{call} of {process} was refused, although it is the newest and was not stopped"
            )

    def check_attempt_answer(self, process: Process, call: str, *, held: bool, accepted: bool) -> None:
        """Check the answer about an attempt; `held`: whether the worker held it before the call."""
        self.must(accepted == held, IDENTITY, f"{call} of {process}: accepted {accepted}, and it held it: {held}")

    # --- commits to the queue

    def check_queue_commit(self, actor: Any) -> None:
        """Compare the queue with its state before this commit."""
        see = self.databases.see_queue
        found = see.execute(
            "SELECT job_id, state, attempt, attempts_max, watchdog_retries, reclaims, claimed_by, lease_expires_at "
            "FROM jobs ORDER BY job_id"
        ).fetchall()
        names = ("job_id", "state", "attempt", "attempts_max", "watchdog_retries", "reclaims", "claimed_by",
                 "lease_expires_at")  # fmt: skip
        rows = {}
        for values in found:
            row = Row(**{**dict(zip(names, values, strict=True)), "state": State(values[1])})
            rows[row.job_id] = row
        workers = see.execute("SELECT host, worker, incarnation FROM workers").fetchall()
        self._check_workers(workers, rows, actor)
        gpus = {gpu for (gpu,) in see.execute("SELECT gpu FROM quarantined_gpus").fetchall()}
        before, self.rows = self.rows, rows
        for job_id, row in rows.items():
            if job_id in before and before[job_id] != row:
                self._check_change(before[job_id], row, actor)
        self._check_quarantine(gpus, actor)
        events: dict[int, list[str]] = {}
        for job_id, kind in see.execute("SELECT job_id, kind FROM outbox_events").fetchall():
            if not kind.startswith("run_"):
                events.setdefault(job_id, []).append(kind)
        for job_id, row in rows.items():
            wanted = [row.state] if row.state in FINAL else []
            self.must(events.get(job_id, []) == wanted, OUTBOX, f"job {job_id} is {row.state}: {events.get(job_id)}")

    def _check_workers(self, found: Iterable[tuple[str, str, str]], rows: Mapping[int, Row], actor: Any) -> None:
        for host, worker, incarnation in found:
            slot = self.world.slot(host, worker)
            known = self.newest.get(slot)
            if known is not None and known.incarnation == incarnation:
                continue
            is_own = isinstance(actor, Process) and actor.slot is slot and actor.incarnation == incarnation
            self.must(is_own, IDENTITY, f"{slot}'s row becomes {incarnation}'s by {actor}")
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
                self.must(not older, LOST, f"{actor} has registered, and its predecessor still holds {older}")

    def _check_quarantine(self, gpus: set[str], actor: Any) -> None:
        for gpu in gpus - self.quarantined:
            self.counts["quarantine"] += 1
            if isinstance(actor, RemediatorState):
                self.must(actor.armed, DRY, f"{gpu} is put in quarantine")
                on_gpu = [each for slot in self.world.slots if gpu in slot.gpus for each in slot.processes]
                stuck = [each for each in on_gpu if each in self.condemned or each in each.slot.strays]
                self.must(stuck, HEALTHY, f"{gpu} is in quarantine without a stuck process")
        for gpu in self.quarantined - gpus:
            self.must(actor == "operator", UNLOCKED, f"{gpu} is released by {actor}")
        self.quarantined = gpus

    def _check_change(self, before: Row, row: Row, actor: Any) -> None:
        what = f"job {row.job_id}: {before} to {row} by {actor}"
        self.must(before.state not in FINAL, TERMINAL, what)
        self.must(row.attempt <= min(row.attempts_max, ATTEMPTS_MAX), CAPS, what)
        self.must(row.watchdog_retries <= self.limits.retries_max, CAPS, what)
        self.must(row.reclaims < RECLAIMS_MAX, CAPS, what)
        self.must(row.attempt - before.attempt in (0, 1), IDENTITY, what)
        condition = isinstance(actor, RemediatorState) and not actor.is_sweeping
        if condition and before.state is row.state is State.FENCING:
            return  # the lease of its fence was renewed
        if condition:
            # Disarmed during an episode it fences no more jobs. It still requeues jobs of dead processes.
            self.must(actor.armed or self._is_orphaned(before, row), DRY, what)
        match before.state, row.state:
            case State.QUEUED, State.RUNNING:
                self._check_claim(row, actor, what)
            case (State.RUNNING, State.RUNNING) | (State.RUNNING, State.COMPLETED):
                self._check_holder(before, row, actor, what)
            case State.RUNNING, State.FAILED if isinstance(actor, Process) and before.claimed_by == actor.incarnation:
                self._check_holder(before, row, actor, what)
            case State.RUNNING, State.FENCING:
                self._check_fence(row, actor, what)
            case State.FENCING, (State.QUEUED | State.FAILED) if condition:
                self._check_settle(before, row, actor, what)
            case ((State.RUNNING | State.FENCING), (State.QUEUED | State.FAILED)):
                self._check_requeue(before, row, actor, what)
            case _, State.CANCELLED:
                pass
            case _:
                self.must(False, TERMINAL, what)

    def _is_orphaned(self, before: Row, row: Row) -> bool:
        gone = not self.holding[row.job_id].process.lives or not self.is_newest(self.holding[row.job_id].process)
        return before.state is State.FENCING and gone

    def _check_claim(self, row: Row, actor: Any, what: str) -> None:
        self.counts["claim"] += 1
        is_own = isinstance(actor, Process) and actor.incarnation == row.claimed_by
        self.must(is_own, IDENTITY, what)
        if isinstance(actor, Process):
            self.must(actor.lives and self.newest.get(actor.slot) is actor, IDENTITY, what)
            self.must(actor not in self.condemned or not self._was_fenced(actor), IDENTITY, what)
            self.must(not self.quarantined.intersection(actor.slot.gpus), UNLOCKED, what)
            self.holding[row.job_id] = _Claim(process=actor, attempt=row.attempt)

    def _was_fenced(self, process: Process) -> bool:
        return any(each.process is process and each.fenced_s is not None for each in self.holding.values())

    def _check_holder(self, before: Row, row: Row, actor: Any, what: str) -> None:
        self.counts[row.state] += row.state is not State.RUNNING
        held = self.holding[row.job_id]
        self.must(held.process is actor and held.attempt == before.attempt, IDENTITY, what)
        self.must(row.watchdog_retries == before.watchdog_retries, CAPS, what)

    def _check_fence(self, row: Row, actor: Any, what: str) -> None:
        self.counts["fence"] += 1
        held = self.holding[row.job_id]
        process = held.process
        held.fenced_s = self.world.clocks.steady_s
        look = self.evidence.get(process.slot.handle)
        confirmed = look is not None and look.process is process and look.stalled
        over = not process.slot.running or process.slot.incarnation != process.container
        self.must(isinstance(actor, RemediatorState) and actor.host == process.slot.host, HEALTHY, what)
        self.must(confirmed or over, HEALTHY, f"a fence of {process}: {what}")
        self.condemned.add(process)

    def _check_settle(self, before: Row, row: Row, actor: RemediatorState, what: str) -> None:
        """Check a settle: once, and after the process is dead or the timeout is over."""
        self.counts[f"settle {row.state}"] += 1
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
        message = "" if actor.step is None else actor.step.message
        self.must(dead or waited_s >= self.limits.settle_timeout_s, ALONE, f"{process} lives: {what}")
        self.must(dead or "not seen dead" in message, ALONE, f"{process} lives, and the ledger says {message}")
        if row.state is State.FAILED:
            exhausted = (before.watchdog_retries >= self.limits.retries_max, before.attempt >= before.attempts_max)
            self.must(any(exhausted), CAPS, f"failed too early: {what}")

    def _check_requeue(self, before: Row, row: Row, actor: Any, what: str) -> None:
        """Check a requeue by the worker, by its next incarnation, or by a sweep after the lease or fence expired."""
        self.counts["reclaim"] += 1
        held = self.holding[row.job_id]
        self.must(row.attempt == before.attempt and row.watchdog_retries == before.watchdog_retries, CAPS, what)
        if isinstance(actor, Process):
            is_holder = actor is held.process and before.state is State.RUNNING
            newer = actor.slot is held.process.slot and actor.number > held.process.number
            self.must(is_holder or (newer and before.state is State.RUNNING), ALONE, what)
            return
        now = self.world.clocks.wall(DATABASE)
        ran_out = before.lease_expires_at is not None and before.lease_expires_at < now
        self.must(ran_out and (actor == "sweep" or isinstance(actor, RemediatorState)), ALONE, f"at {now}: {what}")

    # --- commits to the ledger

    def check_ledger_commit(self, actor: Any) -> None:
        """Compare the intents with their state before this commit."""
        found = self.databases.see_ledger.execute("SELECT intent_id, stage, host FROM intents").fetchall()
        before, self.intents = self.intents, {each[0]: _IntentState(stage=each[1], host=each[2]) for each in found}
        for intent_id, now in self.intents.items():
            was = before.get(intent_id)
            if was is None or was == now or not isinstance(actor, RemediatorState):
                continue
            what = f"intent {intent_id}: {was} to {now} by {actor.host}"
            self.must(was.stage not in OVER, TERMINAL, what)
            self.must(was.host == actor.host, OWN, what)

    def check_ledger(self) -> None:
        """Check between two steps that no intent and no fenced job is forgotten."""
        see = self.databases.see_ledger
        intents = see.execute(
            "SELECT i.kind, i.key, i.stage, e.closed_at, e.episode_id FROM intents i JOIN episodes e USING (episode_id)"
        ).fetchall()
        planned: set[str] = set()
        for kind, key, stage, closed_at, episode_id in intents:
            if kind == Kind.SETTLE and Stage(stage) not in OVER:
                planned.add(key)
            dropped = closed_at is not None and Stage(stage) not in OVER
            self.must(not dropped, LOST, f"episode {episode_id} is closed and its {kind} is {stage}")
        for row in self.rows.values():
            stuck = row.state is State.FENCING and f"{row.job_id}/{row.attempt}" not in planned
            self.must(not stuck, LOST, f"job {row.job_id} is fenced, and no intent settles it")


def list_unfinished(judge: Judge) -> list[str]:
    """List the work that is not finished although everything has answered for long enough."""
    see = judge.databases.see_ledger
    found: list[str] = []
    for what in ("episode", "alert"):
        where = "closed_at IS NULL" if what == "episode" else "state = 'new'"
        rows = see.execute(f"SELECT {what}_id FROM {what}s WHERE {where}").fetchall()  # noqa: S608 - constant names
        found += [f"{what} {number} is open" for (number,) in rows]
    intents = see.execute("SELECT intent_id, kind, key, stage FROM intents").fetchall()
    found += [f"intent {each[0]} ({each[1]} {each[2]}) is {each[3]}" for each in intents if each[3] not in OVER]
    unrecorded = see.execute(
        "SELECT intent_id FROM intents WHERE NOT EXISTS (SELECT 1 FROM journal WHERE journal.message <> '' "
        "AND journal.episode_id = intents.episode_id AND journal.act NOT IN ('saw', 'ordered'))"
    ).fetchall()
    found += [f"intent {number} has no journal entry" for (number,) in unrecorded]
    for row in judge.rows.values():
        held = judge.holding.get(row.job_id)
        runs = held is not None and held.process.lives and held.process.does not in SILENT
        rests = row.state in FINAL or row.state in (State.QUEUED, State.BLOCKED)
        if not rests and not (row.state is State.RUNNING and runs):
            found.append(f"{row} is held by {held}")
    return found


def totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum the counts of several runs."""
    summed: defaultdict[str, int] = defaultdict(int)
    for each in counts:
        for name, count in each.items():
            summed[name] += count
    return dict(summed)
