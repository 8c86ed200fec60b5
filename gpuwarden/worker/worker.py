"""One worker: registers, claims a job, runs it and writes its result."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from gpuwarden import clock
from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.errors import GpuwardenError, WorkerStopping
from gpuwarden.format import error_text, storable, trace_end, trace_of
from gpuwarden.gateway.client import ANSWER_S, GatewayStore
from gpuwarden.job import JobId, Phase
from gpuwarden.queue import Job, ReplacedError, Result, Slot, keep_result
from gpuwarden.queue.models import Success
from gpuwarden.queue.outcomes.fatal_errors import COMPLETED_S, FastFailures, is_fatal
from gpuwarden.reporter import Reporter
from gpuwarden.state_file import TEXT_MAX
from gpuwarden.worker import job_logs, lease
from gpuwarden.worker.commands import CommandFailedError, CommandJobError, Commands, CommandStoppedError
from gpuwarden.worker.lease import DISOWNED, Lease
from gpuwarden.worker.settings import Settings

if TYPE_CHECKING:
    from gpuwarden.db.changes import Changes
    from gpuwarden.queue import JobStore

Body = Callable[[Job, Reporter], Callable[[], Result]]
T = TypeVar("T")


IDLE_WAIT_S: Final = 0.2
"""Time between checks for a stop while idle, seconds."""

RETRY_S: Final = 1.0
"""Seconds between retries while the queue does not answer."""

GIVEN_BACK: Final = "its worker's process could not go on"


log: Final = structlog.get_logger("worker")


class DisownedError(GpuwardenError):
    """Stopped, and its job was lost already. `exit_code` names the condition (A18)."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(DISOWNED)
        self.exit_code = exit_code


class FatalError(GpuwardenError):
    """Stopped after an error that the process cannot survive. Its job was given back."""


class Stop:
    """Whether the worker must stop. A signal interrupts only where this is allowed."""

    def __init__(self) -> None:
        self.requested = False
        self.number = 0
        """The last signal."""
        self._interrupts = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT."""
        self.requested, self.number = True, number
        if self._interrupts:
            raise WorkerStopping

    def check(self) -> None:
        """Raise WorkerStopping after a signal."""
        if self.requested:
            raise WorkerStopping

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a signal raises WorkerStopping at any instruction."""
        try:
            self._interrupts = True
            self.check()
            yield
        finally:
            self._interrupts = False


