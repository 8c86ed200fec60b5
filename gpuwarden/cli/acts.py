"""Subcommands, such as `list` of `gpuwarden job`, and their common options."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuwarden.db.running_up import RUNTIME_DIR_ENV, environment
from gpuwarden.notify.address import from_argument
from gpuwarden.queue.open import add_store
from gpuwarden.reporter import DEFAULT_DIR


def add_act(acts: Any, name: str, act: Callable[..., int], what: str) -> argparse.ArgumentParser:
    """Add a subcommand with `--queue-db`. `arguments.act` is its function.

    Args:
        acts: the result of `add_subparsers`.
        name: the subcommand.
        act: its function.
        what: its help.
    """
    parser: argparse.ArgumentParser = acts.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.set_defaults(act=act)
    add_store(parser)
    return parser


def runtime_dir() -> Path:
    """`$GPUWARDEN_RUNTIME_DIR`, else that of this user's running `gpuwarden up`, else /run/gpuwarden."""
    return Path(environment().get(RUNTIME_DIR_ENV, DEFAULT_DIR))


def add_json(parser: argparse.ArgumentParser, what: str = "print one JSON object per line") -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help=what)


def add_notify(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option `--notify`."""
    parser.add_argument(
        "--notify",
        metavar="ADDRESS",
        type=from_argument,
        help=f"mail address or Apprise URL, notified when the {what} fails or is blocked; default: the submitter's "
        "address in the notify file of the remediator",
    )


def add_reason(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add the option `--reason`."""
    parser.add_argument("--reason", default=default, metavar="TEXT", help="reason, kept in the record")
