"""`gpuwarden ledger export`: every episode as a whole story, for other programs and for the archive.

A line of JSON an episode, as `remediator.ledger.export_rows` has it.

A file is replaced whole, by rename, once all of it is written and synced: what is there is never half of it. Only its
owner may read it, for the last lines of a job's log may say what nobody else is to know.
"""

import argparse
import errno
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_open
from gpuwarden.format import duration_s
from remediator.ledger.ledger import Ledger

PROGRESS_S: Final = 2.0
"""How often it says on stderr how far it is, seconds."""


def add_export(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--since", type=moment, default=0.0, metavar="WHEN", help=f"{_OPEN} then or later; {_WHEN}")
    parser.add_argument("--until", type=moment, default=None, metavar="WHEN", help=f"{_OPEN} by then; {_WHEN}")
    parser.add_argument("--captures", action="store_true", help="also what was captured before a stop, which is large")
    parser.add_argument("--output", type=Path, metavar="FILE", help="replace this file, once all is written to it")


_OPEN: Final = "episodes that were open"
_WHEN: Final = "how long ago, as 12h or 7d, or a local time, as 2026-01-31 or 2026-01-31T08:00 (default: all)"


def export(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """`gpuwarden ledger export`."""
    episodes = ledger.reports.export(since=arguments.since, until=arguments.until, captures=arguments.captures)
    if arguments.output is None:
        _write(_told(episodes), sys.stdout)
        return 0
    with _replaced(arguments.output) as file:
        count = _write(_told(episodes), file)
    print(f"{count} episodes are in {arguments.output}", file=sys.stderr)
    return 0


def moment(text: str) -> float:
    """A time as a person writes it, Unix seconds; what argparse calls for the options that take one."""
    with suppress(argparse.ArgumentTypeError):
        return time.time() - duration_s(text)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise argparse.ArgumentTypeError(f"{text!r} is neither a duration, as 12h or 7d, nor a time, as 2026-01-31T08:00")


def _write(episodes: Iterable[Mapping[str, Any]], file: IO[str]) -> int:
    count = 0
    for count, episode in enumerate(episodes, start=1):  # noqa: B007 - how many there were is told afterwards
        file.write(json.dumps(episode) + "\n")
    return count


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
