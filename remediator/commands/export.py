"""`gpuwarden ledger export`: every episode with its rows, one JSON object a line (`remediator.ledger.export_rows`).

A file is replaced by rename once all is written and synced. Only its owner may read it: log lines may be secret.
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
from gpuwarden.format import parse_duration_s, show
from remediator.ledger.ledger import Ledger

PROGRESS_S: Final = 2.0
"""Interval of progress lines on stderr, seconds."""


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--since", type=moment, default=0.0, metavar="WHEN", help=f"{_OPEN} at or after WHEN: {_WHEN}")
    parser.add_argument(
        "--until", type=moment, default=None, metavar="WHEN", help=f"{_OPEN} at or before WHEN: {_WHEN}"
    )
    parser.add_argument("--captures", action="store_true", help="include captures, which are large")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to this file, replaced when complete")


_OPEN: Final = "only episodes open"
_WHEN: Final = "a duration ago (12h, 7d) or a local time (2026-01-31, 2026-01-31T08:00); default: all"


def export(ledger: Ledger, arguments: argparse.Namespace) -> int:
    """`gpuwarden ledger export`."""
    episodes = ledger.reports.export(since=arguments.since, until=arguments.until, captures=arguments.captures)
    if arguments.output is None:
        _write(_with_progress(episodes), sys.stdout)
        return 0
    with _replace_file(arguments.output) as file:
        count = _write(_with_progress(episodes), file)
    show(f"{count} episodes written to {arguments.output}", file=sys.stderr)
    return 0


def moment(text: str) -> float:
    """Parse a duration ago or a local time into Unix seconds."""
    with suppress(argparse.ArgumentTypeError):
        return time.time() - parse_duration_s(text)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise argparse.ArgumentTypeError(f"invalid time {text!r}: use a duration (12h, 7d) or a time (2026-01-31T08:00)")


def _write(episodes: Iterable[Mapping[str, Any]], file: IO[str]) -> int:
    count = 0
    for count, episode in enumerate(episodes, start=1):  # noqa: B007 - the count is returned
        file.write(json.dumps(episode) + "\n")
    return count


def _with_progress(episodes: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Print progress on stderr during a long export."""
    next_line_s = time.monotonic() + PROGRESS_S
    for count, episode in enumerate(episodes):
        if time.monotonic() >= next_line_s:
            next_line_s = time.monotonic() + PROGRESS_S
            show(f"{count} episodes so far", file=sys.stderr)
        yield episode


@contextmanager
def _replace_file(path: Path) -> Iterator[IO[str]]:
    """A temporary file that replaces `path` when complete, and is removed on an error."""
    try:
        with atomic_open(path, mode=0o600, sync=True, many_writers=True) as file:
            yield file
    except OSError as error:
        advice = "free some space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose"
        raise GpuwardenError(f"{path} cannot be written ({error.strerror}): {advice} another --output") from None
