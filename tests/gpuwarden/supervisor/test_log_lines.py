"""Log lines of a pool's supervisor."""

import json
import os
import pty

import pytest
import structlog

from gpuwarden import logs
from gpuwarden.supervisor.log_lines import LEVELS, Log


@pytest.mark.usefixtures("log_settings")
@pytest.mark.parametrize("level", LEVELS)
def test_lines_are_those_of_structlog(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level=level)
    written = []
    for log in (Log(level), structlog.get_logger()):
        log.info("worker ended", worker="w-0", reason="exit code 1\x7f")
        log.warning("worker ended; started again", worker="w-0", after_s=1.0)
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        shapes = {len(line.pop("timestamp")) for line in lines}
        written.append(([list(line.items()) for line in lines], shapes))

    ours, theirs = written
    assert ours == theirs


def test_line_on_a_terminal_is_text_without_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patched:  # noqa: PTH123
        patched.setattr("sys.stderr", terminal)
        Log("info").warning("worker ended", worker="w-\x1b[0m", after_s=2.0)
    said = os.read(ours, 1000).decode()
    os.close(ours)

    assert said.endswith("worker=w-\\x1b[0m after_s=2.0\r\n")
    assert "Z [warning  ] worker ended " in said


def test_full_disk_does_not_stop_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full, monkeypatch.context() as patched:  # noqa: PTH123
        patched.setattr("sys.stderr", full)
        Log("info").info("worker ended", worker="w-0")
        patched.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
