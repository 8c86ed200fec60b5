"""Performs decided steps. Each action is in the journal before and after it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import structlog

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import State
from gpuwarden.queue import Slot
from remediator import plan
from remediator.actuators import Actuator, Announces, Evicts
from remediator.clients.job_queue import Queue
from remediator.executor import signal_worker
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.limits import RemedyLimits
from remediator.executor.node_taint import NodeTaint
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.intents import SCALINGS
from remediator.ledger.ledger import Ledger
from remediator.ledger.recent import WRANGLING
from remediator.plan import Episode, Intent, Kind, Stage, Subject
from remediator.reasons import Reason
from remediator.remedies import wrangle

log: Final = structlog.get_logger("executor")

ANNOUNCED_S: Final = 10.0
"""Time that an executor has to move a silent host's jobs before another host tries, seconds."""

LOSE: Final = "lose"
"""Journal name of the step that marks the jobs of a host as lost."""


class Performer:
    """Performs single steps."""

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
        self.node_taint: NodeTaint | None = None

    def perform(self, episode: Episode, step: plan.Step) -> None:
        """Perform one step. It makes no decision; the caller reads the facts again."""
        if isinstance(step, plan.Lose | plan.Return):
            self._move_jobs(episode, step)
        elif isinstance(step, plan.Wrangle):
            self._perform_run_action(episode, step)
        elif isinstance(step, plan.Taint | plan.Untaint):
            if self.node_taint is not None:
                self._perform_instead(episode, self.node_taint.apply(episode, step))
        elif isinstance(step, plan.Scale):
            self._scale(episode, step)
        else:
            self._perform_step(episode, step)

    def _perform_step(self, episode: Episode, step: plan.Step) -> None:
        name = type(step).__name__.lower()
        log.info("step", episode=episode.episode_id, worker=episode.worker, step=name, reason=step.message)
        match step:
            case plan.Close(outcome=outcome, reason=reason, message=message):
                self._ledger.episodes.close(episode.episode_id, outcome, reason, message, now=self._ledger.now())
            case plan.WouldAct(message=message):
                self._announce(episode, step.container_kind, step.container_handle, message, acts=False)
                self._ledger.journal.record_dry_run(episode.episode_id, message, now=self._ledger.now())
            case plan.Begin():
                self._begin(episode, step)
            case plan.Withdraw(reason=reason, message=message):
                self._ledger.intents.withdraw(episode.episode_id, reason, message, now=self._ledger.now())
            case plan.Advance(kind=kind, stage=stage, reason=reason, message=message, unspent=unspent):
                intent = episode.free if kind is Kind.FREE else episode.settle
                if intent is not None:
                    saw: dict[str, Any] = {"act": "saw", "state": stage, "reason": reason, "unspent": unspent}
                    saw["data"] = {"abandoned": reason} if stage is Stage.ABANDONED else None
                    self._advance(episode, intent, stage, kind, message, **saw)
            case plan.Warn():
                self._warn(episode, step)
            case plan.Fence() | plan.Requeue() | plan.Fail():
                self._settle(episode, step)
            case plan.Stop() | plan.Start():
                self._restart(episode, step)
            case plan.Quarantine():
                self._quarantine(episode, step)
            case _:
                raise AssertionError("this step is not performed here")

    def _begin(self, episode: Episode, step: plan.Begin) -> None:
        safety_limits = self._limits.safety_limits_of(episode.remedy)
        self._perform_instead(
            episode, self._ledger.intents.begin(episode, step, safety_limits=safety_limits, now=self._ledger.now())
        )

    def _perform_instead(self, episode: Episode, instead: plan.Wait | plan.Close | None) -> None:
        """Perform what the ledger returned instead of the step."""
        if isinstance(instead, plan.Close):
            self.perform(episode, instead)
        elif isinstance(instead, plan.Wait):
            if instead.reason is Reason.CIRCUIT_BREAKER:
                log.error("circuit breaker open, an operator must release it", reason=instead.message)
            self._waits.record(episode, instead)

    def _settle(self, episode: Episode, step: plan.Fence | plan.Requeue | plan.Fail) -> None:
        intent, job_id, attempt = episode.settle, episode.job_id, episode.attempt
        if intent is None or job_id is None or attempt is None:
            raise AssertionError("decided to settle an episode without a job")
        match step:
            case plan.Fence():
                self._fence(episode, step, intent, job_id, attempt)
            case plan.Requeue():
                self._requeue(episode, step, intent, job_id, attempt)
            case plan.Fail():
                self._fail(episode, step, intent, job_id, attempt)

    def _fence(self, episode: Episode, step: plan.Fence, intent: Intent, job_id: int, attempt: int) -> None:
        queue, condition, incarnation = self._queue, episode.condition, intent.data["incarnation"]

        def write() -> bool:
            return queue.fence(job_id, attempt=attempt, incarnation=incarnation, condition=condition, now=queue.now())

        fenced = self._write_to_queue(episode, "fence", write)
        if fenced is None:
            return
        if not fenced:
            job = queue.job(job_id)
            if job is None or job.state is not State.FENCING or job.attempt != attempt:
                return  # the job changed; the next tick decides again
        self._advance(episode, intent, Stage.FENCED, "fence", step.message)

    def _requeue(self, episode: Episode, step: plan.Requeue, intent: Intent, job_id: int, attempt: int) -> None:
        queue, condition, avoid_s = self._queue, episode.condition, step.avoid_s
        gpus = () if episode.free is None else tuple(episode.free.data.get("gpus", ()))
        avoid = Slot(host=episode.host, worker=episode.worker, gpus=gpus)

        def write() -> bool:
            return queue.requeue(
                job_id, attempt=attempt, condition=condition, avoid=avoid, avoid_s=avoid_s, now=queue.now()
            )

        if self._write_to_queue(episode, "requeue", write):
            self._advance(episode, intent, Stage.DONE, "requeue", step.message)

    def _fail(self, episode: Episode, step: plan.Fail, intent: Intent, job_id: int, attempt: int) -> None:
        queue, reason = self._queue, step.message

        def write() -> bool:
            return queue.fail(job_id, attempt=attempt, reason=reason, now=queue.now())

        if self._write_to_queue(episode, "fail", write):
            self._advance(episode, intent, Stage.DONE, "fail", step.message, reason=step.reason)
            queue.sweep(now=queue.now())

    def _write_to_queue(self, episode: Episode, step: str, write: Callable[[], bool | None]) -> bool | None:
        """Write to the queue. Returns its answer, or `None` if it refused.

        Each refusal is recorded once; for a quarantine, once per stage. The step is retried.
        """
        timers = self._timers.of(episode.episode_id)
        timers.refused_at_s = self._clock.now_s()  # also if a defect raises: a stop must not wait forever for the queue
        try:
            taken = write()
        except GpuwardenError as error:
            timers.refused_at_s = self._clock.now_s()
            log.warning("queue refused a write", episode=episode.episode_id, step=step, reason=str(error))
            if step not in timers.refusals:
                message = f"the queue refused and will be retried: {error}"
                self._ledger.journal.record(episode.episode_id, "failed", step, message, now=self._ledger.now())
                timers.refusals.add(step)
            else:
                timers.current_wait = timers.last_wait  # no new entry was written, so do not repeat the wait
            return None
        timers.refused_at_s = None
        timers.refusals.clear()
        return taken is not False

    def _warn(self, episode: Episode, step: plan.Warn) -> None:
        """Send a worker its warning signal. If the executor dies between the two records, the next one warns again."""
        intent = episode.free
        if intent is None:
            raise AssertionError("decided to warn without an intent")
        tries = 1 + int(intent.data.get("warned", {}).get("tries", 0))
        decided = {"warned": {"signal": step.signal, "pid": step.listener.pid, "tries": tries, "done": False}}
        if not self._advance(episode, intent, intent.stage, "warn", step.message, act="decided", data=decided):
            return
        act, message = self._try(lambda: signal_worker.send(step.listener, step.signal))
        intent = replace(intent, data={**intent.data, **decided})
        # A worker that got no signal has no grace period.
        done = {"warned": {**decided["warned"], "done": True, "before": act == "failed"}}
        self._advance(episode, intent, intent.stage, "warn", message, act=act, data=done)

    def _restart(self, episode: Episode, step: plan.Stop | plan.Start) -> None:
        intent = episode.free
        if intent is None:
            raise AssertionError("decided to restart without an intent")
        actuator = self._actuators[intent.data["kind"]]
        handle: str = intent.data["handle"]
        stage = Stage.STARTING if isinstance(step, plan.Start) else Stage.STOPPING
        tries = 1 + (int(intent.data.get("tries", 0)) if intent.stage is stage else 0)
        before = actuator.look(handle)
        if before is None or not before.managed:
            return  # a row of the ledger may be forged
        if isinstance(step, plan.Start):
            if self._advance(episode, intent, stage, "start", step.message, act="decided", data={"tries": tries}):
                self._record(episode, "start", *self._try(lambda: actuator.start(handle)))
            return
        if before.incarnation != intent.key:
            return  # it stopped or restarted since the facts were read
        # Keep the pids of earlier tries: a process may leave its cgroup before the driver frees its memory.
        had = intent.data.get("pids", [])
        data: dict[str, Any] = {
            "pids": sorted(before.pids.union(had)),
            "cgroup": before.cgroup or intent.data.get("cgroup"),
            "tries": tries,
        }
        if isinstance(actuator, Evicts) and "others" not in intent.data:
            others = actuator.list_others(handle)
            data["others"] = None if others is None else sorted(others)
            data["pids"] = sorted(actuator.list_pids(handle).union(data["pids"]))
        if self._advance(episode, intent, stage, "stop", step.message, act="decided", data=data):
            # Check again: the commit may have been slow, and the engine stops any incarnation of the handle.
            still = actuator.look(handle)
            if still is None or still.incarnation != intent.key:
                return
            self._announce(episode, intent.data["kind"], handle, step.message, acts=True)
            how = self._try(lambda: actuator.stop(handle, grace_s=self._stop_grace_s))
            self._timers.of(episode.episode_id).stopped_at_s = self._clock.now_s()
            self._retire(episode)
            self._record(episode, "stop", *how)

    def _scale(self, episode: Episode, step: plan.Scale) -> None:
        """Start or stop a tenant on demand, unless someone else did so since the facts were read."""
        safety_limits, now = self._limits.safety_limits, self._ledger.now()
        instead = self._ledger.intents.begin_scaling(episode, step, safety_limits=safety_limits, now=now)
        if instead is not None:
            self._perform_instead(episode, instead)
            return
        actuator, handle = self._actuators[step.container_kind], step.container_handle
        before = actuator.look(handle)
        if before is None or not before.managed or before.running is step.on:
            return
        name = SCALINGS[step.on]
        log.info("step", episode=episode.episode_id, tenant=episode.worker, step=name, reason=step.message)
        if step.on:
            act, message = self._try(lambda: actuator.start(handle))
        else:
            act, message = self._try(lambda: actuator.stop(handle, grace_s=self._stop_grace_s))
        # Also after a success: a tenant may end as soon as it is started.
        self._timers.of(episode.episode_id).stopped_at_s = self._clock.now_s()
        self._record(episode, name, act, message)

    def _announce(self, episode: Episode, kind: str | None, handle: str | None, message: str, *, acts: bool) -> None:
        """Inform a supervisor why its process is ended. Best effort: a failure does not delay the stop."""
        actuator = self._actuators.get(kind or "")
        if not isinstance(actuator, Announces) or handle is None:
            return
        try:
            actuator.announce(handle, condition=episode.condition, acts=acts, message=message)
        except GpuwardenError as error:
            log.warning("supervisor not informed", worker=episode.worker, reason=str(error))

    def _quarantine(self, episode: Episode, step: plan.Quarantine) -> None:
        intent, message = episode.free, step.message
        if intent is None:
            raise AssertionError("decided to quarantine without an intent")
        gpus: list[str] = list(step.lost) or intent.data["gpus"]
        queue = self._queue
        slot = episode.worker if episode.subject is Subject.WORKER else ""
        its = {"host": self._host, "worker": slot, "reason": message}
        if not self._write_to_queue(episode, "quarantine", lambda: queue.quarantine(gpus, now=queue.now(), **its)):
            return
        log.error("GPUs quarantined, an operator must check them", gpus=gpus, worker=episode.worker, reason=message)
        data = {"lost": [*intent.data.get("lost", []), *step.lost]} if step.lost else {"quarantined": True}
        self._advance(episode, intent, intent.stage, "quarantine", message, data=data, reason=step.reason)

    def _move_jobs(self, episode: Episode, step: plan.Lose | plan.Return) -> None:
        """Mark a silent host's jobs lost or returned. Each is a compare-and-set, so only one host succeeds."""
        losing, queue = isinstance(step, plan.Lose), self._queue
        name, move = (LOSE, queue.mark_lost) if losing else ("return", queue.mark_returned)
        if not self._ledger.journal.record_once_per(
            episode.episode_id, name, step.message, now=self._ledger.now(), for_s=ANNOUNCED_S
        ):
            return  # another host does it
        for job in step.jobs:
            if move(job.job_id, attempt=job.attempt, now=queue.now()):
                message = f"job {job.job_id}, attempt {job.attempt}, of {episode.host}"
                self._ledger.journal.record(episode.episode_id, "did", name, message, now=self._ledger.now())
                if losing:
                    log.error(
                        "host lost, job held: an operator must check the host", host=episode.host, job_id=job.job_id
                    )

    def _perform_run_action(self, episode: Episode, step: plan.Wrangle) -> None:
        """Lock a worker, or move or block a run. The transaction decides again and skips what no longer holds."""
        instead = self._ledger.run_decisions.begin(
            episode, step, safety_limits=self._limits.safety_limits, now=self._ledger.now()
        )
        if instead is not None:
            self._perform_instead(episode, instead)
            return
        queue, name, rules = self._queue, WRANGLING[type(step)], wrangle.rules(self._limits.limits)
        who = f"the executor of {self._host}, episode {episode.episode_id}"
        if queue.wrangle(episode.worker, step, rules=rules, who=who, now=queue.now()):
            tell = f"; inform the {step.tell}" if step.tell else ""
            self._ledger.run_decisions.finish(episode, step, f"{step.deed}{tell}", now=self._ledger.now())
            log.warning(
                "run action done", episode=episode.episode_id, run=episode.worker, step=name, reason=step.message
            )

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
            # A quarantine refused at the new stage gets its own record.
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
        """Perform an action. Returns the journal's entry type and message."""
        started_s = self._clock.now_s()
        try:
            act()
        except GpuwardenError as error:
            return "failed", str(error)
        return "did", f"took {self._clock.now_s() - started_s:.1f} s"

    def _record(self, episode: Episode, step: str, act: str, message: str) -> None:
        self._ledger.journal.record(episode.episode_id, act, step, message, now=self._ledger.now())
        if act == "failed":
            log.warning("action failed", episode=episode.episode_id, step=step, reason=message)
            self._pause()

    def _retire(self, episode: Episode) -> None:
        """Mark the worker retired. Best effort: a failure does not delay the stop."""
        if episode.incarnation is None or episode.subject is not Subject.WORKER:
            return
        queue = self._queue
        try:
            queue.retire_worker(
                host=self._host, worker=episode.worker, incarnation=episode.incarnation, now=queue.now()
            )
        except GpuwardenError as error:
            log.warning("worker not marked retired", worker=episode.worker, reason=str(error))
