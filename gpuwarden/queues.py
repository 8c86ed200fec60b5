"""`gpuwarden queue migrate`: the queue's tables, up and down."""

import argparse
from collections.abc import Callable
from typing import Any

from gpuwarden import history
from gpuwarden.jobs import add_store
from gpuwarden.schema import QUEUE

_Act = Callable[[argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden queue`."""
    arguments = _parser().parse_args(argv)
    act: _Act = arguments.act
    return act(arguments)


def _migrate(arguments: argparse.Namespace) -> int:
    return history.command(arguments.store, QUEUE, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden queue", description="The queue's tables.")
    acts = parser.add_subparsers(required=True, metavar="ACT")
    migrate = _act(acts, "migrate", _migrate, "bring the queue's tables to another version, up or down")
    history.add_migrate(migrate)
    return parser


def _act(acts: Any, name: str, act: _Act, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = acts.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.set_defaults(act=act)
    add_store(parser)
    return parser
