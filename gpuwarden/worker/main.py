"""`gpuwarden worker run`: options and start of a worker."""

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from gpuwarden import gpu_names, logs
from gpuwarden.db.errors import NoAnswerError
from gpuwarden.db.running_up import QUEUE_ENV, RUNTIME_DIR_ENV
from gpuwarden.errors import GpuwardenError, WorkerStopping
from gpuwarden.fields import made_from
from gpuwarden.format import Help, Parser, error_text
from gpuwarden.gateway.client import GatewayStore, socket_in
from gpuwarden.job import EXIT_DISOWNED, EXIT_FATAL, FRESH_S, HEARTBEAT_S, LEASE_S, Condition
from gpuwarden.queue import DrainedError, ReplacedError, is_gpu
from gpuwarden.queue.open import created, default_store
from gpuwarden.reporter import DEFAULT_DIR, Reporter, host_key
from gpuwarden.supervisor.command_record import Record
from gpuwarden.supervisor.pool import become_pool, names
from gpuwarden.supervisor.runtime_dir import runtime_dir
from gpuwarden.tasks import Queue
from gpuwarden.worker import job_logs
from gpuwarden.worker.commands import Commands
from gpuwarden.worker.settings import Settings
from gpuwarden.worker.worker import Body, DisownedError, FatalError, Stop, Worker, answer

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

HEARTBEATS_PER_LEASE: Final = 3
"""Least heartbeats per lease, so that one renewal may fail."""

PROCESSES_MAX: Final = 256

NO_LOGS: Final = Path("none")
"""Value of `--logs` that keeps no output."""

GATEWAY: Final = "gateway"
"""Instead of a database URL: the socket in the worker's folder."""

log: Final = structlog.get_logger("worker")


class BodyError(GpuwardenError):
    """The handler cannot be imported."""


def command(argv: list[str]) -> int:
    """Run a worker.

    Returns:
        The exit code (A18).
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.handler = arguments.handler or arguments.named_handler
    if arguments.commands and arguments.handler is not None:
        parser.error("--commands runs commands only: leave out HANDLER, or start another worker for it")
    if arguments.handler is None and not arguments.commands:
        parser.error("missing HANDLER: gpuwarden worker run MODULE:FUNCTION, or --commands")
    if arguments.processes is None:  # a cancelled command ends its worker, which must start again
        arguments.processes = 1 if arguments.commands else 0
    arguments.name = arguments.name or ("worker" if arguments.processes > 1 else "worker-0")
    if not 0 < HEARTBEATS_PER_LEASE * arguments.heartbeat_s <= arguments.lease_s:
        parser.error(
            f"--lease-s must be {HEARTBEATS_PER_LEASE} times --heartbeat-s or more, and above 0, so that one late "
            "renewal does not end a lease"
        )
    if arguments.heartbeat_s > HEARTBEAT_S:
        parser.error(
            f"--heartbeat-s must be {HEARTBEAT_S:g} or less: a worker counts as gone after {FRESH_S:g} s "
            "without a heartbeat"
        )
    logs.configure(level=arguments.log_level)
    if arguments.processes:
        _run_pool(parser, arguments, argv)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, stop.on_signal)
    try:
        return _serve(arguments, stop)
    except WorkerStopping:
        log.info("stopped", worker=arguments.name)
        return 0
    except DisownedError as error:
        log.error("stopping", worker=arguments.name, reason=str(error), exit_code=error.exit_code)  # noqa: TRY400 - its end is orderly
        return error.exit_code
    except FatalError as error:
        log.error("stopping", worker=arguments.name, reason=str(error), exit_code=EXIT_FATAL)  # noqa: TRY400 - its end is orderly
        return EXIT_FATAL
    except DrainedError as error:
        log.info("drained: stopping", worker=arguments.name, reason=str(error))
        return 0
    except ReplacedError as error:
        reason = str(error)
        log.error("this worker is over: stopping", worker=arguments.name, reason=reason, exit_code=EXIT_DISOWNED)  # noqa: TRY400 - its end is orderly
        return EXIT_DISOWNED


def _run_pool(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: list[str]) -> NoReturn:
    gpus = _named(arguments.gpus or "")
    count: int = arguments.processes
    if gpus and len(gpus) != count:
        parser.error(f"--gpus names {len(gpus)} GPUs for {count} processes: name one for each")
    # A typing error ends all of them here.
    directory = _directory(arguments, None if arguments.commands else find_body(arguments.handler))
    become_pool(
        argv=[*argv, "--processes", "0", "--runtime-dir", str(directory)],
        names=names(arguments.name, count),
        directory=str(directory),
        subdirectory=arguments.subdirectory,
        gpus=gpus,
        log_level=arguments.log_level,
    )


def _serve(arguments: argparse.Namespace, stop: Stop) -> int:
    body = None if arguments.commands else find_body(arguments.handler)
    directory = _directory(arguments, body)
    settings = made_from(
        arguments,
        Settings,
        logs=_log_folder(arguments),
        queue=arguments.queue or (body.name if isinstance(body, Queue) else "gpu"),
        host=host_key(directory),
        gpus=tuple(filter(is_gpu, _named(gpus_named(os.environ) if arguments.gpus is None else arguments.gpus))),
    )
    folder = directory / (arguments.subdirectory or settings.name)
    commands = None if body is not None else Commands(folder, settings.name, lease_s=settings.lease_s)
    left = None if commands is None else commands.left_behind()
    while True:
        reporter = Reporter(
            directory,
            worker=settings.name,
            queue=settings.queue,
            subdirectory=arguments.subdirectory,
            heartbeat_s=settings.heartbeat_s,
            incarnation=None if left is None else left.incarnation,
        )
        with reporter:
            store = answer(
                lambda: _store(arguments.queue_db, folder, settings),
                worker=settings.name,
                stop=stop,
                reporter=reporter,
            )
            try:
                if commands is not None and left is not None and not _owns(store, left, settings, stop, reporter):
                    commands.discard()
                    left = None
                    continue  # as a new incarnation
                if isinstance(body, Queue):
                    body.serve_from(store)
                its = body or commands
                if its is None:
                    raise AssertionError("missing handler")
                Worker(settings, store=store, reporter=reporter, body=its, stop=stop).run()
            finally:
                store.close()
        return 0


def _owns(store: "JobStore | GatewayStore", left: Record, settings: Settings, stop: Stop, reporter: Reporter) -> bool:
    """Whether the earlier worker's incarnation still has the job of its command."""

    def ask() -> bool:
        return store.claims.owns(left.job_id, attempt=left.attempt, incarnation=left.incarnation)

    owned = answer(ask, worker=settings.name, stop=stop, reporter=reporter)
    log.info("earlier command found", worker=settings.name, job_id=left.job_id, owned=owned)
    return owned


