"""Rooms for the tests of `gpuwarden`: processes that are ended, a host's folder, a queue in a file."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.jobstore import JobStore


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start this Python with arguments; whatever still runs at the test's end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, stderr: Path | None = None, **env: str) -> subprocess.Popen[str]:
        with (stderr or Path(os.devnull)).open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **env},
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def host_dir(tmp_path: Path) -> Path:
    """A `$GPUWARDEN_DIR` of host `box1`."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "host").write_text("box1\n")
    return folder


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where the queue's database is, or will be."""
    return tmp_path / "queue.db"


@pytest.fixture
def store(database: Path) -> Iterator[JobStore]:
    """An empty queue in a real SQLite file."""
    opened = JobStore.open(f"sqlite:///{database}")
    yield opened
    opened.close()
