"""`gpuwarden wrangle`: verdicts and actions, also with real workers that process items of a run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.queue import Job, JobStore, Submission
from gpuwarden.queue.items.failures import HAND_OVER_S
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.plan import BlockRun, Migrate, Wrangle
from remediator.remedies.wrangle import Rules, Verdict, classify
from tests.conftest import Cli
from tests.remediator.builders import missing
from tests.waiting import eventually

NOW = 1_000_000.0
ITEMS = [f"{n:03}" for n in range(100)]

Worker = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def store(queue_url: str) -> Iterator[JobStore]:
    opened = JobStore.open(queue_url)
    yield opened
    opened.close()


@pytest.fixture
def cli(queue_url: str, monkeypatch: pytest.MonkeyPatch, command: Cli) -> Cli:
    """The commands, on this queue."""
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", queue_url)
    return command


def start(store: JobStore, *, jobs: int = 2, run_id: str = "r1", wrangled: bool = True) -> None:
    render = Submission(queue="gpu", payload={"task": "render"})
    store.runs.submit_run(run_id, {str(n): render for n in range(jobs)}, wrangled=wrangled, now=NOW)
    store.items.add(run_id, ITEMS, now=NOW)


def claim(store: JobStore, worker: str) -> Job:
    job = store.claims.claim("gpu", host="box1", worker=worker, incarnation=f"i-{worker}", now=store.now())
    assert job is not None
    return job


def end(store: JobStore, job: Job, *, failed: int = 0, done: int = 0) -> None:
    """End the next items of the run on the worker of the job."""
    its: dict[str, Any] = {"attempt": job.attempt, "incarnation": job.claimed_by, "now": NOW}
    for n in range(failed + done):
        item = store.items.take(job.job_id, **its)
        assert item is not None
        if n < failed:
            assert store.items.fail(job.job_id, **its, item=item.item, reason="boom")
        else:
            assert store.items.finish(job.job_id, **its, item=item.item)


def test_list_prints_the_verdict_of_each_wrangled_run(store: JobStore, cli: Cli) -> None:
    start(store)
    start(store, run_id="r2", wrangled=False)
    end(store, claim(store, "bad"), failed=6)
    end(store, claim(store, "good"), done=3)

    code, out, _ = cli("wrangle", "list")

    assert code == 0
    assert out == (
        "r1: would lock bad on box1: bad on box1 has failed 6 items and finished none, and others have finished 3; "
        "inform the administrator\n"
    )
    listed = json.loads(cli("wrangle", "list", "--json")[1])
    assert (listed["run"], listed["verdict"], listed["worker"], listed["tell"]) == (
        "r1",
        "lockworker",
        "bad",
        "administrator",
    )
    assert [each["failed"] for each in listed["tally"]["workers"]] == [6, 0]
    assert [each.locked_at for each in store.admin.workers(now=NOW)] == [None, None]
    assert "r1: nothing to do: no worker has failed more than 6 of its items" in cli(
        "wrangle", "list", "--activation", "6"
    )[1]  # fmt: skip


def test_apply_acts_in_the_name_of_the_operator(store: JobStore, cli: Cli) -> None:
    start(store)
    end(store, claim(store, "bad"), failed=6)
    end(store, claim(store, "good"), done=1)

    code, out, _ = cli("wrangle", "apply", "r1")

    assert code == 0
    assert missing(out, "r1: ", "locked", "bad on box1", "failed 6") == []
    (row,) = (each for each in store.admin.workers(now=NOW) if each.worker == "bad")
    assert row.locked_by is not None
    assert row.locked_by.startswith("ann@")
    assert row.locked_reason is not None
    assert missing(row.locked_reason, "run r1", "bad on box1", "failed 6") == []
    code, out, err = cli("wrangle", "apply", "r1")
    assert (code, out) == (1, "")
    assert missing(err, "gpuwarden wrangle: ", "more than 5") == []


def test_run_is_moved_blocked_and_forgiven(store: JobStore, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    start(store, jobs=1)
    job = claim(store, "w1")
    end(store, job, failed=6)
    assert missing(cli("wrangle", "apply", "r1")[1], "r1: moved", "w1 on box1") == []
    assert re.match(r"r1: waits: 1 of its jobs are fenced.*known$", cli("wrangle", "list")[1])
    assert missing(cli("wrangle", "list", "--migrations-max", "1")[1], "1 of 1 times", "blocked") == []
    store.sweeps.reclaim_expired(now=store.now() + HAND_OVER_S + 1)
    end(store, claim(store, "w2"), failed=6)

    code, out, _ = cli("wrangle", "apply", "r1", "--migrations-max", "1")

    assert (code, missing(out, "r1: blocked", "failed 6", "1 moves of at most 1", "submitter")) == (0, [])
    blocked = store.job(job.job_id)
    assert blocked.state is State.BLOCKED
    assert blocked.reason is not None
    assert re.search(r"\(blocked by ann@[^ ,]+, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\)$", blocked.reason)
    for refused in (cli("wrangle", "forgive", "r1"), cli("job", "unblock", str(job.job_id))):
        assert refused[0] == 1
        assert missing(refused[2], f"job {job.job_id} ", "stays blocked") == []
    now, taken = JobStore.now, HAND_OVER_S + 1
    monkeypatch.setattr(JobStore, "now", lambda its: now(its) + taken)
    assert missing(cli("wrangle", "forgive", "r1")[1], "r1: 1 jobs unblocked") == []
    assert re.match(r"forgiven by ann@[^ ,]+, \d{4}-.* UTC$", store.job(job.job_id).reason or "")
    assert re.search(r"\n  forgiven \d{4}-.* by ann@", cli("runs", "show", "r1")[1])
    assert claim(store, "w1").job_id == job.job_id


def test_action_that_would_use_the_last_attempt_is_refused(store: JobStore, cli: Cli) -> None:
    store.runs.submit_run("r1", {"a": Submission(queue="gpu", attempts_max=1)}, wrangled=True, now=NOW)
    store.items.add("r1", ITEMS, now=NOW)
    job = claim(store, "w1")
    end(store, job, failed=6)

    listed = cli("wrangle", "list")[1]
    code, out, err = cli("wrangle", "apply", "r1")

    assert (code, out) == (1, "")
    figures = ("w1 on box1", "failed 6", "move 1 of 3", f"job {job.job_id} ", "attempt 1 of 1", "0 lost attempts")
    assert missing(listed, "r1: waits", "`gpuwarden worker lock w1 --host box1`", *figures) == []
    assert missing(err, "gpuwarden wrangle: ", *figures) == []
    assert store.job(job.job_id).state is State.RUNNING


def test_run_without_wrangling_is_refused(store: JobStore, cli: Cli) -> None:
    start(store, wrangled=False)
    end(store, claim(store, "bad"), failed=6)

    code, _, err = cli("wrangle", "apply", "r1")

    assert code == 1
    assert missing(err, "gpuwarden wrangle: ", "`gpuwarden wrangle enable r1`") == []
    assert cli("wrangle", "enable", "r1") == (0, "", "")
    assert cli("wrangle", "apply", "r1")[0] == 0
    assert cli("wrangle", "disable", "r1") == (0, "", "")
    assert cli("wrangle", "list") == (0, "", "")


@pytest.mark.parametrize("argv", [("enable", "r9"), ("disable", "r9"), ("apply", "r9")])
def test_unknown_run_is_reported(store: JobStore, cli: Cli, argv: tuple[str, ...]) -> None:
    assert store.item_failures.wrangled_runs() == []

    assert cli("wrangle", *argv) == (
        1,
        "",
        "gpuwarden wrangle: no run 'r9' in the queue: see `gpuwarden runs list`\n",
    )


@pytest.mark.parametrize(
    "argv",
    [("--activation", "-1"), ("--activation", "many"), ("--migrations-max", "1.5"), ("--timeout-s", "nan")],
)
def test_invalid_constant_is_refused(store: JobStore, cli: Cli, argv: tuple[str, str]) -> None:
    assert store.item_failures.wrangled_runs() == []

    code, _, err = cli("wrangle", "list", *argv)

    assert code == 2
    assert f"{argv[1]!r}" in err


@pytest.mark.parametrize(
    ("machine", "said", "wrangled"),
    [
        pytest.param("", (), False, id="default"),
        pytest.param("", ("--wrangle",), True, id="by option"),
        pytest.param("1", (), True, id="by variable"),
        pytest.param("1", ("--no-wrangle",), False, id="option against variable: off"),
        pytest.param("0", ("--wrangle",), True, id="option against variable: on"),
    ],
)
def test_submit_sets_wrangling_by_option_or_variable(
    store: JobStore,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    said: tuple[str, ...],
    *,
    wrangled: bool,
) -> None:
    monkeypatch.setenv("GPUWARDEN_WRANGLE_RUNS", machine)
    file = tmp_path / "run.json"
    file.write_text('{"run": "r1", "jobs": {"a": {}}}')

    assert cli("runs", "submit", str(file), *said)[0] == 0

    assert (store.item_failures.wrangled_runs() == ["r1"]) is wrangled


def test_invalid_variable_submits_nothing(
    store: JobStore, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUWARDEN_WRANGLE_RUNS", "perhaps")
    file = tmp_path / "run.json"
    file.write_text('{"run": "r1", "jobs": {"a": {}}}')

    assert cli("runs", "submit", str(file)) == (
        1,
        "",
        "gpuwarden runs: $GPUWARDEN_WRANGLE_RUNS is 'perhaps': use 1 to wrangle runs of this host, or 0\n",
    )
    assert store.runs.get("r1") is None


# --- outdated verdicts


def carry_out(store: JobStore, verdict: Wrangle) -> bool:
    return BuiltinQueue(store).wrangle("r1", verdict, rules=Rules(), who="ann@box1", now=store.now())


WORST = WorkerTally(host="box1", worker="bad", done=0, failed=6, runs_for_s=1.0)


@pytest.mark.parametrize("meanwhile", ["others finish", "it finishes one itself", "another worker joins"])
def test_outdated_verdict_is_not_applied(store: JobStore, meanwhile: str) -> None:
    start(store)
    bad = claim(store, "bad")
    end(store, bad, failed=6)
    counts = store.item_failures.tally("r1", now=store.now())
    assert counts is not None
    verdict = classify(counts, Rules())
    assert isinstance(verdict, Migrate)

    if meanwhile == "it finishes one itself":
        end(store, bad, done=1)
    else:
        end(store, claim(store, "w2"), done=int(meanwhile == "others finish"))

    assert not carry_out(store, verdict)
    assert store.job(bad.job_id).state is State.RUNNING


def test_verdict_is_applied_although_more_items_failed(store: JobStore) -> None:
    start(store)
    bad = claim(store, "bad")
    end(store, bad, failed=6)
    verdict = classify(
        RunTally(run_id="r1", asked=True, over=False, ranked=False, unsettled=0, migrations=0, workers=(WORST,)),
        Rules(),
    )
    end(store, bad, failed=3)

    assert isinstance(verdict, Migrate)
    assert carry_out(store, verdict)
    assert store.job(bad.job_id).state is State.FENCING


# --- with real workers

TASKS = """
import os, time
from gpuwarden import Queue, current

