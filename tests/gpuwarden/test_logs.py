"""What a program logs, and that a log which cannot be written is not its end."""

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


def test_an_event_is_a_line_of_json_with_its_level_and_time(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=log, stdout=subprocess.DEVNULL, check=True)

    first, *_, last = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (first["event"], first["number"], first["level"]) == ("a line", 0, "warning")
    assert first["timestamp"].endswith("Z")
    assert "ValueError: a defect" in last["exception"]


def test_a_log_on_a_full_disk_ends_no_program() -> None:
    with Path("/dev/full").open("w") as full:
        said = subprocess.run(
            [sys.executable, "-c", PROGRAM], stderr=full, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    assert said == "lives\n"


def test_a_stream_that_is_closed_costs_the_line_and_no_more() -> None:
    closed = PROGRAM.replace("logs.configure()", "logs.configure(); import sys; sys.stderr.close()")

    done = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True, check=True)

    assert done.stdout == "lives\n"
