"""The rules' tests on two versions of promtool: what is said of one that comes to no end."""

import re
from pathlib import Path

import pytest

from bench import versions
from bench.figures import BenchError
from deploy import parts


def program(path: Path, then: str) -> Path:
    """A promtool that tells its version, and runs tests like that."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "promtool, version 9.9.9"; exit 0; }}\n{then}\n')
    path.chmod(0o755)
    return path


def test_a_promtool_that_comes_to_no_end_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = program(tmp_path / "promtool", "exec sleep 60")
    monkeypatch.setattr(parts, "find", lambda _: hangs)
    monkeypatch.setattr(parts, "find_newer", lambda *_: hangs)
    monkeypatch.setattr(versions, "TIMEOUT_S", 2)

    with pytest.raises(BenchError, match=re.escape(f"{hangs} did not end within 2 s and was killed")):
        list(versions.measure())


def test_both_promtools_are_timed_where_all_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = program(tmp_path / "promtool", "exit 0")
    monkeypatch.setattr(parts, "find", lambda _: passes)
    monkeypatch.setattr(parts, "find_newer", lambda *_: passes)

    found = list(versions.measure())

    assert [each.what for each in found] == ["Prometheus 9.9.9: all tests of the rules pass"] * 2
