"""Worker processes during queue outages."""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.queue import JobStore
from testbed.postgres import Postgres
from tests.gpuwarden.worker.builders import Spawn, reaches, state_files, submit
from tests.waiting import eventually


@pytest.fixture
def locked(database: Path, store: JobStore) -> Iterator[sqlite3.Connection]:
    """A connection that can lock the queue; `store` has created its tables."""
    store.jobs()
    connection = sqlite3.connect(database, isolation_level=None)
    yield connection
    connection.close()


def test_job_continues_and_its_result_waits_while_the_queue_is_away(
    start: Callable[..., Any], store: JobStore, locked: sqlite3.Connection, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    job_id = submit(store, do="await", out=str(tmp_path / "go"))
    process = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    locked.execute("BEGIN IMMEDIATE")
    eventually(lambda: "job continues" in log.read_text(), "a renewal goes unanswered")
    (tmp_path / "go").touch()
    eventually(lambda: "the result waits" in log.read_text(), "the result goes unanswered")
    assert process.poll() is None
    assert store.job(job_id).state is State.RUNNING
    locked.execute("ROLLBACK")

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")
    assert store.job(job_id).attempt == 1
    assert process.poll() is None


def test_idle_worker_survives_a_queue_outage(
    start: Callable[..., Any], store: JobStore, locked: sqlite3.Connection, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    process = start()  # lock later: opening the queue writes
    locked.execute("BEGIN IMMEDIATE")
    eventually(lambda: "asking again" in log.read_text(), "a heartbeat goes unanswered")
    locked.execute("ROLLBACK")

    job_id = submit(store, out=str(tmp_path / "out"))

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")
    assert process.poll() is None


@pytest.mark.needs_postgres
def test_worker_retries_an_absent_queue(
    start: Callable[..., Any], postgres: Postgres, postgres_url: str, log: Path
) -> None:
    postgres.stop()
    process = start(store=postgres_url, says="queue does not answer; asking again")
    assert process.poll() is None

    postgres.start()

    eventually(lambda: "worker ready" in log.read_text(), "the worker is ready", log=log.read_text)


@pytest.mark.needs_postgres
def test_worker_that_waits_for_its_queue_stops_on_a_signal(
    start: Callable[..., Any], postgres: Postgres, postgres_url: str, host_dir: Path
) -> None:
    postgres.stop()
    process = start(store=postgres_url, says="queue does not answer; asking again")

    process.terminate()

    assert process.wait(timeout=30) == 0
    assert state_files(host_dir) == {"w1.lock"}


@pytest.mark.needs_postgres
def test_idle_worker_survives_a_server_restart_and_wakes_on_submission(
    start: Callable[..., Any], postgres: Postgres, shared_store: JobStore, postgres_url: str, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    process = start(store=postgres_url)
    postgres.stop()
    eventually(lambda: "asking again" in log.read_text(), "a look goes unanswered")
    shared_store.close()  # a recent connection is not checked

    postgres.start()
    job_id = submit(shared_store, out=str(tmp_path / "out"))

    eventually(reaches(shared_store, job_id, State.COMPLETED), "the job is completed", log=log.read_text)
    assert process.poll() is None


@pytest.mark.needs_postgres
def test_worker_cut_off_from_a_shared_queue_for_a_lease_stops_itself(
    start: Callable[..., Any], postgres: Postgres, shared_store: JobStore, postgres_url: str, log: Path
) -> None:
    job_id = submit(shared_store, do="block")
    process = start("--lease-s", "3", store=postgres_url)
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    postgres.stop()

    assert process.wait(timeout=20) == 77
    # The log's writer passes a job's output on. It may do so after the worker's end.
    why = "the lease could not be renewed for 3 s"
    eventually(lambda: why in log.read_text(), "it says why", log=log.read_text)
    assert "job continues" in log.read_text()
    postgres.start()
    assert shared_store.job(job_id).state is State.RUNNING


@pytest.mark.needs_postgres
def test_interruption_shorter_than_the_lease_stops_nothing(
    start: Callable[..., Any], postgres: Postgres, shared_store: JobStore, postgres_url: str, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    job_id = submit(shared_store, do="await", out=str(tmp_path / "go"))
    process = start(store=postgres_url)
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    postgres.stop()
    eventually(lambda: "job continues" in log.read_text(), "a renewal goes unanswered")
    postgres.start()
    (tmp_path / "go").touch()

    eventually(reaches(shared_store, job_id, State.COMPLETED), "the job is completed", log=log.read_text)
    assert shared_store.job(job_id).attempt == 1
    assert process.poll() is None


def test_worker_cut_off_from_a_local_queue_for_a_lease_works_on(
    start: Callable[..., Any], store: JobStore, locked: sqlite3.Connection, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    job_id = submit(store, do="await", out=str(tmp_path / "go"))
    process = start("--lease-s", "1")
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    locked.execute("BEGIN IMMEDIATE")
    eventually(lambda: log.read_text().count("job continues") >= 3, "more than a lease has passed")
    locked.execute("ROLLBACK")
    (tmp_path / "go").touch()

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed", log=log.read_text)
    assert process.poll() is None


# A thread waits for the write lock to renew. Meanwhile the process hangs with the GIL.
HANGS_IN_RENEWAL = """
import ctypes, sys, threading, time
from gpuwarden.queue import JobStore

url, call, job_id = sys.argv[1:]
store = JobStore.open(url)
slot = {"host": "h", "worker": "w", "incarnation": "i"}

def keep():
    begun.set()
    if call == "renew":
        store.claims.renew(int(job_id), attempt=1, incarnation="i", now=2_000_000.0)
    else:
        store.claims.heartbeat(**slot, queue="gpu", model="m", now=2_000_000.0)

store.claims.owns(int(job_id), attempt=1, incarnation="i")  # connects
begun = threading.Event()
threading.Thread(target=keep, daemon=True).start()
begun.wait()
time.sleep(0.5)  # the thread waits for the lock
print("hung", flush=True)
ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.parametrize("call", ["renew", "heartbeat"])
def test_worker_that_hangs_during_a_renewal_does_not_block_writers(
    call: str, store: JobStore, url: str, spawn: Spawn, tmp_path: Path, locked: sqlite3.Connection
) -> None:
    job_id = submit(store)
    assert store.claims.claim("gpu", host="h", worker="w", incarnation="i", now=0)
    locked.execute("BEGIN IMMEDIATE")
    stderr = tmp_path / "hung.log"
    process = spawn("-c", HANGS_IN_RENEWAL, url, call, str(job_id), stderr=stderr)
    assert process.stdout is not None
    assert process.stdout.readline() == "hung\n", stderr.read_text()

    locked.execute("COMMIT")
    written = {"renew": "SELECT lease_expires_at FROM jobs", "heartbeat": "SELECT last_seen_at FROM workers"}[call]
    eventually(lambda: locked.execute(written).fetchone()[0] >= 2_000_000, "the hung process has written")

    store.check_writable()
    assert process.poll() is None
