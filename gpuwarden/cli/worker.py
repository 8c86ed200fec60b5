"""`gpuwarden worker run|list|lock|unlock|drain`: run a worker; list, lock, unlock or drain workers."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

from gpuwarden.cli.acts import add_act, add_because, add_json
from gpuwarden.format import ago, plain, who
from gpuwarden.queue import JobStore, WorkerRow
from gpuwarden.queue.open import current, existing
from gpuwarden.reporter import host_key, state_directory

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden worker`. `run` has a parser of its own."""
    if argv[:1] == ["run"]:
        from gpuwarden.worker import main  # noqa: PLC0415 - the other commands need no worker

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
        seen = ago(now - each.last_seen_at) if each.alive else f"({ago(now - each.last_seen_at)})"
        print(
            f"{plain(each.worker):20} {plain(each.host):16} {plain(each.queue):12} {_state(each):10} {job:>6} "
            f"{seen:11} {plain(_model(each)):16} {', '.join(each.gpus) or '-'}"
        )
        if each.locked_at is not None:
            because = f": {plain(each.locked_because)}" if each.locked_because else ""
            print(f"    locked {ago(now - each.locked_at)} ago by {plain(each.locked_by or '')}{because}")
        elif each.unlocked_at is not None:
            print(f"    unlocked {ago(now - each.unlocked_at)} ago by {plain(each.unlocked_by or '')}")
    return 0


def _model(worker: WorkerRow) -> str:
    """What it works with; in brackets, what it only keeps loaded."""
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
    locked = store.admin.lock(host=host, worker=arguments.worker, who=who(), because=arguments.reason, now=store.now())
    return 0 if locked else _unknown(arguments.worker, host)


def _unlock(store: JobStore, arguments: argparse.Namespace) -> int:
    host = _host(arguments)
    if store.admin.unlock(host=host, worker=arguments.worker, who=who(), now=store.now()):
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
            since = ago(now - each.since)
            print(f"{plain(each.worker)} on {plain(each.host)}, queue {plain(each.queue)}: dead for {since}, "
                  f"{plain(each.because)}")  # fmt: skip
    return 0


def _host(arguments: argparse.Namespace) -> str:
    host: str = arguments.host or host_key(state_directory())
    return host


def _unknown(worker: str, host: str) -> int:
    print(
        f"gpuwarden worker: no worker {worker!r} of {host} has registered: see `gpuwarden worker list`", file=sys.stderr
    )
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden worker", description="Who serves the queues, and a hand on them.")
    acts = parser.add_subparsers(required=True, metavar="ACT")
    acts.add_parser("run", add_help=False, help="claim jobs and run them, one at a time; `run --help` has its options")
    listing = add_act(acts, "list", _list, "list workers, what they run, and whether they are alive")
    listing.add_argument("--host", help="only workers of this host")
    listing.add_argument("--queue", help="only workers of this queue")
    listing.add_argument("--dead", action="store_true", help="only workers that were found dead and have not come back")
    add_json(listing)
    mine = "the worker's host; this one when not given"
    lock = add_act(acts, "lock", _lock, "have a worker claim nothing until it is unlocked")
    lock.add_argument("--host", help=mine)
    lock.add_argument("worker", metavar="WORKER")
    add_because(lock)
    unlock = add_act(acts, "unlock", _unlock, "let a worker claim again")
    unlock.add_argument("--host", help=mine)
    unlock.add_argument("worker", metavar="WORKER")
    drain = add_act(acts, "drain", _drain, "have a worker end once it has finished what it runs")
    drain.add_argument("--host", help=mine)
    drain.add_argument("worker", metavar="WORKER")
    return parser
