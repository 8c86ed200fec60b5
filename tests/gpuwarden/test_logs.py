"""Logs of programs, and logs that cannot be written."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import structlog
from gpuwarden import logs
logs.configure()
log = structlog.get_logger()
for number in range(1000):
    log.warning("a line", number=number)
try:
    raise ValueError("a defect")
except ValueError:
    log.exception("another one")
print("lives")
"""


def test_event_is_a_json_line_with_level_and_time(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=log, stdout=subprocess.DEVNULL, check=True)

    first, *_, last = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (first["event"], first["number"], first["level"]) == ("a line", 0, "warning")
    assert first["timestamp"].endswith("Z")
    assert "ValueError: a defect" in last["exception"]


def test_full_log_disk_does_not_end_the_program() -> None:
    with Path("/dev/full").open("w") as full:
        said = subprocess.run(
            [sys.executable, "-c", PROGRAM], stderr=full, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    assert said == "lives\n"


def test_closed_stream_loses_only_the_line() -> None:
    closed = PROGRAM.replace("logs.configure()", "logs.configure(); import sys; sys.stderr.close()")

    done = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True, check=True)

    assert done.stdout == "lives\n"
