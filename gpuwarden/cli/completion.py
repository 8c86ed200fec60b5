"""`gpuwarden completion SHELL`: print a script that completes commands, options and their values in a shell."""

import argparse
from pathlib import Path
from typing import Final

import shtab

from gpuwarden import __version__
from gpuwarden.cli.main import HELP
from gpuwarden.cli.parsers import parsers
from gpuwarden.format import Parser, show

SHELLS: Final = ("bash", "zsh", "fish")

_EPILOG: Final = """\
Write the script once, and again after an update:

  bash  gpuwarden completion bash > ~/.local/share/bash-completion/completions/gpuwarden
  zsh   gpuwarden completion zsh > DIR/_gpuwarden    (DIR is a folder of $fpath)
  fish  gpuwarden completion fish > ~/.config/fish/completions/gpuwarden.fish
"""


def command(argv: list[str]) -> int:
    """`gpuwarden completion`."""
    parser = Parser(
        prog="gpuwarden completion",
        description="Print a script that completes commands, options and their values in a shell.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="shell of the script")
    shell = parser.parse_args(argv).shell
    show(*shtab.complete(tree(), shell=shell).splitlines())
    return 0


def tree() -> Parser:
    """One parser with all commands below it."""
    root = Parser(prog="gpuwarden")
    root.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    commands = root.add_subparsers()
    for words, parser in parsers(skip_missing=True).items():
        if " " not in words:
            commands.add_parser(words, help=HELP.get(words, ""))
            commands.choices[words] = parser
        for action in parser._actions:  # noqa: SLF001 - argparse has no public list of options
            if action.metavar == "DIR" or action.dest.endswith("_dir"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.type is Path or action.metavar in ("Path", "FILE", "CMD"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif not action.option_strings and not action.choices:
                action.complete = {"zsh": " :"}  # type: ignore[attr-defined] # without it, zsh inserts no option here
    return root
