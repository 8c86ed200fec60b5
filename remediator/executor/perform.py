"""Does what was decided, with each act on record before and after it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import structlog

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import State
from gpuwarden.queue import Slot
from remediator import plan
from remediator.actuators import Actuator
from remediator.clients.job_queue import Queue
from remediator.executor import signal_worker
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.limits import RemedyLimits
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.ledger.recent import WRANGLING
from remediator.plan import Episode, Intent, Kind, Stage, Subject
from remediator.reasons import Reason
from remediator.remedies import wrangle

log: Final = structlog.get_logger("executor")

ANNOUNCED_S: Final = 10.0
"""How long another host leaves a silent host's jobs to the executor that has announced to move them, seconds."""

LOSE: Final = "lose"
"""The step that takes a host's jobs for lost, as the ledger names it."""


class Performer:
    """Does single steps.

    Args:
        ledger: where each act is recorded.
        host: this host's key.
        queue: the job queue.
        actuators: what stops and starts containers, by kind.
        limits: what bounds each remedy.
        timers: what this process has seen of each episode.
        waits: what records a wait where a step may not begin.
        clock: the executor's clock.
        stop_grace_s: how long a container has to stop by itself, seconds.
        pause: waits for a moment after an act that failed.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        host: str,
        queue: Queue,
        actuators: Mapping[str, Actuator],
        limits: RemedyLimits,
        timers: Timers,
        waits: WaitRecorder,
        clock: SuspendAwareClock,
        stop_grace_s: float,
        pause: Callable[[], object],
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._queue = queue
        self._actuators = actuators
        self._limits = limits
        self._timers = timers
        self._waits = waits
        self._clock = clock
        self._stop_grace_s = stop_grace_s
        self._pause = pause

    def perform(self, episode: Episode, step: plan.Step) -> None:
        """Do one step. It decides nothing: that was done, and facts are read again after it."""
        if isinstance(step, plan.Lose | plan.Return):
            self._move_jobs(episode, step)
        elif isinstance(step, plan.Wrangle):
            self._carry_out(episode, step)
        else:
            self._do(episode, step)

    def _do(self, episode: Episode, step: plan.Step) -> None:
        name = type(step).__name__.lower()
        log.info("step", episode=episode.episode_id, worker=episode.worker, step=name, because=step.message)
        match step:
            case plan.Close(outcome=outcome, reason=reason, message=message):
                self._ledger.episodes.close(episode.episode_id, outcome, reason, message, now=self._ledger.now())
            case plan.WouldAct(message=message):
                self._ledger.journal.would_act(episode.episode_id, message, now=self._ledger.now())
            case plan.Begin():
                self._begin(episode, step)
            case plan.Withdraw(reason=reason, message=message):
                self._ledger.intents.withdraw(episode.episode_id, reason, message, now=self._ledger.now())
            case plan.Advance(kind=kind, stage=stage, reason=reason, message=message, unspent=unspent):
                intent = episode.free if kind is Kind.FREE else episode.settle
                if intent is not None:
                    saw: dict[str, Any] = {"act": "saw", "state": stage, "reason": reason, "unspent": unspent}
                    self._advance(episode, intent, stage, kind, message, **saw)
            case plan.Warn():
                self._warn(episode, step)
            case plan.Fence() | plan.Requeue() | plan.Fail():
                self._settle(episode, step)
            case plan.Stop() | plan.Start():
                self._free(episode, step)
            case plan.Quarantine():
                self._quarantine(episode, step)
            case plan.Wait() | plan.Lose() | plan.Return() | plan.LockWorker() | plan.Migrate() | plan.BlockRun():
                raise AssertionError("it is not performed here")

    def _begin(self, episode: Episode, step: plan.Begin) -> None:
        safeguards = self._limits.safeguards_of(episode.remedy)
        self._instead(episode, self._ledger.intents.begin(episode, step, safeguards=safeguards, now=self._ledger.now()))

    def _instead(self, episode: Episode, instead: plan.Wait | plan.Close | None) -> None:
        """What is done instead of what may not be begun."""
        if isinstance(instead, plan.Close):
            self.perform(episode, instead)
        elif isinstance(instead, plan.Wait):
            if instead.reason is Reason.CIRCUIT_BREAKER:
                log.error("the brake is latched: nothing is begun until a person releases it", because=instead.message)
            self._waits.record(episode, instead)

    def _settle(self, episode: Episode, step: plan.Fence | plan.Requeue | plan.Fail) -> None:
        intent, job_id, attempt = episode.settle, episode.job_id, episode.attempt
        if intent is None or job_id is None or attempt is None:
            raise AssertionError("a settle without a job was decided")
        match step:
            case plan.Fence():
                self._fence(episode, step, intent, job_id, attempt)
            case plan.Requeue():
                self._requeue(episode, step, intent, job_id, attempt)
            case plan.Fail():
                self._fail(episode, step, intent, job_id, attempt)

    def _fence(self, episode: Episode, step: plan.Fence, intent: Intent, job_id: int, attempt: int) -> None:
        queue, trip, incarnation = self._queue, episode.trip, intent.data["incarnation"]

        def write() -> bool:
            return queue.fence(job_id, attempt=attempt, incarnation=incarnation, trip=trip, now=queue.now())

        fenced = self._taken(episode, "fence", write)
        if fenced is None:
            return
        if not fenced:
            job = queue.job(job_id)
            if job is None or job.state is not State.FENCING or job.attempt != attempt:
                return  # the job moved meanwhile; the next look decides again
        self._advance(episode, intent, Stage.FENCED, "fence", step.message)

    def _requeue(self, episode: Episode, step: plan.Requeue, intent: Intent, job_id: int, attempt: int) -> None:
        queue, trip, avoid_s = self._queue, episode.trip, step.avoid_s
        gpus = () if episode.free is None else tuple(episode.free.data.get("gpus", ()))
        avoid = Slot(host=episode.host, worker=episode.worker, gpus=gpus)

        def write() -> bool:
            return queue.requeue(job_id, attempt=attempt, trip=trip, avoid=avoid, avoid_s=avoid_s, now=queue.now())

        if self._taken(episode, "requeue", write):
            self._advance(episode, intent, Stage.DONE, "requeue", step.message)

    def _fail(self, episode: Episode, step: plan.Fail, intent: Intent, job_id: int, attempt: int) -> None:
        queue, because = self._queue, step.message

        def write() -> bool:
            return queue.fail(job_id, attempt=attempt, because=because, now=queue.now())

        if self._taken(episode, "fail", write):
            self._advance(episode, intent, Stage.DONE, "fail", step.message, reason=step.reason)
            queue.tend(now=queue.now())

    def _taken(self, episode: Episode, step: str, write: Callable[[], bool | None]) -> bool | None:
        """Have the queue write what becomes of a job or of GPUs; what it says to it, `None` where it refused.

        Each refusal is on record once, of a quarantine once a stage: the step is tried again for as long as it takes,
        and the free has its turn.
        """
        timers = self._timers.of(episode.episode_id)
        timers.refused_at_s = self._clock.now_s()  # also where a defect ends it: no stop waits for that for ever
        try:
            taken = write()
        except GpuwardenError as error:
            timers.refused_at_s = self._clock.now_s()
            log.warning("the queue refused", episode=episode.episode_id, step=step, because=str(error))
            if step not in timers.refusals:
                message = f"the queue takes nothing, and it is tried again: {error}"
                self._ledger.journal.record(episode.episode_id, "failed", step, message, now=self._ledger.now())
                timers.refusals.add(step)
            else:
                timers.waits_for = timers.waited  # nothing is on record that it would be told again after
            return None
        timers.refused_at_s = None
        timers.refusals.clear()
        return taken is not False

    def _warn(self, episode: Episode, step: plan.Warn) -> None:
        """Warn a worker, on record before and after: whoever comes after a death in between warns once more."""
        intent = episode.free
        if intent is None:
            raise AssertionError("a warning without a free was decided")
        tries = 1 + int(intent.data.get("warned", {}).get("tries", 0))
        decided = {"warned": {"signal": step.signal, "pid": step.listener.pid, "tries": tries, "done": False}}
        if not self._advance(episode, intent, intent.stage, "warn", step.message, act="decided", data=decided):
            return
        act, message = self._try(lambda: signal_worker.send(step.listener, step.signal))
        intent = replace(intent, data={**intent.data, **decided})
        # Whom no signal reached has no grace to wait for.
        done = {"warned": {**decided["warned"], "done": True, "before": act == "failed"}}
        self._advance(episode, intent, intent.stage, "warn", message, act=act, data=done)

    def _free(self, episode: Episode, step: plan.Stop | plan.Start) -> None:
        intent = episode.free
        if intent is None:
            raise AssertionError("a free without an intent was decided")
        actuator = self._actuators[intent.data["kind"]]
        handle: str = intent.data["handle"]
        stage = Stage.STARTING if isinstance(step, plan.Start) else Stage.STOPPING
        tries = 1 + (int(intent.data.get("tries", 0)) if intent.stage is stage else 0)
        if isinstance(step, plan.Start):
            if self._advance(episode, intent, stage, "start", step.message, act="decided", data={"tries": tries}):
                self._tell(episode, "start", *self._try(lambda: actuator.start(handle)))
            return
        before = actuator.look(handle)
        if before is None or before.incarnation != intent.key:
            return  # it ended or was restarted since the facts were read: that incarnation is over
        # What it had at the first try counts too: a process may leave its cgroup before the driver lets go of it.
        had = intent.data.get("pids", [])
        data = {
            "pids": sorted(before.pids.union(had)),
            "cgroup": before.cgroup or intent.data.get("cgroup"),
            "tries": tries,
        }
        if self._advance(episode, intent, stage, "stop", step.message, act="decided", data=data):
            # The commit may have taken its time, and an engine stops whatever bears the handle by now.
            still = actuator.look(handle)
            if still is None or still.incarnation != intent.key:
                return
            how = self._try(lambda: actuator.stop(handle, grace_s=self._stop_grace_s))
            self._timers.of(episode.episode_id).stopped_at_s = self._clock.now_s()
            self._retire(episode)
            self._tell(episode, "stop", *how)

    def _quarantine(self, episode: Episode, step: plan.Quarantine) -> None:
        intent, message = episode.free, step.message
        if intent is None:
            raise AssertionError("a quarantine without a free was decided")
        gpus: list[str] = list(step.lost) or intent.data["gpus"]
        queue = self._queue
        slot = episode.worker if episode.subject is Subject.WORKER else ""
        its = {"host": self._host, "worker": slot, "because": message}
        if not self._taken(episode, "quarantine", lambda: queue.quarantine(gpus, now=queue.now(), **its)):
            return
        log.error("GPUs in quarantine: a person must look", gpus=gpus, worker=episode.worker, because=message)
        data = {"lost": [*intent.data.get("lost", []), *step.lost]} if step.lost else {"quarantined": True}
        self._advance(episode, intent, intent.stage, "quarantine", message, data=data, reason=step.reason)

    def _move_jobs(self, episode: Episode, step: plan.Lose | plan.Return) -> None:
        """Move a silent host's jobs, on record before; each is a compare-and-set that one host alone gets done."""
        losing, queue = isinstance(step, plan.Lose), self._queue
        name, move = (LOSE, queue.lose) if losing else ("return", queue.find)
        if not self._ledger.journal.announce(
            episode.episode_id, name, step.message, now=self._ledger.now(), for_s=ANNOUNCED_S
        ):
            return  # another host is at it
        for job in step.jobs:
            if move(job.job_id, attempt=job.attempt, now=queue.now()):
                message = f"job {job.job_id}, attempt {job.attempt}, of {episode.host}"
                self._ledger.journal.record(episode.episode_id, "did", name, message, now=self._ledger.now())
                if losing:
                    log.error("node lost: a person must look", host=episode.host, job_id=job.job_id)

    def _carry_out(self, episode: Episode, step: plan.Wrangle) -> None:
        """Do it, on record before. Decided anew in the transaction that does it: what is so no more is not done."""
        instead = self._ledger.run_decisions.begin(
            episode, step, safeguards=self._limits.safeguards, now=self._ledger.now()
        )
        if instead is not None:
            self._instead(episode, instead)
            return
        queue, name, rules = self._queue, WRANGLING[type(step)], wrangle.rules(self._limits.limits)
        who = f"the executor of {self._host}, episode {episode.episode_id}"
        if queue.wrangle(episode.worker, step, rules=rules, who=who, now=queue.now()):
            tell = f"; the {step.tell} is to be told" if step.tell else ""
            self._ledger.run_decisions.finish(episode, step, f"{step.deed}{tell}", now=self._ledger.now())
            log.warning("wrangled", episode=episode.episode_id, run=episode.worker, step=name, because=step.message)

    def _advance(
        self,
        episode: Episode,
        intent: Intent,
        stage: Stage,
        step: str,
        message: str,
        *,
        act: str = "did",
        data: Mapping[str, object] | None = None,
        unspent: bool = False,
        state: str | None = None,
        reason: Reason | None = None,
    ) -> bool:
        if stage is not intent.stage:
            # One that is wanted at this stage too is recorded for it.
            self._timers.of(episode.episode_id).refusals.discard("quarantine")
        return self._ledger.intents.advance(
            intent,
            stage,
            episode_id=episode.episode_id,
            act=act,
            step=step,
            message=message,
            now=self._ledger.now(),
            data=data,
            unspent=unspent,
            state=state,
            reason=reason,
        )

    def _try(self, act: Callable[[], None]) -> tuple[str, str]:
        """Act after the decision is on record; how it went, in the ledger's words."""
        started_s = self._clock.now_s()
        try:
            act()
        except GpuwardenError as error:
            return "failed", str(error)
        return "did", f"took {self._clock.now_s() - started_s:.1f} s"

    def _tell(self, episode: Episode, step: str, act: str, message: str) -> None:
        self._ledger.journal.record(episode.episode_id, act, step, message, now=self._ledger.now())
        if act == "failed":
            log.warning("act failed", episode=episode.episode_id, step=step, because=message)
            self._pause()

    def _retire(self, episode: Episode) -> None:
        """Best effort: it never holds up the stop."""
        if episode.incarnation is None or episode.subject is not Subject.WORKER:
            return
        queue = self._queue
        try:
            queue.retire_worker(
                host=self._host, worker=episode.worker, incarnation=episode.incarnation, now=queue.now()
            )
        except GpuwardenError as error:
            log.warning("the worker's row could not be aged", worker=episode.worker, because=str(error))
