"""The webhook without its ledger: a full disk of PostgreSQL, and a database that does not answer.

It returns 503 and saves every alert once the ledger is back. It exits on SIGTERM although a database hangs.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from remediator.ledger.ledger import Ledger
from remediator.webhook.serve import END_S
from testbed.postgres import NoPostgres, Postgres
from testbed.postgres import postgres as postgres_server
from tests.asking import PLAIN
from tests.e2e.faulty import Disk, small_disk
from tests.remediator.builders import HOST, payload, sent
from tests.remediator.webhook.test_app import Served, served_here, serving
from tests.waiting import eventually

UNAVAILABLE = (503, {"detail": "the ledger cannot be written; retry"})


def taken(served: Served) -> list[str]:
    """The workers of the open episodes, one entry per episode."""
    while served.ledger.inbox.take_new(HOST, now=1.0):
        pass
    return sorted(episode.worker for episode in served.ledger.episodes.list_open())


@pytest.fixture
def on_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Postgres, Disk]]:
    """A PostgreSQL server on a separate small disk."""
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-disk-"))  # accessible to the user of the server
    try:
        with small_disk(folder / "disk", size="96m") as disk:
            folder.chmod(0o711)
            disk.at.chmod(0o711)
            monkeypatch.setattr(tempfile, "tempdir", str(disk.at))
            with postgres_server(tmp_path / "postgres") as found:
                monkeypatch.undo()
                if isinstance(found, NoPostgres):
                    pytest.skip(found.reason)
                yield found, disk
    finally:
        shutil.rmtree(folder)


@pytest.mark.needs_postgres
@pytest.mark.skipif(os.geteuid() != 0, reason="to mount is root's")
def test_full_disk_of_postgresql_gives_503(on_small_disk: tuple[Postgres, Disk], ledger_file: Path) -> None:
    server, disk = on_small_disk
    server.create("ledger")
    calls = [payload(*(sent(f"{call}-{each}", worker=f"w{call}-{each}") for each in range(20))) for call in range(20)]
    with (
        closing(Ledger.open(server.url("ledger"), host=HOST)) as ledger,
        served_here(ledger, ledger_file) as served,
    ):
        assert served.post(payload(sent("before", worker="before"))).status_code == 202
        disk.fill()

        # Free space inside its tables may still take some alerts.
        answers = [served.post(call) for call in calls]

        assert (answers[-1].status_code, answers[-1].json()) == UNAVAILABLE
        assert {answer.status_code for answer in answers} <= {202, 503}
        accepted = [number for number, answer in enumerate(answers) if answer.status_code == 202]
        assert served.count("alerts_total", outcome="accepted", reason="") == 1 + 20 * len(accepted)
        assert served.asked("healthy") == (200, "healthy\n")
        eventually(lambda: served.asked("ready")[0] == 503, "it is not ready")
        assert "its server's disk is full, make room there: could not" in served.asked("ready")[1]

        disk.free()
        eventually(lambda: served.asked("ready") == (200, "ready\n"), "it is ready again")
        assert {served.post(call).status_code for number, call in enumerate(calls) if number not in accepted} == {202}
        expected = ["before", *(f"w{call}-{each}" for call in range(20) for each in range(20))]
        assert taken(served) == sorted(expected)
        assert "No space left on device" in (ledger_file.parent / "postgres" / "postgres.log").read_text()


# --- a hung database


@contextmanager
def silent(postgres: Postgres) -> Iterator[None]:
    """Suspend every process of the server: it receives queries and sends no answer."""
    pids = postgres._processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def scrape(served: Served) -> None:
    with suppress(httpx.HTTPError):
        httpx.get(f"{served.url}/metrics", timeout=20, trust_env=False, verify=PLAIN)


def deliver(served: Served) -> None:
    with suppress(httpx.HTTPError):
        served.post(payload(sent()))


def probe(served: Served) -> None:
    with suppress(httpx.HTTPError):
        while served.asked("ready")[0] == 200:
            pass  # the answer is cached for a moment


@pytest.mark.needs_postgres
@pytest.mark.parametrize(
    ("database", "ask", "says"),
    [
        ("--queue-db", scrape, "no answer from a database"),
        ("--ledger", deliver, "shutting down, the ledger did not answer yet"),
        ("--ledger", probe, "no answer from a database"),
    ],
    ids=["queue, scrape", "ledger, delivery", "ledger, readiness"],
)
def test_sigterm_exits_in_time_while_a_database_hangs(
    postgres: Postgres, postgres_url: str, tmp_path: Path, database: str, ask: Callable[[Served], None], says: str
) -> None:
    with (
        serving(tmp_path / "run", database, postgres_url) as (served, process),
        ThreadPoolExecutor(1) as asking,
    ):
        scrape(served)
        assert served.asked("ready") == (200, "ready\n")
        with silent(postgres):
            asked = asking.submit(ask, served)
            eventually(lambda: unread(postgres), "the database has a query")
            sigterm_s = time.monotonic()
            process.send_signal(signal.SIGTERM)

            code = process.wait(5 * END_S)
            took_s = time.monotonic() - sigterm_s

        asked.result()
        assert code == 0
        assert took_s < 2 * END_S
        log = served.log.read_text()
        assert says in log
        assert "Traceback" not in log


def unread(postgres: Postgres) -> bool:
    """Whether the server has unread data in a socket: see proc_net_tcp(5)."""
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        established, received = state == "01", queues.rpartition(":")[2]
        if established and int(local.rpartition(":")[2], 16) == postgres.port and int(received, 16):
            return True
    return False
