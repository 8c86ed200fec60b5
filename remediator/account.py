"""`gpuwarden ledger list|show`: what was seen, decided and done, for people and, with --json, for programs."""

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gpuwarden.errors import GpuwardenError
from remediator.ledger import Entry, Ledger, Story


def command(argv: list[str]) -> int:
    """`gpuwarden ledger`."""
    arguments = _parser().parse_args(argv)
    ledger = _existing(arguments.ledger)
    try:
        return {"list": _list, "show": _show, "refused": _refused}[arguments.what](ledger, arguments)
    finally:
        ledger.close()


def lines(story: Story) -> list[str]:
    """One episode as text: a heading, then a line an entry with its time since the episode opened.

    What another host's remediator wrote names that host.

    Names and sentences hold what labels and jobs said: nothing of it reaches a terminal but what can be printed.
    """
    job = "no job" if story.job_id is None else f"job {story.job_id} attempt {story.attempt}"
    heading = (
        f"episode {story.episode_id}: {story.trip} of {_plain(story.worker)} on {story.host}, {job}: "
        f"{story.outcome or 'open'}" + (f" ({_plain(story.because)})" if story.because else "")
    )
    return [heading] + [
        f"  {entry.at - story.opened_at:+7.1f} s  {entry.act:8} {entry.step:18} {_elsewhere(entry, story)}"
        f"{_plain(entry.because)}"
        for entry in story.entries
    ]


def _elsewhere(entry: Entry, story: Story) -> str:
    return "" if entry.host in (None, story.host) else f"({_plain(str(entry.host))}) "


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _existing(url: str) -> Ledger:
    """Open a ledger that is there: who mistypes its name is told so, and is not shown a new and empty one."""
    with suppress(ArgumentError):  # Ledger.open says it better
        database = make_url(url).database
        if make_url(url).get_backend_name() == "sqlite" and database and not Path(database).exists():
            raise GpuwardenError(
                f"there is no ledger at {database}: is --ledger or $GPUWARDEN_REMEDIATOR_LEDGER right?"
            )
    return Ledger.open(url)


def _list(ledger: Ledger, arguments: argparse.Namespace) -> int:
    stories = ledger.stories(last=arguments.last)
    if arguments.json:
        for story in stories:
            print(json.dumps(asdict(story)))
        return 0
    if not stories:
        print("no episode yet", file=sys.stderr)
    for story in stories:
        print(f"{_when(story.opened_at)}  {lines(story)[0]}")
    return 0


def _show(ledger: Ledger, arguments: argparse.Namespace) -> int:
    story = ledger.story(arguments.episode)
    if story is None:
        raise GpuwardenError(f"the ledger has no episode {arguments.episode}: `gpuwarden ledger list` names them")
    print(json.dumps(asdict(story)) if arguments.json else "\n".join(lines(story)))
    return 0


def _refused(ledger: Ledger, arguments: argparse.Namespace) -> int:
    for at, reason, because, labels in ledger.refused(last=arguments.last):
        if arguments.json:
            print(json.dumps({"at": at, "reason": reason, "because": because, "labels": dict(labels)}))
        else:
            print(f"{_when(at)}  {reason:14} {_plain(because)}")
    return 0


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden ledger", description="What was seen, decided and done.")
    found = os.environ.get("GPUWARDEN_REMEDIATOR_LEDGER")
    parser.add_argument(
        "--ledger",
        default=found,
        required=found is None,
        help="the ledger's database URL, or $GPUWARDEN_REMEDIATOR_LEDGER",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="list|show|refused")
    for name, help_text in (("list", "the newest episodes"), ("show", "one episode"), ("refused", "refused alerts")):
        each = what.add_parser(name, help=help_text, description=help_text)
        each.add_argument("--json", action="store_true", help="one JSON object a line")
        if name == "show":
            each.add_argument("episode", type=int, help="its number, from `gpuwarden ledger list`")
        else:
            each.add_argument("--last", type=int, default=50, help="how many, newest (default: 50)")
    return parser
