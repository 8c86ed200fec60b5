"""`gpuwarden ledger export`: every episode as a whole story, for other programs and for the archive.

As `jsonl` a line an episode, as `remediator.whole` has it. As `csv` a line for each thing that happened: first what the
episode is about, then when (Unix seconds), `kind` (opened, alert, intent, journal, capture, closed), `what`, `because`,
and all the rest as JSON in `data`; a text that a spreadsheet would take for a formula begins with an apostrophe.

A file is replaced whole, by rename, once all of it is written and synced: what is there is never half of it. Only its
owner may read it, for the last lines of a job's log may say what nobody else is to know.
"""

import argparse
import csv
import errno
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_open
from gpuwarden.text import duration_s
from remediator.ledger import Ledger

PROGRESS_S: Final = 2.0
"""How often it says on stderr how far it is, seconds."""

ABOUT: Final = (
    *("episode_id", "remedy", "trip", "host", "subject", "worker", "incarnation", "job_id", "attempt", "outcome"),
)
COLUMNS: Final = (*ABOUT, "at", "kind", "what", "because", "data")

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet calculates (OWASP, CSV injection)."""


def add_export(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--since", type=moment, default=0.0, metavar="WHEN", help=f"{_OPEN} then or later; {_WHEN}")
    parser.add_argument("--until", type=moment, default=None, metavar="WHEN", help=f"{_OPEN} by then; {_WHEN}")
    parser.add_argument("--format", choices=_FORMATS, default="jsonl", help="default: jsonl, a line an episode")
    parser.add_argument("--captures", action="store_true", help="also what was captured before a stop, which is large")
    parser.add_argument("--output", type=Path, metavar="FILE", help="replace this file, once all is written to it")


_OPEN: Final = "episodes that were open"
_WHEN: Final = "how long ago, as 12h or 7d, or a local time, as 2026-01-31 or 2026-01-31T08:00 (default: all)"


def export(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """`gpuwarden ledger export`."""
    write = _FORMATS[arguments.format]
    episodes = ledger.whole(since=arguments.since, until=arguments.until, captures=arguments.captures)
    if arguments.output is None:
        write(_told(episodes), sys.stdout)
        return 0
    with _replaced(arguments.output) as file:
        count = write(_told(episodes), file)
    print(f"{count} episodes are in {arguments.output}", file=sys.stderr)
    return 0


def moment(text: str) -> float:
    """A time as a person writes it, Unix seconds; what argparse calls for the options that take one."""
    with suppress(argparse.ArgumentTypeError):
        return time.time() - duration_s(text)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise argparse.ArgumentTypeError(f"{text!r} is neither a duration, as 12h or 7d, nor a time, as 2026-01-31T08:00")


def _jsonl(episodes: Iterable[Mapping[str, Any]], file: IO[str]) -> int:
    count = 0
    for count, episode in enumerate(episodes, start=1):  # noqa: B007 - how many there were is told afterwards
        file.write(json.dumps(episode) + "\n")
    return count


def _csv(episodes: Iterable[Mapping[str, Any]], file: IO[str]) -> int:
    lines = csv.writer(file)
    lines.writerow(COLUMNS)
    count = 0
    for count, episode in enumerate(episodes, start=1):  # noqa: B007 - as above
        about = [episode[name] for name in ABOUT]
        lines.writerows([_cell(each) for each in (*about, *event)] for event in _events(episode))
    return count


_FORMATS: Final[Mapping[str, Callable[[Iterable[Mapping[str, Any]], IO[str]], int]]] = {"jsonl": _jsonl, "csv": _csv}

_Event = tuple[float, str, str, str, str]
"""When, kind, what, because, data."""


def _events(episode: Mapping[str, Any]) -> list[_Event]:
    """What happened in an episode, in its order."""
    found: list[_Event] = [(episode["opened_at"], "opened", "", "", "")]
    for row in episode["alerts"]:
        what, why = "firing" if row["firing"] else "resolved", row["annotations"].get("summary", "")
        found.append((row["received_at"], "alert", what, why, _rest(row, "received_at", "firing")))
    for row in episode["intents"]:
        what = f"{row['kind']}: {row['stage']}"
        found.append((row["entered_at"], "intent", what, row["key"], _rest(row, "entered_at", "kind", "stage", "key")))
    for row in episode["journal"]:
        because = row["because"]
        found.append((row["at"], "journal", f"{row['act']} {row['step']}", because, _rest(row, *_JOURNAL)))
    found += [(row["at"], "capture", "", "", _rest(row, "at")) for row in episode.get("captures", ())]
    if episode["closed_at"] is not None:
        found.append((episode["closed_at"], "closed", episode["outcome"] or "", episode["because"] or "", ""))
    return sorted(found, key=lambda event: event[0])


_JOURNAL: Final = ("at", "act", "step", "because")


def _rest(row: Mapping[str, Any], *told: str) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in told})


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _told(episodes: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Say on stderr how far it is, where it takes long."""
    next_word_s = time.monotonic() + PROGRESS_S
    for count, episode in enumerate(episodes):
        if time.monotonic() >= next_word_s:
            next_word_s = time.monotonic() + PROGRESS_S
            print(f"{count} episodes so far", file=sys.stderr)
        yield episode


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """A file beside it that takes its place once it is whole; nothing is left of it where it does not come to that."""
    try:
        with atomic_open(path, mode=0o600, sync=True, many_writers=True) as file:
            yield file
    except OSError as error:
        advice = "make room, or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
        raise GpuwardenError(f"{path} cannot be written ({error.strerror}): {advice} another --output") from None
