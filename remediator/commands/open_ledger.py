"""Where a person's commands find ledger and queue: as told, in the environment, or as `gpuwarden up` keeps them.

`gpuwarden up` keeps `ledger/ledger.db` and `queue/queue.db` in /var/lib/gpuwarden for root, and for anybody else in
`gpuwarden` below $XDG_STATE_HOME (XDG Base Directory Specification; ~/.local/state where it is not set).
"""

import argparse
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gpuwarden.errors import GpuwardenError
from remediator.ledger.ledger import Ledger

LEDGER_ENV: Final = "GPUWARDEN_REMEDIATOR_LEDGER"
QUEUE_ENVS: Final = ("GPUWARDEN_REMEDIATOR_QUEUE", "GPUWARDEN_STORE")


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """The option `--ledger`: wanted only where there is none to be found."""
    parser.add_argument(
        "--ledger",
        default=ledger_url(os.environ) or "",
        type=_named,  # which is asked of a default, too
        help=f"the ledger's database URL, or ${LEDGER_ENV}; else the one of `gpuwarden up`",
    )


def _named(url: str) -> str:
    if url:
        return url
    raise argparse.ArgumentTypeError(
        "no ledger is named, and `gpuwarden up` keeps none for this user: give its database URL, or set "
        f"${LEDGER_ENV} to it, as the services of `gpuwarden init` have it in their gpuwarden.env"
    )


def existing(url: str, *, host: str | None = None) -> Ledger:
    """Open a ledger that is there, as it is: who mistypes its name is told so, and is not shown a new and empty one.

    Raises:
        GpuwardenError: there is none, or it cannot be opened.
    """
    check_there(url)
    return Ledger.open(url, host=host, migrate=False)


def check_there(url: str) -> None:
    """Whether there is a ledger, as far as that can be told without asking its server.

    Raises:
        GpuwardenError: there is none.
    """
    with suppress(ArgumentError):  # Ledger.open says it better
        database = make_url(url).database
        if make_url(url).get_backend_name() == "sqlite" and database and not Path(database).exists():
            raise GpuwardenError(f"there is no ledger at {database}: is --ledger or ${LEDGER_ENV} right?")


def ledger_url(env: Mapping[str, str]) -> str | None:
    """The ledger's URL, as far as it can be found."""
    return env.get(LEDGER_ENV) or _kept(env, "ledger")


def queue_url(env: Mapping[str, str]) -> str | None:
    """The queue's URL, as far as it can be found."""
    return next((env[name] for name in QUEUE_ENVS if env.get(name)), None) or _kept(env, "queue")


def _kept(env: Mapping[str, str], name: str) -> str | None:
    state = env.get("XDG_STATE_HOME", "")
    users = (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "gpuwarden"
    path = (Path("/var/lib/gpuwarden") if os.geteuid() == 0 else users) / name / f"{name}.db"
    return f"sqlite:///{path}" if path.is_file() else None
