"""Texts of `--help`."""

import re

import pytest

from gpuwarden.cli.main import main

COMMANDS = ("exporter", "remediator serve", "remediator execute", "worker run")


def help_of(command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The help of a command, each option on one line."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return capfd.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_python_syntax(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = help_of(command, capfd, monkeypatch)

    assert (
        re.findall(r"\w+\[[\w,.]+\]|default factory: \w+|\(default: (?:None|\(\))?\)| (?:str|int|float|Path)\b", says)
        == []
    )
    assert re.search(r"\(default: [\d.]+\)", says)


def test_help_shows_values_and_defaults(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUWARDEN_RUNTIME_DIR", raising=False)

    says = help_of("exporter", capfd, monkeypatch)

    assert re.search(r"--runtime-dir PATH .*\(default: /run/gpuwarden\)\n", says)
    assert re.search(r"--port N .*\(default: 29835\)\n", says)
    assert re.search(r"--node-name TEXT .*; required with --pods api\n", says)
    assert re.search(r"--systemd-unit TEXT,\.\.\.\s+.*; each counts as one container\n", says)
    assert re.search(r"--task-dir PATH,\.\.\.\s+.*\(docs/reference/formats\.md\)\n", says)
