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
    """The option `--store`: wanted only where the environment does not say."""
    store = os.environ.get("GPUWARDEN_STORE")
    parser.add_argument(
        "--store", default=store, required=store is None, help="the queue's database URL, or $GPUWARDEN_STORE"
    )


def existing(url: str) -> JobStore:
    """Open a queue that is there, as it is: nothing is made, and tables of another version are not changed.

    Raises:
        GpuwardenError: there is none, it is of another version, or it cannot be opened.
    """
    check_there(url)
    return JobStore.open(url, migrate=False)


def check_there(url: str) -> None:
    """Whether there is a queue, as far as that can be told without asking its server.

    Raises:
        GpuwardenError: there is none.
    """
    with suppress(ArgumentError, ValueError):  # whoever opens it says it better
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite" and parsed.database and not Path(parsed.database).exists():
            raise GpuwardenError(f"there is no queue at {parsed.database}: is --store or $GPUWARDEN_STORE right?")
