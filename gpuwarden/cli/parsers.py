"""The argument parsers of all commands, for completion and the reference page."""

import os

from gpuwarden.cli import main as cli
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser


class _FoundError(Exception):
    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def parsers(*, skip_missing: bool = False) -> dict[str, Parser]:
    """The parser of each command and subcommand, by its words.

    Args:
        skip_missing: leave out a command that needs a missing package.

    Raises:
        GpuwardenError: a command needs a missing package.
    """
    found: dict[str, Parser] = {}
    for name, target in cli.commands().items():
        try:
            run = cli.load(target)
        except GpuwardenError:
            if skip_missing:
                continue
            raise
        found[name] = _parser_of(run, [])
        if found[name].subcommands is None:
            continue
        below = found[name].subcommands.choices
        for sub, parser in below.items():
            if not parser.add_help:  # its command makes the full parser
                below[sub] = _parser_of(run, [sub])
            found[f"{name} {sub}"] = below[sub]
    return found


def _parser_of(run: cli.Command, argv: list[str]) -> Parser:
    def stop(parser: Parser) -> None:
        if not argv or (parser.add_help and parser.subcommands is None):
            raise _FoundError(parser)

    ours = {name: value for name, value in os.environ.items() if name.startswith("GPUWARDEN_")}
    for name in ours:
        del os.environ[name]  # the defaults in help do not depend on the caller's variables
    Parser.before = stop
    try:
        run(argv)
    except _FoundError as found:
        return found.parser
    finally:
        Parser.before = None
        os.environ.update(ours)
    raise ValueError(f"{run.__module__} parsed no arguments")
