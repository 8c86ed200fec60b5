"""docs/reference/cli.md: every command with its options, from the argparse parsers."""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from gpuwarden.cli import main as cli
from gpuwarden.cli.parsers import parsers
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

`gpuwarden COMMAND --help` prints the same.
"""


def page() -> str:
    """Render the page."""
    tree = {words: each for words, each in parsers().items() if words.partition(" ")[0] not in {*ELSEWHERE} - {words}}
    counts = Counter(row for parser in tree.values() for row in _rows(parser) if row.startswith("| `--"))
    # The most frequent meaning of each option.
    common = list({_option(row): row for row, count in reversed(counts.most_common()) if count >= COMMON_MIN}.values())
    lines = [_INTRO]
    for title, group in cli.GROUPS.items():
        lines += [f"| {title} | purpose |", "|---|---|"]
        lines += [f"| [`gpuwarden {name}`](#gpuwarden-{name}) | {purpose} |" for name, purpose in group.items()]
        lines.append("")
    lines += ["", "## Common options", "", "| option | meaning |", "|---|---|", *sorted(common), ""]
    lines += ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in cli.EXIT_CODES.items()]
    lines += ["", "`gpuwarden run` otherwise returns the code of its command.", ""]
    for words, parser in tree.items():
        lines += _section(words, parser, common)
    return "\n".join(lines)


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
    if parser.subcommands is None:
        yield from ("```text", usage(command, parser), "```", "")
    rows = list(_rows(parser))
    own = [row for row in rows if row not in common]
    if own:
        yield from ("| argument or option | meaning |", "|---|---|", *own, "")
    if shared := [f"`{_option(row)}`" for row in rows if row in common]:
        yield from (f"[Common options](#common-options): {', '.join(shared)}.", "")
    if parser.subcommands is not None:
        yield from ("| subcommand | purpose |", "|---|---|")
        for sub, its in _helps(parser).items():
            yield f"| [`{command} {sub}`](#{'-'.join(f'{command} {sub}'.split())}) | {its} |"
        yield ""
    yield from _prose(parser.epilog)


def _helps(parser: Parser) -> dict[str, str]:
    return {each.dest: each.help or "" for each in parser.subcommands._choices_actions}


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
