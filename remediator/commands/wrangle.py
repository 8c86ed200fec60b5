"""`gpuwarden wrangle`: what is found of runs whose items fail, and of the workers that fail them; a person has it done.

What an executor does by itself where it is armed (`remediator.remedies.wrangle`): `list` says what would be done, and
`do` does it for one run, decided anew in the transaction that acts, and in the name of the person who said so.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Final

from gpuwarden.cli.acts import add_act, add_json
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import plain, stamp, who
from gpuwarden.queue import JobStore
from gpuwarden.queue.items.tally import RunTally
from gpuwarden.queue.open import current, existing
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.plan import BlockRun, LockWorker, Migrate, Wait
from remediator.remedies.wrangle import ACTIVATION, MIGRATIONS_MAX, PATIENCE_S, Leave, Rules, Verdict, judge

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden wrangle`."""
    arguments = _parser().parse_args(argv)
    act: _Act = arguments.act
    with closing((existing if act is _list else current)(arguments.store)) as store:
        return act(store, arguments)


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    rules = _rules(arguments)
    for run_id in store.item_failures.wrangled_runs():
        run = store.item_failures.tally(run_id, now=store.now())
        if run is None:
            continue  # taken away since it was listed
        verdict = judge(run, rules)
        if arguments.json:
            told = {"run": run_id, "verdict": type(verdict).__name__.lower(), **asdict(verdict), "tally": asdict(run)}
            print(json.dumps(told))
        else:
            besides = f"{_tell(verdict)}{_cap(run, verdict, rules)}"
            print(f"{plain(run_id)}: {_would(verdict)}: {plain(verdict.message)}{besides}")
    return 0


def _do(store: JobStore, arguments: argparse.Namespace) -> int:
    rules, run_id = _rules(arguments), arguments.run
    run = store.item_failures.tally(run_id, now=store.now())
    if run is None:
        raise GpuwardenError(f"the queue has no run {run_id!r}: `gpuwarden run list` names them")
    verdict = judge(run, rules)
    if isinstance(verdict, Leave | Wait):
        print(f"gpuwarden wrangle: nothing is done: {plain(verdict.message)}", file=sys.stderr)
        return 1
    if not BuiltinQueue(store).wrangle(run_id, verdict, rules=rules, who=who(), now=store.now()):
        print("gpuwarden wrangle: nothing is done: it has just changed; look again", file=sys.stderr)
        return 1
    print(f"{plain(run_id)}: {_DID[type(verdict)]}: {plain(verdict.message)}{_tell(verdict)}")
    return 0


def _ask(store: JobStore, arguments: argparse.Namespace) -> int:
    if not store.item_failures.ask_wrangling(arguments.run, wrangled=arguments.wrangled):
        raise GpuwardenError(f"the queue has no run {arguments.run!r}: `gpuwarden run list` names them")
    return 0


def _forgive(store: JobStore, arguments: argparse.Namespace) -> int:
    by, now = who(), store.now()
    count = store.item_failures.forgive_run(arguments.run, who=by, because=f"forgiven by {by}, {stamp(now)}", now=now)
    print(f"{plain(arguments.run)}: {count} jobs unblocked, its failures forgotten, its workers free to claim it")
    return 0


def _would(verdict: Verdict) -> str:
    match verdict:
        case Wait():
            return "waits"
        case Leave():
            return "nothing to do"
    return f"would {plain(verdict.deed)}"


_DID: Final = {LockWorker: "worker locked", Migrate: "moved", BlockRun: "blocked"}


def _tell(verdict: Verdict) -> str:
    return f"; the {verdict.tell} is to be told" if isinstance(verdict, LockWorker | BlockRun) else ""


def _cap(run: RunTally, verdict: Verdict, rules: Rules) -> str:
    """That a run has been moved as often as it may be, where the verdict does not say so itself."""
    if run.migrations < max(rules.migrations_max, 1) or not isinstance(verdict, Leave | Wait):
        return ""
    return f"; moved {run.migrations} times of at most {rules.migrations_max}: instead of the next move it is blocked"


def _rules(arguments: argparse.Namespace) -> Rules:
    return Rules(
        activation=arguments.activation, migrations_max=arguments.migrations_max, patience_s=arguments.patience_s
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden wrangle", description="Is it the worker that is faulty, or the job? See docs/wrangling.md."
    )
    acts = parser.add_subparsers(required=True, metavar="ACT")
    listing = add_act(acts, "list", _list, "what is found of each run that asked for it; nothing is done")
    add_json(listing, "one JSON object a line, with the counts")
    do = add_act(acts, "do", _do, "do what is found for one run, if it is still so")
    for each in (listing, do):
        _add_rules(each)
    do.add_argument("run", metavar="RUN")
    for name, wrangled, what in (("on", True, "have a run judged"), ("off", False, "have a run judged no more")):
        asking = add_act(acts, name, _ask, what)
        asking.set_defaults(wrangled=wrangled)
        asking.add_argument("run", metavar="RUN")
    forgive = add_act(
        acts,
        "forgive",
        _forgive,
        "undo what was done to a run: all its blocked jobs may be claimed, by every worker, and its failures count no "
        "more; a locked worker is unlocked with `gpuwarden worker unlock`",
    )
    forgive.add_argument("run", metavar="RUN")
    return parser


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activation", type=_count, default=ACTIVATION, metavar="N",
        help="so many items of a run may fail on a worker before anything is judged (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--migrations-max", type=_count, default=MIGRATIONS_MAX, metavar="N",
        help="so often a run is moved to another worker before it is blocked (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--patience-s", type=_seconds, default=PATIENCE_S, metavar="S",
        help="who has run it for so long and neither finished nor failed an item does not fail, seconds "
        "(default: %(default)s)",
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} will not do: a whole number from 0 to 999999")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 604800:
        raise argparse.ArgumentTypeError(f"{text!r} will not do: seconds, from 0 to 604800")
    return value
