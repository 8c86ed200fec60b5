"""`gpuwarden ledger`: what was observed, decided and done."""

import argparse
import sys
import time
from dataclasses import asdict
from typing import Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, count_of, format_time, operator_name, parse_duration_s, show, show_json
from remediator.commands import summary
from remediator.commands.export import add_export, export
from remediator.commands.open_ledger import add_ledger, existing
from remediator.ledger.journal import Entry
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.plan import Outcome
from remediator.reasons import Reason

_EXPORT: Final = "export episodes with all their rows, as JSON lines"


def command(argv: list[str]) -> int:
    """`gpuwarden ledger`."""
    arguments = _parser().parse_args(argv)
    ledger = existing(arguments.ledger)
    try:
        return _ACTS[arguments.what](ledger, arguments)
    finally:
        ledger.close()


def lines(history: EpisodeHistory) -> list[str]:
    """One episode as text: a heading, then a line per entry with the seconds since the episode opened.

    An entry of another host names that host. Only printable characters reach the terminal.
    """
    job = "no job" if history.job_id is None else f"job {history.job_id} attempt {history.attempt}"
    heading = (
        f"episode {history.episode_id}: {history.condition} of {history.worker} on {history.host}, {job}: "
        f"{history.outcome or 'open'}" + (f" ({history.message})" if history.message else "")
    )
    return [heading] + [
        f"  {entry.at - history.opened_at:+7.1f} s  {entry.act:8} {entry.what:18} "
        f"{_host_prefix(entry, history)}{entry.message}"
        for entry in history.entries
    ]


def _host_prefix(entry: Entry, history: EpisodeHistory) -> str:
    return "" if entry.host in (None, history.host) else f"({entry.host!s}) "


def _list(ledger: Ledger, arguments: argparse.Namespace) -> int:
    histories = ledger.reports.newest(last=arguments.last)
    if arguments.json:
        for history in histories:
            show_json(asdict(history))
        return 0
    if not histories:
        show("no episodes yet", file=sys.stderr)
    for history in histories:
        show(f"{format_time(history.opened_at)}  {lines(history)[0]}")
    return 0


def _show(ledger: Ledger, arguments: argparse.Namespace) -> int:
    history = _read_history(ledger, arguments.episode)
    if arguments.json:
        show_json(asdict(history))
        return 0
    from remediator.capture import render  # noqa: PLC0415 - imports an HTTP client

    show(*lines(history))
    for capture in ledger.captures.of_episode(arguments.episode):
        show(*render.in_short(capture, since=history.opened_at))
    return 0


