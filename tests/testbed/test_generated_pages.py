"""The generated pages of commands, alerts and the HTTP API are up to date and complete."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from gpuwarden.cli import main as cli
from gpuwarden.cli.parsers import parsers
from gpuwarden.format import Parser
from testbed.check_release import CHECKOUT, RULES_GLOB
from testbed.reference import alerts, http_api
from testbed.reference import cli as commands
from testbed.reference.__main__ import DOCS, main


def test_pages_in_docs_match_the_code() -> None:
    """To fix it: `python -m testbed.reference`."""
    assert main(["--check"]) == 0


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """Sections of the page of commands, by heading."""
    page = (DOCS / "cli.md").read_text()
    found = re.split(r"^##+ (.+)\n", page, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_every_command_and_subcommand_has_a_section(
    sections: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ["Common options", "Exit codes"]
    for name in cli.commands():
        expected.append(f"gpuwarden {name}")
        if name in commands.ELSEWHERE:
            continue
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        _, _, listed = capsys.readouterr().out.partition("\ncommands:\n")
        expected += [f"gpuwarden {name} {sub}" for sub in re.findall(r"^    ([\w-]+)(?: |$)", listed, re.MULTILINE)]

    assert len(expected) > 50
    assert list(sections) == expected


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--help"])
    return capsys.readouterr().out


def test_every_option_of_a_command_is_in_its_section(
    sections: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for heading, text in sections.items():
        words = heading.removeprefix("gpuwarden ")
        if heading == "Common options" or words in commands.ELSEWHERE:
            continue
        options = set(re.findall(r"^  (--[a-z-]+)", help_of(words, capsys), re.MULTILINE))
        assert {each for each in options if f"`{each}" not in text} == set(), heading


def test_common_options_are_listed_once(sections: dict[str, str]) -> None:
    listed = re.findall(r"^\| `(--[a-z-]+)", sections["Common options"], re.MULTILINE)

    assert {"--ledger", "--queue-db", "--json"} <= set(listed)
    assert len(listed) == len(set(listed))
    assert "| `--queue-db" not in sections["gpuwarden job list"]


def test_commands_with_settings_link_to_their_pages(sections: dict[str, str]) -> None:
    assert "(settings-exporter.md)" in sections["gpuwarden exporter"]
    assert "(settings-remediator.md)" in sections["gpuwarden remediator"]


def test_usage_names_what_is_required() -> None:
    found = parsers()

    assert commands.usage("gpuwarden pause", found["pause"]) == ("gpuwarden pause [OPTIONS] (--for 2h | --until TIME)")
    assert commands.usage("gpuwarden job cancel", found["job cancel"]) == "gpuwarden job cancel [OPTIONS] [JOB...]"


def test_page_is_the_same_in_any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_JOB_LOG_DIR", "/mnt/logs")
    monkeypatch.setenv("HOME", "/nonexistent")

    assert commands.page() == (DOCS / "cli.md").read_text()


def test_argument_without_help_is_refused() -> None:
    def command(argv: list[str]) -> int:
        parser = Parser(prog="gpuwarden x")
        parser.add_argument("--y")
        parser.parse_args(argv)
        return 0

    with (
        patch.object(cli, "commands", lambda: {"up": "x:y"}),
        patch.object(cli, "load", lambda _: command),
        pytest.raises(ValueError, match="gpuwarden x: --y Y has no help"),
    ):
        commands.page()


def test_command_that_parses_nothing_is_refused() -> None:
    with (
        patch.object(cli, "load", lambda _: lambda _: 0),
        pytest.raises(ValueError, match="parsed no arguments"),
    ):
        parsers()


def rules() -> Iterator[dict[str, Any]]:
    for file in sorted(CHECKOUT.glob(RULES_GLOB)):
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from (rule for rule in group["rules"] if "alert" in rule)


def test_every_alert_has_a_row() -> None:
    found = re.findall(
        r"^\| \[(\w+)\]\(\.\./runbooks/(\w+)\.md\) \| ([a-z ]+) \| `?(\w+)`? \| (\w+) \| [^{}|]+ \|$",
        alerts.page(),
        re.MULTILINE,
    )
    rows = {name: (remedy, wait) for name, runbook, _, remedy, wait in found if name == runbook}

    assert len(found) == len(rows) > 40
    whom = {rule["alert"]: rule["labels"].get("remedy", "people") for rule in rules()} | {
        "GpuwardenWatchdog": "gpuwarden"
    }
    assert rows == {rule["alert"]: (whom[rule["alert"]], rule.get("for", "0")) for rule in rules()}


def test_rule_file_without_a_heading_is_refused() -> None:
    with (
        patch.object(alerts, "HEADINGS", {"Jobs": "^budget"}),
        pytest.raises(ValueError, match=r"attribution\.rules\.yaml is under no heading"),
    ):
        alerts.page()


def test_every_operation_of_the_remediator_has_a_section_with_its_statuses() -> None:
    page = http_api.page()

    for path, methods in http_api.description()["paths"].items():
        for method, operation in methods.items():
            section = page.partition(f"### {method.upper()} {path}\n")[2].partition("\n#")[0]
            assert re.findall(r"^\| (\d+) \|", section, re.MULTILINE) == list(operation["responses"])


@pytest.mark.parametrize("known", ["EXPORTER", "UNDESCRIBED"])
def test_route_without_a_text_is_refused(known: str) -> None:
    with patch.object(http_api, known, {}), pytest.raises(ValueError, match=r"http_api\.py"):
        http_api.page()