def _log_folder(arguments: argparse.Namespace) -> Path | None:
    """The folder of job logs. Only a named one must be writable."""
    named: Path | None = arguments.logs
    if named == NO_LOGS or (named is None and arguments.queue_db == GATEWAY):  # a container's files end with it
        return None
    try:
        folder = named or job_logs.default_folder(arguments.queue_db)
        job_logs.check_folder(folder)
    except job_logs.JobLogError as error:
        if named is not None:
            raise
        log.warning("output of jobs is not kept", worker=arguments.name, reason=str(error))
        return None
    return folder


def _store(url: str, folder: Path, settings: Settings) -> "JobStore | GatewayStore":
    """The queue: through the gateway's socket in the worker's folder, or in a database.

    Raises:
        NoAnswerError: there is no gateway yet.
    """
    if url != GATEWAY:
        return created(url)
    if not socket_in(folder):
        raise NoAnswerError(f"no socket in {folder} yet: start `gpuwarden gateway host` on this host")
    return GatewayStore(folder, worker=settings.name, queue=settings.queue)


def _directory(arguments: argparse.Namespace, body: Body | None) -> Path:
    """The folder of state files, after the queue's address is known."""
    if arguments.queue_db is None:
        # Only a folder that somebody set up can have a gateway's socket.
        given = arguments.runtime_dir or Path(os.environ.get(RUNTIME_DIR_ENV, DEFAULT_DIR))
        own = arguments.subdirectory or arguments.name
        arguments.queue_db = (
            GATEWAY if socket_in(given / own) else body.url if isinstance(body, Queue) else default_store()
        )
    if arguments.queue_db == GATEWAY:
        return runtime_dir(arguments.runtime_dir, say=log.warning)
    return runtime_dir(arguments.runtime_dir, say=log.warning, queue_db=arguments.queue_db)