def _capture(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """Print the captures of an episode in full."""
    history = _read_history(ledger, arguments.episode)
    captures = ledger.captures.of_episode(arguments.episode)
    if arguments.json:
        for capture in captures:
            show_json(asdict(capture))
        return 0
    if not captures:
        show(f"no capture of episode {history.episode_id}", file=sys.stderr)
    from remediator.capture import render  # noqa: PLC0415 - imports an HTTP client

    for capture in captures:
        show(*render.in_full(capture))
    return 0


def _read_history(ledger: Ledger, episode_id: int) -> EpisodeHistory:
    history = ledger.reports.get(episode_id)
    if history is None:
        raise GpuwardenError(f"no episode {episode_id} in the ledger: see `gpuwarden ledger list`")
    return history


def _refused(ledger: Ledger, arguments: argparse.Namespace) -> int:
    refused = ledger.inbox.refused(last=arguments.last)
    if not refused and not arguments.json:
        show("no refused alerts", file=sys.stderr)
    for at, reason, message, labels in refused:
        if arguments.json:
            show_json({"at": at, "reason": reason, "message": message, "labels": dict(labels)})
        else:
            show(f"{format_time(at)}  {reason:14} {message}")
    return 0


def _summary(ledger: Ledger, arguments: argparse.Namespace) -> int:
    now = time.time()
    since = now - arguments.since
    found = summary.summarize(ledger.reports.activity_since(since, host=arguments.host), since=since, now=now)
    if arguments.json:
        show_json(found.figures())
        return 0
    show(f"since {format_time(since)}: {count_of(found.episodes, 'episode')}")
    for each in found.would:
        state = "still open" if each.outcome is None else each.outcome
        show(f"  would have acted on {each.worker} on {each.host} (episode {each.episode_id}, {state}):")
        show(f"    {format_time(each.at)}  {each.message}")
    for title, counts in (
        ("done", found.did), ("failed", found.failed), ("closed", found.outcomes), ("open", found.waiting)
    ):  # fmt: skip
        if counts:
            show(f"  {title}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}")
    if not found.episodes:
        show("  no failures")
    return 0


def _audit(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """Print orders of operators and openings of the circuit breaker."""
    given = ledger.orders.given_since(since=time.time() - arguments.since)
    if not given and not arguments.json:
        show("no orders in this time", file=sys.stderr)
    for order in given:
        if arguments.json:
            show_json(asdict(order))
        else:
            until = "" if order.until is None else f" until {format_time(order.until)}"
            why = f": {order.reason}" if order.reason else ""
            show(f"{format_time(order.at)}  {order.act:10} {order.scope}{until}, by {order.who}{why}")
    return 0


def _acknowledge(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """Close an episode whose restart was given up. That ends its alert."""
    history = _read_history(ledger, arguments.episode)
    if history.outcome is not None:
        raise GpuwardenError(f"episode {history.episode_id} is closed already: {history.outcome}")
    if history.wait_reason != Reason.GIVEN_UP:
        waits = history.wait_reason or "no wait"
        raise GpuwardenError(f"episode {history.episode_id} has no restart that was given up, but {waits}")
    message = f"acknowledged by {operator_name()}" + (f": {arguments.reason}" if arguments.reason else "")
    ledger.episodes.close(history.episode_id, Outcome.PARTLY, Reason.ACKNOWLEDGED, message, now=ledger.now())
    show(f"episode {history.episode_id} of {history.worker} on {history.host} {message}")
    return 0


_ACTS: Final = {
    "list": _list, "show": _show, "capture": _capture, "refused": _refused, "summary": _summary, "audit": _audit,
    "acknowledge": _acknowledge,
    "export": export,
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpuwarden ledger", description="Show episodes: observations, decisions and actions.")
    add_ledger(parser)
    what = parser.add_subparsers(dest="what", required=True)
    for name, help_text in (
        ("list", "list the newest episodes"),
        ("show", "show one episode"),
        ("capture", "show stacks and logs saved before a stop"),
        ("refused", "list refused alerts"),
        ("summary", "count actions, and list what a dry run would have done"),
        ("audit", "list orders of operators, and openings of the circuit breaker"),
    ):
        each = what.add_parser(name, help=help_text, description=help_text)
        each.add_argument("--json", action="store_true", help="print one JSON object per line")
        if name in ("show", "capture"):
            each.add_argument("episode", type=int, help="number from `gpuwarden ledger list`")
        elif name in ("summary", "audit"):
            default = "24h" if name == "summary" else "30d"
            help_since = f"time range: 12h, 7d (default: {default})"
            each.add_argument("--since", type=parse_duration_s, default=parse_duration_s(default), help=help_since)
        else:
            each.add_argument("--last", type=int, default=50, help="number of rows (default: 50)")
        if name == "summary":
            each.add_argument("--host", help="only episodes of this host")
    help_text = "close an episode whose restart was given up"
    acknowledge = what.add_parser("acknowledge", help=help_text, description=help_text)
    acknowledge.add_argument("episode", type=int, help="number from `gpuwarden status`")
    acknowledge.add_argument("--reason", default="", metavar="TEXT", help="reason, kept in the record")
    add_export(what.add_parser("export", help=_EXPORT, description=_EXPORT))
    return parser
