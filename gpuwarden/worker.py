"""`gpuwarden worker`: claims jobs, loads, arms, runs, renews, and stops itself when it no longer owns its job.

The job's own code is a *body*: a function `load(job, report)` that loads what the job needs and returns the function
that does the work. Between the two the worker sends the arming beat (A3). The body runs in the main thread; another
thread renews the lease and watches the claim, and ends the process at once when the claim is gone (A11), because the
body may be deaf. A body must be idempotent on its output: an attempt can end at any instruction and another begin.

SIGTERM and SIGINT interrupt a body and nothing else: between a claim and its job's first line, or while a result is
being written, a stop waits, so that no claim is left behind. A queue that does not answer stops no work: an idle worker
asks again, and a result waits for it up to a lease.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import structlog

from gpuwarden import logs
from gpuwarden.database import BUSY_TIMEOUT_S, Changes, DatabaseError
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import EXIT_DISOWNED, HEARTBEAT_S, LEASE_S, Phase
from gpuwarden.jobstore import Job, JobStore
from gpuwarden.reporter import Reporter, host_key, state_directory

Body = Callable[[Job, Reporter], Callable[[], None]]

OWNERSHIP_S: Final = 1.0
"""How often a running worker checks that the job is still its own, seconds."""

IDLE_POLL_S: Final = 0.2
"""How often an idle worker looks whether the queue has changed, seconds; it claims only when it has."""

IDLE_CLAIM_S: Final = 5.0
"""An idle worker tries a claim this often even if it saw no change, seconds."""

SETTLE_RETRY_S: Final = 1.0
"""How long a result waits before it is offered again to a queue that did not answer, seconds."""

log: Final = structlog.get_logger("worker")


class BodyError(GpuwardenError):
    """The job body cannot be found."""


class WorkerStopping(BaseException):
    """SIGTERM or SIGINT came: give the job back and end."""


class Stop:
    """Whether this worker was told to end. A signal is noted, and interrupts only what allows it."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = False

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """A handler for SIGTERM and SIGINT."""
        self.requested = True
        if self._interrupts:
            raise WorkerStopping

    def check(self) -> None:
        """Raise WorkerStopping if told to end."""
        if self.requested:
            raise WorkerStopping

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, WorkerStopping is raised at whatever instruction the signal finds."""
        try:
            self._interrupts = True
            self.check()
            yield
        finally:
            self._interrupts = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one worker is told."""

    name: str
    queue: str
    host: str
    lease_s: float = LEASE_S
    heartbeat_s: float = HEARTBEAT_S
    jobs_max: int | None = None


