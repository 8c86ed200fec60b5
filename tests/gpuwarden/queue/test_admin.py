"""Acts of operators on jobs and workers, and the flag of a dead worker."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import Condition, JobClass, State
from gpuwarden.queue import DrainedError, Job, JobStore, Slot, Submission, SubmissionError, sql
from gpuwarden.reporter import Reporter
from tests.conftest import Cli
from tests.gpuwarden.queue.builders import NOW
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

HOST = "box1"


def submit(store: JobStore, **its: Any) -> int:
    return store.runs.submit(Submission(queue="gpu", **its), now=NOW)


def claim(store: JobStore, worker: str = "w1", *, incarnation: str = "i1", now: float = NOW) -> Job | None:
    return store.claims.claim("gpu", host=HOST, worker=worker, incarnation=incarnation, now=now)


def register(store: JobStore, worker: str = "w1", *, incarnation: str = "i1") -> None:
    store.claims.register("gpu", host=HOST, worker=worker, incarnation=incarnation, now=NOW, gpus=("GPU-a",))


# --- jobs


@pytest.mark.parametrize("running", [False, True], ids=["waits", "runs"])
def test_cancelled_job_is_final_and_its_attempt_is_refused(store: JobStore, *, running: bool) -> None:
    job_id = submit(store)
    if running:
        claim(store)

    assert store.admin.cancel(job_id, reason="cancelled by ann", now=NOW)

    job = store.job(job_id)
    assert (job.state, job.reason, job.claimed_by) == (State.CANCELLED, "cancelled by ann", None)
    assert claim(store) is None
    assert not store.claims.complete(job_id, attempt=1, incarnation="i1", now=NOW)
    assert not store.admin.cancel(job_id, reason="again", now=NOW), "an ended job stays ended"


def test_cancelled_run_cancels_its_jobs_and_takes_no_more(store: JobStore) -> None:
    done, waits, other = submit(store, run_id="r1"), submit(store, run_id="r1"), submit(store, run_id="r2")
    claim(store)
    store.claims.complete(done, attempt=1, incarnation="i1", now=NOW)

    assert store.admin.cancel_run("r1", reason="cancelled by ann", now=NOW) == [waits]

    states = {each: store.job(each).state for each in (done, waits, other)}
    assert states == {done: State.COMPLETED, waits: State.CANCELLED, other: State.QUEUED}
    assert store.runs.state("r1") == "cancelled"
    with pytest.raises(SubmissionError, match="was cancelled: give the job another run"):
        submit(store, run_id="r1")


@pytest.mark.behaviour("B9")
def test_blocked_job_is_not_claimed_until_it_is_unblocked(store: JobStore) -> None:
    held, next_one = submit(store, priority=1), submit(store)
    assert store.admin.block(held, reason="blocked by ann", now=store.now())
    assert not store.admin.block(held, reason="again", now=store.now())

    first = claim(store)
    assert first is not None
    assert first.job_id == next_one
    assert not store.admin.block(next_one, reason="it runs", now=store.now())
    assert store.admin.unblock(held, reason="", now=NOW)
    assert not store.admin.unblock(held, reason="", now=NOW)

    second = claim(store, "w2", incarnation="i2")
    assert second is not None
    assert (second.job_id, second.reason) == (held, None)


# --- workers


@pytest.mark.behaviour("B9")
@pytest.mark.parametrize("again", [False, True], ids=["it", "its successor"])
def test_locked_worker_finishes_its_job_and_claims_nothing(store: JobStore, *, again: bool) -> None:
    register(store)
    running, waits = submit(store), submit(store)
    claim(store)
    assert store.admin.lock(host=HOST, worker="w1", who="ann", reason="faulty", now=NOW)

    assert store.claims.renew(running, attempt=1, incarnation="i1", now=NOW)
    assert store.claims.complete(running, attempt=1, incarnation="i1", now=NOW)
    incarnation = "i1"
    if again:
        incarnation = "i1b"
        register(store, incarnation=incarnation)
    assert claim(store, incarnation=incarnation) is None
    (row,) = store.admin.workers(now=NOW)
    assert (row.locked_at, row.locked_by, row.locked_reason) == (NOW, "ann", "faulty")

    assert store.admin.unlock(host=HOST, worker="w1", who="bob", now=NOW + 1)
    assert not store.admin.unlock(host=HOST, worker="w1", who="eve", now=NOW + 2)
    (row,) = store.admin.workers(now=NOW)
    assert (row.locked_at, row.unlocked_at, row.unlocked_by) == (None, NOW + 1, "bob")
    found = claim(store, incarnation=incarnation)
    assert found is not None
    assert found.job_id == waits


def test_drained_worker_ends_when_idle_and_its_successor_claims(store: JobStore) -> None:
    register(store)
    running, waits = submit(store), submit(store)
    claim(store)
    assert store.admin.drain(host=HOST, worker="w1")
    again = claim(store)
    assert again is not None
    assert again.job_id == running, "it gets its own job again"
    store.claims.complete(running, attempt=1, incarnation="i1", now=NOW)

    with pytest.raises(DrainedError, match="w1 is draining"):
        claim(store)

    register(store, incarnation="i1b")
    found = claim(store, incarnation="i1b")
    assert found is not None
    assert found.job_id == waits


@pytest.mark.parametrize("held_back", ["lock", "drain"])
def test_job_avoids_its_slot_only_while_another_worker_would_claim_it(store: JobStore, held_back: str) -> None:
    register(store)
    store.claims.register("gpu", host="box2", worker="w9", incarnation="i9", now=NOW)
    if held_back == "lock":
        store.admin.lock(host="box2", worker="w9", who="ann", reason="", now=NOW)
    else:
        store.admin.drain(host="box2", worker="w9")
    job_id = submit(store)
    claim(store)
    store.fencing.fence(job_id, attempt=1, incarnation="i1", condition=Condition.STALL, now=NOW)
    store.fencing.requeue(
        job_id, attempt=1, condition=Condition.STALL, now=NOW, avoid=Slot(host=HOST, worker="w1"), avoid_s=600
    )
    register(store, incarnation="i1b")

    assert claim(store, incarnation="i1b") is not None


def test_unknown_worker_is_not_locked_drained_or_unlocked(store: JobStore) -> None:
    assert not store.admin.lock(host=HOST, worker="w1", who="ann", reason="", now=NOW)
    assert not store.admin.drain(host=HOST, worker="w1")
    assert not store.admin.unlock(host=HOST, worker="w1", who="bob", now=NOW)


def test_workers_are_listed_with_job_and_liveness(store: JobStore) -> None:
    register(store)
    store.claims.register("gpu", host=HOST, worker="w2", incarnation="i2", now=NOW - 31)
    job_id = submit(store, model="sd-xl")
    claim(store)

    first, second = store.admin.workers(now=NOW)

    assert (first.alive, first.job_id, first.current_model, first.gpus) == (True, job_id, "sd-xl", ("GPU-a",))
    assert (second.alive, second.job_id, second.gpus, second.draining) == (False, None, (), False)


# --- the flag of a dead worker


@pytest.mark.behaviour("A14")
def test_dead_flag_is_set_once_and_cleared_by_a_sign_of_life(store: JobStore) -> None:
    register(store)
    job_id = submit(store)
    claim(store)
    assert store.fencing.dead_workers(now=NOW) == []

    store.fencing.fence(job_id, attempt=1, incarnation="i1", condition=Condition.DEAD_WORKER, now=NOW)

    (flag,) = store.fencing.dead_workers(now=NOW, host=HOST, queue="gpu")
    assert (flag.worker, flag.incarnation, flag.since, flag.stamped_at) == ("w1", "i1", NOW, NOW)
    assert store.fencing.dead_workers(now=NOW, host="box2") == store.fencing.dead_workers(now=NOW, queue="cpu") == []

    store.fencing.hold_fence(job_id, attempt=1, now=NOW + 29)
    assert store.fencing.dead_workers(now=NOW + 89)[0].stamped_at == NOW
    assert store.fencing.dead_workers(now=NOW + 90) == [], "an old flag is none"
    store.fencing.hold_fence(job_id, attempt=1, now=NOW + 30)
    (stamped,) = store.fencing.dead_workers(now=NOW + 90)
    assert (stamped.since, stamped.stamped_at) == (NOW, NOW + 30)

    register(store, incarnation="i1b")
    assert store.fencing.dead_workers(now=NOW + 30) == []


@pytest.mark.behaviour("A14")
def test_late_heartbeat_leaves_a_newer_flag(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    register(store)
    job_id = submit(store)
    claim(store)
    touch = sql.touch_worker

    def touch_and_stand_still(*arguments: Any, **named: Any) -> bool:
        accepted = touch(*arguments, **named)
        store.fencing.fence(job_id, attempt=1, incarnation="i1", condition=Condition.DEAD_WORKER, now=NOW)
        return accepted

    with monkeypatch.context() as slow:
        slow.setattr(sql, "touch_worker", touch_and_stand_still)
        store.claims.heartbeat(host=HOST, worker="w1", queue="gpu", incarnation="i1", model="m", now=NOW)

    assert [flag.worker for flag in store.fencing.dead_workers(now=NOW)] == ["w1"]


@pytest.mark.behaviour("A14")
@pytest.mark.parametrize("condition", [Condition.STALL, Condition.BUDGET, Condition.HEALTH])
def test_hung_worker_is_not_flagged_dead(store: JobStore, condition: Condition) -> None:
    job_id = submit(store)
    claim(store)

    store.fencing.fence(job_id, attempt=1, incarnation="i1", condition=condition, now=NOW)

    assert store.fencing.dead_workers(now=NOW) == []


# --- the commands


def test_jobs_are_blocked_cancelled_and_requeued_by_command(store: JobStore, cli: Cli) -> None:
    first, second = submit(store), submit(store, run_id="r1", job_class=JobClass.GPU_VIDEO, payload={"a": 1})

    assert cli("job", "block", str(first), "--reason", "it fails everywhere") == (0, "", "")
    reason = store.job(first).reason or ""
    assert reason.startswith("blocked by ann@")
    assert reason.endswith(" UTC: it fails everywhere")
    assert cli("job", "unblock", str(first), str(second)) == (
        1, "", f"gpuwarden job: job {second} is queued: only a blocked job can be unblocked\n",
    )  # fmt: skip
    assert cli("job", "requeue", str(second))[0] == 1
    assert cli("job", "cancel")[::2] == (1, "gpuwarden job: missing JOB or --run RUN\n")
    assert cli("job", "cancel", str(first)) == (0, "", "")
    assert cli("job", "cancel", str(first)) == (1, "", f"gpuwarden job: job {first} is cancelled: it is over\n")
    assert cli("job", "cancel", "--run", "r1") == (0, f"1 job cancelled: {second}\n", "")

    code, out, _ = cli("job", "requeue", str(second), "--run", "r2")
    assert code == 0
    again = store.job(int(out))
    assert (again.state, again.payload, again.job_class, again.run_id) == (
        State.QUEUED, {"a": 1}, JobClass.GPU_VIDEO, "r2",
    )  # fmt: skip
    assert cli("job", "show", "99")[::2] == (1, "gpuwarden job: the queue has no job 99: see `gpuwarden job list`\n")


def test_job_on_this_host_is_shown_with_its_progress(store: JobStore, cli: Cli, host_dir: Path) -> None:
    job_id = submit(store, model="sd-xl", steps_total=20)
    _, waits, _ = cli("job", "show", str(job_id))
    with Reporter(host_dir, worker="w1", queue="gpu") as reporter:
        claim(store, incarnation=reporter.incarnation)
        _, unseen, _ = cli("job", "show", str(job_id))
        reporter.start_job(
            job_id=job_id, attempt=1, job_class=JobClass.GPU, model="sd-xl", budget_s=1.0, stall_timeout_s=1.0,
            steps_total=20,
        )  # fmt: skip
        reporter.items(done=3, failed=1)
        reporter.ready()
        code, runs, _ = cli("job", "show", str(job_id))
        parsed = json.loads(cli("job", "show", str(job_id), "--json")[1])

    assert code == 0
    assert "progress" not in waits
    assert "progress  its worker's files are not on this host, or not in --runtime-dir" in unseen
    assert "progress  phase step, step 0 of 20" in runs
    assert "items     3 done, 1 failed" in runs
    assert f"worker    w1 on {HOST}" in runs
    assert (parsed["progress"]["steps_total"], parsed["progress"]["items_done"]) == (20, 3)


def test_workers_are_listed_locked_and_drained_by_command(store: JobStore, cli: Cli) -> None:
    for worker in ("idle", "busy", "gone", "locked", "draining"):
        register(store, worker, incarnation=f"i-{worker}")
    now = store.now()
    for worker in ("idle", "busy", "locked", "draining"):
        store.claims.heartbeat(host=HOST, worker=worker, queue="gpu", incarnation=f"i-{worker}", model=None, now=now)
    submit(store)
    claim(store, "busy", incarnation="i-busy", now=now)

    assert cli("worker", "lock", "locked", "--reason", "bad memory") == (
        0, "locked on box1 is locked: it finishes its job and claims no other\n", ""
    )  # fmt: skip
    assert cli("worker", "drain", "draining") == (0, "draining on box1 drains: it finishes its job, then ends\n", "")
    code, out, _ = cli("worker", "list")

    assert code == 0
    states = {line.split()[0]: line.split()[3] for line in out.splitlines()[1:] if not line.startswith(" ")}
    assert states == {"busy": "busy", "draining": "draining", "gone": "gone", "idle": "idle", "locked": "locked"}
    assert "by ann@" in out
    assert ": bad memory" in out
    assert len(cli("worker", "list", "--json")[1].splitlines()) == 5
    assert cli("worker", "list", "--host", "box2") == (
        0,
        "",
        "no worker is listed: none has registered, or none matches\n",
    )

    assert cli("worker", "unlock", "locked") == (0, "locked on box1 is unlocked: it claims jobs again\n", "")
    assert re.search(r"\n    unlocked \d+ s ago by ann@", cli("worker", "list")[1])
    assert cli("worker", "unlock", "locked") == (1, "", "gpuwarden worker: locked on box1 is not locked\n")
    assert cli("worker", "lock", "stranger")[0] == cli("worker", "drain", "stranger")[0] == 1

    store.fencing.fence(1, attempt=1, incarnation="i-busy", condition=Condition.DEAD_WORKER, now=store.now())
    assert "busy on box1, queue gpu: dead for" in cli("worker", "list", "--dead")[1]
    assert json.loads(cli("worker", "list", "--dead", "--queue", "gpu", "--json")[1])["incarnation"] == "i-busy"


def test_drained_worker_finishes_its_job_and_exits_0(
    store: JobStore, url: str, host_dir: Path, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "bodies.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def load(job, report):\n"
        "    def work():\n"
        "        while not Path(job.payload['out']).exists():\n"
        "            report.step()\n"
        "            time.sleep(0.01)\n"
        "    return work\n"
    )
    go, log = tmp_path / "go", tmp_path / "worker.log"
    running = store.runs.submit(Submission(queue="gpu", payload={"out": str(go)}), now=store.now())
    store.runs.submit(Submission(queue="gpu", payload={"out": str(go)}), now=store.now())
    process = spawn(
        "-m",
        "gpuwarden",
        "worker",
        "run",
        "--name",
        "w1",
        "--handler",
        "bodies:load",
        "--queue-db",
        url,
        "--runtime-dir",
        str(host_dir),
        stderr=log,
        PYTHONPATH=str(tmp_path),
    )
    eventually(lambda: log.exists() and "job ready" in log.read_text(), "the job runs", log=log.read_text)

    assert store.admin.drain(host=HOST, worker="w1")
    go.touch()

    assert process.wait(timeout=30) == 0
    assert "drained: stopping" in log.read_text()
    assert store.job(running).state is State.COMPLETED
    assert [job.state for job in store.jobs()] == [State.COMPLETED, State.QUEUED]