def _parser() -> argparse.ArgumentParser:
    env = os.environ
    parser = Parser(
        prog="gpuwarden worker run",
        description="Claim jobs from a queue and run them, one at a time.",
        formatter_class=Help,
        epilog="Exit codes: 0 stopped by a signal; 1 could not start, or the queue refused a result; "
        f"{EXIT_DISOWNED} the job has another owner, or another process replaced this worker. gpuwarden took the job: "
        f"{Condition.BUDGET.exit_code} over its time budget, {Condition.STALL.exit_code} stalled, "
        f"{Condition.HEALTH.exit_code} unhealthy. {EXIT_FATAL} the process cannot survive an error, and its job is "
        "queued again. With --commands, SIGTERM leaves the command running for the next worker of this name, "
        "which must start within --lease-s; Ctrl-C ends the command, and its job is queued again.",
    )
    parser.add_argument("handler", metavar="HANDLER", nargs="?",
                        help="module:function that loads a job and returns its work, module:queue, or a "
                             "module with one gpuwarden.Queue")  # fmt: skip
    parser.add_argument("--commands", action="store_true",
                        help="run jobs that are commands (`gpuwarden job submit -- CMD`). Everyone who may submit to "
                             "the queue can then run anything as this user")  # fmt: skip
    parser.add_argument("--handler", dest="named_handler", metavar="HANDLER", help="same as the argument HANDLER")
    parser.add_argument("--name", help="name of this slot and its state files, unique on the host; default: worker-0, "
                        "of several processes worker-0, worker-1 ...")  # fmt: skip
    parser.add_argument("--processes", type=_count, metavar="N",
                        help="run N workers, NAME-0 to NAME-(N-1), and start each again when it ends. SIGTERM stops "
                             "them; --gpus gives one GPU to each. Default: 1 with --commands, else none")  # fmt: skip
    parser.add_argument("--queue", help="queue to serve; default: the gpuwarden.Queue's, else gpu")
    parser.add_argument("--queue-db", default=env.get(QUEUE_ENV),
                        help="database URL of the queue, or `gateway` for the socket in the worker's folder; default: "
                             "$GPUWARDEN_QUEUE_DB, else that socket if it is there, else the gpuwarden.Queue's, else "
                             "the running `gpuwarden up`'s, else an SQLite file of this user")  # fmt: skip
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        help="folder of state files; default: $GPUWARDEN_RUNTIME_DIR, else that of this user's running `gpuwarden up` "
        f"if it has the same queue, else {DEFAULT_DIR} if it is set up, else a folder of this user",
    )
    parser.add_argument("--subdirectory", default=env.get("GPUWARDEN_SUBDIRECTORY"),
                        help="the container's folder in --runtime-dir; default: the worker's name")  # fmt: skip
    parser.add_argument("--gpus", metavar="GPU,...",
                        help="UUIDs of its GPUs, for quarantines; default: $GPUWARDEN_GPUS, else the UUIDs in "
                             "$CUDA_VISIBLE_DEVICES or $NVIDIA_VISIBLE_DEVICES. With --processes the UUID or index of "
                             "one GPU for each")  # fmt: skip
    parser.add_argument("--lease-s", type=float, default=LEASE_S,
                        help="seconds until a claim ends without renewal, at least three heartbeats. On PostgreSQL the "
                             "worker stops after this time without renewal. With several hosts keep it 120 s above "
                             "--host-lost-after-s, so that jobs of a lost host are held")  # fmt: skip
    parser.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_S,
                        help="seconds between renewals of the lease and the files, at most 10")  # fmt: skip
    parser.add_argument("--jobs-max", type=int, help="stop after this many jobs; default: no limit")
    log_dir = env.get("GPUWARDEN_JOB_LOG_DIR")
    parser.add_argument("--logs", type=Path, default=None if log_dir is None else Path(log_dir), metavar="DIR",
                        help="folder for the output of each attempt, see `gpuwarden job logs`, or none; default: "
                             "$GPUWARDEN_JOB_LOG_DIR, else a folder of this user for the queue")  # fmt: skip
    parser.add_argument("--logs-max", type=_jobs, default=job_logs.JOBS_MAX, metavar="JOBS",
                        help="number of jobs whose output is kept, the newest")  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="verbosity")
    return parser


def gpus_named(env: Mapping[str, str]) -> str:
    """UUIDs of this process's GPUs from its environment, comma-separated. Index numbers are ignored."""
    return ",".join(filter(is_gpu, gpu_names.of_process(env) or ()))


def _jobs(given: str) -> int:
    if not given.isdecimal() or not int(given):
        raise argparse.ArgumentTypeError(f"invalid number {given!r}: use a whole number, 1 or more")
    return int(given)


def _count(given: str) -> int:
    if not given.isdecimal() or int(given) > PROCESSES_MAX:
        raise argparse.ArgumentTypeError(f"invalid number {given!r}: expected 1 to {PROCESSES_MAX}")
    return int(given)


def _named(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def find_body(target: str) -> Body:
    """Import `module:function`, or the only `gpuwarden.Queue` of a module.

    Raises:
        BodyError: it does not exist or is not callable.
    """
    module, _, name = target.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the installed command has its own folder there
    try:
        found = importlib.import_module(module)
        body: Body = getattr(found, name) if name else _only_queue(found)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise BodyError(
            f"no handler at {target!r} ({error}): give module:function, importable from here or PYTHONPATH"
        ) from None
    except SyntaxError as error:
        raise BodyError(f"cannot import {module!r}: {error.msg} in {error.filename}, line {error.lineno}") from None
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise BodyError(f"cannot import {module!r}: {error_text(error)}, in {at.filename}, line {at.lineno}") from error
    if not callable(body):
        raise BodyError(f"{target!r} is {type(body).__name__}, not a function that loads a job and returns its work")
    return body


def _only_queue(module: ModuleType) -> Body:
    queues = {id(each): each for each in vars(module).values() if isinstance(each, Queue)}
    if len(queues) != 1:
        raise ValueError(f"it has {len(queues)} queues: name one")
    return queues.popitem()[1]
