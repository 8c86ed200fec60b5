"""`gpuwarden worker` as a process of its own, with real jobs; and what only a worker in hand can be put through."""

import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuwarden import state_file
from gpuwarden.cli.main import main
from gpuwarden.db.engine import DatabaseError, NoAnswerError
from gpuwarden.job import JobId, State, Trip
from gpuwarden.queue import Job, JobStore, ReplacedError, Submission
from gpuwarden.reporter import Reporter
from gpuwarden.worker import lease as lease_module
from gpuwarden.worker import main as main_module
from gpuwarden.worker import worker as worker_module
from gpuwarden.worker.main import BodyError, find_body, gpus_named
from gpuwarden.worker.settings import Settings
from gpuwarden.worker.worker import DisownedError, Stop, Worker, WorkerStopping
from testbed.postgres import Postgres
from tests.waiting import eventually

Spawn = Callable[..., subprocess.Popen[str]]

# What the worker processes run: each job's payload says what it does. A locked queue gives up early, is asked often.
BODIES = """
import ctypes, sys, time
from pathlib import Path
from gpuwarden.db import engine
from gpuwarden.worker import worker

engine.BUSY_TIMEOUT_S = 0.2
worker.IDLE_CLAIM_S = 0.5
worker.RETRY_S = 0.2
not_callable = 3

def load(job, report):
    def work():
        do = job.payload.get("do", "write")
        if do == "write":
            Path(job.payload["out"]).write_text(str(job.attempt))
        elif do == "raise":
            raise RuntimeError("out of memory \\udcff")
        elif do == "exit":
            sys.exit(3)
        elif do == "await":  # until a file appears
            while not Path(job.payload["out"]).exists():
                report.step()
                time.sleep(0.01)
        elif do == "block":  # a C call that lets go of the interpreter's lock and never returns
            ctypes.CDLL(None).sleep(600)
    return work

def cannot_load(job, report):
    raise ValueError("no such model")
"""


@pytest.fixture
def url(database: Path) -> str:
    """A worker's own doings are the same on both databases; what is not has tests of its own below."""
    return f"sqlite:///{database}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the worker process logs."""
    return tmp_path / "worker.log"


