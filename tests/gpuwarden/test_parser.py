"""The errors of the argument parser."""

import argparse

import pytest

from gpuwarden.format import Parser, nearest
from gpuwarden.job import State


def parser() -> Parser:
    parser = Parser(prog="gpuwarden job")
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list")
    listing.add_argument("--state", choices=list(State))
    listing.add_argument("--limit", type=int)
    show = commands.add_parser("show")
    show.add_argument("job")
    return parser


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        pytest.param(["lst"], "gpuwarden job: 'lst' is unknown; did you mean list?", id="command"),
        pytest.param(["zzz"], "gpuwarden job: 'zzz' is unknown: use list, show", id="command without a near one"),
        pytest.param([], "gpuwarden job: missing COMMAND: use list, show", id="no command"),
        pytest.param(["show"], "gpuwarden job show: missing job", id="no value"),
        pytest.param(
            ["list", "--stat=waiting", "--lmit", "3"],
            "gpuwarden job list: unknown argument --lmit 3; did you mean --limit?", id="option",
        ),
        pytest.param(["show", "1", "2"], "gpuwarden job show: unknown argument 2", id="one value too many"),
        pytest.param(["list", "--limit", "x"], "argument --limit: invalid int value: 'x'", id="number"),
    ],
)  # fmt: skip
def test_error_is_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(argv)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
    assert said.endswith(" --help`)")


def test_choices_are_named_by_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--state", choices=list(State))
    with pytest.raises(SystemExit):
        parser.parse_args(["--state", "zzz"])
    assert capsys.readouterr().err.startswith("x: argument --state: 'zzz' is unknown: use waiting, queued, running, ")


def test_valid_arguments_are_parsed() -> None:
    assert parser().parse_args(["list", "--limit", "3", "--state", "queued"]) == argparse.Namespace(
        limit=3, state="queued"
    )


def test_nearest_is_empty_if_no_name_is_near() -> None:
    assert nearest("zzz", ["list", "show"]) == ""
    assert nearest("shw", ["list", "show"]) == "; did you mean show?"
