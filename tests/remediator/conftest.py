"""A ledger and a queue in real databases: SQLite files and PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from gpuwarden.cli.main import main
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from testbed.postgres import Postgres
from tests.remediator.builders import HOST, NOW
from tests.templates import Files, copied, empty_file


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    """A PostgreSQL database with the tables of ledger and queue, as a template."""
    name = "remediator_template"
    postgres.create(name)
    Ledger.open(postgres.url(name)).close()
    JobStore.open(postgres.url(name)).close()
    return name


@pytest.fixture
def postgres_url(postgres: Postgres, template: str) -> Iterator[str]:
    """An empty ledger and an empty queue in one PostgreSQL database. A stopped server is started afterwards."""
    name = f"remediator_{uuid4().hex}"
    postgres.create(name, template=template)
    yield postgres.url(name)
    postgres.start()
    postgres.drop(name)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """SQLite files with the tables of ledger and queue, as templates."""
    folder = tmp_path_factory.mktemp("templates")
    return Files(ledger=empty_file(Ledger, folder / "ledger.db"), queue=empty_file(JobStore, folder / "queue.db"))


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """The path of an SQLite ledger."""
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger_url(backend: str, request: pytest.FixtureRequest, ledger_file: Path) -> str:
    """The URL of an empty ledger."""
    if backend == "sqlite":
        return copied(request.getfixturevalue("files").ledger, ledger_file)
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def queue_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty queue."""
    if backend == "sqlite":
        return copied(request.getfixturevalue("files").queue, tmp_path / "queue.db")
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An empty ledger."""
    opened = Ledger.open(ledger_url, host=HOST)
    yield opened
    opened.close()


@pytest.fixture
def cli(ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command on this ledger, for which an executor of box1 has a heartbeat."""
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_LEDGER", ledger_url)
    ledger.executors.beat(host=HOST, pid=1, armed=False, started_at=NOW, errors=0, now=NOW)

    def run(*argv: str) -> int:
        try:
            return main(list(argv))
        except SystemExit as ended:
            return int(ended.code or 0)

    return run


@pytest.fixture
def store(queue_url: str) -> Iterator[JobStore]:
    """An empty queue."""
    opened = JobStore.open(queue_url)
    yield opened
    opened.close()
