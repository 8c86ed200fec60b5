"""Worker processes whose queue does not answer."""

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
    """A connection that can lock the queue against every writer; `store` has made its tables."""
    store.jobs()
    connection = sqlite3.connect(database, isolation_level=None)
    yield connection
    connection.close()


def test_a_job_goes_on_while_the_queue_does_not_answer_and_its_result_waits(
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


def test_an_idle_worker_outlives_a_queue_that_does_not_answer(
    start: Callable[..., Any], store: JobStore, locked: sqlite3.Connection, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    process = start()  # opening the queue needs a turn to write, so the lock comes after
    locked.execute("BEGIN IMMEDIATE")
    eventually(lambda: "asking again" in log.read_text(), "a heartbeat goes unanswered")
    locked.execute("ROLLBACK")

    job_id = submit(store, out=str(tmp_path / "out"))

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")
    assert process.poll() is None


@pytest.mark.needs_postgres
def test_an_absent_queue_is_asked(start: Callable[..., Any], postgres: Postgres, postgres_url: str, log: Path) -> None:
    postgres.stop()
    process = start(store=postgres_url, says="queue does not answer; asking again")
    assert process.poll() is None

    postgres.start()

    eventually(lambda: "worker ready" in log.read_text(), "the worker is ready", log=log.read_text)


@pytest.mark.needs_postgres
def test_a_worker_that_waits_for_its_queue_can_be_told_to_stop(
    start: Callable[..., Any], postgres: Postgres, postgres_url: str, host_dir: Path
) -> None:
    postgres.stop()
    process = start(store=postgres_url, says="queue does not answer; asking again")

    process.terminate()

    assert process.wait(timeout=30) == 0
    assert state_files(host_dir) == {"w1.lock"}


@pytest.mark.needs_postgres
def test_an_idle_worker_outlives_its_server_and_is_woken_by_a_submission(
    start: Callable[..., Any], postgres: Postgres, shared_store: JobStore, postgres_url: str, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    process = start(store=postgres_url)
    postgres.stop()
    eventually(lambda: "asking again" in log.read_text(), "a look goes unanswered")
    shared_store.close()  # a connection that was used a moment ago is not asked whether it is there still

    postgres.start()
    job_id = submit(shared_store, out=str(tmp_path / "out"))

    eventually(reaches(shared_store, job_id, State.COMPLETED), "the job is completed", log=log.read_text)
    assert process.poll() is None


@pytest.mark.needs_postgres
def test_cut_off_from_a_shared_queue_for_a_lease_a_worker_stops_itself(
    start: Callable[..., Any], postgres: Postgres, shared_store: JobStore, postgres_url: str, log: Path
) -> None:
    job_id = submit(shared_store, do="block")
    process = start("--lease-s", "3", store=postgres_url)
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    postgres.stop()

    assert process.wait(timeout=20) == 77
    assert "the lease could not be renewed for 3 s" in log.read_text()
    assert "job continues" in log.read_text()
    postgres.start()
    assert shared_store.job(job_id).state is State.RUNNING


@pytest.mark.needs_postgres
def test_an_interruption_shorter_than_the_lease_stops_nothing(
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


def test_cut_off_from_a_queue_of_its_own_for_a_lease_a_worker_works_on(
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


# A thread renews, as a worker's does, and waits for its turn to write; meanwhile the process wedges with Python's lock.
WEDGES_AS_IT_RENEWS = """
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
time.sleep(0.5)  # by now the thread waits for its turn
print("wedged", flush=True)
ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.parametrize("call", ["renew", "heartbeat"])
def test_a_worker_that_wedges_while_it_renews_keeps_nobody_from_writing(
    call: str, store: JobStore, url: str, spawn: Spawn, tmp_path: Path, locked: sqlite3.Connection
) -> None:
    job_id = submit(store)
    assert store.claims.claim("gpu", host="h", worker="w", incarnation="i", now=0)
    locked.execute("BEGIN IMMEDIATE")
    stderr = tmp_path / "wedged.log"
    process = spawn("-c", WEDGES_AS_IT_RENEWS, url, call, str(job_id), stderr=stderr)
    assert process.stdout is not None
    assert process.stdout.readline() == "wedged\n", stderr.read_text()

    locked.execute("COMMIT")
    written = {"renew": "SELECT lease_expires_at FROM jobs", "heartbeat": "SELECT last_seen_at FROM workers"}[call]
    eventually(lambda: locked.execute(written).fetchone()[0] >= 2_000_000, "the wedged process has had its turn")

    store.check_writable()
    assert process.poll() is None
