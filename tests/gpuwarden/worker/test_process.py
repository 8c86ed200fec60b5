"""Worker processes: jobs, stops, kills and lost jobs."""

import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import Condition, State
from gpuwarden.queue import JobStore, Submission
from tests.gpuwarden.worker.builders import reaches, state_files, submit
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("door", ["database", "gateway"], indirect=True)


def model_of(database: Path) -> str | None:
    """The model in the worker's row."""
    connection = sqlite3.connect(database)
    row = connection.execute("SELECT current_model FROM workers").fetchone()
    connection.close()
    return None if row is None else row[0]


def test_worker_completes_a_job_and_waits_for_the_next(
    start: Callable[..., Any], store: JobStore, tmp_path: Path
) -> None:
    process = start()
    outs = [tmp_path / "out1", tmp_path / "out2"]

    for out in outs:
        job_id = submit(store, out=str(out))
        eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")

    assert [out.read_text() for out in outs] == ["1", "1"]
    assert process.poll() is None


def test_worker_ends_after_jobs_max(start: Callable[..., Any], store: JobStore, tmp_path: Path) -> None:
    first, second = (submit(store, out=str(tmp_path / "out")) for _ in range(2))

    process = start("--jobs-max", "1")
    process.communicate()

    assert process.returncode == 0
    assert [store.job(job_id).state for job_id in (first, second)] == [State.COMPLETED, State.QUEUED]


def test_running_job_publishes_its_model(
    start: Callable[..., Any], store: JobStore, database: Path, tmp_path: Path
) -> None:
    job_id = submit(store, do="await", out=str(tmp_path / "go"))
    start()
    eventually(lambda: model_of(database) == "sd-xl", "the row holds the model")

    (tmp_path / "go").touch()

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed")
    eventually(lambda: model_of(database) is None, "the row holds nothing")


def test_lease_is_renewed_while_the_job_runs(start: Callable[..., Any], store: JobStore, tmp_path: Path) -> None:
    job_id = submit(store, do="await", out=str(tmp_path / "go"))
    start()
    eventually(lambda: store.job(job_id).lease_expires_at, "the job is claimed")
    first = store.job(job_id).lease_expires_at

    eventually(lambda: (store.job(job_id).lease_expires_at or 0) > (first or 0), "the lease is longer")


@pytest.mark.parametrize(
    ("do", "body", "reason"),
    [
        pytest.param("raise", "bodies:load", "RuntimeError: out of memory \\udcff", id="raises"),
        pytest.param("exit", "bodies:load", "SystemExit: 3", id="calls sys.exit"),
        pytest.param("load", "bodies:cannot_load", "ValueError: no such model", id="cannot load"),
    ],
)
def test_failing_handler_fails_the_job(
    start: Callable[..., Any], store: JobStore, do: str, body: str, reason: str
) -> None:
    process = start(body=body)

    for _ in range(2):
        job_id = submit(store, do=do)
        eventually(reaches(store, job_id, State.FAILED), "the job has failed")
        assert store.job(job_id).reason == reason
        assert store.outbox.events_of(job_id) == ["failed"]

    assert process.poll() is None


# --- stops


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_worker_releases_its_job(
    start: Callable[..., Any], store: JobStore, host_dir: Path, tmp_path: Path, log: Path, number: signal.Signals,
) -> None:  # fmt: skip
    job_id = submit(store, do="await", out=str(tmp_path / "never"))
    process = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    process.send_signal(number)
    process.communicate()

    assert process.returncode == 0
    back = store.job(job_id)
    assert (back.state, back.attempt, back.watchdog_retries, back.reclaims) == (State.QUEUED, 1, 0, 0)
    assert (back.claimed_by, back.priority) == (None, 100)
    assert state_files(host_dir) == {"w1.lock"}


def test_idle_worker_stops_at_once_and_removes_its_files(start: Callable[..., Any], host_dir: Path) -> None:
    process = start()

    process.terminate()
    process.communicate(timeout=10)

    assert process.returncode == 0
    assert state_files(host_dir) == {"w1.lock"}


def test_killed_worker_leaves_its_claim(start: Callable[..., Any], store: JobStore, host_dir: Path, log: Path) -> None:
    job_id = submit(store, do="block")
    process = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    process.kill()
    process.communicate()

    assert store.job(job_id).state is State.RUNNING
    assert state_files(host_dir) >= {"w1.lock", "w1.worker.json", "w1.job.json"}


# --- lost jobs


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(
    ("condition", "code"),
    [(Condition.BUDGET, 75), (Condition.STALL, 76), (Condition.HEALTH, 78), (Condition.DEAD_WORKER, 77)],
)
def test_lost_job_ends_its_worker(
    start: Callable[..., Any], store: JobStore, log: Path, condition: Condition, code: int
) -> None:
    job_id = submit(store, do="block")
    process = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")

    holder = store.job(job_id).claimed_by or ""
    assert store.fencing.fence(job_id, attempt=1, incarnation=holder, condition=condition, now=1)

    assert process.wait(timeout=30) == code
    assert store.job(job_id).state is State.FENCING