class Worker:
    """One slot: one process, one job at a time."""

    def __init__(
        self, settings: Settings, *, store: JobStore, reporter: Reporter, body: Body, stop: Stop | None = None
    ) -> None:
        self._settings = settings
        self._stop = stop or Stop()
        self._store = store
        self._reporter = reporter
        self._body = body

    def run(self) -> None:
        """Claim and run until `jobs_max` jobs are done.

        Raises:
            WorkerStopping: told to stop; the job it held is given back.
            DatabaseError: the queue would not take a result.
        """
        done = 0
        changes = self._store.changes()
        try:
            while self._settings.jobs_max is None or done < self._settings.jobs_max:
                job = self._next(changes)
                self._run_one(job)
                done += 1
        finally:
            changes.close()

    def _next(self, changes: Changes) -> Job:
        next_claim_s = next_row_s = 0.0
        while True:
            self._stop.check()
            now_s = time.monotonic()
            self._reporter.loop_seen()
            if now_s >= next_row_s:
                self._see(model=None)
                next_row_s = now_s + self._settings.heartbeat_s
            try:
                if changes.any() or now_s >= next_claim_s:
                    next_claim_s = now_s + IDLE_CLAIM_S
                    job = self._claim()
                    if job is not None:
                        return job
            except DatabaseError as error:
                log.warning("queue does not answer; asking again", worker=self._settings.name, because=str(error))
            time.sleep(IDLE_POLL_S)

    def _claim(self) -> Job | None:
        return self._store.claim(
            self._settings.queue,
            host=self._settings.host,
            worker=self._settings.name,
            incarnation=self._reporter.incarnation,
            now=time.time(),
            lease_s=self._settings.lease_s,
        )

    def _run_one(self, job: Job) -> None:
        bound = log.bind(worker=self._settings.name, job_id=job.job_id, attempt=job.attempt)
        bound.info("job claimed", job_class=job.job_class, model=job.model)
        self._reporter.start_job(
            job_id=job.job_id,
            attempt=job.attempt,
            job_class=job.job_class,
            model=job.model,
            budget_s=job.budget_s,
            stall_timeout_s=job.stall_timeout_s,
            steps_total=job.steps_total,
        )
        over = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(job, over), name="gpuwarden-lease", daemon=True)
        keeper.start()
        try:
            because = self._attempt(job, bound)
        except WorkerStopping:
            over.set()
            given_back = self._store.release(job.job_id, attempt=job.attempt, incarnation=self._reporter.incarnation)
            bound.info("stopping: job given back", accepted=given_back)
            raise
        finally:
            over.set()  # before the result is written: a keeper that finds the job settled must not take it for lost
        if not self._settle(job, because, bound):
            _stop_at_once(bound)
        keeper.join(timeout=BUSY_TIMEOUT_S)  # or its last heartbeat could put the model back into the row
        self._reporter.end_job()
        self._see(model=None)

    def _attempt(self, job: Job, bound: structlog.typing.FilteringBoundLogger) -> str | None:
        """Load, arm and work; why the job failed, or `None` when it is done."""
        try:
            with self._stop.interrupting():
                work = self._body(job, self._reporter)
                self._reporter.arm()
                bound.info("job armed")
                work()
        except (Exception, SystemExit) as error:
            if self._stop.requested:
                raise WorkerStopping from error  # a body that turned the stop into an error of its own
            because = f"{type(error).__name__}: {error}"[:500].encode("utf-8", "backslashreplace").decode()
            bound.error("job failed", because=because, exc_info=True)
            return because
        return None

    def _settle(self, job: Job, because: str | None, bound: structlog.typing.FilteringBoundLogger) -> bool:
        """Write the result, for up to a lease if the queue does not answer; false when the job was no longer ours."""
        attempt, incarnation = job.attempt, self._reporter.incarnation
        give_up_s = time.monotonic() + self._settings.lease_s
        while True:
            try:
                if because is None:
                    accepted = self._store.complete(
                        job.job_id, attempt=attempt, incarnation=incarnation, now=time.time()
                    )
                else:
                    accepted = self._store.fail_by_worker(
                        job.job_id, attempt=attempt, incarnation=incarnation, because=because, now=time.time()
                    )
            except DatabaseError as error:
                if self._stop.requested or time.monotonic() >= give_up_s:
                    raise
                bound.warning("queue does not answer; the result waits", because=str(error))
                self._reporter.phase(Phase.SAVE)  # a beat: this worker is not wedged, whatever its GPU does meanwhile
                time.sleep(SETTLE_RETRY_S)
                continue
            bound.info("job completed" if because is None else "job marked failed", accepted=accepted)
            return accepted

    def _keep(self, job: Job, over: threading.Event) -> None:
        """Renew the lease and watch the claim. A database that does not answer is no reason to stop working."""
        bound = log.bind(worker=self._settings.name, job_id=job.job_id, attempt=job.attempt)
        incarnation = self._reporter.incarnation
        next_renewal_s = 0.0
        while not over.wait(OWNERSHIP_S):
            try:
                if time.monotonic() >= next_renewal_s:
                    next_renewal_s = time.monotonic() + self._settings.heartbeat_s
                    owned = self._store.renew(
                        job.job_id,
                        attempt=job.attempt,
                        incarnation=incarnation,
                        now=time.time(),
                        lease_s=self._settings.lease_s,
                    )
                    if owned:
                        self._see(model=job.model or job.job_class)
                else:
                    owned = self._store.owns(job.job_id, attempt=job.attempt, incarnation=incarnation)
            except DatabaseError as error:
                bound.warning("queue does not answer; working on", because=str(error))
                continue
            if not owned and not over.is_set():
                _stop_at_once(bound)

    def _see(self, *, model: str | None) -> None:
        with suppress(DatabaseError):
            self._store.heartbeat(
                host=self._settings.host,
                worker=self._settings.name,
                queue=self._settings.queue,
                incarnation=self._reporter.incarnation,
                model=model,
                now=time.time(),
            )


