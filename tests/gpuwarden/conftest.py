"""Rooms for the tests of `gpuwarden`: processes that are ended, a host's folder, a queue in a file."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from gpuwarden.queue import JobStore
from testbed.postgres import Postgres
from tests.conftest import Cli
from tests.templates import copied, empty_file


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
    """A `$GPUWARDEN_RUNTIME_DIR` of host `box1`."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "host").write_text("box1\n")
    return folder


@pytest.fixture
def cli(url: str, host_dir: Path, monkeypatch: pytest.MonkeyPatch, command: Cli) -> Cli:
    """The commands, on this queue, on box1."""
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", url)
    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", str(host_dir))
    return command


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where the queue's database is, or will be."""
    return tmp_path / "queue.db"


@pytest.fixture(scope="session")
def queue_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the queue's tables, to be copied."""
    return empty_file(JobStore, tmp_path_factory.mktemp("template") / "queue.db")


@pytest.fixture(scope="session")
def queue_template(postgres: Postgres) -> str:
    """A PostgreSQL database with the queue's tables, to be copied."""
    postgres.create("queue_template")
    JobStore.open(postgres.url("queue_template")).close()
    return "queue_template"


@pytest.fixture
def postgres_url(postgres: Postgres, queue_template: str) -> Iterator[str]:
    """An empty queue on PostgreSQL; its server runs again afterwards, whatever was done to it."""
    name = f"queue_{uuid4().hex}"
    postgres.create(name, template=queue_template)
    yield postgres.url(name)
    postgres.start()
    postgres.drop(name)


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest) -> str:
    """Where an empty queue is."""
    if backend == "sqlite":
        return copied(request.getfixturevalue("queue_file"), request.getfixturevalue("database"))
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    """An empty queue in a real database."""
    opened = JobStore.open(url)
    yield opened
    opened.close()


@pytest.fixture
def shared_store(postgres_url: str) -> Iterator[JobStore]:
    """An empty queue on PostgreSQL, which other hosts may use too."""
    opened = JobStore.open(postgres_url)
    yield opened
    opened.close()