@pytest.mark.behaviour("A11")
def test_cancelled_job_ends_its_worker(start: Callable[..., Any], store: JobStore, log: Path) -> None:
    job_id = store.runs.submit(Submission(queue="gpu", run_id="r1", payload={"do": "block"}), now=0)
    sibling = store.runs.submit(Submission(queue="cpu", run_id="r1"), now=0)
    process = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")
    store.claims.claim("cpu", host="box1", worker="w2", incarnation="i2", now=1)
    store.claims.fail_by_worker(sibling, attempt=1, incarnation="i2", reason="boom", now=1)

    store.sweeps.consume_events(now=2)

    assert process.wait(timeout=30) == 77
    assert store.job(job_id).state is State.CANCELLED


@pytest.mark.behaviour("A11")
def test_restarted_worker_gets_its_job_at_once(start: Callable[..., Any], store: JobStore, log: Path) -> None:
    job_id = submit(store, do="block")
    killed = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")
    first = store.job(job_id)
    killed.kill()
    killed.wait()

    start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs again", log=log.read_text)

    again = store.job(job_id)
    assert f'"settled": [{job_id}]' in log.read_text() or f"settled=[{job_id}]" in log.read_text()
    assert (again.state, again.attempt, again.reclaims) == (State.RUNNING, 2, 1)
    assert again.claimed_by != first.claimed_by
    assert not store.claims.renew(job_id, attempt=1, incarnation=first.claimed_by or "", now=store.now())


@pytest.mark.behaviour("A13")
def test_job_whose_worker_was_killed_three_times_fails(start: Callable[..., Any], store: JobStore, log: Path) -> None:
    job_id = submit(store, do="block")
    for attempt in (1, 2, 3):
        killed = start()
        eventually(lambda: "job ready" in log.read_text(), f"attempt {attempt} runs", log=log.read_text)
        assert store.job(job_id).attempt == attempt
        killed.kill()
        killed.wait()

    start()

    ended = store.job(job_id)
    assert (ended.state, ended.attempt) == (State.FAILED, 3)
    assert ended.reason == "its worker was restarted, and all 3 lost attempts are used"


@pytest.mark.behaviour("A11")
@pytest.mark.needs_postgres
def test_worker_that_wakes_after_its_job_was_taken_ends_without_changes(
    start: Callable[..., Any], shared_store: JobStore, postgres_url: str, log: Path
) -> None:
    store = shared_store
    job_id = submit(store, do="block")
    asleep = start(store=postgres_url)
    eventually(lambda: "job ready" in log.read_text(), "the job runs")
    eventually(lambda: store.job(job_id).state is State.RUNNING, "it is claimed")
    asleep.send_signal(signal.SIGSTOP)

    # The stopped worker may hold a transaction open: retry the sweep.
    eventually(lambda: store.sweeps.reclaim_expired(now=store.now() + 700), "the lease is given away", within_s=70)
    taken = store.claims.claim("gpu", host="box1", worker="w2", incarnation="i2", now=store.now())
    assert taken is not None
    assert (taken.job_id, taken.attempt) == (job_id, 2)
    asleep.send_signal(signal.SIGCONT)

    assert asleep.wait(timeout=30) == 77
    assert store.job(job_id) == taken
    assert store.claims.complete(job_id, attempt=2, incarnation="i2", now=store.now())


@pytest.mark.behaviour("A11")
def test_replaced_idle_worker_ends(start: Callable[..., Any], store: JobStore, host_dir: Path, log: Path) -> None:
    process = start()

    store.claims.register("gpu", host="box1", worker="w1", incarnation="next", now=store.now())

    assert process.wait(timeout=30) == 77
    assert "this worker is over: stopping" in log.read_text()
    assert state_files(host_dir) == {"w1.lock"}


@pytest.mark.behaviour("A11")
def test_retired_worker_ends_at_once(start: Callable[..., Any], store: JobStore, log: Path) -> None:
    job_id = submit(store, do="block")
    process = start()
    eventually(lambda: "job ready" in log.read_text(), "the job runs")
    holder = store.job(job_id).claimed_by or ""

    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation=holder, now=store.now())

    assert process.wait(timeout=30) == 77


def test_quarantined_worker_logs_it(start: Callable[..., Any], store: JobStore, tmp_path: Path, log: Path) -> None:
    store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker=None, reason="D state", now=1)
    job_id = submit(store, out=str(tmp_path / "out"))
    start("--gpus", "GPU-b,GPU-a")
    eventually(lambda: "in quarantine: it claims nothing" in log.read_text(), "it says why", log=log.read_text)
    seen = store.job(job_id)

    store.gpu_quarantine.release_gpu("GPU-a")

    eventually(reaches(store, job_id, State.COMPLETED), "the job is completed", log=log.read_text)
    assert seen.state is State.QUEUED
    assert log.read_text().count("in quarantine: it claims nothing") == 1
    assert "D state" in log.read_text()
