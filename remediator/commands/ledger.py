"""`gpuwarden ledger`: what was seen, decided and done, for people and, with --json, for programs."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.format import duration_s, plain, when
from remediator.capture import render
from remediator.commands import summary
from remediator.commands.export import add_export, export
from remediator.commands.open_ledger import add_ledger, existing
from remediator.ledger.journal import Entry
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory

_EXPORT: Final = "every episode with all that the ledger holds of it"


def command(argv: list[str]) -> int:
    """`gpuwarden ledger`."""
    arguments = _parser().parse_args(argv)
    ledger = existing(arguments.ledger)
    try:
        return _ACTS[arguments.what](ledger, arguments)
    finally:
        ledger.close()


def lines(story: EpisodeHistory) -> list[str]:
    """One episode as text: a heading, then a line an entry with its time since the episode opened.

    What another host's remediator wrote names that host.

    Names and sentences hold what labels and jobs said: nothing of it reaches a terminal but what can be printed.
    """
    job = "no job" if story.job_id is None else f"job {story.job_id} attempt {story.attempt}"
    heading = (
        f"episode {story.episode_id}: {story.trip} of {plain(story.worker)} on {story.host}, {job}: "
        f"{story.outcome or 'open'}" + (f" ({plain(story.message)})" if story.message else "")
    )
    return [heading] + [
        f"  {entry.at - story.opened_at:+7.1f} s  {entry.act:8} {plain(entry.what):18} {_elsewhere(entry, story)}"
        f"{plain(entry.message)}"
        for entry in story.entries
    ]


def _elsewhere(entry: Entry, story: EpisodeHistory) -> str:
    return "" if entry.host in (None, story.host) else f"({plain(str(entry.host))}) "


def _list(ledger: Ledger, arguments: argparse.Namespace) -> int:
    stories = ledger.reports.newest(last=arguments.last)
    if arguments.json:
        for story in stories:
            print(json.dumps(asdict(story)))
        return 0
    if not stories:
        print("no episode yet", file=sys.stderr)
    for story in stories:
        print(f"{when(story.opened_at)}  {lines(story)[0]}")
    return 0


def _show(ledger: Ledger, arguments: argparse.Namespace) -> int:
    story = _story(ledger, arguments.episode)
    if arguments.json:
        print(json.dumps(asdict(story)))
        return 0
    print("\n".join(lines(story)))
    for kept in ledger.captures.of_episode(arguments.episode):
        print("\n".join(render.in_short(kept, since=story.opened_at)))
    return 0


def _evidence(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """What the processes were doing right before they were stopped, whole."""
    story = _story(ledger, arguments.episode)
    captures = ledger.captures.of_episode(arguments.episode)
    if arguments.json:
        for kept in captures:
            print(json.dumps(asdict(kept)))
        return 0
    if not captures:
        print(f"nothing was captured of episode {story.episode_id}", file=sys.stderr)
    for kept in captures:
        print("\n".join(render.in_full(kept)))
    return 0


def _story(ledger: Ledger, episode_id: int) -> EpisodeHistory:
    story = ledger.reports.get(episode_id)
    if story is None:
        raise GpuwardenError(f"the ledger has no episode {episode_id}: `gpuwarden ledger list` names them")
    return story


def _refused(ledger: Ledger, arguments: argparse.Namespace) -> int:
    for at, reason, message, labels in ledger.inbox.refused(last=arguments.last):
        if arguments.json:
            print(json.dumps({"at": at, "reason": reason, "message": message, "labels": dict(labels)}))
        else:
            print(f"{when(at)}  {reason:14} {plain(message)}")
    return 0


def _summary(ledger: Ledger, arguments: argparse.Namespace) -> int:
    now = time.time()
    since = now - arguments.since
    told = summary.summarize(ledger.reports.since(since, host=arguments.host), since=since, now=now)
    if arguments.json:
        print(json.dumps(told.figures()))
        return 0
    print(f"since {when(since)}: {told.episodes} episodes")
    for each in told.would:
        state = "still open" if each.outcome is None else each.outcome
        print(f"  would have acted on {plain(each.worker)} on {each.host} (episode {each.episode_id}, {state}):")
        print(f"    {when(each.at)}  {plain(each.message)}")
    for title, counts in (
        ("done", told.did), ("failed", told.failed), ("closed", told.outcomes), ("open and waiting", told.waiting)
    ):  # fmt: skip
        if counts:
            print(f"  {title}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}")
    if not told.episodes:
        print("  nothing wedged")
    return 0


def _orders(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """Who armed, approved, paused or released, and when the brake latched."""
    for order in ledger.orders.given_since(since=time.time() - arguments.since):
        if arguments.json:
            print(json.dumps(asdict(order)))
        else:
            until = "" if order.until is None else f" until {when(order.until)}"
            why = f": {plain(order.because)}" if order.because else ""
            print(f"{when(order.at)}  {order.act:10} {order.scope}{until}, by {plain(order.who)}{why}")
    return 0


_ACTS: Final = {
    "list": _list, "show": _show, "evidence": _evidence, "refused": _refused, "summary": _summary, "orders": _orders,
    "export": export,
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden ledger", description="What was seen, decided and done.")
    add_ledger(parser)
    what = parser.add_subparsers(dest="what", required=True, metavar="list|show|evidence|refused|summary|orders|export")
    for name, help_text in (
        ("list", "the newest episodes"),
        ("show", "one episode"),
        ("evidence", "what an episode's processes were doing right before they were stopped"),
        ("refused", "refused alerts"),
        ("summary", "what was done, and what a dry run would have done"),
        ("orders", "who armed, disarmed, approved, paused and released, and when the brake latched"),
    ):
        each = what.add_parser(name, help=help_text, description=help_text)
        each.add_argument("--json", action="store_true", help="one JSON object a line")
        if name in ("show", "evidence"):
            each.add_argument("episode", type=int, help="its number, from `gpuwarden ledger list`")
        elif name in ("summary", "orders"):
            default = "24h" if name == "summary" else "30d"
            help_since = f"how far to look back: 12h, 7d (default: {default})"
            each.add_argument("--since", type=duration_s, default=duration_s(default), help=help_since)
        else:
            each.add_argument("--last", type=int, default=50, help="how many, newest (default: 50)")
        if name == "summary":
            each.add_argument("--host", help="this host's episodes only")
    add_export(what.add_parser("export", help=_EXPORT, description=_EXPORT))
    return parser
