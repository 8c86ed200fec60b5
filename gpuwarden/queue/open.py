"""Where commands find the queue, and how they open it."""

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.db.running_up import QUEUE_ENV, environment
from gpuwarden.errors import GpuwardenError

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the option `--queue-db`."""
    parser.add_argument(
        "--queue-db",
        default="",
        type=lambda url: url or default_store(),
        help="database URL of the queue; default $GPUWARDEN_QUEUE_DB, else the queue of this user's running "
        "`gpuwarden up`, else an SQLite file in this user's data folder",
    )


def default_store() -> str:
    """`$GPUWARDEN_QUEUE_DB`, else the running `gpuwarden up`'s, else an SQLite file in this user's data folder."""
    if url := environment().get(QUEUE_ENV):
        return url
    return f"sqlite:///{_file_of_user()}"


def created(url: str, *, connections: int | None = None) -> "JobStore":
    """Open a queue; create it and the folder of the default file if they are missing. See `connect`.

    Raises:
        GpuwardenError: it cannot be created or opened.
    """
    with suppress(RuntimeError):  # no home folder
        file = _file_of_user()
        try:
            if url == f"sqlite:///{file}":
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise GpuwardenError(
                f"no folder for the queue ({error}): set $GPUWARDEN_QUEUE_DB to its database URL"
            ) from None
    return _opened(url, connections=connections)


def _file_of_user() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gpuwarden" / "queue.db"


def existing(url: str) -> "JobStore":
    """Open an existing queue without a change of its tables.

    Raises:
        GpuwardenError: it is missing, has another version, or cannot be opened.
    """
    check_there(url)
    return _opened(url, migrate=False)


def current(url: str) -> "JobStore":
    """Open an existing queue for changes, and migrate older tables.

    Raises:
        GpuwardenError: it is missing, has a newer version, or cannot be opened.
    """
    check_there(url)
    return _opened(url)


def _opened(url: str, *, migrate: bool = True, connections: int | None = None) -> "JobStore":
    from gpuwarden.queue import JobStore  # noqa: PLC0415 - a worker behind a gateway has no database

    return JobStore.open(url, migrate=migrate, connections=connections)


def check_there(url: str) -> None:
    """Check that an SQLite queue exists.

    Raises:
        GpuwardenError: it is missing.
    """
    from sqlalchemy import make_url  # noqa: PLC0415 - as in _opened
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    with suppress(ArgumentError, ValueError):  # opening the database gives a better error
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite" and parsed.database and not Path(parsed.database).exists():
            raise GpuwardenError(f"no queue database at {parsed.database}: check --queue-db or $GPUWARDEN_QUEUE_DB")