@pytest.fixture
def start(spawn: Spawn, tmp_path: Path, host_dir: Path, url: str, log: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a worker process, which logs anew, and wait until it is ready, or says what else is awaited."""
    (tmp_path / "bodies.py").write_text(BODIES)

    def run(
        *more: str, body: str = "bodies:load", store: str = url, says: str = "worker ready"
    ) -> subprocess.Popen[str]:
        options = ["--name", "w1", "--body", body, "--store", store, "--dir", str(host_dir)]
        arguments = ["-m", "gpuwarden", "worker", *options, "--heartbeat-s", "0.2", *more]
        process = spawn(*arguments, stderr=log, PYTHONPATH=str(tmp_path))
        eventually(lambda: says in log.read_text(), "the worker is ready", log=log.read_text)
        return process

    return run


def submit(store: JobStore, **payload: Any) -> JobId:
    return store.runs.submit(Submission(queue="gpu", model="sd-xl", payload=payload), now=0)


def reaches(store: JobStore, job_id: JobId, state: State) -> Callable[[], bool]:
    return lambda: store.job(job_id).state is state


def model_of(database: Path) -> str | None:
    """What the worker's row advertises."""
    connection = sqlite3.connect(database)
    row = connection.execute("SELECT current_model FROM workers").fetchone()
    connection.close()
    return None if row is None else row[0]


def state_files(host_dir: Path) -> set[str]:
    return {path.name for path in (host_dir / "w1").iterdir()}


# --- a job's life


def test_a_job_is_claimed_run_and_completed_and_the_worker_waits_for_the_next(
    start: Callable[..., Any], store: JobStore, tmp_path: Path
) -> None:
    process = start()
    outs = [tmp_path / "out1", tmp_path / "out2"]

    for out in outs:
        job_id = submit(store, out=str(out))
        eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")

    assert [out.read_text() for out in outs] == ["1", "1"]
    assert process.poll() is None


def test_a_worker_ends_after_as_many_jobs_as_it_was_told(
    start: Callable[..., Any], store: JobStore, tmp_path: Path
) -> None:
    first, second = (submit(store, out=str(tmp_path / "out")) for _ in range(2))

    process = start("--jobs-max", "1")
    process.communicate()

    assert process.returncode == 0
    assert [store.job(job_id).state for job_id in (first, second)] == [State.COMPLETED, State.QUEUED]


def test_the_row_holds_the_model_while_the_job_runs_and_not_after(
    start: Callable[..., Any], store: JobStore, database: Path, tmp_path: Path
) -> None:
    job_id = submit(store, do="await", out=str(tmp_path / "go"))
    start()
    eventually(lambda: model_of(database) == "sd-xl", "the row holds the model")

    (tmp_path / "go").touch()

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")
    eventually(lambda: model_of(database) is None, "the row holds nothing")


def test_the_lease_is_renewed_while_the_job_runs(start: Callable[..., Any], store: JobStore, tmp_path: Path) -> None:
    job_id = submit(store, do="await", out=str(tmp_path / "go"))
    start()
    eventually(lambda: store.job(job_id).lease_expires_at, "the job is claimed")
    first = store.job(job_id).lease_expires_at

    eventually(lambda: (store.job(job_id).lease_expires_at or 0) > (first or 0), "the lease is longer")


@pytest.mark.parametrize(
    ("do", "body", "because"),
    [
        pytest.param("raise", "bodies:load", "RuntimeError: out of memory \\udcff", id="raises"),
        pytest.param("exit", "bodies:load", "SystemExit: 3", id="calls sys.exit"),
        pytest.param("load", "bodies:cannot_load", "ValueError: no such model", id="cannot load"),
    ],
)
def test_a_body_that_fails_fails_its_job_with_its_event_and_the_worker_goes_on(
    start: Callable[..., Any], store: JobStore, do: str, body: str, because: str
) -> None:
    process = start(body=body)

    for _ in range(2):
        job_id = submit(store, do=do)
        eventually(reaches(store, job_id, State.FAILED), "the job has failed")
        assert store.job(job_id).because == because
        assert store.outbox.dispatch_events(job_id) == ["failed"]

    assert process.poll() is None


# --- told to stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_told_to_stop_gives_its_job_back_unharmed(
    start: Callable[..., Any], store: JobStore, host_dir: Path, tmp_path: Path, log: Path, number: signal.Signals,
) -> None:  # fmt: skip
    job_id = submit(store, do="await", out=str(tmp_path / "never"))
    process = start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    process.send_signal(number)
    process.communicate()

    assert process.returncode == 0
    back = store.job(job_id)
    assert (back.state, back.attempt, back.watchdog_retries, back.reclaims) == (State.QUEUED, 1, 0, 0)
    assert (back.claimed_by, back.priority) == (None, 100)
    assert state_files(host_dir) == {"w1.lock"}


def test_an_idle_worker_that_is_told_to_stop_ends_at_once_and_leaves_no_files(
    start: Callable[..., Any], host_dir: Path
) -> None:
    process = start()

    process.terminate()
    process.communicate(timeout=10)

    assert process.returncode == 0
    assert state_files(host_dir) == {"w1.lock"}


def test_a_killed_worker_leaves_its_claim_and_its_files_to_be_found(
    start: Callable[..., Any], store: JobStore, host_dir: Path, log: Path
) -> None:
    job_id = submit(store, do="block")
    process = start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    process.kill()
    process.communicate()

    assert store.job(job_id).state is State.RUNNING
    assert state_files(host_dir) >= {"w1.lock", "w1.worker.json", "w1.job.json"}


# --- no longer the owner


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(
    ("trip", "code"), [(Trip.BUDGET, 75), (Trip.STALL, 76), (Trip.HEALTH, 78), (Trip.DEAD_WORKER, 77)]
)
def test_a_worker_whose_job_was_taken_ends_at_once_though_its_body_is_deaf_and_says_for_what(
    start: Callable[..., Any], store: JobStore, log: Path, trip: Trip, code: int
) -> None:
    job_id = submit(store, do="block")
    process = start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    holder = store.job(job_id).claimed_by or ""
    assert store.fencing.fence(job_id, attempt=1, incarnation=holder, trip=trip, now=1)

    assert process.wait(timeout=30) == code
    assert store.job(job_id).state is State.FENCING


