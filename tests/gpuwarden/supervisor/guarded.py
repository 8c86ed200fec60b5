"""Runs of commands under `gpuwarden run`, for tests."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpuwarden.job import Condition
from gpuwarden.supervisor import files
from remediator.actuators.process import ProcessActuator
from tests.waiting import eventually

NAME: Final = "job"
WAITS: Final = "import time; print('ready', flush=True); time.sleep(1000)"
DEAF: Final = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS


class Guarded:
    """Starts runs, and ends their processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / NAME
        self.actuator = ProcessActuator(directory)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, cmd: Sequence[str], *options: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuwarden", "run", "--name", NAME, *options, "--", *cmd],
            env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(self.directory)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def result(self, cmd: Sequence[str], *options: str) -> tuple[int, str]:
        process = self.start(cmd, *options)
        said = process.communicate(timeout=30)[0]
        return process.returncode, said

    def pid(self, *, but: int | None = None) -> int:
        """The pid of the command, once it runs."""

        def found() -> int | None:
            file = files.read_process(self.folder, NAME)
            runs = file is not None and file.process.runs() and file.process.pid != but
            return file.process.pid if file is not None and runs else None

        eventually(lambda: found() is not None, "the command runs")
        return found() or 0

    def end(self, condition: Condition, *, acts: bool = True) -> None:
        """End the command as the executor does."""
        self.actuator.announce(NAME, condition=condition, acts=acts, message="no step for 120 s")
        if acts:
            self.actuator.stop(NAME, grace_s=0.5)

    def close(self) -> None:
        for process in self.started:
            for _ in range(2):  # the second SIGTERM kills
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=8)
            process.kill()
            process.communicate(timeout=8)


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def when_ready(process: subprocess.Popen[str]) -> str:
    """The output up to the line `ready`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line == "ready\n":
            return said
    raise AssertionError(said)
