"""`gpuwarden worker run|list|lock|unlock|drain`: run a worker; list, lock, unlock or drain workers."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

from gpuwarden.cli.acts import add_act, add_because, add_json
from gpuwarden.format import format_duration, operator_name, printable
from gpuwarden.queue import JobStore, WorkerRow
from gpuwarden.queue.open import current, existing
from gpuwarden.reporter import host_key, state_directory

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """Run a subcommand; `run` has its own parser."""
    if argv[:1] == ["run"]:
        from gpuwarden.worker import main  # noqa: PLC0415 - other commands need no worker

        return main.command(argv[1:])
    arguments = _parser().parse_args(argv)
    asks = arguments.act is _list
    with closing((existing if asks else current)(arguments.queue_db)) as store:
        act: _Act = arguments.act
        return act(store, arguments)


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    now = store.now()
    if arguments.dead:
        return _list_dead(store, arguments)
    found = [
        each
        for each in store.admin.workers(now=now)
        if arguments.host in (None, each.host) and arguments.queue in (None, each.queue)
    ]
    if not arguments.json and found:
        print(f"{'WORKER':20} {'HOST':16} {'QUEUE':12} {'STATE':10} {'JOB':>6} {'SEEN':11} {'MODEL':16} GPUS")
    for each in found:
        if arguments.json:
            print(json.dumps(asdict(each)))
            continue
        job = "-" if each.job_id is None else str(each.job_id)
        age = format_duration(now - each.last_seen_at)
        seen = age if each.alive else f"({age})"
        print(
            f"{printable(each.worker):20} {printable(each.host):16} {printable(each.queue):12} "
            f"{_state(each):10} {job:>6} {seen:11} {printable(_model(each)):16} {', '.join(each.gpus) or '-'}"
        )
        if each.locked_at is not None:
            because = f": {printable(each.locked_because)}" if each.locked_because else ""
            print(
                f"    locked {format_duration(now - each.locked_at)} ago by {printable(each.locked_by or '')}{because}"
            )
        elif each.unlocked_at is not None:
            print(f"    unlocked {format_duration(now - each.unlocked_at)} ago by {printable(each.unlocked_by or '')}")
    return 0


def _model(worker: WorkerRow) -> str:
    """The current model, or in brackets a model that is only loaded."""
    return worker.current_model or (f"({worker.loaded_model})" if worker.loaded_model else "-")


def _state(worker: WorkerRow) -> str:
    if worker.locked_at is not None:
        return "locked"
    if not worker.alive:
        return "gone"
    if worker.draining:
        return "draining"
    return "idle" if worker.job_id is None else "busy"


def _lock(store: JobStore, arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    locked = store.admin.lock(
        host=host, worker=arguments.worker, who=operator_name(), because=arguments.reason, now=store.now()
    )
    return 0 if locked else _unknown(arguments.worker, host)


def _unlock(store: JobStore, arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    if store.admin.unlock(host=host, worker=arguments.worker, who=operator_name(), now=store.now()):
        return 0
    print(f"gpuwarden worker: {arguments.worker} on {host} is not locked", file=sys.stderr)
    return 1


def _drain(store: JobStore, arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    return 0 if store.admin.drain(host=host, worker=arguments.worker) else _unknown(arguments.worker, host)


def _list_dead(store: JobStore, arguments: argparse.Namespace) -> int:
    now = store.now()
    for each in store.fencing.dead_workers(now=now, host=arguments.host, queue=arguments.queue):
        if arguments.json:
            print(json.dumps(asdict(each)))
        else:
            since = format_duration(now - each.since)
            print(f"{printable(each.worker)} on {printable(each.host)}, queue {printable(each.queue)}: dead for "
                  f"{since}, {printable(each.because)}")  # fmt: skip
    return 0


def _host(arguments: argparse.Namespace) -> str:
    host: str = arguments.host or host_key(state_directory())
    return host


def _unknown(worker: str, host: str) -> int:
    print(f"gpuwarden worker: no worker {worker!r} on {host}: see `gpuwarden worker list`", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden worker", description="List, lock and drain workers.")
    acts = parser.add_subparsers(required=True, metavar="ACT")
    acts.add_parser("run", add_help=False, help="claim jobs and run them; see `run --help`")
    listing = add_act(acts, "list", _list, "list workers with state and job")
    listing.add_argument("--host", help="only this host")
    listing.add_argument("--queue", help="only this queue")
    listing.add_argument("--dead", action="store_true", help="only workers that were found dead and have not come back")
    add_json(listing)
    mine = "host of the worker; default: this host"
    lock = add_act(acts, "lock", _lock, "keep a worker from claiming until it is unlocked")
    lock.add_argument("--host", help=mine)
    lock.add_argument("worker", metavar="WORKER")
    add_because(lock)
    unlock = add_act(acts, "unlock", _unlock, "let a worker claim again")
    unlock.add_argument("--host", help=mine)
    unlock.add_argument("worker", metavar="WORKER")
    drain = add_act(acts, "drain", _drain, "stop a worker after its current job")
    drain.add_argument("--host", help=mine)
    drain.add_argument("worker", metavar="WORKER")
    return parser
