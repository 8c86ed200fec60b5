"""`gpuwarden worker run`: its options, and the worker that they ask for."""

import argparse
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

import structlog

from gpuwarden import logs
from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from
from gpuwarden.files import atomic_write
from gpuwarden.format import Help
from gpuwarden.job import EXIT_DISOWNED, FRESH_S, HEARTBEAT_S, LEASE_S, Condition
from gpuwarden.queue import DrainedError, JobStore, ReplacedError, is_gpu
from gpuwarden.queue.open import default_store
from gpuwarden.reporter import DEFAULT_DIR, Reporter, host_key, state_directory
from gpuwarden.tasks import Queue
from gpuwarden.worker import job_logs
from gpuwarden.worker.settings import Settings
from gpuwarden.worker.worker import Body, DisownedError, Stop, Worker, WorkerStopping, answer

HEARTBEATS_PER_LEASE: Final = 3
"""How many heartbeats a lease holds at least: a renewal may fail, and be made good, before it ends."""

log: Final = structlog.get_logger("worker")


class BodyError(GpuwardenError):
    """The job body cannot be found."""


def command(argv: list[str]) -> int:
    """`gpuwarden worker run`: run one.

    Returns:
        The exit code (A18).
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.handler = arguments.handler or arguments.named_handler
    if arguments.handler is None:
        parser.error("missing HANDLER: gpuwarden worker run MODULE:FUNCTION")
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
    body = find_body(arguments.handler)
    directory = arguments.runtime_dir or _own_directory()
    if arguments.queue_db is None:
        arguments.queue_db = body.url if isinstance(body, Queue) else default_store()
    settings = made_from(
        arguments,
        Settings,
        queue=arguments.queue or (body.name if isinstance(body, Queue) else "gpu"),
        host=host_key(directory),
        gpus=_gpus(arguments.gpus),
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
        store = answer(lambda: JobStore.open(arguments.queue_db), worker=settings.name, stop=stop, reporter=reporter)
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
        prog="gpuwarden worker run",
        description="Claim jobs from a queue and run them, one at a time.",
        formatter_class=Help,
        epilog="Exit codes: 0 told to stop; 1 could not start, or the queue would not take a result; "
        f"{EXIT_DISOWNED} the job was taken away (A11), or this incarnation of the worker is over; "
        f"{Condition.BUDGET.exit_code} it was taken for its budget, {Condition.STALL.exit_code} for a stall, "
        f"{Condition.HEALTH.exit_code} for its GPU's health (A18).",
    )
    parser.add_argument("handler", metavar="HANDLER", nargs="?",
                        help="module:function that loads a job and returns its work, or module:queue, or the module "
                             "alone where it has one gpuwarden.Queue")  # fmt: skip
    parser.add_argument("--handler", dest="named_handler", metavar="HANDLER", help="the same, by name")
    parser.add_argument("--name", default="worker-0", help="this slot's name, unique on the host; it names the state "
                        "files")  # fmt: skip
    parser.add_argument("--queue", help="the queue to serve; that of the gpuwarden.Queue, else gpu")
    parser.add_argument("--queue-db", default=env.get("GPUWARDEN_QUEUE_DB"),
                        help="the queue's database URL, or $GPUWARDEN_QUEUE_DB; that of the gpuwarden.Queue, else an "
                             "SQLite file of this user's")  # fmt: skip
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        default=_directory_told(),
        help=f"where state files go, or $GPUWARDEN_RUNTIME_DIR; {DEFAULT_DIR} if it exists, else a folder "
        "of this user's",
    )
    parser.add_argument("--subdirectory", default=env.get("GPUWARDEN_SUBDIRECTORY"),
                        help="the container's folder in --runtime-dir; default: the worker's name")  # fmt: skip
    parser.add_argument("--gpus", default=gpus_named(env), metavar="UUID,...",
                        help="its GPUs, so that what is in quarantine is not used; $GPUWARDEN_GPUS, else the UUIDs in "
                             "$CUDA_VISIBLE_DEVICES or $NVIDIA_VISIBLE_DEVICES")  # fmt: skip
    parser.add_argument("--lease-s", type=float, default=LEASE_S,
                        help="how long a claim holds without renewal, seconds; three heartbeats or more; a worker that "
                             "cannot renew for so long stops itself (PostgreSQL), or works on where nobody else can "
                             "reach the queue (SQLite); where hosts share the queue, two minutes or more longer than "
                             "--host-lost-after-s, or nothing is held for a host that is lost")  # fmt: skip
    parser.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_S,
                        help="how often the lease is renewed and the files refreshed, seconds; at most 10")  # fmt: skip
    parser.add_argument("--jobs-max", type=int, help="end after this many jobs; without end when not given")
    logs_told = env.get("GPUWARDEN_JOB_LOG_DIR")
    parser.add_argument("--logs", type=Path, default=None if logs_told is None else Path(logs_told), metavar="DIR",
                        help="keep what each attempt prints in a file there, for `gpuwarden job logs`, or "
                             "$GPUWARDEN_JOB_LOG_DIR; none is kept when not given")  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="verbosity")
    return parser


def gpus_named(env: Mapping[str, str]) -> str:
    """The GPUs of this process as its environment tells them, comma separated; those it tells by number are unknown."""
    for name in ("GPUWARDEN_GPUS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if gpus := _gpus(env.get(name, "")):
            return ",".join(gpus)
    return ""


def _directory_told() -> Path | None:
    """Where state files go as far as anybody has said so, or set the host up for it."""
    told = "GPUWARDEN_RUNTIME_DIR" in os.environ or (DEFAULT_DIR / "host").exists()
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
        raise BodyError(
            f"no place for state files ({error}): say where with --runtime-dir or $GPUWARDEN_RUNTIME_DIR"
        ) from None
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
            f"no handler at {target!r} ({error}): give module:function, importable from here or PYTHONPATH"
        ) from None
    if not callable(body):
        raise BodyError(f"{target!r} is {type(body).__name__}, not a function that loads a job and returns its work")
    return body


def _only_queue(module: ModuleType) -> Body:
    queues = {id(each): each for each in vars(module).values() if isinstance(each, Queue)}
    if len(queues) != 1:
        raise ValueError(f"it has {len(queues)} queues, and the one that is meant is not said")
    return queues.popitem()[1]