@pytest.mark.behaviour("A11")
def test_a_worker_whose_job_was_cancelled_with_its_run_ends_at_once(
    start: Callable[..., Any], store: JobStore, log: Path
) -> None:
    job_id = store.runs.submit(Submission(queue="gpu", run_id="r1", payload={"do": "block"}), now=0)
    sibling = store.runs.submit(Submission(queue="cpu", run_id="r1"), now=0)
    process = start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs")
    store.claims.claim("cpu", host="box1", worker="w2", incarnation="i2", now=1)
    store.claims.fail_by_worker(sibling, attempt=1, incarnation="i2", because="boom", now=1)

    store.sweeps.consume_events(now=2)

    assert process.wait(timeout=30) == 77
    assert store.job(job_id).state is State.CANCELLED


# --- a queue that does not answer


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
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    locked.execute("BEGIN IMMEDIATE")
    eventually(lambda: "working on" in log.read_text(), "a renewal goes unanswered")
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
def test_a_queue_that_is_away_at_the_start_is_asked_until_it_answers(
    start: Callable[..., Any], postgres: Postgres, postgres_url: str, log: Path
) -> None:
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
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    postgres.stop()

    assert process.wait(timeout=20) == 77
    assert "the lease could not be renewed for 3 s" in log.read_text()
    assert "working on" in log.read_text()
    postgres.start()
    assert shared_store.job(job_id).state is State.RUNNING


@pytest.mark.needs_postgres
def test_an_interruption_shorter_than_the_lease_stops_nothing(
    start: Callable[..., Any], postgres: Postgres, shared_store: JobStore, postgres_url: str, tmp_path: Path, log: Path
) -> None:  # fmt: skip
    job_id = submit(shared_store, do="await", out=str(tmp_path / "go"))
    process = start(store=postgres_url)
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    postgres.stop()
    eventually(lambda: "working on" in log.read_text(), "a renewal goes unanswered")
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
    eventually(lambda: "job armed" in log.read_text(), "the job runs")

    locked.execute("BEGIN IMMEDIATE")
    eventually(lambda: log.read_text().count("working on") >= 3, "more than a lease has passed")
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


# --- started anew


@pytest.mark.behaviour("A11")
def test_a_killed_worker_that_is_started_anew_gets_its_job_at_once(
    start: Callable[..., Any], store: JobStore, log: Path
) -> None:
    job_id = submit(store, do="block")
    killed = start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs")
    first = store.job(job_id)
    killed.kill()
    killed.wait()

    start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs again", log=log.read_text)

    again = store.job(job_id)
    assert f'"settled": [{job_id}]' in log.read_text() or f"settled=[{job_id}]" in log.read_text()
    assert (again.state, again.attempt, again.reclaims) == (State.RUNNING, 2, 1)
    assert again.claimed_by != first.claimed_by
    assert not store.claims.renew(job_id, attempt=1, incarnation=first.claimed_by or "", now=store.now())


@pytest.mark.behaviour("A11")
@pytest.mark.needs_postgres
def test_a_worker_that_slept_while_another_took_its_job_ends_and_changes_nothing(
    start: Callable[..., Any], shared_store: JobStore, postgres_url: str, log: Path
) -> None:
    store = shared_store
    job_id = submit(store, do="block")
    asleep = start(store=postgres_url)
    eventually(lambda: "job armed" in log.read_text(), "the job runs")
    eventually(lambda: store.job(job_id).state is State.RUNNING, "it is claimed")
    asleep.send_signal(signal.SIGSTOP)

    # A sweep may meet a transaction that the stopped worker left open; it is looked at again.
    eventually(lambda: store.sweeps.reclaim_expired(now=store.now() + 700), "the lease is given away", within_s=70)
    taken = store.claims.claim("gpu", host="box1", worker="w2", incarnation="i2", now=store.now())
    assert taken is not None
    assert (taken.job_id, taken.attempt) == (job_id, 2)
    asleep.send_signal(signal.SIGCONT)

    assert asleep.wait(timeout=30) == 77
    assert store.job(job_id) == taken
    assert store.claims.complete(job_id, attempt=2, incarnation="i2", now=store.now())


@pytest.mark.behaviour("A11")
def test_an_idle_worker_that_is_over_ends_and_says_so(
    start: Callable[..., Any], store: JobStore, host_dir: Path, log: Path
) -> None:
    process = start()

    store.claims.register("gpu", host="box1", worker="w1", incarnation="next", now=store.now())

    assert process.wait(timeout=30) == 77
    assert "this worker is over: stopping" in log.read_text()
    assert state_files(host_dir) == {"w1.lock"}


