"""Find the ledger and queue of a command: from its option, the environment, or `gpuwarden up`.

Without `--data-dir`, `gpuwarden up` keeps `ledger/ledger.db` and `queue/queue.db` in /var/lib/gpuwarden for root. For
other users they are in `gpuwarden` below $XDG_STATE_HOME (default ~/.local/state).
"""

import argparse
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gpuwarden.db.running_up import LEDGER_ENV, QUEUE_ENV, environment, path_of
from gpuwarden.errors import GpuwardenError
from remediator.ledger.ledger import Ledger

NO_LEDGER: Final = (
    f"no ledger found: start `gpuwarden up`, or set --ledger or ${LEDGER_ENV} to the URL in gpuwarden.env, which "
    "`gpuwarden init` writes"
)


def add_ledger(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the option `--ledger`, required only if no ledger is found. Without one it may be an empty text."""
    parser.add_argument(
        "--ledger",
        default=ledger_url(environment()) or "",
        type=_check_named if required else str,  # argparse calls it for a default string too
        help=f"database URL of the ledger; default ${LEDGER_ENV}, else the ledger of `gpuwarden up`",
    )


def _check_named(url: str) -> str:
    if url:
        return url
    raise argparse.ArgumentTypeError(NO_LEDGER)


def existing(url: str, *, host: str | None = None) -> Ledger:
    """Open an existing ledger without migration. A mistyped name must not create a new one.

    Raises:
        GpuwardenError: it does not exist or cannot be opened.
    """
    if not url:
        raise GpuwardenError(NO_LEDGER)
    check_there(url)
    return Ledger.open(url, host=host, migrate=False)


def check_there(url: str) -> None:
    """Check that an SQLite ledger exists.

    Raises:
        GpuwardenError: it does not.
    """
    with suppress(ArgumentError):  # Ledger.open gives a better error
        database = make_url(url).database
        if make_url(url).get_backend_name() == "sqlite" and database and not Path(database).exists():
            raise GpuwardenError(f"no ledger at {database}: check --ledger or ${LEDGER_ENV}")


def ledger_url(env: Mapping[str, str]) -> str | None:
    """Find the ledger's URL."""
    return env.get(LEDGER_ENV) or _default_path(env, "ledger")


def queue_url(env: Mapping[str, str]) -> str | None:
    """Find the queue's URL."""
    return env.get(QUEUE_ENV) or _default_path(env, "queue")


def _default_path(env: Mapping[str, str], name: str) -> str | None:
    folder = Path("/var/lib/gpuwarden") if os.geteuid() == 0 else path_of(env).parent
    path = folder / name / f"{name}.db"
    return f"sqlite:///{path}" if path.is_file() else None
