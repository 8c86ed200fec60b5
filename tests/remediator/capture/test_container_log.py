"""The last log lines of a container from real engines."""

from collections.abc import Callable

from remediator.capture.capture import CaptureRunner
from testbed.docker_engine import Engine
from tests.remediator import builders as build
from tests.remediator.actuators.test_docker import engine, run

__all__ = ["engine", "run"]  # fixtures

PROGRAM = """
import os, time

{}
time.sleep(600)
"""


def last_lines(engine: Engine, container: str) -> tuple[list[list[str]], list[str]]:
    capture_runner = CaptureRunner(for_s=30.0, max_bytes=2**18, engines={engine.kind: engine.base_url})
    target = build.container(kind=engine.kind, handle=container, pids=frozenset())
    document = capture_runner.capture(build.episode(), target, None, armed=False, now=build.NOW).document
    return [log["lines"] for log in document["logs"]], [each for each in document["notes"] if "last" in each]


def test_last_hundred_lines_are_kept(engine: Engine, run: Callable[..., str]) -> None:
    container = run(program=PROGRAM.format("for n in range(150): print(n, flush=True)\nprint('ready', flush=True)"))

    assert last_lines(engine, container) == ([[*(str(n) for n in range(51, 150)), "ready"]], [])


def test_line_after_a_very_long_line_is_read(engine: Engine, run: Callable[..., str]) -> None:
    container = run(program=PROGRAM.format(f"print('a' * {6 * 2**20}, flush=True)\nprint('ready', flush=True)"))

    logs, notes = last_lines(engine, container)

    assert logs == {"docker": [["ready"]], "podman": []}[engine.kind]
    assert [note.partition(": ")[0] for note in notes] == {
        "docker": [],
        "podman": ["no last lines of the container's log"],
    }[engine.kind]
