"""`gpuwarden worker`: claims jobs, loads, arms, runs, renews, and stops itself when it no longer owns its job.

The job's own code is a *body*: a function `load(job, report)` that loads what the job needs and returns the function
that does the work. Between the two the worker sends the arming beat (A3). What the work returns is kept as the job's
result. The body runs in the main thread; another thread renews the lease and watches the claim, and ends the process at
once when the claim is gone (A11), because the body may be deaf. A body must be idempotent on its output: an attempt can
end at any instruction and another begin. A body that keeps a model loaded between jobs says so in an attribute
`loaded_model`, and jobs that need it come first. `gpuwarden.Queue` is such a body.

At its start it registers with the queue, which settles what the incarnation before it held. An incarnation that is
over, because another has registered or because it is being ended, claims nothing and ends with the same exit code.

SIGTERM and SIGINT interrupt a body and nothing else: between a claim and its job's first line, or while a result is
being written, a stop waits, so that no claim is left behind.

A queue that does not answer is asked again, and a result waits for it up to a lease. Whether the job works on meanwhile
depends on who else can reach the queue. On PostgreSQL others may, and give the job away once its lease has run out: a
worker that could not renew for a whole lease stops itself at once, by a clock that counts suspended time. On SQLite
nobody else reaches it either, and the worker works on.
"""

import argparse
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Final, TypeVar

import structlog

from gpuwarden import clock, logs
from gpuwarden.argparse_help import Help
from gpuwarden.cli import worker as workers
from gpuwarden.db.changes import Changes
from gpuwarden.db.engine import BUSY_TIMEOUT_S, DatabaseError, NoAnswerError
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.format import kept
from gpuwarden.job import EXIT_DISOWNED, FRESH_S, HEARTBEAT_S, LEASE_S, JobId, Phase, State, Trip
from gpuwarden.queue import DrainedError, Job, JobStore, ReplacedError, Result, check_result, is_gpu
from gpuwarden.queue.open import default_store
from gpuwarden.reporter import DEFAULT_DIR, Reporter, host_key, state_directory
from gpuwarden.state_file import TEXT_MAX
from gpuwarden.tasks import Queue
from gpuwarden.worker import job_logs

Body = Callable[[Job, Reporter], Callable[[], Result]]
T = TypeVar("T")

OWNERSHIP_S: Final = 1.0
"""How often a running worker checks that the job is still its own, seconds."""

IDLE_WAIT_S: Final = 0.2
"""How long an idle worker waits for a change of the queue before it looks whether it was told to stop, seconds."""

IDLE_CLAIM_S: Final = 5.0
"""An idle worker tries a claim this often even if it saw no change, seconds."""

RETRY_S: Final = 1.0
"""How long a worker waits before it asks a queue again that did not answer, seconds."""

TRIP_S: Final = 1.0
"""How long a worker that lost its job asks for what, before it ends without knowing, seconds."""

HEARTBEATS_PER_LEASE: Final = 3
"""How many heartbeats a lease holds at least: a renewal may fail, and be made good, before it ends."""

log: Final = structlog.get_logger("worker")


class BodyError(GpuwardenError):
    """The job body cannot be found."""


class WorkerStopping(BaseException):
    """SIGTERM or SIGINT came: give the job back and end."""