def _stop_at_once(bound: structlog.typing.FilteringBoundLogger) -> None:
    """End this process without another instruction of the job: the job belongs to someone else now."""
    bound.error("this worker no longer owns its job: stopping at once", exit_code=EXIT_DISOWNED)
    os._exit(EXIT_DISOWNED)


def find_body(target: str) -> Body:
    """Import `module:function`.

    Raises:
        BodyError: there is no such module or function.
    """
    module, _, name = target.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the installed command has its own folder there instead
    try:
        body: Body = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BodyError(
            f"no job body at {target!r} ({error}): give module:function, importable from here or PYTHONPATH"
        ) from None
    if not callable(body):
        raise BodyError(f"{target!r} is {type(body).__name__}, not a function that loads a job and returns its work")
    return body


def command(argv: list[str]) -> int:
    """`gpuwarden worker`."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not 0 < arguments.heartbeat_s < arguments.lease_s:
        parser.error("--heartbeat-s must be above 0 and below --lease-s, or a lease ends before it is renewed")
    logs.configure(level=arguments.log_level)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, stop.on_signal)
    try:
        return _serve(arguments, stop)
    except WorkerStopping:
        log.info("stopped", worker=arguments.name)
        return 0


def _serve(arguments: argparse.Namespace, stop: Stop) -> int:
    body = find_body(arguments.body)
    settings = Settings(
        name=arguments.name,
        queue=arguments.queue,
        host=host_key(arguments.dir),
        lease_s=arguments.lease_s,
        heartbeat_s=arguments.heartbeat_s,
        jobs_max=arguments.jobs_max,
    )
    store = JobStore.open(arguments.store)
    reporter = Reporter(
        arguments.dir,
        worker=settings.name,
        queue=settings.queue,
        subdirectory=arguments.subdirectory,
        heartbeat_s=settings.heartbeat_s,
    )
    try:
        with reporter:
            log.info("worker ready", worker=settings.name, queue=settings.queue, incarnation=reporter.incarnation)
            Worker(settings, store=store, reporter=reporter, body=body, stop=stop).run()
    finally:
        store.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    env = os.environ
    parser = argparse.ArgumentParser(
        prog="gpuwarden worker",
        description="Claim jobs from a queue and run them, one at a time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"Exit codes: 0 told to stop; 1 could not start; {EXIT_DISOWNED} the job was taken away (A11).",
    )
    parser.add_argument("--name", required=True, help="this slot's name, unique on the host; it names the state files")
    parser.add_argument("--body", required=True, help="module:function that loads a job and returns its work")
    parser.add_argument("--queue", default="gpu", help="the queue to serve")
    parser.add_argument("--store", default=env.get("GPUWARDEN_STORE"), required="GPUWARDEN_STORE" not in env,
                        help="the queue's database URL, or $GPUWARDEN_STORE")  # fmt: skip
    parser.add_argument("--dir", type=Path, default=state_directory(),
                        help="where state files go, or $GPUWARDEN_DIR")  # fmt: skip
    parser.add_argument("--subdirectory", default=env.get("GPUWARDEN_SUBDIRECTORY"),
                        help="the container's own folder in --dir; the worker's name when not given")  # fmt: skip
    parser.add_argument(
        "--lease-s", type=float, default=LEASE_S, help="how long a claim holds without renewal, seconds"
    )
    parser.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_S,
                        help="how often the lease is renewed and the files refreshed, seconds")  # fmt: skip
    parser.add_argument("--jobs-max", type=int, help="end after this many jobs; without end when not given")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="verbosity")
    return parser
