"""`gpuwarden worker run|list|lock|unlock|drain`: run a worker; list, lock, unlock or drain workers."""

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from gpuwarden.cli.acts import add_act, add_json, add_reason, runtime_dir
from gpuwarden.format import Parser, format_duration, operator_name, show, show_json, table
from gpuwarden.queue import WorkerRow
from gpuwarden.queue.open import current, existing
from gpuwarden.reporter import host_key

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

_Act = Callable[["JobStore", argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """Run a subcommand; `run` has its own parser."""
    if argv[:1] == ["run"]:
        from gpuwarden.cli.main import load  # noqa: PLC0415 - it imports this module

        return load("gpuwarden.worker.main:command")(argv[1:])
    arguments = _parser().parse_args(argv)
    asks = arguments.act is _list
    with closing((existing if asks else current)(arguments.queue_db)) as store:
        act: _Act = arguments.act
        return act(store, arguments)


def _list(store: "JobStore", arguments: argparse.Namespace) -> int:
    now = store.now()
    if arguments.dead:
        return _list_dead(store, arguments)
    found = [
        each
        for each in store.admin.workers(now=now)
        if arguments.host in (None, each.host) and arguments.queue in (None, each.queue)
    ]
    if arguments.json:
        for each in found:
            show_json(asdict(each))
        return 0
    head, *lines = table(
        ("WORKER", "HOST", "QUEUE", "STATE", "JOB", "SEEN", "MODEL", "GPUS"), [_row(each, now) for each in found]
    )
    if not found:
        show("no worker is listed: none has registered, or none matches", file=sys.stderr)
        return 0
    show(head)
    for each, line in zip(found, lines, strict=True):
        show(line)
        if each.locked_at is not None:
            reason = f": {each.locked_reason}" if each.locked_reason else ""
            show(f"    locked {format_duration(now - each.locked_at)} ago by {each.locked_by or ''}{reason}")
        elif each.unlocked_at is not None:
            show(f"    unlocked {format_duration(now - each.unlocked_at)} ago by {each.unlocked_by or ''}")
    return 0


def _row(worker: WorkerRow, now: float) -> tuple[str, ...]:
    age = format_duration(now - worker.last_seen_at)
    return (
        worker.worker, worker.host, worker.queue, state_of(worker),
        "-" if worker.job_id is None else str(worker.job_id),
        age if worker.alive else f"({age})", _model(worker), ", ".join(worker.gpus) or "-",
    )  # fmt: skip


def _model(worker: WorkerRow) -> str:
    """The current model, or in brackets a model that is only loaded."""
    return worker.current_model or (f"({worker.loaded_model})" if worker.loaded_model else "-")


def state_of(worker: WorkerRow) -> str:
    """Locked, gone, draining, idle or busy."""
    if worker.locked_at is not None:
        return "locked"
    if not worker.alive:
        return "gone"
    if worker.draining:
        return "draining"
    return "idle" if worker.job_id is None else "busy"


def _lock(store: "JobStore", arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    locked = store.admin.lock(
        host=host, worker=arguments.worker, who=operator_name(), reason=arguments.reason, now=store.now()
    )
    if not locked:
        return _unknown(arguments.worker, host)
    show(f"{arguments.worker} on {host} is locked: it finishes its job and claims no other")
    return 0


def _unlock(store: "JobStore", arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    if store.admin.unlock(host=host, worker=arguments.worker, who=operator_name(), now=store.now()):
        show(f"{arguments.worker} on {host} is unlocked: it claims jobs again")
        return 0
    show(f"gpuwarden worker: {arguments.worker} on {host} is not locked", file=sys.stderr)
    return 1


def _drain(store: "JobStore", arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    if not store.admin.drain(host=host, worker=arguments.worker):
        return _unknown(arguments.worker, host)
    show(f"{arguments.worker} on {host} drains: it finishes its job, then ends")
    return 0


def _list_dead(store: "JobStore", arguments: argparse.Namespace) -> int:
    now = store.now()
    for each in store.fencing.dead_workers(now=now, host=arguments.host, queue=arguments.queue):
        if arguments.json:
            show_json(asdict(each))
        else:
            since = format_duration(now - each.since)
            show(f"{each.worker} on {each.host}, queue {each.queue}: dead for "
                  f"{since}, {each.reason}")  # fmt: skip
    return 0


def _host(arguments: argparse.Namespace) -> str:
    host: str = arguments.host or host_key(runtime_dir())
    return host


def _unknown(worker: str, host: str) -> int:
    show(f"gpuwarden worker: no worker {worker!r} on {host}: see `gpuwarden worker list`", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpuwarden worker", description="List, lock and drain workers.")
    acts = parser.add_subparsers(required=True)
    acts.add_parser("run", add_help=False, help="claim jobs and run them; see `run --help`")
    listing = add_act(acts, "list", _list, "list workers with state and job")
    listing.add_argument("--host", help="only this host")
    listing.add_argument("--queue", help="only this queue")
    listing.add_argument("--dead", action="store_true", help="only workers that were found dead and have not come back")
    add_json(listing)
    mine = "host of the worker; default: this host"
    lock = add_act(acts, "lock", _lock, "keep a worker from claiming until it is unlocked")
    lock.add_argument("--host", help=mine)
    lock.add_argument("worker", metavar="WORKER", help="name of the worker")
    add_reason(lock)
    unlock = add_act(acts, "unlock", _unlock, "let a worker claim again")
    unlock.add_argument("--host", help=mine)
    unlock.add_argument("worker", metavar="WORKER", help="name of the worker")
    drain = add_act(acts, "drain", _drain, "stop a worker after its current job")
    drain.add_argument("--host", help=mine)
    drain.add_argument("worker", metavar="WORKER", help="name of the worker")
    return parser
