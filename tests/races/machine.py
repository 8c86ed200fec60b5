"""State machine of hosts, workers, alerts, remediators and clocks; hypothesis draws the order of the rules."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, ClassVar, Final
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpuwarden.db.clock import DatabaseClock
from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import JobClass, State
from gpuwarden.queue import JobStore, Submission, SubmissionError
from remediator.alert import Alert
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome
from remediator.reasons import Reason
from tests.races.clocks import DATABASE, Clocks
from tests.races.databases import Databases
from tests.races.judge import LOST, Judge, list_unfinished
from tests.races.points import HARMS, KINDS, Killed, Points, Trouble, watch_commits
from tests.races.remediators import LIMITS, Remediator, deliver, fake_time
from tests.races.workers import QUEUE, RESULTS, Result, Workers
from tests.races.world import DEAD_AFTER_S, SILENT, STALL_S, Does, Exporter, Slot, World
from tests.remediator import builders as build

SLOTS: Final = st.integers(0, 3)
HOSTS: Final = st.sampled_from(["box1", "box2"])
PAUSE_S: Final = 4.0
"""Between two rounds of a loop. A longer pause counts as a suspend."""

JOBS_MAX: Final = 12
END_ROUNDS_MAX: Final = 60

MEANWHILE: Final = ("others' rounds", "20 s", "40 s", "700 s", "all turn", "silent die", "silent wake", "silent stray",
                   "engines start")  # fmt: skip

_NTH: Final = {"write": 14, "read": 20, "look": 8, "about": 4, "stop": 2, "start": 2}
SOME_TROUBLE: Final = st.sampled_from(["write", "write", "write", *KINDS]).flatmap(
    lambda kind: st.builds(
        Trouble,
        kind=st.just(kind),
        nth=st.integers(1, _NTH[kind]),
        harm=st.sampled_from([*HARMS, "meanwhile", "meanwhile"]),
        meanwhile=st.sampled_from(MEANWHILE),
    )
)
TROUBLE: Final = st.none() | SOME_TROUBLE


class Races(RuleBasedStateMachine):
    """Queue, ledger and simulated hosts."""

    databases: ClassVar[Databases]
    judge_class: ClassVar[type[Judge]] = Judge
    ends: ClassVar[bool] = True
    """Whether each example runs until all work is finished."""

    seen: ClassVar[list[dict[str, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        with ExitStack() as stack:  # a failed start has no teardown: undo the patches
            self._set_up(stack)
            self._stack = stack.pop_all()

    def _set_up(self, stack: ExitStack) -> None:
        """Create the world. `stack` undoes the patches."""
        self.databases.empty()
        self.clocks = Clocks()
        self.world = World(self.clocks)
        self.points = Points(self._meanwhile)
        self.judge = self.judge_class(world=self.world, databases=self.databases, limits=LIMITS)
        self.sent: list[Alert] = []
        for module in ("remediator.executor.clock", "remediator.clients.job_queue_sql"):
            stack.enter_context(patch(f"{module}.time", fake_time(self.clocks)))
        stack.enter_context(patch.object(DatabaseClock, "now", lambda _: self.clocks.database()))
        for engine, check in (
            (self.databases.ledger, self.judge.check_ledger_commit),
            (self.databases.queue, self.judge.check_queue_commit),
        ):
            stack.callback(watch_commits(engine, self.points, check))
        self.store = JobStore(self.databases.queue)
        self.inbox = Ledger(self.databases.ledger)
        self.workers = Workers(self.world, self.store, self.judge, self.points)
        self.remediators = {
            host: Remediator(
                host, world=self.world, databases=self.databases, judge=self.judge, points=self.points,
            )
            for host in self.world.hosts
        }  # fmt: skip

    # --- rules about workers

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self._submit(None, 20)
        self._all_turn()

    @rule(run=st.sampled_from([None, "r1"]), attempts_max=st.sampled_from([1, 2, 20]))
    def submit(self, run: str | None, attempts_max: int) -> None:
        self._submit(run, attempts_max)

    @rule(at=SLOTS, trouble=TROUBLE)
    def worker_turns(self, at: int, trouble: Trouble | None) -> None:
        for process in list(self.world.slots[at].processes):
            self.workers.turn(process, trouble)

    @rule(at=SLOTS, result=st.sampled_from(RESULTS), trouble=TROUBLE)
    def worker_finishes(self, at: int, result: Result, trouble: Trouble | None) -> None:
        for process in list(self.world.slots[at].processes):
            self.workers.finish(process, result, trouble)

    @rule(at=SLOTS, how=st.sampled_from([Does.STALLED, Does.FROZEN, Does.BUSY]))
    def worker_falls_silent(self, at: int, how: Does) -> None:
        self._silence(self.world.slots[at], how)

    @rule(at=SLOTS, next_write=st.none() | st.sampled_from(RESULTS))
    def worker_wakes(self, at: int, next_write: Result | None) -> None:
        """A frozen worker continues, and its next write may be the result of its job."""
        slot = self.world.slots[at]
        self._wake(slot)
        for process in list(slot.processes):
            if next_write is None:
                self.workers.turn(process)
            else:
                self.workers.finish(process, next_write)

    @rule(at=SLOTS, result=st.sampled_from(RESULTS))
    def worker_is_frozen_until_another_has_its_job(self, at: int, result: Result) -> None:
        """The lease expires, another worker claims the job, and then the first one writes its result."""
        slot = self.world.slots[at]
        self._incident(slot, Does.FROZEN)
        self._pass(610.0, kept=True)
        self._sweep()
        self._all_turn()
        self._wake(slot)
        for process in list(slot.processes):
            self.workers.finish(process, result)

    @rule(at=SLOTS, started=st.booleans())
    def worker_is_killed(self, at: int, *, started: bool) -> None:
        """Kill a worker. The engine or an operator may start its container again at once."""
        self._kill(self.world.slots[at])
        if started:
            self.world.start(self.world.slots[at])

    @rule(at=SLOTS)
    def container_is_replaced_and_its_process_lives_on(self, at: int) -> None:
        """The new worker registers while the old process still claims jobs."""
        slot = self.world.slots[at]
        self._stray(slot)
        for process in list(slot.processes):
            self.workers.turn(process)

    @rule(at=SLOTS)
    def container_cannot_be_stopped(self, at: int) -> None:
        slot = self.world.slots[at]
        slot.unkillable = slot.process is not None and slot.process.does in SILENT

    @rule(
        at=SLOTS,
        how=st.sampled_from([Does.STALLED, Does.FROZEN]),
        kills=st.booleans(),
        stuck=st.sampled_from([False, False, True]),
    )
    def incident(self, at: int, how: Does, *, kills: bool, stuck: bool) -> None:
        """A worker claims a job and becomes silent until Alertmanager reports it."""
        slot = self.world.slots[at]
        self._incident(slot, how)
        if slot.process is not None and slot.process.does is how:
            slot.unkillable = stuck
        if kills:
            self._kill(slot)

    @rule(
        at=SLOTS,
        how=st.sampled_from([Does.STALLED, Does.FROZEN]),
        trouble=SOME_TROUBLE,
        count=st.integers(0, 3),
        after=st.sampled_from(["continue", "others continue", "disarm"]),
    )
    def incident_and_trouble(self, at: int, how: Does, trouble: Trouble, count: int, after: str) -> None:
        """An incident, and a fault of the remediator that handles it."""
        slot = self.world.slots[at]
        self._incident(slot, how)
        remediator = self.remediators[slot.host]
        remediator.round(trouble)
        if after == "disarm":
            remediator.arm(armed=False)
        for _ in range(count):
            self._pass(PAUSE_S, kept=True)
            for each in self.remediators.values():
                if (each is remediator) is (after != "others continue"):
                    each.round()

    @rule(at=SLOTS, nth=st.integers(5, 14), count=st.integers(1, 4))
    def incident_and_its_remediator_is_killed(self, at: int, nth: int, count: int) -> None:
        """The remediator is killed after one of its writes, and the other host continues alone."""
        killed = Trouble(kind="write", nth=nth, harm="killed after")
        self.incident_and_trouble(at, Does.FROZEN, killed, count, "others continue")

    @rule(at=SLOTS, nth=st.integers(5, 9))
    def incident_is_overtaken_by_its_lease(self, at: int, nth: int) -> None:
        """The remediator is killed, and returns when another attempt of the job runs."""
        remediator = self.remediators[self.world.slots[at].host]
        self._incident(self.world.slots[at], Does.FROZEN)
        remediator.round(Trouble(kind="write", nth=nth, harm="killed after"))
        self._pass(610.0, kept=True)
        self._sweep()
        self._all_turn()
        remediator.round()

    @rule(at=SLOTS, how=st.sampled_from([Does.STALLED, Does.FROZEN]), stuck=st.booleans())
    def incident_happens_again(self, at: int, how: Does, *, stuck: bool) -> None:
        """Two incidents in one container: in two incarnations, or in one that cannot be stopped."""
        slot = self.world.slots[at]
        for _ in range(2):
            self._submit(None, 20)
            self._incident(slot, how)
            slot.unkillable = stuck and slot.process is not None and slot.process.does is how
            for _ in range(6 if stuck else 1):
                self.remediators[slot.host].round()
                self._pass(PAUSE_S, kept=True)

    # --- rules about hosts and time

    @rule(by_s=st.sampled_from([3.0, PAUSE_S, 40.0, 130.0, 610.0]), kept=st.booleans())
    def time_passes(self, by_s: float, *, kept: bool) -> None:
        self._pass(by_s, kept=kept)

    @rule(host=HOSTS | st.just(DATABASE), by_s=st.sampled_from([-900.0, 900.0]))
    def clock_is_set(self, host: str, by_s: float) -> None:
        """Set a clock, then run the remediator for the delay of a sweep."""
        self._submit(None, 20)
        self._all_turn()
        self.clocks.step(host, by_s)
        for _ in range(7 if host in self.remediators else 0):
            self.remediators[host].round()
            self._pass(PAUSE_S, kept=True)

    @rule(host=HOSTS, mode=st.sampled_from([Exporter.FRESH, *Exporter]), down=st.sampled_from([False, False, True]))
    def exporter_and_engine_answer(self, host: str, mode: Exporter, *, down: bool) -> None:
        self.world.answer(host, mode)
        (self.world.engines_down.add if down else self.world.engines_down.discard)(host)

    @rule()
    def operator_releases_gpus_and_a_sweep_runs(self) -> None:
        with self.points.program("operator"):
            for each in self.store.gpu_quarantine.quarantined():
                self.store.gpu_quarantine.release_gpu(each.gpu)
        self._sweep()

    # --- rules about alerts

    @rule(trouble=TROUBLE, backwards=st.booleans(), some=st.integers(0, 3))
    def alertmanager_notifies(self, trouble: Trouble | None, *, backwards: bool, some: int) -> None:
        """Send firing and resolved alerts in one group, maybe incomplete and in any order."""
        group = [*self._firing(), *self._resolved()]
        self._notify((group[::-1] if backwards else group)[: some or None], trouble)

    @rule(which=st.integers(0, 20), firing=st.booleans())
    def an_old_alert_comes_again(self, which: int, *, firing: bool) -> None:
        if self.sent:
            self._notify([self._as(self.sent[which % len(self.sent)], firing=firing)])

    @rule(at=SLOTS, condition=st.sampled_from(["stall", "dead_worker"]), named=st.booleans())
    def an_alert_is_forged(self, at: int, condition: str, *, named: bool) -> None:
        """Forge an alert about a worker in any state; `named`: with its incarnation."""
        found = self._alert(self.world.slots[at], condition)
        labels = {name: value for name, value in found.labels.items() if named or name != "incarnation"}
        self._notify([Alert(fingerprint=found.fingerprint, firing=True, labels=labels, annotations={}, starts_at="s")])

    # --- rules about remediators

    @rule(host=HOSTS, trouble=TROUBLE, count=st.integers(1, 4))
    def remediator_does_rounds(self, host: str, trouble: Trouble | None, count: int) -> None:
        """Run some rounds, with a fault in the first."""
        self.remediators[host].round(trouble)
        for _ in range(count - 1):
            self._pass(PAUSE_S, kept=True)
            self.remediators[host].round()

    @rule(host=HOSTS, armed=st.sampled_from([True, True, False]))
    def remediator_ends_and_the_next_is_armed_or_not(self, host: str, *, armed: bool) -> None:
        self.remediators[host].arm(armed=armed)
        self.remediators[host].end()

    @rule(host=HOSTS, armed=st.booleans(), count=st.integers(0, 2))
    def remediator_is_armed_or_disarmed_as_it_runs(self, host: str, *, armed: bool, count: int) -> None:
        self.remediators[host].arm(armed=armed)
        for _ in range(count):
            self.remediators[host].round()
            self._pass(PAUSE_S, kept=True)

    @invariant()
    def nothing_is_broken(self) -> None:
        self.judge.check_ledger()
        if self.judge.broken:
            raise self.judge.broken[0]

    # --- the end

    def teardown(self) -> None:
        try:
            if self.ends and not self.judge.broken:
                self._finish_all()
            self.seen.append({**self.judge.counts, "trouble": self.points.hits})
        finally:
            self._stack.close()

    def _finish_all(self) -> None:
        """Let everything answer and time pass: then no work may be unfinished."""
        self.world.engines_down.clear()
        for host, remediator in self.remediators.items():
            self.world.answer(host, Exporter.FRESH)
            remediator.arm(armed=True)
        self._pass(STALL_S + 10.0, kept=True)
        for count in range(END_ROUNDS_MAX):
            self._all_turn()
            self._notify([*self._firing(), *self._resolved()])
            for remediator in self.remediators.values():
                remediator.round()
            self._acknowledge()
            self.nothing_is_broken()
            unfinished = list_unfinished(self.judge)
            if not unfinished:
                return
            # Leases without renewal expire, and a sweep waits some time before it requeues.
            self._pass(PAUSE_S if count % 20 else 610.0, kept=True)
        self.judge.must(False, LOST, "; ".join(unfinished))
        self.nothing_is_broken()

    def _acknowledge(self) -> None:
        """As an operator, close the episodes whose restart was given up."""
        given_up = "SELECT episode_id FROM episodes WHERE closed_at IS NULL AND wait_reason = 'given_up'"
        for (episode_id,) in self.databases.see_ledger.execute(given_up).fetchall():
            self.inbox.episodes.close(
                episode_id, Outcome.PARTLY, Reason.ACKNOWLEDGED, "by a test", now=self.inbox.now()
            )

    # --- parts of rules

    def _submit(self, run: str | None, attempts_max: int) -> None:
        if len(self.judge.rows) >= JOBS_MAX:
            return
        with self.points.program("submitter"), suppress(SubmissionError):
            job = Submission(queue=QUEUE, job_class=JobClass.GPU, run_id=run, attempts_max=attempts_max)
            self.store.runs.submit(job, now=self.store.now())

    def _sweep(self) -> None:
        """Sweep the queue as another program."""
        with self.points.program("sweep"):
            self.store.sweeps.reclaim_expired(now=self.store.now())
            self.store.sweeps.consume_events(now=self.store.now())

    def _all_turn(self) -> None:
        for slot in self.world.slots:
            for process in list(slot.processes):
                self.workers.turn(process)

    def _silence(self, slot: Slot, how: Does) -> None:
        process = slot.process
        if process is None:
            return
        working = process.job is not None and process.does in (Does.WORKS, Does.BUSY)
        if working or (process.does is Does.IDLES and how is Does.FROZEN):
            process.turns(how, self.clocks.steady_s)

    def _incident(self, slot: Slot, how: Does) -> None:
        if not any(row.state is State.QUEUED for row in self.judge.rows.values()):
            self._submit(None, 20)
        self.world.start(slot)
        for _ in range(2):
            for process in list(slot.processes):
                self.workers.turn(process)
        self._silence(slot, how)
        self._pass(STALL_S + 10.0, kept=True)
        self._notify(self._firing())

    def _wake(self, slot: Slot) -> None:
        for process in slot.processes:
            if process.does is Does.FROZEN:
                process.turns(process.before, self.clocks.steady_s)
            elif process.does in (Does.STALLED, Does.BUSY):
                process.turns(Does.WORKS, self.clocks.steady_s)
        slot.unkillable = False

    def _stray(self, slot: Slot) -> None:
        """Leave a process outside. One that has not registered holds the worker's lock, so it is excluded."""
        process = slot.process
        if process is not None and process.lives and process.does is not Does.BEGINS and not slot.strays:
            self.world.stray(slot)

    def _kill(self, slot: Slot) -> None:
        if slot.process is not None and slot.process.lives and not slot.unkillable:
            self.world.end(slot.process, cleanly=False)

    def _pass(self, by_s: float, *, kept: bool) -> None:
        """Let time pass; `kept`: workers renew their leases."""
        left_s = by_s
        while left_s > 0:
            self.clocks.steady_s += min(left_s, 300.0)
            left_s -= 300.0
            for slot in self.world.slots if kept else ():
                for process in list(slot.processes):
                    if process.job is not None:
                        self.workers.turn(process)

    def _meanwhile(self, what: str) -> None:
        acts: dict[str, Callable[[], None]] = {
            "others' rounds": self._rounds,
            "all turn": self._all_turn,
            "silent die": lambda: self._each_silent(self._kill),
            "silent stray": lambda: self._each_silent(self._stray),
            "silent wake": lambda: self._each_silent(self._wake),
            "engines start": self._engines_start,
        }
        if what in acts:
            acts[what]()
        else:
            self._pass(float(what.split(maxsplit=1)[0]), kept=True)

    def _rounds(self) -> None:
        for _ in range(4):
            for each in self.remediators.values():
                each.round()
            self._pass(PAUSE_S, kept=True)

    def _engines_start(self) -> None:
        for slot in self.world.slots:
            self.world.start(slot)

    def _each_silent(self, act: Callable[[Slot], None]) -> None:
        for slot in self.world.slots:
            if slot.process is not None and slot.process.does in SILENT:
                act(slot)

    def _alert(self, slot: Slot, condition: str) -> Alert:
        process = slot.process
        job_id, attempt = (process and process.job) or (None, None)
        labels: dict[str, Any] = {
            "alertname": condition,
            "host": slot.host,
            "worker": slot.worker,
            "container": slot.worker,
            "job_id": None if job_id is None else str(job_id),
            "attempt": None if attempt is None else str(attempt),
            "incarnation": None if process is None else process.incarnation,
            "condition": condition,
        }
        return build.alert("-".join(str(each) for each in labels.values()), **labels)

    def _firing(self) -> list[Alert]:
        """The alerts that fire now."""
        found: list[Alert] = []
        for slot in self.world.slots:
            process = slot.process
            if process is None or process.job is None or process.does not in SILENT:
                continue
            silent_s = self.clocks.steady_s - process.since_s
            if process.does is Does.FROZEN and silent_s >= DEAD_AFTER_S:
                found.append(self._alert(slot, "dead_worker"))
            if silent_s >= STALL_S:
                found.append(self._alert(slot, "stall"))
        return found

    def _resolved(self) -> list[Alert]:
        firing = {each.fingerprint for each in self._firing()}
        ended = {each.fingerprint: each for each in self.sent if each.fingerprint not in firing}
        return [self._as(each, firing=False) for each in ended.values()]

    def _as(self, alert: Alert, *, firing: bool) -> Alert:
        return Alert(
            fingerprint=alert.fingerprint,
            firing=firing,
            labels=alert.labels,
            annotations=alert.annotations,
            starts_at=alert.starts_at,
        )

    def _notify(self, alerts: list[Alert], trouble: Trouble | None = None) -> None:
        if not alerts:
            return
        with self.points.program("webhook", trouble), suppress(Killed, DatabaseError):
            deliver(self.inbox, alerts, hosts=self.world.hosts, now=self.clocks.wall("box1"))
        self.sent += [each for each in alerts if each.fingerprint not in {known.fingerprint for known in self.sent}]
