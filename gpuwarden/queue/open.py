"""Where commands find the queue, and how those open it that only ask."""

import argparse
import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gpuwarden.errors import GpuwardenError
from gpuwarden.queue import JobStore


def add_store(parser: argparse.ArgumentParser) -> None:
    """The option `--queue-db`."""
    parser.add_argument(
        "--queue-db",
        default="",
        type=lambda told: told or default_store(),
        help="the queue's database URL, or $GPUWARDEN_QUEUE_DB; an SQLite file of this user's when neither is given",
    )


def default_store() -> str:
    """`$GPUWARDEN_QUEUE_DB`, else an SQLite file in this user's data folder, which is made.

    Raises:
        GpuwardenError: that folder cannot be made.
    """
    if url := os.environ.get("GPUWARDEN_QUEUE_DB"):
        return url
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gpuwarden"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise GpuwardenError(f"no place for a queue ({error}): set $GPUWARDEN_QUEUE_DB to its database URL") from None
    return f"sqlite:///{data / 'queue.db'}"


def existing(url: str) -> JobStore:
    """Open a queue that is there, as it is: nothing is made, and tables of another version are not changed.

    Raises:
        GpuwardenError: there is none, it is of another version, or it cannot be opened.
    """
    check_there(url)
    return JobStore.open(url, migrate=False)


def current(url: str) -> JobStore:
    """Open a queue that is there, for who changes what is in it: tables of an older version are brought up.

    A GPU in quarantine in a queue of which no worker knows would keep nobody from it.

    Raises:
        GpuwardenError: there is none, it is of a newer version, or it cannot be opened.
    """
    check_there(url)
    return JobStore.open(url)


def check_there(url: str) -> None:
    """Whether there is a queue, as far as that can be told without asking its server.

    Raises:
        GpuwardenError: there is none.
    """
    with suppress(ArgumentError, ValueError):  # whoever opens it says it better
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite" and parsed.database and not Path(parsed.database).exists():
            raise GpuwardenError(f"there is no queue at {parsed.database}: is --queue-db or $GPUWARDEN_QUEUE_DB right?")