queue = Queue()

@queue.job()
def render():
    for item in current().items():
        with item:
            time.sleep(0.1)  # a frame
            if os.environ["NATURE"] == "bad":
                raise RuntimeError("no such device")
"""


@pytest.fixture
def worker(tmp_path: Path, queue_url: str) -> Iterator[Worker]:
    """Start `gpuwarden worker run tasks` with a name and a nature. Kills the workers at the end."""
    folder, started = tmp_path / "run", list[subprocess.Popen[bytes]]()
    folder.mkdir()
    (folder / "host").write_text("box1\n")
    (tmp_path / "tasks.py").write_text(TASKS)

    def start_one(name: str, nature: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gpuwarden",
                    "worker",
                    "run",
                    "tasks",
                    "--name",
                    name,
                    "--runtime-dir",
                    str(folder),
                ],
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                env={**os.environ, "GPUWARDEN_QUEUE_DB": queue_url, "NATURE": nature, "PYTHONPATH": str(tmp_path)},
            )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def found(store: JobStore, verdict: type[Verdict], folder: Path) -> None:
    """Wait for this verdict."""

    def is_found() -> bool:
        counts = store.item_failures.tally("r1", now=store.now())
        return counts is not None and isinstance(classify(counts, Rules()), verdict)

    def logs() -> str:
        return "\n".join(each.read_text() for each in folder.glob("*.log"))

    eventually(is_found, f"{verdict.__name__} is found", within_s=60, log=logs)


def give_back(store: JobStore) -> None:
    """Sweep as an executor does after the fence expired."""
    store.sweeps.reclaim_expired(now=store.now() + HAND_OVER_S + 1)


@pytest.mark.behaviour("B5")
def test_bad_job_is_moved_three_times_and_blocked(store: JobStore, cli: Cli, worker: Worker, tmp_path: Path) -> None:
    start(store, jobs=1)
    (job,) = store.jobs()
    for number in range(1, 5):
        its = worker(f"w{number}", "bad")
        found(store, BlockRun if number == 4 else Migrate, tmp_path)
        assert store.job(job.job_id).worker == f"w{number}", "earlier workers run and do not get it back"
        assert cli("wrangle", "apply", "r1")[0] == 0
        assert its.wait(30) == 77
        worker(f"w{number}", "bad")  # as its supervisor does
        give_back(store)

    assert store.job(job.job_id).state is State.BLOCKED
    counts = store.item_failures.tally("r1", now=store.now())
    assert counts is not None
    assert counts.migrations == 3
    assert [each.worker for each in counts.workers if each.failed >= 6] == ["w1", "w2", "w3", "w4"]
