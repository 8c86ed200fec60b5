"""The last log lines of a container from real engines."""

from collections.abc import Callable

from remediator.capture.capture import CaptureRunner
from testbed.docker_engine import Engine
from tests.remediator import builders as build
from tests.remediator.actuators.test_docker import engine, run

__all__ = ["engine", "run"]  # fixtures

PROGRAM = """
import os, time

left = {}  # Podman 4.3 adds a line that is written in two pieces to the line before it.
while left:
    left = left[os.write(1, left) :]
time.sleep(600)
"""


def last_lines(engine: Engine, container: str) -> tuple[list[list[str]], list[str]]:
    capture_runner = CaptureRunner(for_s=30.0, max_bytes=2**18, engines={engine.kind: engine.base_url})
    target = build.container(kind=engine.kind, handle=container, pids=frozenset())
    document = capture_runner.capture(build.episode(), target, None, armed=False, now=build.NOW).document
    return [log["lines"] for log in document["logs"]], [each for each in document["notes"] if "last" in each]


def test_last_hundred_lines_are_kept(engine: Engine, run: Callable[..., str]) -> None:
    lines = [*(str(n) for n in range(150)), "ready"]
    container = run(program=PROGRAM.format("".join(f"{line}\n" for line in lines).encode()))

    assert last_lines(engine, container) == ([lines[-100:]], [])


def test_line_after_a_very_long_line_is_read(engine: Engine, run: Callable[..., str]) -> None:
    container = run(program=PROGRAM.format(f"b'a' * {6 * 2**20} + b'\\nready\\n'"))

    logs, notes = last_lines(engine, container)

    if engine.kind == "podman" and not logs:  # version 4.3 needs 0.5 to 3 s for such a log
        assert notes == ["no last lines of the container's log: timed out"]
    else:
        # Podman returns the end of the long line, which is empty, and loses the rest.
        assert (logs, notes) == ([["ready"] if engine.kind == "docker" else ["", "ready"]], [])
