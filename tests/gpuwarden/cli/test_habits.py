"""What all commands have in common: exit codes, and `--json` on each that lists."""

import re
from pathlib import Path

import pytest

from gpuwarden.cli.main import EXIT_CODES, main
from gpuwarden.cli.parsers import parsers
from gpuwarden.job import EXIT_DISOWNED, EXIT_FATAL, Condition
from tests.conftest import Cli

LISTS = {"list", "show", "check", "audit", "refused", "summary", "capture"}
LISTING = {"status", "doctor", "top", "events"}
ALL = parsers()
LEAVES = [words for words, parser in ALL.items() if parser.subcommands is None]


@pytest.mark.parametrize("words", LEAVES)
def test_wrong_usage_exits_with_2_and_help_with_0(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    codes = []
    for option in ("--no-such-option", "--help"):
        try:
            codes.append(main([*words.split(), option]))
        except SystemExit as ended:
            codes.append(int(ended.code or 0))

    assert codes == [2, 0]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [words for words in LEAVES if {words} & LISTING or words.split()[-1] in LISTS])
def test_each_command_that_lists_has_json(words: str) -> None:
    assert "--json" in {option for action in ALL[words]._actions for option in action.option_strings}


@pytest.mark.parametrize(
    "words",
    [
        ("notify", "test", "json://[::1/secret"),
        ("job", "submit", "--notify", "json://[::1/secret", "--", "true"),
        ("runs", "submit", "--notify", "json://[::1/secret", "-"),
        ("run", "--notify", "json://[::1/secret", "--", "true"),
        ("up", "--notify", "json://[::1/secret"),
    ],
)
def test_invalid_address_is_wrong_usage_and_is_not_repeated(command: Cli, words: tuple[str, ...]) -> None:
    code, _, said = command(*words)

    assert code == 2, said
    assert "address" in said
    assert "secret" not in said


def test_unreadable_queue_or_ledger_is_a_failure(command: Cli, tmp_path: Path) -> None:
    nowhere = f"sqlite:///{tmp_path}/none.db"

    for words in ("job list", "queue list", "runs list", "worker list", "gpu list", "host list", "wrangle list"):
        assert command(*words.split(), "--queue-db", nowhere)[0] == 1, words
    for words in ("ledger", "arm", "disarm"):
        rest = {"ledger": ["list"], "arm": ["--yes"]}.get(words, [])
        assert command(words, "--ledger", nowhere, *rest)[0] == 1, words


def test_codes_of_workers_are_listed() -> None:
    assert {str(each) for each in (EXIT_DISOWNED, EXIT_FATAL, *(its.exit_code for its in Condition))} <= {*EXIT_CODES}


def test_help_of_commands_names_no_other_codes() -> None:
    known = {code for codes in EXIT_CODES for code in re.findall(r"\d+", codes)}
    for words, parser in ALL.items():
        for line in re.findall(r"[Ee]xit codes?:? .*", f"{parser.description}\n{parser.epilog}"):
            assert set(re.findall(r"\b\d+\b", line)) <= known, words
