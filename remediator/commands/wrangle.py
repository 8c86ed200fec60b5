"""`gpuwarden wrangle`: find faulty workers and jobs from failed items, and act on them by command.

`list` shows what an armed executor would do (`remediator.remedies.wrangle`). `apply` does it for one run. The
transaction that acts decides again, in the operator's name.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Final

from gpuwarden.cli.acts import add_act, add_json
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, format_utc_time, operator_name, show, show_json
from gpuwarden.queue import JobStore
from gpuwarden.queue.items.tally import RunTally
from gpuwarden.queue.open import current, existing
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.plan import BlockRun, LockWorker, Migrate, Wait
from remediator.remedies.wrangle import ACTIVATION, MIGRATIONS_MAX, TIMEOUT_S, NoAction, Rules, Verdict, classify

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden wrangle`."""
    arguments = _parser().parse_args(argv)
    act: _Act = arguments.act
    with closing((existing if act is _list else current)(arguments.queue_db)) as store:
        return act(store, arguments)


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    rules = _rules(arguments)
    for run_id in store.item_failures.wrangled_runs():
        run = store.item_failures.tally(run_id, now=store.now())
        if run is None:
            continue  # deleted since the listing
        verdict = classify(run, rules)
        if arguments.json:
            row = {"run": run_id, "verdict": type(verdict).__name__.lower(), **asdict(verdict), "tally": asdict(run)}
            show_json(row)
        else:
            notes = f"{_whom_to_inform(verdict)}{_cap(run, verdict, rules)}"
            show(f"{run_id}: {_describe_verdict(verdict)}: {verdict.message}{notes}")
    return 0


def _apply(store: JobStore, arguments: argparse.Namespace) -> int:
    rules, run_id = _rules(arguments), arguments.run
    run = store.item_failures.tally(run_id, now=store.now())
    if run is None:
        raise GpuwardenError(f"no run {run_id!r} in the queue: see `gpuwarden runs list`")
    verdict = classify(run, rules)
    if isinstance(verdict, NoAction | Wait):
        show(f"gpuwarden wrangle: no action: {verdict.message}", file=sys.stderr)
        return 1
    if not BuiltinQueue(store).wrangle(run_id, verdict, rules=rules, who=operator_name(), now=store.now()):
        show("gpuwarden wrangle: no action: the run has changed; retry", file=sys.stderr)
        return 1
    show(f"{run_id}: {_DID[type(verdict)]}: {verdict.message}{_whom_to_inform(verdict)}")
    return 0


def _set_wrangled(store: JobStore, arguments: argparse.Namespace) -> int:
    if not store.item_failures.ask_wrangling(arguments.run, wrangled=arguments.wrangled):
        raise GpuwardenError(f"no run {arguments.run!r} in the queue: see `gpuwarden runs list`")
    return 0


def _clear_failures(store: JobStore, arguments: argparse.Namespace) -> int:
    by, now = operator_name(), store.now()
    count = store.item_failures.forgive_run(
        arguments.run, who=by, reason=f"forgiven by {by}, {format_utc_time(now)}", now=now
    )
    show(f"{arguments.run}: {count} jobs unblocked, failures cleared, workers may claim it again")
    return 0


def _describe_verdict(verdict: Verdict) -> str:
    match verdict:
        case Wait():
            return "waits"
        case NoAction():
            return "nothing to do"
    return f"would {verdict.deed}"


_DID: Final = {LockWorker: "worker locked", Migrate: "moved", BlockRun: "blocked"}


def _whom_to_inform(verdict: Verdict) -> str:
    return f"; inform the {verdict.tell}" if isinstance(verdict, LockWorker | BlockRun) else ""


def _cap(run: RunTally, verdict: Verdict, rules: Rules) -> str:
    """A note that the run has used its moves, unless the verdict says so."""
    if run.migrations < max(rules.migrations_max, 1) or not isinstance(verdict, NoAction | Wait):
        return ""
    return f"; moved {run.migrations} of {rules.migrations_max} times: it is blocked next"


def _rules(arguments: argparse.Namespace) -> Rules:
    return Rules(
        activation=arguments.activation, migrations_max=arguments.migrations_max, timeout_s=arguments.timeout_s
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden wrangle",
        description="Find faulty workers and jobs from failed items. See docs/how-to/faulty-workers.md.",
    )
    acts = parser.add_subparsers(required=True)
    listing = add_act(acts, "list", _list, "list the verdict for each wrangled run")
    add_json(listing, "print one JSON object per line, with the counts")
    apply = add_act(acts, "apply", _apply, "apply the verdict for one run, if it still holds")
    for each in (listing, apply):
        _add_rules(each)
    apply.add_argument("run", metavar="RUN", help="name of the run")
    for name, wrangled, what in (("enable", True, "wrangle a run"), ("disable", False, "stop wrangling a run")):
        asking = add_act(acts, name, _set_wrangled, what)
        asking.set_defaults(wrangled=wrangled)
        asking.add_argument("run", metavar="RUN", help="name of the run")
    forgive = add_act(
        acts,
        "forgive",
        _clear_failures,
        "undo actions on a run: unblock its jobs for every worker and clear its failures; unlock a worker with "
        "`gpuwarden worker unlock`",
    )
    forgive.add_argument("run", metavar="RUN", help="name of the run")
    return parser


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activation", type=_count, default=ACTIVATION, metavar="N",
        help="failed items on a worker before it is judged (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--migrations-max", type=_count, default=MIGRATIONS_MAX, metavar="N",
        help="moves of a run to another worker before it is blocked (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout-s", type=_seconds, default=TIMEOUT_S, metavar="S",
        help="ignore a worker after this time without an item result, seconds "
        "(default: %(default)s)",
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"invalid count {text!r}: use 0 to 999999")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 604800:
        raise argparse.ArgumentTypeError(f"invalid duration {text!r}: use 0 to 604800 seconds")
    return value
