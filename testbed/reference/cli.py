"""docs/reference/cli.md: every command with its options, from the argparse parsers."""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final
from unittest.mock import patch

from gpuwarden.cli import main as cli
from gpuwarden.docs_pages import marked
from gpuwarden.format import Parser

COMMON_MIN: Final = 5
"""An option of this many commands, with the same meaning, is listed once."""

ELSEWHERE: Final = {
    "exporter": "gpuwarden exporter [OPTIONS]",
    "remediator": "gpuwarden remediator serve [OPTIONS]\ngpuwarden remediator execute [OPTIONS]",
}
"""Usage of the commands whose options are settings, with pages of their own."""

_INTRO: Final = """# Commands

<!-- Written by `python -m testbed.reference`; change the commands' parsers, not this page. -->

`gpuwarden COMMAND --help` prints the same. Exit codes, if a command has no other: 0 success, 1 failure, 2 wrong usage.
"""


class _FoundError(Exception):
    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def page() -> str:
    """Render the page."""
    tree = parsers()
    counts = Counter(row for parser in tree.values() for row in _rows(parser) if row.startswith("| `--"))
    # The most frequent meaning of each option.
    common = list({_option(row): row for row, count in reversed(counts.most_common()) if count >= COMMON_MIN}.values())
    lines = [_INTRO, "| command | purpose |", "|---|---|"]
    lines += [f"| [`gpuwarden {name}`](#gpuwarden-{name}) | {cli.HELP[name]} |" for name in cli.commands()]
    lines += ["", "## Common options", "", "| option | meaning |", "|---|---|", *sorted(common), ""]
    for words, parser in tree.items():
        lines += _section(words, parser, common)
    return "\n".join(lines)


def parsers() -> dict[str, Parser]:
    """The parser of each command and subcommand, by its words."""
    found: dict[str, Parser] = {}
    for name, target in cli.commands().items():
        run = cli.load(target)
        found[name] = _parser_of(run, [])
        if name in ELSEWHERE:
            continue
        for sub, parser in _subcommands(found[name]).items():
            found[f"{name} {sub}"] = parser if parser.add_help else _parser_of(run, [sub])
    return found


def _parser_of(run: cli.Command, argv: list[str]) -> Parser:
    def stop(parser: Parser, *_: Any, **__: Any) -> None:
        raise _FoundError(parser)

    ours = {name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")}
    with patch.dict(os.environ, ours, clear=True), patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            run(argv)
        except _FoundError as found:
            return found.parser
    raise ValueError(f"{run.__module__} parsed no arguments")


def _subcommands(parser: Parser) -> Mapping[str, Parser]:
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _actions(parser: Parser) -> list[argparse.Action]:
    return parser._actions


def _section(words: str, parser: Parser, common: list[str]) -> Iterator[str]:
    command = f"gpuwarden {words}"
    yield from ("###" * (" " in words) + "##" * (" " not in words) + f" {command}", "")
    if words in ELSEWHERE:
        yield from (
            f"{_sentence(cli.HELP[words])} Its options are the settings of the",
            f"[{words}](settings-{words}.md).",
            "",
        )
        yield from ("```text", ELSEWHERE[words], "```", "")
        return
    yield from _prose(parser.description)
    subcommands = _subcommands(parser)
    if not subcommands:
        yield from ("```text", usage(command, parser), "```", "")
    rows = list(_rows(parser))
    own = [row for row in rows if row not in common]
    if own:
        yield from ("| argument or option | meaning |", "|---|---|", *own, "")
    if shared := [f"`{_option(row)}`" for row in rows if row in common]:
        yield from (f"[Common options](#common-options): {', '.join(shared)}.", "")
    if subcommands:
        yield from ("| subcommand | purpose |", "|---|---|")
        for sub, its in _helps(parser).items():
            yield f"| [`{command} {sub}`](#{'-'.join(f'{command} {sub}'.split())}) | {its} |"
        yield ""
    yield from _prose(parser.epilog)


def _helps(parser: Parser) -> dict[str, str]:
    for action in _actions(parser):
        if isinstance(action, argparse._SubParsersAction):
            return {each.dest: each.help or "" for each in action._choices_actions}
    return {}


def usage(command: str, parser: Parser) -> str:
    """The line of a command: required options and arguments, and `[OPTIONS]` for all others."""
    if parser.usage is not None:
        return parser.usage.replace("[options]", "[OPTIONS]")
    either = parser._mutually_exclusive_groups
    needed = [
        "(" + " | ".join(_named(each) for each in group._group_actions) + ")" for group in either if group.required
    ]
    needed += [_named(each) for each in _actions(parser) if each.option_strings and each.required]
    return " ".join([command, "[OPTIONS]", *needed, *(_named(each) for each in _arguments(parser))])


def _arguments(parser: Parser) -> Iterator[argparse.Action]:
    for action in _actions(parser):
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield action


def _named(action: argparse.Action) -> str:
    """An option with the name of its value, or an argument."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if isinstance(action, argparse.BooleanOptionalAction):
        return ", ".join(action.option_strings)
    if action.option_strings:
        return action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {name}"
    return {"+": f"{name}...", "*": f"[{name}...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _rows(parser: Parser) -> Iterator[str]:
    """Rows of the table: arguments, then options.

    Raises:
        ValueError: one has no help.
    """
    options = (each for each in _actions(parser) if each.option_strings and each.dest != "help")
    for action in (*_arguments(parser), *options):
        if not action.help:
            raise ValueError(f"{parser.prog}: {_named(action)} has no help: add one")
        formatter = parser._get_formatter()
        text = marked(formatter._expand_help(action))
        choices = f"; one of {', '.join(f'`{each}`' for each in action.choices)}" if action.choices else ""
        yield f"| `{_named(action).strip('[]')}` | {text}{choices} |"


def _option(row: str) -> str:
    return row.split("`", 2)[1].split(maxsplit=1)[0]


def _prose(text: str | None) -> Iterator[str]:
    """Paragraphs; one with indented lines is printed as it is."""
    for paragraph in (text or "").split("\n\n"):
        if re.search(r"^  ", paragraph, re.MULTILINE):
            yield from ("```text", paragraph.strip("\n"), "```", "")
        elif paragraph.strip():
            yield from (_sentence(marked(" ".join(paragraph.split()))), "")


def _sentence(text: str) -> str:
    end = "" if text.endswith((".", ":")) or "`" in text[-1:] else "."
    return f"{text[0].upper()}{text[1:]}{end}"