class Worker:
    """One slot: one process, one job at a time."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: "JobStore | GatewayStore",
        reporter: Reporter,
        body: Body,
        stop: Stop | None = None,
    ) -> None:
        self._settings = settings
        self._stop = stop or Stop()
        self._store = store
        self._reporter = reporter
        self._body = body
        self._quarantine: str | None = None
        self._fast = FastFailures()
        self._row_due_s = self._claim_due_s = self._quarantine_due_s = 0.0
        self._claimed: Job | None = None
        """The next job, claimed with the last result."""
        self._commands = body if isinstance(body, Commands) else None
        self._lease = Lease(
            settings, store=store, reporter=reporter, loaded=self._loaded, commands=self._commands
        )  # fmt: skip

    def run(self) -> None:
        """Register, then claim and run up to `jobs_max` jobs.

        Raises:
            WorkerStopping: stopped; its job was released.
            DisownedError: stopped, and its job was lost already.
            FatalError: the process cannot go on; its job was given back.
            ReplacedError: this incarnation is over.
            DrainedError: the worker is drained and idle.
            DatabaseError: the queue refused a result.
        """
        settings, done = self._settings, 0
        settled = self._answer(self._register)
        log.info(
            "worker ready",
            worker=settings.name,
            queue=settings.queue,
            incarnation=self._reporter.incarnation,
            gpus=settings.gpus,
            settled=settled,
        )
        changes = self._answer(self._store.changes)
        try:
            while settings.jobs_max is None or done < settings.jobs_max:
                job, self._claimed = self._claimed or self._next(changes), None
                done += 1
                self._run_one(job, is_last=done == settings.jobs_max)
        finally:
            changes.close()

    def _answer(self, ask: Callable[[], T]) -> T:
        return answer(ask, worker=self._settings.name, stop=self._stop, reporter=self._reporter)

    def _register(self) -> list[JobId]:
        return self._store.claims.register(
            self._settings.queue,
            host=self._settings.host,
            worker=self._settings.name,
            incarnation=self._reporter.incarnation,
            now=self._store.now(),
            gpus=self._settings.gpus,
        )

    def _next(self, changes: "Changes") -> Job:
        changed = False
        while True:
            self._stop.check()
            now_s = time.monotonic()
            self._reporter.loop_seen()
            try:
                if now_s >= self._row_due_s:
                    self._check_in()
                    self._row_due_s = now_s + self._settings.heartbeat_s
                if changed or now_s >= self._claim_due_s:
                    self._claim_due_s = now_s + self._store.idle_claim_s
                    job = self._claim()
                    if job is not None:
                        return job
                if now_s >= self._quarantine_due_s:
                    self._quarantine_due_s = now_s + self._store.idle_claim_s
                    self._tell_of_quarantine()
                changed = changes.wait(IDLE_WAIT_S)
            except DatabaseError as error:
                log.warning("queue does not answer; asking again", worker=self._settings.name, reason=str(error))
                time.sleep(RETRY_S)

    def _claim(self) -> Job | None:
        self._lease.claiming()
        return self._store.claims.claim(
            self._settings.queue,
            host=self._settings.host,
            worker=self._settings.name,
            incarnation=self._reporter.incarnation,
            now=self._store.now(),
            lease_s=self._settings.lease_s,
            loaded=self._loaded(),
        )

    def _loaded(self) -> str | None:
        """The handler's loaded model. Foreign code, called from the lease thread."""
        with suppress(BaseException):
            name = getattr(self._body, "loaded_model", None)
            return name if isinstance(name, str) else None
        return None

    def _tell_of_quarantine(self) -> None:
        """Log the begin and the end of a quarantine once."""
        found = self._store.gpu_quarantine.quarantine_of(host=self._settings.host, worker=self._settings.name)
        gpu = None if found is None else found.gpu
        if gpu == self._quarantine:
            return
        self._quarantine = gpu
        if found is None:
            log.info("GPU quarantine ended", worker=self._settings.name)
        else:
            log.warning(
                "a GPU of this worker is in quarantine: it claims nothing until `gpuwarden gpu release`",
                worker=self._settings.name,
                gpu=gpu,
                reason=found.reason,
            )

    def _run_one(self, job: Job, *, is_last: bool) -> None:
        bound = log.bind(worker=self._settings.name, job_id=job.job_id, attempt=job.attempt)
        bound.info("job claimed", job_class=job.job_class, model=job.model)
        self._start_job(job)
        self._claim_due_s = 0.0
        over = threading.Event()
        keeper = self._lease.start(job, over)
        try:
            with self._kept_log(job, bound):
                outcome = self._attempt(job, bound)
        except WorkerStopping:
            over.set()
            if self._commands is not None and self._commands.leave(ends=self._stop.number == signal.SIGINT):
                self._reporter.close(leave_files=True)
                bound.info("stopping: the command goes on", within_s=self._settings.lease_s)
                raise
            given_back = self._store.claims.release(
                job.job_id, attempt=job.attempt, incarnation=self._reporter.incarnation, now=self._store.now()
            )
            if not given_back:
                raise DisownedError(self._lease.exit_code()) from None
            bound.info("stopping: job given back")
            raise
        finally:
            over.set()  # before the result: the lease thread must not see a settled job
        keeper.join(timeout=ANSWER_S)  # a late heartbeat would put the model back into the row
        if not self._settle(job, outcome, bound, is_last=is_last):
            lease.stop_at_once(bound, DISOWNED, self._lease.exit_code())
        if self._commands is not None:
            self._commands.settled()
        self._reporter.end_job()
        if self._claimed is None and not self._claim_due_s:  # else the result has refreshed the worker's row
            self._lease.see(model=None, completed=outcome.failed is None and not outcome.again)
        if outcome.fatal:
            raise FatalError(f"this process cannot go on: {outcome.failed}")

    def _start_job(self, job: Job) -> None:
        self._reporter.start_job(
            job_id=job.job_id,
            attempt=job.attempt,
            job_class=job.job_class,
            model=job.model,
            budget_s=job.budget_s,
            stall_timeout_s=job.stall_timeout_s,
            busy_timeout_s=job.busy_timeout_s,
            steps_total=job.steps_total,
            ranks=job.ranks,
            # Another queue's gang may have the same number and run name. The distinct part comes first, as the field
            # may be cut.
            gang=None if job.gang is None else f"{job.gang}@{job.submitted_at:.3f}/{job.run_id}"[:TEXT_MAX],
            rank=job.rank,
            # As in `gpuwarden run`: nothing but its budget ends a command that has used no GPU.
            after_gpu_use=self._commands is not None,
            health_acts=self._commands is None,
        )

    @contextmanager
    def _kept_log(self, job: Job, bound: structlog.typing.FilteringBoundLogger) -> Iterator[None]:
        """Keep the output. A failure of this does not stop the job."""
        with ExitStack() as keeping:
            if self._settings.logs is not None:
                try:
                    kept = job_logs.kept(
                        self._settings.logs,
                        job.job_id,
                        job.attempt,
                        submitted_at=job.submitted_at,
                        jobs_max=self._settings.logs_max,
                    )
                    keeping.enter_context(kept)
                except (job_logs.JobLogError, OSError) as error:
                    bound.warning("job log not written", reason=str(error))
            yield

    def _attempt(self, job: Job, bound: structlog.typing.FilteringBoundLogger) -> "_Outcome":
        """Load, start the monitoring, and work."""
        began_s = clock.boottime_s()
        try:
            with self._stop.interrupting():
                if job.needs:
                    job = replace(job, inputs=self._answer(lambda: self._store.inputs(job)))
                work = self._body(job, self._reporter)
                if self._commands is None:
                    self._reporter.ready()  # a command reports its own steps
                bound.info("job ready")
                result = work()
        except BaseException as error:
            if self._stop.requested:
                raise WorkerStopping from error  # or the handler turned the stop into its own error
            if isinstance(error, SystemExit) and error.code in (None, 0):
                result = None
            elif isinstance(error, CommandStoppedError):
                return _Outcome(again=True)
            elif isinstance(error, CommandFailedError | CommandJobError):
                bound.error("job failed", reason=str(error))
                return _Outcome(failed=storable(str(error)), retried=self._is_retried(job, error))
            else:
                reason = error_text(error)
                bound.error("job failed", reason=reason, exception=trace_of(error))
                fatal = self._is_fatal(job, error, after_s=clock.boottime_s() - began_s)
                retried = not fatal and self._is_retried(job, error)
                return _Outcome(failed=reason, traceback=trace_end(error), fatal=fatal, retried=retried)
        self._fast.clear()
        kept, lost = keep_result(result)
        if lost is not None:
            bound.warning("result kept in part", reason=lost)
        return _Outcome(result=kept, lost=lost)

    def _is_retried(self, job: Job, error: BaseException) -> bool:
        """Whether the job has a retry left, and its handler wants one after this error."""
        if job.retries >= job.retries_max or job.attempt >= job.attempts_max:
            return False
        wanted = getattr(self._body, "is_retried", None)
        return isinstance(error, Exception) if wanted is None else bool(wanted(job, error))

    def _is_fatal(self, job: Job, error: BaseException, *, after_s: float) -> bool:
        """Whether this process cannot survive the error, so that its next jobs would fail too."""
        suspected = self._fast.failed(job.job_id, error, after_s=after_s)
        if is_fatal(error, getattr(self._body, "fatal", None)):
            return True
        if not suspected:
            return False
        its = {"host": self._settings.host, "worker": self._settings.name}
        try:
            return self._store.claims.others_completed(
                self._settings.queue, **its, since=self._store.now() - COMPLETED_S
            )
        except DatabaseError as unknown:
            log.warning("other workers unknown", worker=self._settings.name, reason=str(unknown))
            return False

    def _settle(
        self, job: Job, outcome: "_Outcome", bound: structlog.typing.FilteringBoundLogger, *, is_last: bool
    ) -> bool:
        """Write the result, with retries for up to a lease; False if the job was lost."""
        attempt, incarnation = job.attempt, self._reporter.incarnation
        give_up_s = time.monotonic() + self._settings.lease_s
        reason = outcome.failed
        while True:
            try:
                if outcome.again:
                    accepted = self._store.claims.release(
                        job.job_id, attempt=attempt, incarnation=incarnation, now=self._store.now()
                    )
                elif reason is None:
                    accepted = self._complete(job, outcome, is_last=is_last)
                elif outcome.fatal:
                    accepted = self._store.claims.give_back(
                        job.job_id,
                        attempt=attempt,
                        incarnation=incarnation,
                        slot=Slot(host=self._settings.host, worker=self._settings.name, gpus=self._settings.gpus),
                        reason=f"{GIVEN_BACK}: {reason}",
                        traceback=outcome.traceback,
                        now=self._store.now(),
                    )
                else:
                    end = self._store.claims.retry if outcome.retried else self._store.claims.fail_by_worker
                    accepted = end(
                        job.job_id,
                        attempt=attempt,
                        incarnation=incarnation,
                        reason=reason,
                        traceback=outcome.traceback,
                        now=self._store.now(),
                    )
                if not accepted:  # or an answer was lost
                    accepted = self._is_settled(job, outcome)
            except DatabaseError as error:
                if self._stop.requested or time.monotonic() >= give_up_s:
                    raise
                bound.warning("queue does not answer; the result waits", reason=str(error))
                self._reporter.phase(Phase.SAVE)  # a step beat: this worker is not stalled
                time.sleep(RETRY_S)
                continue
            bound.info(outcome.done, accepted=accepted)
            return accepted

    def _complete(self, job: Job, outcome: "_Outcome", *, is_last: bool) -> bool:
        """Complete the job, and claim the next one with it, except when the worker's row is due for a heartbeat."""
        reason = None if outcome.lost is None else f"result kept in part: {outcome.lost}"
        stops = is_last or self._stop.requested or time.monotonic() >= self._row_due_s
        if stops:
            return self._store.claims.complete(
                job.job_id,
                attempt=job.attempt,
                incarnation=self._reporter.incarnation,
                now=self._store.now(),
                result=outcome.result,
                reason=reason,
            )
        self._lease.claiming()
        found = self._store.claims.complete_and_claim(
            Success(job.job_id, job.attempt, outcome.result, reason, in_run=job.run_id is not None),
            queue=self._settings.queue,
            host=self._settings.host,
            worker=self._settings.name,
            incarnation=self._reporter.incarnation,
            now=self._store.now(),
            lease_s=self._settings.lease_s,
            loaded=self._loaded(),
        )
        self._claimed = found.job
        if found.idle:
            self._claim_due_s = time.monotonic() + self._store.idle_claim_s
        return found.done

    def _is_settled(self, job: Job, outcome: "_Outcome") -> bool:
        """Whether the queue already has this result, from a commit whose answer was lost."""
        reason = f"{GIVEN_BACK}: {outcome.failed}" if outcome.fatal else outcome.failed
        return self._store.claims.is_settled(
            job.job_id,
            attempt=job.attempt,
            reason=reason,
            given_back=outcome.fatal,
            retried_after=job.retries if outcome.retried else None,
        )

    def _check_in(self) -> None:
        if not self._lease.heartbeat(model=None):
            raise ReplacedError("the queue refuses the heartbeat of this incarnation")


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The result of an attempt, or why it failed. `lost`: why the result is only a part.

    `fatal`: the process cannot go on. `again`: the job runs again, with no retry counted.
    """

    failed: str | None = None
    traceback: str | None = None
    fatal: bool = False
    retried: bool = False
    again: bool = False
    result: Result = None
    lost: str | None = None

    @property
    def done(self) -> str:
        """What is logged once it is stored."""
        if self.failed is None and not self.again:
            return "job completed"
        if self.fatal or self.again:
            return "job given back"
        return "job queued again for a retry" if self.retried else "job marked failed"


def answer(ask: Callable[[], T], *, worker: str, stop: Stop, reporter: Reporter) -> T:
    """Ask the queue until it answers or the worker must stop."""
    while True:
        stop.check()
        reporter.loop_seen()
        try:
            return ask()
        except NoAnswerError as error:
            log.warning("queue does not answer; asking again", worker=worker, reason=str(error))
            time.sleep(RETRY_S)