class DisownedError(GpuwardenError):
    """Told to stop, it found its job taken away already. `exit_code` says for which trip (A18)."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(_DISOWNED)
        self.exit_code = exit_code


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
    gpus: tuple[str, ...] = ()
    lease_s: float = LEASE_S
    heartbeat_s: float = HEARTBEAT_S
    jobs_max: int | None = None
    logs: Path | None = None


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
        self._quarantine: str | None = None
        # When the renewal of the lease that was last accepted was sent, CLOCK_BOOTTIME.
        self._renewed_s = 0.0

    def run(self) -> None:
        """Register, then claim and run until `jobs_max` jobs are done.

        Raises:
            WorkerStopping: told to stop; the job it held is given back.
            DisownedError: told to stop, and the job it held was not its own any more.
            ReplacedError: this incarnation is over.
            DrainedError: a person asked it to end once it has nothing to do.
            DatabaseError: the queue would not take a result.
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
                job = self._next(changes)
                self._run_one(job)
                done += 1
        finally:
            changes.close()

    def _answer(self, ask: Callable[[], T]) -> T:
        return _answer(ask, worker=self._settings.name, stop=self._stop, reporter=self._reporter)

    def _register(self) -> list[JobId]:
        return self._store.claims.register(
            self._settings.queue,
            host=self._settings.host,
            worker=self._settings.name,
            incarnation=self._reporter.incarnation,
            now=self._store.now(),
            gpus=self._settings.gpus,
        )

    def _next(self, changes: Changes) -> Job:
        next_claim_s = next_row_s = 0.0
        changed = False
        while True:
            self._stop.check()
            now_s = time.monotonic()
            self._reporter.loop_seen()
            try:
                if now_s >= next_row_s:
                    self._check_in()
                    next_row_s = now_s + self._settings.heartbeat_s
                if changed or now_s >= next_claim_s:
                    next_claim_s = now_s + IDLE_CLAIM_S
                    job = self._claim()
                    if job is not None:
                        return job
                    self._tell_of_quarantine()
                changed = changes.wait(IDLE_WAIT_S)
            except DatabaseError as error:
                log.warning("queue does not answer; asking again", worker=self._settings.name, because=str(error))
                time.sleep(RETRY_S)

    def _claim(self) -> Job | None:
        self._renewed_s = clock.boottime_s()
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
        """What the body keeps loaded, if it says so. It is another's code, and is asked by the thread of the lease."""
        with suppress(Exception):
            name = getattr(self._body, "loaded_model", None)
            return name if isinstance(name, str) else None
        return None

    def _tell_of_quarantine(self) -> None:
        """Say once why nothing is claimed, and once that it is over."""
        found = self._store.gpu_quarantine.quarantine_of(host=self._settings.host, worker=self._settings.name)
        gpu = None if found is None else found.gpu
        if gpu == self._quarantine:
            return
        self._quarantine = gpu
        if found is None:
            log.info("no GPU of this worker is in quarantine any more", worker=self._settings.name)
        else:
            log.warning(
                "a GPU of this worker is in quarantine: it claims nothing until `gpuwarden gpu release`",
                worker=self._settings.name,
                gpu=gpu,
                because=found.because,
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
            ranks=job.ranks,
            # Another queue's gang may have the same number, and be of a run of the same name. As short as a field may
            # be: what tells them apart comes first.
            gang=None if job.gang is None else f"{job.gang}@{job.submitted_at:.3f}/{job.run_id}"[:TEXT_MAX],
            rank=job.rank,
        )
        over = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(job, over), name="gpuwarden-lease", daemon=True)
        keeper.start()
        if self._store.shared:
            threading.Thread(target=self._time, args=(bound, over), name="gpuwarden-lease-time", daemon=True).start()
        try:
            with self._kept_log(job, bound):
                outcome = self._attempt(job, bound)
        except WorkerStopping:
            over.set()
            given_back = self._store.claims.release(
                job.job_id, attempt=job.attempt, incarnation=self._reporter.incarnation, now=self._store.now()
            )
            if not given_back:
                raise DisownedError(self._code_of_end()) from None
            bound.info("stopping: job given back")
            raise
        finally:
            over.set()  # before the result is written: a keeper that finds the job settled must not take it for lost
        if not self._settle(job, outcome, bound):
            _stop_at_once(bound, _DISOWNED, self._code_of_end())
        keeper.join(timeout=BUSY_TIMEOUT_S)  # or its last heartbeat could put the model back into the row
        self._reporter.end_job()
        self._see(model=None)

    @contextmanager
    def _kept_log(self, job: Job, bound: structlog.typing.FilteringBoundLogger) -> Iterator[None]:
        """Inside, what is printed is kept, where that was asked for. A log that cannot be is no reason not to work."""
        with ExitStack() as keeping:
            if self._settings.logs is not None:
                try:
                    keeping.enter_context(job_logs.kept(self._settings.logs, job.job_id, job.attempt))
                except (job_logs.JobLogError, OSError) as error:
                    bound.warning("what this attempt prints is not kept", because=str(error))
            yield

    def _attempt(self, job: Job, bound: structlog.typing.FilteringBoundLogger) -> "_Outcome":
        """Load, arm and work."""
        try:
            with self._stop.interrupting():
                if job.needs:
                    job = replace(job, inputs=self._answer(lambda: self._store.runs.inputs(job.job_id)))
                work = self._body(job, self._reporter)
                self._reporter.arm()
                bound.info("job armed")
                result = work()
                check_result(result)
        except (Exception, SystemExit) as error:
            if self._stop.requested:
                raise WorkerStopping from error  # a body that turned the stop into an error of its own
            because = kept(f"{type(error).__name__}: {error}")
            bound.error("job failed", because=because, exc_info=True)
            return _Outcome(failed=because)
        return _Outcome(result=result)

    def _settle(self, job: Job, outcome: "_Outcome", bound: structlog.typing.FilteringBoundLogger) -> bool:
        """Write the result, for up to a lease if the queue does not answer; false when the job was no longer ours."""
        attempt, incarnation = job.attempt, self._reporter.incarnation
        give_up_s = time.monotonic() + self._settings.lease_s
        unanswered, because = False, outcome.failed
        while True:
            try:
                if because is None:
                    accepted = self._store.claims.complete(
                        job.job_id,
                        attempt=attempt,
                        incarnation=incarnation,
                        now=self._store.now(),
                        result=outcome.result,
                    )
                else:
                    accepted = self._store.claims.fail_by_worker(
                        job.job_id, attempt=attempt, incarnation=incarnation, because=because, now=self._store.now()
                    )
                if unanswered and not accepted:
                    accepted = self._is_settled(job, because)
            except DatabaseError as error:
                if self._stop.requested or time.monotonic() >= give_up_s:
                    raise
                unanswered = True
                bound.warning("queue does not answer; the result waits", because=str(error))
                self._reporter.phase(Phase.SAVE)  # a beat: this worker is not wedged, whatever its GPU does meanwhile
                time.sleep(RETRY_S)
                continue
            bound.info("job completed" if because is None else "job marked failed", accepted=accepted)
            return accepted

    def _is_settled(self, job: Job, because: str | None) -> bool:
        """Whether the queue has this attempt's result already, by a commit whose answer was lost."""
        found = self._store.job(job.job_id)
        if because is None:
            ours = found.state in (State.COMPLETED, State.FINISHED)
        else:
            ours = found.state is State.FAILED and found.because == because
        return ours and found.attempt == job.attempt

    def _keep(self, job: Job, over: threading.Event) -> None:
        """Renew the lease and watch the claim. That the database does not answer is no reason to stop working yet."""
        bound = log.bind(worker=self._settings.name, job_id=job.job_id, attempt=job.attempt)
        incarnation = self._reporter.incarnation
        next_renewal_s = 0.0
        while not over.wait(OWNERSHIP_S):
            try:
                now_s = time.monotonic()
                if now_s >= next_renewal_s:
                    owned = self._renew(job)
                    # Set only now: a renewal that failed is due at the next look, or the lease might end first.
                    next_renewal_s = now_s + self._settings.heartbeat_s
                else:
                    owned = self._store.claims.owns(job.job_id, attempt=job.attempt, incarnation=incarnation)
            except DatabaseError as error:
                bound.warning("queue does not answer; working on", because=str(error))
                continue
            except Exception:  # noqa: BLE001 - told; without this thread nobody renews, nor sees that the job is lost
                bound.exception("unexpected error; working on")
                continue
            if not owned and not over.is_set():
                _stop_at_once(bound, _DISOWNED, self._code_of_end())

    def _code_of_end(self) -> int:
        """The exit code of a worker whose job was taken: that of the trip, where the queue tells it at once."""
        codes = [EXIT_DISOWNED]

        def ask() -> None:
            host, name, incarnation = self._settings.host, self._settings.name, self._reporter.incarnation
            with suppress(Exception):  # whatever it is, it must not keep this worker from its end
                trip = self._store.claims.retired_for(host=host, worker=name, incarnation=incarnation)
                if trip is not None:
                    codes.append(trip.exit_code)

        asking = threading.Thread(target=ask, name="gpuwarden-trip", daemon=True)
        asking.start()
        asking.join(TRIP_S)
        return codes[-1]

    def _renew(self, job: Job) -> bool:
        sent_s = clock.boottime_s()
        owned = self._store.claims.renew(
            job.job_id,
            attempt=job.attempt,
            incarnation=self._reporter.incarnation,
            now=self._store.now(),
            lease_s=self._settings.lease_s,
        )
        if owned:
            self._renewed_s = sent_s
        return owned and self._see(model=job.model or job.job_class)

    def _time(self, bound: structlog.typing.FilteringBoundLogger, over: threading.Event) -> None:
        """Stop the process when its lease has run out unrenewed. Asks no database, which could keep it waiting."""
        while not over.wait(OWNERSHIP_S):
            if clock.boottime_s() - self._renewed_s >= self._settings.lease_s and not over.is_set():
                _stop_at_once(bound, f"the lease could not be renewed for {self._settings.lease_s:g} s")

    def _see(self, *, model: str | None) -> bool:
        """Refresh the worker's row; false when this incarnation is over. A queue that does not answer says nothing."""
        with suppress(DatabaseError):
            return self._heartbeat(model=model)
        return True

    def _check_in(self) -> None:
        if not self._heartbeat(model=None):
            raise ReplacedError("the queue refuses the heartbeat of this incarnation")

    def _heartbeat(self, *, model: str | None) -> bool:
        return self._store.claims.heartbeat(
            host=self._settings.host,
            worker=self._settings.name,
            queue=self._settings.queue,
            incarnation=self._reporter.incarnation,
            model=model,
            now=self._store.now(),
            loaded=self._loaded(),
        )


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How an attempt ended: with a result, or why it failed."""

    failed: str | None = None
    result: Result = None


_DISOWNED: Final = "this worker no longer owns its job"


def _stop_at_once(bound: structlog.typing.FilteringBoundLogger, because: str, exit_code: int = EXIT_DISOWNED) -> None:
    """End this process without another instruction of the job: the job may belong to someone else now."""
    bound.error("stopping at once", because=because, exit_code=exit_code)
    os._exit(exit_code)


def _answer(ask: Callable[[], T], *, worker: str, stop: Stop, reporter: Reporter) -> T:
    """What the queue answers, asked again until it does or the worker is told to stop."""
    while True:
        stop.check()
        reporter.loop_seen()
        try:
            return ask()
        except NoAnswerError as error:
            log.warning("queue does not answer; asking again", worker=worker, because=str(error))
            time.sleep(RETRY_S)


def gpus_named(env: Mapping[str, str]) -> str:
    """The GPUs of this process as its environment tells them, comma separated; those it tells by number are unknown."""
    for name in ("GPUWARDEN_GPUS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if gpus := _gpus(env.get(name, "")):
            return ",".join(gpus)
    return ""


def _directory_told() -> Path | None:
    """Where state files go as far as anybody has said so, or set the host up for it."""
    told = "GPUWARDEN_DIR" in os.environ or (DEFAULT_DIR / "host").exists()
    return state_directory() if told else None


def _own_directory() -> Path:
    """A folder of this user's, for a host that nobody has set up; its key is the host's name."""
    room = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    directory = Path(room) / "gpuwarden"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = directory / "host"
        if not key.exists():
            atomic_write(key, socket.gethostname() + "\n", many_writers=True)  # other workers may start at this moment
    except OSError as error:
        raise BodyError(f"no place for state files ({error}): say where with --dir or $GPUWARDEN_DIR") from None
    log.warning(
        "this host is not set up: state files go to a folder of this user's, where no exporter looks unless it is told",
        dir=str(directory),
    )
    return directory


def _gpus(text: str) -> tuple[str, ...]:
    given = (each.strip() for each in text.split(","))
    return tuple(each for each in given if is_gpu(each))


def find_body(target: str) -> Body:
    """Import `module:function`; without a function, the one `gpuwarden.Queue` that the module has.

    Raises:
        BodyError: there is no such module or function.
    """
    module, _, name = target.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the installed command has its own folder there instead
    try:
        found = importlib.import_module(module)
        body: Body = getattr(found, name) if name else _only_queue(found)
    except (ImportError, AttributeError, ValueError) as error:
        raise BodyError(
            f"no job body at {target!r} ({error}): give module:function, importable from here or PYTHONPATH"
        ) from None
    if not callable(body):
        raise BodyError(f"{target!r} is {type(body).__name__}, not a function that loads a job and returns its work")
    return body


def _only_queue(module: ModuleType) -> Body:
    queues = {id(each): each for each in vars(module).values() if isinstance(each, Queue)}
    if len(queues) != 1:
        raise ValueError(f"it has {len(queues)} queues, and the one that is meant is not said")
    return queues.popitem()[1]


def command(argv: list[str]) -> int:
    """`gpuwarden worker`: runs one, or looks after those there are."""
    if argv[:1] and argv[0] in ("list", "lock", "unlock", "drain", "dead"):
        return workers.command(argv)
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.body = arguments.body or arguments.named_body
    if arguments.body is None:
        parser.error("say what runs a job: gpuwarden worker MODULE:FUNCTION")
    if not 0 < HEARTBEATS_PER_LEASE * arguments.heartbeat_s <= arguments.lease_s:
        parser.error(
            f"--lease-s must be {HEARTBEATS_PER_LEASE} times --heartbeat-s or more, and that above 0, or a lease ends "
            "for one renewal that was late or lost"
        )
    if arguments.heartbeat_s > HEARTBEAT_S:
        parser.error(
            f"--heartbeat-s must be {HEARTBEAT_S:g} or less: others take a worker that was not seen for {FRESH_S:g} s "
            "for gone, the dead-worker condition and the sweep of leases among them"
        )
    logs.configure(level=arguments.log_level)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, stop.on_signal)
    try:
        return _serve(arguments, stop)
    except WorkerStopping:
        log.info("stopped", worker=arguments.name)
        return 0
    except DisownedError as error:
        log.error("stopping", worker=arguments.name, because=str(error), exit_code=error.exit_code)  # noqa: TRY400 - its end is orderly
        return error.exit_code
    except DrainedError as error:
        log.info("drained: stopping", worker=arguments.name, because=str(error))
        return 0
    except ReplacedError as error:
        because = str(error)
        log.error("this worker is over: stopping", worker=arguments.name, because=because, exit_code=EXIT_DISOWNED)  # noqa: TRY400 - its end is orderly
        return EXIT_DISOWNED


def _serve(arguments: argparse.Namespace, stop: Stop) -> int:
    body = find_body(arguments.body)
    directory = arguments.dir or _own_directory()
    if arguments.store is None:
        arguments.store = body.url if isinstance(body, Queue) else default_store()
    settings = Settings(
        name=arguments.name,
        queue=arguments.queue or (body.name if isinstance(body, Queue) else "gpu"),
        host=host_key(directory),
        gpus=_gpus(arguments.gpus),
        lease_s=arguments.lease_s,
        heartbeat_s=arguments.heartbeat_s,
        jobs_max=arguments.jobs_max,
        logs=arguments.logs,
    )
    if settings.logs is not None:
        job_logs.check_folder(settings.logs)
    reporter = Reporter(
        directory,
        worker=settings.name,
        queue=settings.queue,
        subdirectory=arguments.subdirectory,
        heartbeat_s=settings.heartbeat_s,
    )
    with reporter:
        store = _answer(lambda: JobStore.open(arguments.store), worker=settings.name, stop=stop, reporter=reporter)
        if isinstance(body, Queue):
            body.serve_from(store)
        try:
            Worker(settings, store=store, reporter=reporter, body=body, stop=stop).run()
        finally:
            store.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    env = os.environ
    parser = argparse.ArgumentParser(
        prog="gpuwarden worker",
        description="Claim jobs from a queue and run them, one at a time.",
        formatter_class=Help,
        epilog="Exit codes: 0 told to stop; 1 could not start, or the queue would not take a result; "
        f"{EXIT_DISOWNED} the job was taken away (A11), or this incarnation of the worker is over; "
        f"{Trip.BUDGET.exit_code} it was taken for its budget, {Trip.STALL.exit_code} for a stall, "
        f"{Trip.HEALTH.exit_code} for its GPU's health (A18).",
    )
    parser.add_argument("body", metavar="BODY", nargs="?",
                        help="module:function that loads a job and returns its work, or module:queue, or the module "
                             "alone where it has one gpuwarden.Queue")  # fmt: skip
    parser.add_argument("--body", dest="named_body", metavar="BODY", help="the same, by name")
    parser.add_argument("--name", default="worker-0", help="this slot's name, unique on the host; it names the state "
                        "files")  # fmt: skip
    parser.add_argument("--queue", help="the queue to serve; that of the gpuwarden.Queue, else gpu")
    parser.add_argument("--store", default=env.get("GPUWARDEN_STORE"),
                        help="the queue's database URL, or $GPUWARDEN_STORE; that of the gpuwarden.Queue, else an "
                             "SQLite file of this user's")  # fmt: skip
    parser.add_argument("--dir", type=Path, default=_directory_told(),
                        help=f"where state files go, or $GPUWARDEN_DIR; {DEFAULT_DIR} where it is there, else a folder "
                             "of this user's")  # fmt: skip
    parser.add_argument("--subdirectory", default=env.get("GPUWARDEN_SUBDIRECTORY"),
                        help="the container's own folder in --dir; the worker's name when not given")  # fmt: skip
    parser.add_argument("--gpus", default=gpus_named(env), metavar="UUID,...",
                        help="its GPUs, so that what is in quarantine is not used; $GPUWARDEN_GPUS, else the UUIDs in "
                             "$CUDA_VISIBLE_DEVICES or $NVIDIA_VISIBLE_DEVICES")  # fmt: skip
    parser.add_argument("--lease-s", type=float, default=LEASE_S,
                        help="how long a claim holds without renewal, seconds; three heartbeats or more; a worker that "
                             "cannot renew for so long stops itself (PostgreSQL), or works on where nobody else can "
                             "reach the queue (SQLite); where hosts share the queue, two minutes or more longer than "
                             "--node-lost-after-s, or nothing is held for a host that is lost")  # fmt: skip
    parser.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_S,
                        help="how often the lease is renewed and the files refreshed, seconds; at most 10")  # fmt: skip
    parser.add_argument("--jobs-max", type=int, help="end after this many jobs; without end when not given")
    logs_told = env.get("GPUWARDEN_LOGS")
    parser.add_argument("--logs", type=Path, default=None if logs_told is None else Path(logs_told), metavar="DIR",
                        help="keep what each attempt prints in a file there, for `gpuwarden job logs`, or "
                             "$GPUWARDEN_LOGS; none is kept when not given")  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="verbosity")
    return parser
