"""Fixtures: child processes, a host folder, queues."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import structlog

from gpuwarden.queue import JobStore
from testbed.postgres import Postgres
from tests.conftest import Cli
from tests.templates import copied, empty_file


@pytest.fixture
def log_settings() -> Iterator[None]:
    """Later tests have the log settings of before."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python with arguments; kill it at the end of the test."""
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
    """The runtime folder of host `box1`."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "host").write_text("box1\n")
    return folder


@pytest.fixture
def cli(url: str, host_dir: Path, monkeypatch: pytest.MonkeyPatch, command: Cli) -> Cli:
    """Run commands on this queue and host."""
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", url)
    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", str(host_dir))
    return command


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Path of the queue's database."""
    return tmp_path / "queue.db"


@pytest.fixture(scope="session")
def queue_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite template with the queue's tables."""
    return empty_file(JobStore, tmp_path_factory.mktemp("template") / "queue.db")


@pytest.fixture(scope="session")
def queue_template(postgres: Postgres) -> str:
    """A PostgreSQL template with the queue's tables."""
    postgres.create("queue_template")
    JobStore.open(postgres.url("queue_template")).close()
    return "queue_template"


@pytest.fixture
def postgres_url(postgres: Postgres, queue_template: str) -> Iterator[str]:
    """URL of an empty queue on PostgreSQL; restarts the server at the end."""
    name = f"queue_{uuid4().hex}"
    postgres.create(name, template=queue_template)
    yield postgres.url(name)
    postgres.start()
    postgres.drop(name)


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest) -> str:
    """URL of an empty queue."""
    if backend == "sqlite":
        return copied(request.getfixturevalue("queue_file"), request.getfixturevalue("database"))
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    """An empty queue."""
    opened = JobStore.open(url)
    yield opened
    opened.close()


@pytest.fixture
def shared_store(postgres_url: str) -> Iterator[JobStore]:
    """An empty queue on PostgreSQL."""
    opened = JobStore.open(postgres_url)
    yield opened
    opened.close()