@pytest.mark.behaviour("A11")
def test_a_worker_whose_incarnation_is_retired_while_its_job_runs_ends_at_once(
    start: Callable[..., Any], store: JobStore, log: Path
) -> None:
    job_id = submit(store, do="block")
    process = start()
    eventually(lambda: "job armed" in log.read_text(), "the job runs")
    holder = store.job(job_id).claimed_by or ""

    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation=holder, now=store.now())

    assert process.wait(timeout=30) == 77


def test_a_worker_whose_gpu_is_in_quarantine_says_so_once_and_goes_on_when_it_is_released(
    start: Callable[..., Any], store: JobStore, tmp_path: Path, log: Path
) -> None:
    store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker=None, because="D state", now=1)
    job_id = submit(store, out=str(tmp_path / "out"))
    start("--gpus", "GPU-b,GPU-a")
    eventually(lambda: "in quarantine: it claims nothing" in log.read_text(), "it says why", log=log.read_text)
    seen = store.job(job_id)

    store.gpu_quarantine.release_gpu("GPU-a")

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed", log=log.read_text)
    assert seen.state is State.QUEUED
    assert log.read_text().count("in quarantine: it claims nothing") == 1
    assert "D state" in log.read_text()


# --- what cannot start


@pytest.fixture
def refused(
    tmp_path: Path,
    host_dir: Path,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Run a worker that ought not to start, in this process; its exit code and complaint. Options replace good ones."""
    (tmp_path / "bodies.py").write_text("def load(job, report): ...\nnot_callable = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bodies", raising=False)
    monkeypatch.setattr("gpuwarden.worker.main.signal.signal", lambda *_: None)
    monkeypatch.setattr("gpuwarden.worker.main.logs.configure", lambda **_: None)

    def run(**changed: str) -> tuple[int, str]:
        good = {"name": "w1", "body": "bodies:load", "store": f"sqlite:///{database}", "dir": str(host_dir)}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in {**good, **changed}.items()]
        try:
            code = main(["worker", *options])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param({"dir": "/no/such"}, "no host key at /no/such/host", id="no host file"),
        pytest.param({"body": "bodies"}, "no job body at 'bodies'", id="no function named"),
        pytest.param({"body": "bodies:nothing"}, "no job body at 'bodies:nothing'", id="no such function"),
        pytest.param({"body": "no_such_module:load"}, "give module:function, importable from here", id="no module"),
        pytest.param({"body": "bodies:not_callable"}, "is int, not a function that loads a job", id="not callable"),
        pytest.param({"store": "queue.db"}, "'queue.db' is no database URL", id="bad store"),
        pytest.param({"store": "sqlite:////no/such/q.db"}, "does not exist: make it first", id="no folder for it"),
        pytest.param({"name": "a/b"}, "worker name 'a/b' will not do", id="bad name"),
        pytest.param({"subdirectory": ".."}, "subdirectory name '..' will not do", id="bad subdirectory"),
        pytest.param({"subdirectory": "host"}, "cannot keep state files in", id="no folder for state files"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    refused: Callable[..., tuple[int, str]], changed: dict[str, str], says: str
) -> None:
    code, err = refused(**changed)

    assert code == 1
    assert says in err
    assert err.startswith("gpuwarden worker: ")
    assert err.count("\n") == 1


def test_a_second_worker_of_one_name_says_who_holds_it(
    start: Callable[..., Any], spawn: Spawn, tmp_path: Path, host_dir: Path, database: Path
) -> None:
    first = start()
    options = ["--name=w1", "--body=bodies:load", f"--store=sqlite:///{database}", f"--dir={host_dir}"]

    second = spawn("-m", "gpuwarden", "worker", *options, stderr=tmp_path / "second.log", PYTHONPATH=str(tmp_path))
    second.communicate()

    assert second.returncode == 1
    complaint = (tmp_path / "second.log").read_text()
    assert complaint.startswith("gpuwarden worker: another live process is worker 'w1'")
    assert complaint.count("\n") == 1
    assert first.poll() is None


@pytest.mark.parametrize(
    "changed", [{"heartbeat_s": "700"}, {"heartbeat_s": "10", "lease_s": "29.9"}, {"heartbeat_s": "0"}], ids=str
)
def test_a_lease_of_less_than_three_heartbeats_is_called_wrong(
    refused: Callable[..., tuple[int, str]], changed: dict[str, str]
) -> None:
    code, err = refused(**changed, jobs_max="0")

    assert code == 2
    assert "--lease-s must be 3 times --heartbeat-s or more" in " ".join(err.split())


def test_a_heartbeat_slower_than_others_wait_for_is_called_wrong(refused: Callable[..., tuple[int, str]]) -> None:
    code, err = refused(heartbeat_s="10.1", jobs_max="0")

    assert code == 2
    assert "--heartbeat-s must be 10 or less" in " ".join(err.split())


def test_a_lease_of_three_heartbeats_will_do(refused: Callable[..., tuple[int, str]]) -> None:
    code, _ = refused(heartbeat_s="10", lease_s="30", jobs_max="0")

    assert code == 0


def test_a_worker_with_nothing_to_do_starts_and_ends(refused: Callable[..., tuple[int, str]], host_dir: Path) -> None:
    code, _ = refused(jobs_max="0")

    assert code == 0
    assert state_files(host_dir) == {"w1.lock"}


def test_help_names_every_option_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_module.command(["--help"])

    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in ("--name", "--body", "--queue", "--store", "--dir", "--subdirectory", "--lease-s", "--heartbeat-s"):
        assert option in shown
    assert "77 the job was taken away" in shown
    assert "--gpus" in shown
    assert "stops itself (PostgreSQL), or works on where nobody else can reach the queue (SQLite)" in shown
    assert "renewal, seconds" in shown


# --- a worker in hand


@pytest.fixture
def reporter(host_dir: Path) -> Iterator[Reporter]:
    with Reporter(host_dir, worker="w1", queue="gpu") as opened:
        yield opened


@pytest.fixture
def disowned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which a worker stopped itself for having lost its job; here only the thread ends."""
    threads: list[str] = []

    def stop(_bound: object, _because: str, _exit_code: int) -> None:
        threads.append(threading.current_thread().name)
        raise SystemExit

    monkeypatch.setattr(lease_module, "stop_at_once", stop)
    monkeypatch.setattr(lease_module, "OWNERSHIP_S", 0.005)
    return threads


def run_worker(
    store: JobStore,
    reporter: Reporter,
    body: Any,
    *,
    stop: Stop | None = None,
    jobs_max: int = 1,
    gpus: tuple[str, ...] = (),
    heartbeat_s: float = 0.005,
    lease_s: float = 0.5,
) -> None:
    settings = Settings(
        name="w1", queue="gpu", host="box1", gpus=gpus, lease_s=lease_s, heartbeat_s=heartbeat_s, jobs_max=jobs_max
    )
    Worker(settings, store=store, reporter=reporter, body=body, stop=stop).run()


def nothing_to_do(_job: Job, _report: Reporter) -> Callable[[], None]:
    return lambda: None


def keeper_ends() -> None:
    """Let the thread that watches the claim look once more, or end."""
    for thread in threading.enumerate():
        if thread.name == "gpuwarden-lease":
            thread.join(timeout=5)


@pytest.mark.parametrize("settle", ["complete", "fail_by_worker"])
def test_a_keeper_that_finds_the_job_settled_does_not_take_it_for_lost(
    store: JobStore, reporter: Reporter, disowned: list[str], monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    job_id = submit(store)
    settled = getattr(store.claims, settle)

    def slowly(*arguments: Any, **named: Any) -> bool:
        accepted: bool = settled(*arguments, **named)
        keeper_ends()
        return accepted

    monkeypatch.setattr(store.claims, settle, slowly)

    run_worker(store, reporter, nothing_to_do if settle == "complete" else lambda *_: None)

    assert disowned == []
    assert store.job(job_id).state is (State.COMPLETED if settle == "complete" else State.FAILED)


def test_a_result_that_is_refused_stops_the_worker(store: JobStore, reporter: Reporter, disowned: list[str]) -> None:
    submit(store)

    def lose(job: Job, _report: Reporter) -> Callable[[], None]:
        def work() -> None:
            store.fencing.fence(
                job.job_id, attempt=job.attempt, incarnation=job.claimed_by or "", trip=Trip.BUDGET, now=1
            )

        return work

    with pytest.raises(SystemExit):
        run_worker(store, reporter, lose)

    assert "MainThread" in disowned


@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(("told", "code"), [(True, 75), (False, 77)], ids=["known", "not told"])
def test_a_worker_that_is_told_to_stop_after_its_job_was_taken_says_for_what(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch, told: bool, code: int
) -> None:
    submit(store)
    stop = Stop()
    if not told:
        monkeypatch.setattr(store.claims, "retired_for", no_answer)

    def lose(job: Job, _report: Reporter) -> Callable[[], None]:
        def work() -> None:
            store.fencing.fence(
                job.job_id, attempt=job.attempt, incarnation=job.claimed_by or "", trip=Trip.BUDGET, now=1
            )
            stop.on_signal(signal.SIGTERM, None)

        return work

    with pytest.raises(DisownedError) as ended:
        run_worker(store, reporter, lose, stop=stop, heartbeat_s=10)

    assert ended.value.exit_code == code


def no_answer(**_: Any) -> None:
    raise DatabaseError("database is locked")


def settled_without_an_answer(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, settle: str, *, committed: bool
) -> list[bool]:
    """The first answer to a result is lost, its commit with it or not; what was answered afterwards."""
    ask, answers = getattr(store.claims, settle), list[bool]()
    lost = False

    def asked(job_id: int, **named: Any) -> bool:
        nonlocal lost
        if not lost:
            lost = True
            if committed:
                assert ask(job_id, **named)
            else:
                store.fencing.fence(
                    job_id, attempt=named["attempt"], incarnation=named["incarnation"], trip=Trip.STALL, now=1
                )
                store.fencing.fail(job_id, attempt=named["attempt"], because="stall", now=1)
            raise NoAnswerError("connection lost")
        answers.append(ask(job_id, **named))
        return answers[-1]

    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    monkeypatch.setattr(store.claims, settle, asked)
    return answers


@pytest.mark.parametrize("settle", ["complete", "fail_by_worker"])
def test_a_result_whose_answer_was_lost_is_accepted_and_the_worker_goes_on(
    store: JobStore, reporter: Reporter, disowned: list[str], monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    submit(store)
    submit(store)
    answers = settled_without_an_answer(store, monkeypatch, settle, committed=True)

    body = nothing_to_do if settle == "complete" else lambda *_: None
    run_worker(store, reporter, body, jobs_max=2, lease_s=60)

    assert answers == [False, True]
    assert {job.state for job in store.jobs()} == {State.COMPLETED if settle == "complete" else State.FAILED}
    assert disowned == []


@pytest.mark.parametrize("settle", ["complete", "fail_by_worker"])
def test_a_job_that_another_ended_while_the_queue_was_away_is_lost_all_the_same(
    store: JobStore, reporter: Reporter, disowned: list[str], monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    submit(store)
    answers = settled_without_an_answer(store, monkeypatch, settle, committed=False)

    with pytest.raises(SystemExit):
        run_worker(store, reporter, nothing_to_do if settle == "complete" else lambda *_: None, lease_s=60)

    assert answers == [False]
    assert "MainThread" in disowned


def test_a_body_that_cannot_say_what_it_has_loaded_has_nothing_loaded(store: JobStore, reporter: Reporter) -> None:
    class Body:
        @property
        def loaded_model(self) -> str:
            raise RuntimeError("dictionary changed size during iteration")

        def __call__(self, *_: object) -> Callable[[], None]:
            return lambda: None

    submit(store)

    run_worker(store, reporter, Body())

    assert [job.state for job in store.jobs()] == [State.COMPLETED]


@pytest.mark.parametrize("error", [NoAnswerError("connection lost"), RuntimeError("nobody thought of this")])
def test_a_renewal_that_failed_is_tried_again_at_the_next_look_and_not_a_heartbeat_later(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    submit(store)
    renewed = threading.Event()
    renew = store.claims.renew
    asked = 0

    def at_last(*arguments: Any, **named: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise error
        accepted = renew(*arguments, **named)
        renewed.set()
        return accepted

    monkeypatch.setattr(lease_module, "OWNERSHIP_S", 0.005)
    monkeypatch.setattr(store.claims, "renew", at_last)
    in_time: list[bool] = []

    run_worker(store, reporter, lambda *_: lambda: in_time.append(renewed.wait(10)), heartbeat_s=1000)

    assert in_time == [True]
    assert asked == 2


def test_a_stop_that_comes_between_the_claim_and_the_job_gives_the_job_back(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store)
    stop = Stop()
    claim = store.claims.claim

    def stopped_after(*arguments: Any, **named: Any) -> Job | None:
        job = claim(*arguments, **named)
        stop.on_signal(signal.SIGTERM, None)
        return job

    monkeypatch.setattr(store.claims, "claim", stopped_after)

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, nothing_to_do, stop=stop)

    back = store.job(job_id)
    assert (back.state, back.attempt, back.because) == (State.QUEUED, 1, "released by its worker")


def test_a_body_that_turns_the_stop_into_an_error_of_its_own_is_not_failed(store: JobStore, reporter: Reporter) -> None:
    job_id = submit(store)
    stop = Stop()

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        def work() -> None:
            try:
                stop.on_signal(signal.SIGTERM, None)
            except WorkerStopping:
                raise RuntimeError("interrupted") from None

        return work

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, body, stop=stop)

    assert store.job(job_id).state is State.QUEUED
    assert store.outbox.dispatch_events(job_id) == []


def test_a_stop_that_comes_while_the_result_is_written_keeps_the_result(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = submit(store), submit(store)
    stop = Stop()
    complete = store.claims.complete

    def stopped_before(*arguments: Any, **named: Any) -> bool:
        stop.on_signal(signal.SIGTERM, None)
        return complete(*arguments, **named)

    monkeypatch.setattr(store.claims, "complete", stopped_before)

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, nothing_to_do, stop=stop, jobs_max=2)

    assert [store.job(job_id).state for job_id in (first, second)] == [State.COMPLETED, State.QUEUED]


def test_a_result_that_the_queue_never_takes_ends_the_worker_after_a_lease(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store)
    monkeypatch.setattr(worker_module, "RETRY_S", 0.05)
    offered = 0

    def refuse(*_: Any, **__: Any) -> bool:
        nonlocal offered
        offered += 1
        raise DatabaseError("disk I/O error")

    monkeypatch.setattr(store.claims, "complete", refuse)

    with pytest.raises(DatabaseError, match="disk I/O error"):
        run_worker(store, reporter, nothing_to_do)

    assert offered > 2
    assert store.job(job_id).state is State.RUNNING


def test_a_watch_that_fails_does_not_end_an_idle_worker(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store)
    looks = 0

    class Failing:
        def any(self) -> bool:
            raise NotImplementedError

        def wait(self, _timeout_s: float) -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise DatabaseError("disk I/O error")
            submit(store)
            return True

        def close(self) -> None: ...

    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    monkeypatch.setattr(store, "changes", Failing)

    run_worker(store, reporter, nothing_to_do, jobs_max=2)

    assert looks == 2
    assert [job.state for job in store.jobs()] == [State.COMPLETED] * 2


def test_the_arming_beat_is_sent_between_the_load_and_the_work(store: JobStore, reporter: Reporter) -> None:
    submit(store)
    beats: list[object] = []

    def beat() -> object:
        return json.loads((reporter.folder / "w1.job.json").read_text())["beat"]

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        beats.append(beat())
        return lambda: beats.append(beat())

    run_worker(store, reporter, body)

    assert beats[0] is None
    assert beats[1] is not None


def told_of_gang(store: JobStore, reporter: Reporter) -> tuple[str | None, int, int]:
    """What the job file says of the gang while the next job runs: which, which rank, and of how many."""
    told: list[state_file.JobFile] = []

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        return lambda: told.append(state_file.parse_job((reporter.folder / "w1.job.json").read_text()))

    run_worker(store, reporter, body)

    (job,) = told
    return job.gang, job.rank, job.ranks


def test_the_job_file_says_which_rank_of_which_gang_it_is_and_of_how_many(store: JobStore, reporter: Reporter) -> None:
    gang = store.runs.submit(Submission(queue="gpu", ranks=2, run_id="night"), now=0)

    assert told_of_gang(store, reporter) == (f"{gang}@0.000/night", 0, 2)


def test_the_second_rank_names_the_same_gang(store: JobStore, reporter: Reporter) -> None:
    gang = store.runs.submit(Submission(queue="gpu", ranks=2, run_id="night"), now=0)
    store.claims.claim("gpu", host="box2", worker="w2", incarnation="i2", now=0)

    assert told_of_gang(store, reporter) == (f"{gang}@0.000/night", 1, 2)


def test_gangs_of_one_number_and_run_in_two_queues_differ_by_when_they_were_submitted(
    tmp_path: Path, reporter: Reporter
) -> None:
    named = set()
    for queue, submitted_at in (("one", 1700000000.25), ("other", 1700000000.5)):
        with closing(JobStore.open(f"sqlite:///{tmp_path / queue}.db")) as store:
            store.runs.submit(Submission(queue="gpu", ranks=2, run_id="night"), now=submitted_at)
            named.add(told_of_gang(store, reporter)[0])

    assert named == {"1@1700000000.250/night", "1@1700000000.500/night"}


def test_a_gang_of_the_longest_run_there_may_be_is_named_by_its_number_all_the_same(
    store: JobStore, reporter: Reporter
) -> None:
    gang = store.runs.submit(Submission(queue="gpu", ranks=2, run_id="r" * state_file.TEXT_MAX), now=0)

    named, _, _ = told_of_gang(store, reporter)

    assert named is not None
    assert named.startswith(f"{gang}@0.000/rrr")


def test_a_job_of_one_rank_is_of_no_gang(store: JobStore, reporter: Reporter) -> None:
    store.runs.submit(Submission(queue="gpu", run_id="night"), now=0)

    assert told_of_gang(store, reporter) == (None, 0, 1)


def test_a_body_is_found_by_module_and_function() -> None:
    assert find_body("gpuwarden.procfs:start_ticks").__name__ == "start_ticks"


@pytest.mark.parametrize("target", ["", ":", "gpuwarden.procfs", "gpuwarden.procfs:", ":load", "gpuwarden.procfs:PROC"])
def test_a_body_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(BodyError):
        find_body(target)


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        pytest.param({}, "", id="nothing is told"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "all"}, "", id="all"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, "", id="numbers are no identity"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-a,GPU-b", id="the container's"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-a, 1,MIG-c"}, "GPU-a,MIG-c", id="a mixture"),
        pytest.param(
            {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b", "CUDA_VISIBLE_DEVICES": "GPU-b"}, "GPU-b", id="the process's own"
        ),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-a", "CUDA_VISIBLE_DEVICES": "0"}, "GPU-a", id="the first of one"),
        pytest.param({"GPUWARDEN_GPUS": "GPU-c", "CUDA_VISIBLE_DEVICES": "GPU-b"}, "GPU-c", id="ours before all"),
    ],
)
def test_the_gpus_of_a_worker_are_those_its_environment_tells_by_uuid(env: dict[str, str], gpus: str) -> None:
    assert gpus_named(env) == gpus


def test_a_worker_registers_its_gpus_before_it_claims(store: JobStore, reporter: Reporter) -> None:
    submit(store)
    blocked: list[object] = []

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker=None, because="D state", now=1)
        blocked.append(store.gpu_quarantine.quarantine_of(host="box1", worker="w1"))
        return lambda: None

    run_worker(store, reporter, body, gpus=("GPU-a",))

    assert blocked[0] is not None


def test_a_worker_that_was_replaced_while_its_job_ended_claims_no_other(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, other = submit(store), submit(store)
    complete = store.claims.complete

    def replaced_after(*arguments: Any, **named: Any) -> bool:
        accepted = complete(*arguments, **named)
        store.claims.register("gpu", host="box1", worker="w1", incarnation="next", now=2)
        return accepted

    monkeypatch.setattr(store.claims, "complete", replaced_after)

    with pytest.raises(ReplacedError):
        run_worker(store, reporter, nothing_to_do, jobs_max=2)

    assert [store.job(each).state for each in (job_id, other)] == [State.COMPLETED, State.QUEUED]


def test_a_registration_that_is_not_answered_is_asked_again(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store)
    register = store.claims.register
    asked = 0

    def at_last(*arguments: Any, **named: Any) -> list[JobId]:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise NoAnswerError("database is locked")
        return register(*arguments, **named)

    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    monkeypatch.setattr(store.claims, "register", at_last)

    run_worker(store, reporter, nothing_to_do)

    assert asked == 3
    assert store.job(job_id).state is State.COMPLETED


def test_a_failure_that_no_database_could_write_is_written_readably(store: JobStore, reporter: Reporter) -> None:
    job_id = submit(store)

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        raise RuntimeError("a\0b\udcff")

    run_worker(store, reporter, body)

    assert store.job(job_id).because == "RuntimeError: a\\x00b\\udcff"
