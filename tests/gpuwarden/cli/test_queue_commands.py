"""Commands for jobs, runs, queues and events; text and JSON."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.cli.main import main
from gpuwarden.cli.runs import parse
from gpuwarden.clock import stamp
from gpuwarden.db.migrate import OlderTablesError
from gpuwarden.db.transactions import writing
from gpuwarden.format import format_time
from gpuwarden.job import JobClass, JobId, Phase, State
from gpuwarden.queue import Job, JobStore, Slot, Submission
from gpuwarden.reporter import Reporter
from tests.conftest import Cli
from tests.waiting import eventually

NOW = 1000.0
HOST = "box1"


def submit(store: JobStore, **its: Any) -> JobId:
    return store.runs.submit(Submission(**{"queue": "gpu", **its}), now=NOW)


def claim(store: JobStore, queue: str = "gpu", *, now: float = NOW) -> Job:
    found = store.claims.claim(queue, host=HOST, worker=f"w-{queue}", incarnation=f"i-{queue}", now=now)
    assert found is not None
    return found


def complete(store: JobStore, job: Job, **result: Any) -> None:
    assert job.claimed_by is not None
    assert store.claims.complete(
        job.job_id, attempt=job.attempt, incarnation=job.claimed_by, now=NOW + 60, result=result
    )


def parsed(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


# --- reading


ASKS = (
    ["job", "list"],
    ["job", "show", "1"],
    ["job", "wait", "1"],
    ["runs", "list"],
    ["runs", "show", "r"],
    ["queue", "list"],
    ["worker", "list"],
    ["worker", "list", "--dead"],
    ["gpu", "list"],
    ["host", "list"],
    ["host", "show", HOST],
    ["events", "c"],
)


@pytest.mark.parametrize("asks", ASKS, ids=" ".join)
def test_read_only_command_refuses_older_tables(store: JobStore, cli: Cli, url: str, asks: list[str]) -> None:
    with writing(store._engine) as connection:
        connection.exec_driver_sql("UPDATE gpuwarden_queue_version SET version_num = '0001'")

    code, out, err = cli(*asks)

    assert (code, out) == (1, "")
    assert "queue tables are of an older gpuwarden (revision 0001; " in err
    with pytest.raises(OlderTablesError):
        JobStore.open(url)


CHANGES = (
    ["job", "cancel", "1"],
    ["job", "requeue", "1"],
    ["job", "block", "1"],
    ["job", "unblock", "1"],
    ["runs", "cancel", "r"],
    ["queue", "unset", "gpu"],
    ["worker", "lock", "w", "--host", HOST],
    ["worker", "unlock", "w", "--host", HOST],
    ["worker", "drain", "w", "--host", HOST],
    ["gpu", "quarantine", "GPU-1", "--host", HOST],
    ["gpu", "release", "GPU-1"],
    ["host", "enrol", HOST],
    ["host", "rotate", HOST],
    ["host", "revoke", HOST],
    ["wrangle", "apply", "r"],
    ["wrangle", "enable", "r"],
    ["wrangle", "disable", "r"],
    ["wrangle", "forgive", "r"],
)


@pytest.mark.parametrize("said", [*ASKS, *CHANGES], ids=" ".join)
def test_reading_and_changing_commands_create_no_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", f"sqlite:///{tmp_path}/typo.db")

    assert main(said) == 1

    assert (
        f"no queue database at {tmp_path}/typo.db: check --queue-db or $GPUWARDEN_QUEUE_DB" in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", [*ASKS, *CHANGES], ids=" ".join)
def test_reading_and_changing_commands_create_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.delenv("GPUWARDEN_QUEUE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    assert main(said) == 1

    assert f"no queue database at {tmp_path}/data/gpuwarden/queue.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_submission_creates_the_queue_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUWARDEN_QUEUE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    assert main(["job", "submit", "--payload", "{}"]) == 0

    assert capsys.readouterr().out == "1\n"
    assert (tmp_path / "data" / "gpuwarden").stat().st_mode & 0o777 == 0o700


# --- jobs


def test_newest_jobs_are_listed_or_all_on_request(store: JobStore, cli: Cli) -> None:
    ids = [submit(store) for _ in range(52)]

    code, out, err = cli("job", "list")
    assert code == 0
    assert [int(line.split()[0]) for line in out.splitlines()[1:]] == ids[2:], "the oldest of them first"
    assert err == "gpuwarden job: these are the newest 50; --limit 0 lists all\n"
    assert [each["job_id"] for each in parsed(cli("job", "list", "--json", "--limit", "2")[1])] == ids[-2:]
    assert len(parsed(cli("job", "list", "--json", "--limit", "0")[1])) == 52
    assert cli("job", "list", "--limit", "-1")[0] == 2


@pytest.mark.parametrize(
    ("stored", "task"),
    [
        ({"argv": ["python", "-u", "jobs/train.py", "--lr", "3"]}, "train.py"),
        ({"argv": ["/usr/bin/env", "x"]}, "env"),
        ({"argv": [3]}, "-"),
        ({}, "-"),
    ],
)
def test_command_is_listed_with_its_script_or_program(
    store: JobStore, cli: Cli, stored: dict[str, object], task: str
) -> None:
    submit(store, payload={"command": stored})

    assert cli("job", "list")[1].splitlines()[1].split()[2] == task


def test_all_jobs_are_listed_page_by_page(store: JobStore, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.queue.queries.PAGE", 3)
    ids = [submit(store) for _ in range(6)]

    assert [each["job_id"] for each in parsed(cli("job", "list", "--json", "--limit", "0")[1])] == ids


def test_jobs_are_filtered_by_queue_run_and_state(store: JobStore, cli: Cli) -> None:
    here, other, of_run = submit(store), submit(store, queue="cpu"), submit(store, run_id="r1")
    waits = submit(store, run_id="r1", needs=(of_run,))
    claim(store)

    def chosen(*options: str) -> list[int]:
        return [each["job_id"] for each in parsed(cli("job", "list", "--json", *options)[1])]

    assert chosen("--queue", "cpu") == [other]
    assert chosen("--run", "r1") == [of_run, waits]
    assert chosen("--state", "waiting") == [waits]
    assert chosen("--state", "running", "--state", "waiting") == [here, waits]
    assert chosen("--state", "queued", "--run", "r1", "--queue", "gpu") == [of_run]
    assert chosen("--queue", "none") == []


def test_running_job_is_listed_with_its_progress(store: JobStore, cli: Cli, host_dir: Path) -> None:
    submit(store, steps_total=20)
    with Reporter(host_dir, worker="w1", queue="gpu") as reporter:
        job = store.claims.claim("gpu", host=HOST, worker="w1", incarnation=reporter.incarnation, now=NOW)
        assert job is not None
        before = cli("job", "list")[1].splitlines()
        reporter.start_job(
            job_id=1, attempt=1, job_class=JobClass.GPU, model=None, budget_s=1.0, stall_timeout_s=1.0, steps_total=20
        )
        reporter.ready()
        after = cli("job", "list")[1].splitlines()
        json_line = parsed(cli("job", "list", "--json")[1])[0]

    assert before[0].split()[7] == "PROGRESS"
    assert before[1].split()[7] == "-"
    assert after[1].split()[7:] == ["step", "0/20", "0s/1s"]
    assert json_line["progress"]["steps_total"] == 20


@pytest.mark.parametrize(
    ("phase", "silence", "in_list", "max_s"),
    [
        pytest.param(Phase.STEP, "2 min 36 s of 120 s", "156s/120s", 120.0, id="step"),
        pytest.param(Phase.SAVE, "2 min 36 s", "156s", None, id="the host's setting decides"),
    ],
)
def test_running_job_is_listed_with_its_silence(
    store: JobStore,
    cli: Cli,
    host_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    silence: str,
    in_list: str,
    max_s: float | None,
) -> None:
    submit(store)
    with Reporter(host_dir, worker="w1", queue="gpu") as reporter:
        assert store.claims.claim("gpu", host=HOST, worker="w1", incarnation=reporter.incarnation, now=NOW) is not None
        reporter.start_job(job_id=1, attempt=1, job_class=JobClass.GPU, model=None, budget_s=1.0, stall_timeout_s=120.0)
        before = cli("job", "list")[1].splitlines()
        reporter.ready()
        reporter.phase(phase)
        later = replace(stamp(), boottime_s=stamp().boottime_s + 156)
        monkeypatch.setattr("gpuwarden.cli.job.stamp", lambda: later)

        listed = cli("job", "list")[1].splitlines()
        shown = cli("job", "show", "1")[1].splitlines()
        progress = json.loads(cli("job", "show", "1", "--json")[1])["progress"]

    assert before[1].endswith(" -"), "not policed before the first step beat"
    assert listed[1].endswith(f" {in_list}")
    assert any(line.startswith("progress  ") and line.endswith(f", silent {silence}") for line in shown)
    assert progress["silent_s"] == pytest.approx(156, abs=1)
    assert progress["silence_max_s"] == max_s


def test_watched_list_follows_changes(store: JobStore, url: str, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    submit(store)
    watching = spawn("-m", "gpuwarden", "job", "list", "--watch", "--json", "--queue-db", url)
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["state"] == "queued"

    claim(store)

    while json.loads(watching.stdout.readline())["state"] != "running":
        pass
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=20) == 130


def test_job_with_needs_waits_and_shows_them(store: JobStore, cli: Cli) -> None:
    first, second = (int(cli("job", "submit", "--run", "r1", "--payload", "{}")[1]) for _ in range(2))
    needs = ("--needs", str(first), "--needs", str(second))
    code, third, _ = cli("job", "submit", "--run", "r1", "--payload", "{}", *needs)
    assert code == 0
    complete(store, claim(store), frames=[1, 2])

    page = cli("job", "show", third.strip())[1].splitlines()
    assert "state     waiting" in page
    assert f"needs     {first}, {second}; 1 of 2 are not done" in page
    assert not any(line.startswith(("queued", "claimed", "ended", "result")) for line in page)
    shown = json.loads(cli("job", "show", third.strip(), "--json")[1])
    assert (shown["needs_jobs"], shown["pending"]) == ([first, second], 1)

    done = cli("job", "show", str(first))[1].splitlines()
    assert 'result    {"frames": [1, 2]}' in done
    assert any(line.startswith("ended ") and line.endswith("after an attempt of 1 min") for line in done)
    assert cli("job", "submit", "--payload", "{}", "--needs", str(first))[::2] == (
        1, "gpuwarden job: a job that needs other jobs must be in their run: set the run\n",
    )  # fmt: skip


def test_class_of_a_job_defaults_to_its_queue(store: JobStore, cli: Cli) -> None:
    assert cli("queue", "set", "sweeps", "--class", "ingest", "--budget-s", "60")[0] == 0

    for options in (["--queue", "sweeps"], ["--queue", "load"], [], ["--class", "cpu"]):
        assert cli("job", "submit", "--payload", "{}", *options)[0] == 0

    assert [job.job_class for job in store.jobs()] == ["ingest", "ingest_load", "gpu", "cpu"]
    assert store.job(1).budget_s == 60


# --- waiting


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param([State.COMPLETED, State.COMPLETED], 0, id="completed"),
        pytest.param([State.COMPLETED, State.FAILED], 1, id="one failed"),
        pytest.param([State.CANCELLED, State.COMPLETED], 1, id="one cancelled"),
    ],
)
def test_wait_ends_with_its_jobs_and_prints_their_states(
    store: JobStore, url: str, spawn: Callable[..., subprocess.Popen[str]], ends: list[State], code: int
) -> None:
    ids = [submit(store) for _ in ends]
    waiting = spawn("-m", "gpuwarden", "job", "wait", *map(str, ids), "--timeout-s", "60", "--queue-db", url)
    assert waiting.stdout is not None

    for job_id, end in zip(ids, ends, strict=True):
        assert waiting.poll() is None
        if end is State.CANCELLED:
            store.admin.cancel(job_id, reason="", now=NOW)
        elif end is State.COMPLETED:
            complete(store, claim(store))
        else:
            job = claim(store)
            store.claims.fail_by_worker(job.job_id, attempt=1, incarnation="i-gpu", reason="it broke", now=NOW)
        assert waiting.stdout.readline() == f"{job_id} {end}\n"

    assert waiting.wait(timeout=20) == code


def test_failed_job_is_shown_with_its_traceback(store: JobStore, cli: Cli) -> None:
    job_id = submit(store)
    its: dict[str, Any] = {"attempt": claim(store).attempt, "incarnation": "i-gpu", "now": NOW}
    store.claims.fail_by_worker(job_id, **its, reason="it broke", traceback="Traceback:\n  line 1\nit\x1b[2J broke")

    _, shown, _ = cli("job", "show", str(job_id))
    _, as_json, _ = cli("job", "show", str(job_id), "--json")

    assert shown.endswith("\ntraceback\n    Traceback:\n      line 1\n    it\\x1b[2J broke\n")
    assert json.loads(as_json)["traceback"] == "Traceback:\n  line 1\nit\x1b[2J broke"


def test_traceback_of_an_attempt_that_was_not_the_last_is_named_so(store: JobStore, cli: Cli) -> None:
    job_id = submit(store)
    its: dict[str, Any] = {"attempt": claim(store).attempt, "incarnation": "i-gpu", "now": NOW}
    slot = Slot(host=HOST, worker="w-gpu")
    store.claims.give_back(job_id, **its, slot=slot, reason="it broke", traceback="line 1")

    assert cli("job", "show", str(job_id))[1].endswith("\ntraceback of an earlier attempt\n    line 1\n")


def test_retried_job_says_so(store: JobStore, cli: Cli) -> None:
    job_id = submit(store, retries_max=3)
    its: dict[str, Any] = {"attempt": claim(store).attempt, "incarnation": "i-gpu", "now": NOW}
    store.claims.retry(job_id, **its, reason="E: boom")

    _, shown, _ = cli("job", "show", str(job_id))
    _, listed, _ = cli("job", "list")

    next_at = format_time(NOW + 5)
    assert f"retries   0 by gpuwarden, 0 after lost leases, 1 of 3 after exceptions, next at {next_at}\n" in shown
    assert "reason    E: boom; retry 1 of 3\n" in shown
    assert "E: boom; retry 1 of 3\n" in listed


def test_wait_that_times_out_exits_2_and_names_the_jobs(store: JobStore, cli: Cli) -> None:
    done, open_one = submit(store), submit(store)
    complete(store, claim(store))
    began_s = time.monotonic()

    code, out, err = cli("job", "wait", str(done), str(open_one), "--timeout-s", "0.2")

    assert (code, out, err) == (124, f"{done} completed\n", f"gpuwarden job: timeout: not ended yet: {open_one}\n")
    assert time.monotonic() - began_s < 20
    assert cli("job", "wait", str(done)) == (0, f"{done} completed\n", "")
    assert cli("job", "wait", "99")[::2] == (1, "gpuwarden job: the queue has no job 99: see `gpuwarden job list`\n")


# --- queues


def test_queues_are_listed_with_jobs_workers_and_settings(store: JobStore, cli: Cli) -> None:
    assert cli("queue", "list") == (0, "", "")
    now = store.now()
    for _ in range(3):
        store.runs.submit(Submission(queue="gpu"), now=now - 90)
    store.runs.submit(Submission(queue="gpu"), now=now)
    first = submit(store, queue="cpu", run_id="r1")
    submit(store, queue="cpu", run_id="r1", needs=(first,))
    store.admin.block(submit(store, queue="cpu"), reason="", now=store.now())
    claim(store, now=now)
    claim(store, "cpu", now=now - 31)
    store.claims.register("gpu", host=HOST, worker="idle", incarnation="i", now=now)
    store.runs.submit(Submission(queue="done"), now=now)
    complete(store, claim(store, "done", now=now))
    store.claims.heartbeat(host=HOST, worker="w-done", queue="done", incarnation="i-done", model=None, now=now)
    for _ in range(2):
        store.admin.cancel(submit(store, queue="old"), reason="", now=now)
    submit(store, queue="old")
    failed = claim(store, "old", now=now)
    assert store.claims.fail_by_worker(failed.job_id, attempt=1, incarnation="i-old", reason="boom", now=now)
    cli("queue", "set", "video", "--class", "gpu_video", "--lost-hold-s", "600")

    code, out, _ = cli("queue", "list")
    rows = {each["queue"]: each for each in parsed(cli("queue", "list", "--json")[1])}

    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["QUEUE", "cpu", "done", "gpu", "old", "video"]
    assert rows["gpu"]["jobs"] == {"queued": 3, "running": 1}
    assert rows["gpu"]["oldest_s"] == pytest.approx(90, abs=30)
    assert (rows["gpu"]["busy"], rows["gpu"]["workers"]) == (1, 2)
    assert rows["cpu"]["jobs"] == {"waiting": 1, "running": 1, "blocked": 1}
    assert (rows["cpu"]["busy"], rows["cpu"]["workers"]) == (0, 0), "not seen for 31 s"
    assert (rows["done"]["jobs"], rows["done"]["oldest_s"]) == ({}, None)
    assert rows["done"]["ended"] == {"completed": 1, "failed": 0, "cancelled": 0}
    assert rows["old"]["ended"] == {"completed": 0, "failed": 1, "cancelled": 2}
    assert next(line.split()[1:8] for line in out.splitlines() if line.startswith("old")) == [
        "0", "-", "0", "0", "0", "1", "2"
    ]  # fmt: skip
    assert rows["video"]["settings"]["set_by"].startswith("ann@")
    assert rows["video"]["settings"]["set_at"] == pytest.approx(now, abs=60)
    assert "class gpu_video, lost hold 600 s (set " in out
    assert "by ann@" in out


def test_unnamed_settings_stay_and_none_removes_one(store: JobStore, cli: Cli) -> None:
    def settings() -> tuple[Any, ...]:
        (found,) = store.queue_settings.all()
        return found.job_class, found.budget_s, found.lost_hold_s, found.retention_days

    cli("queue", "set", "gpu", "--budget-s", "60")
    assert settings() == (None, 60, None, None)
    cli("queue", "set", "gpu", "--lost-hold-s", "0")
    assert settings() == (None, 60, 0, None)
    assert "retention 30 d" in cli("queue", "set", "gpu", "--retention-days", "30")[1]
    assert settings() == (None, 60, 0, 30)
    assert cli("queue", "set", "gpu", "--budget-s", "none", "--class", "cpu")[0] == 0
    assert cli("queue", "set", "gpu", "--retention-days", "none")[0] == 0
    assert settings() == (JobClass.CPU, None, 0, None)

    assert cli("queue", "unset", "gpu") == (0, "", "")
    assert store.queue_settings.all() == []
    assert cli("queue", "unset", "gpu")[::2] == (
        1, "gpuwarden queue: queue 'gpu' has no settings: see `gpuwarden queue list`\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        pytest.param(["gpu"], 1, "missing --class, --budget-s, --lost-hold-s or --retention-days", id="nothing"),
        pytest.param(["gpu", "--class", "tpu"], 2, "unknown class 'tpu': use one of gpu, ", id="unknown class"),
        pytest.param(["gpu", "--budget-s", "much"], 2, "invalid 'much': use a number of seconds", id="not a number"),
        pytest.param(
            ["gpu", "--retention-days", "1.5"], 2, "invalid '1.5': use a whole number of days", id="half days"
        ),
        pytest.param(["gpu", "--budget-s", "-1"], 1, "budget_s -1.0 is invalid", id="below 0"),
        pytest.param(["", "--budget-s", "1"], 1, "queue '' is invalid", id="no name"),
    ],
)
def test_invalid_setting_is_refused(store: JobStore, cli: Cli, options: list[str], code: int, says: str) -> None:
    ended, _, err = cli("queue", "set", *options)

    assert ended == code
    assert says in err
    assert store.queue_settings.all() == []


# --- runs


DIAMOND = {
    "run": "render-7",
    "jobs": {
        "post": {"queue": "cpu", "needs": ["left", "right"]},
        "load": {"payload": {"scene": "a"}, "priority": 5},
        "left": {"needs": ["load"], "model": "svd", "class": "gpu_video", "reports_steps": False},
        "right": {"needs": ["load"], "budget_s": 60, "steps_total": 20, "attempts_max": 3, "stall_timeout_s": 10},
    },
}


def written(tmp_path: Path, whole: object) -> str:
    path = tmp_path / "run.json"
    path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    return str(path)


def test_run_is_submitted_from_a_file_and_shown_to_its_end(store: JobStore, cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("runs", "submit", written(tmp_path, DIAMOND))
    ids = {line.split()[1]: int(line.split()[0]) for line in out.splitlines()}

    assert (code, list(ids)) == (0, ["post", "load", "left", "right"])
    assert store.job(ids["left"]).job_class is JobClass.GPU_VIDEO
    assert store.job(ids["right"]).budget_s == 60
    assert store.runs.needs(ids["post"]) == sorted([ids["left"], ids["right"]])
    listed = cli("runs", "list")[1].splitlines()[1]
    assert listed.split()[:5] == ["render-7", "running", "0", "of", "4"]
    assert listed.endswith("3 waiting, 1 queued")
    page = cli("runs", "show", "render-7")[1]
    assert f"  {ids['post']:>6} waiting    cpu        needs 2 more\n" in page

    for queue in ("gpu", "gpu", "gpu", "cpu"):
        complete(store, claim(store, queue))

    (run,) = parsed(cli("runs", "list", "--json")[1])
    assert (run["state"], run["jobs"]) == ("completed", {"completed": 4})
    assert cli("runs", "list", "--state", "running") == (0, "", "")
    first, second = cli("runs", "show", "render-7")[1].splitlines()
    assert first.startswith("run render-7: completed, submitted ")
    assert second == "  4 of 4 jobs are over: 4 completed"
    assert len(cli("runs", "show", "render-7", "--all")[1].splitlines()) == 6
    shown = json.loads(cli("runs", "show", "render-7", "--json")[1])
    assert {each["job_id"]: each["needs_jobs"] for each in shown["all"]}[ids["left"]] == [ids["load"]]


def test_example_file_of_the_docs_is_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    example = page.partition("## Run files")[2].partition("```json\n")[2].partition("```")[0]

    run_id, submissions, needs = parse(example)

    assert run_id == "render-7"
    assert list(submissions) == ["load", "left", "right", "post"]
    assert needs["post"] == ["left", "right"]


@pytest.mark.behaviour("D7")
def test_cancel_of_a_lost_job_warns_that_its_process_may_still_run(store: JobStore, cli: Cli) -> None:
    lost, other, kept = submit(store), submit(store), submit(store)
    for number in (1, 2, 3):
        assert store.claims.claim("gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=NOW)
    assert store.lost_hosts.mark_lost(lost, attempt=1, now=NOW)
    assert store.lost_hosts.mark_lost(kept, attempt=1, now=NOW)

    code, out, complaints = cli("job", "cancel", str(lost), str(other))

    assert (code, out) == (0, "")
    assert complaints.startswith(f"gpuwarden job: job {lost} is lost with host box1: its process may still run")
    assert complaints.count("\n") == 1
    assert [store.job(each).state for each in (lost, other, kept)] == [
        State.CANCELLED,
        State.CANCELLED,
        State.HOST_LOST,
    ]


def test_run_is_cancelled_with_its_jobs(store: JobStore, cli: Cli, tmp_path: Path) -> None:
    cli("runs", "submit", written(tmp_path, DIAMOND), "--run", "other", "--json")

    assert cli("runs", "cancel", "other", "--reason", "wrong scene") == (0, "4 jobs cancelled: 1, 2, 3, 4\n", "")
    assert (store.job(1).reason or "").endswith(": wrong scene")
    assert cli("runs", "cancel", "other")[::2] == (1, "gpuwarden runs: run 'other' has ended: it is cancelled\n")
    for act in ("show", "cancel"):
        assert cli("runs", act, "none")[::2] == (
            1, "gpuwarden runs: the queue has no run 'none': see `gpuwarden runs list`\n",
        )  # fmt: skip


def test_run_shows_its_items_with_reasons_of_failures(store: JobStore, cli: Cli) -> None:
    store.items.add("r1", ["a", "b", "c"], now=NOW)
    submit(store, run_id="r1")
    job = claim(store)
    assert job.claimed_by is not None
    how: dict[str, Any] = {"attempt": job.attempt, "incarnation": job.claimed_by, "now": NOW}
    for item in ("a", "b"):
        assert store.items.take(job.job_id, **how) is not None
        if item == "a":
            store.items.fail(job.job_id, **how, item=item, reason="no such texture", tries_max=1)
    store.items.finish(job.job_id, **how, item="b")

    out = cli("runs", "show", "r1")[1]

    assert out.endswith("  3 items: 1 pending, 1 done, 1 failed\n  a failed on w-gpu: no such texture\n")
    (listed,) = parsed(cli("runs", "show", "r1", "--json")[1])
    assert [item["state"] for item in listed["items"]] == ["failed", "done", "pending"]


def test_newest_runs_are_listed(store: JobStore, cli: Cli) -> None:
    for n in range(3):
        store.runs.submit(Submission(queue="gpu", run_id=f"r{n}"), now=NOW + n)

    assert [each["run_id"] for each in parsed(cli("runs", "list", "--limit", "2", "--json")[1])] == ["r1", "r2"]
    assert "these are the newest 2" in cli("runs", "list", "--limit", "2")[2]
    assert len(parsed(cli("runs", "list", "--limit", "0", "--json")[1])) == 3


@pytest.mark.parametrize(
    ("whole", "says"),
    [
        pytest.param("{", "it is not JSON", id="not JSON"),
        pytest.param([], 'it is not an object with "jobs"', id="a list"),
        pytest.param({"run": "r", "jobs": {}}, 'it is not an object with "jobs"', id="no jobs"),
        pytest.param({"jobs": {"a": {}}}, "names no run: add", id="no name"),
        pytest.param({"run": 7, "jobs": {"a": {}}}, "`run` must be a text", id="a number as name"),
        pytest.param({"run": "r", "job": {}, "jobs": {"a": {}}}, "unknown key 'job'", id="unknown key"),
        pytest.param('{"run": "r", "jobs": {"a": {}, "a": {}}}', "duplicate key 'a'", id="duplicate key"),
        pytest.param({"run": "r", "jobs": {"a": []}}, "job 'a' is not an object", id="not an object"),
        pytest.param(
            {"run": "r", "jobs": {"a": {"prio": 1}}},
            "job 'a': unknown key 'prio': use queue, ",
            id="unknown key of a job",
        ),
        pytest.param({"run": "r", "jobs": {"a": {"priority": "1"}}}, "`priority` must be a whole number", id="a text"),
        pytest.param({"run": "r", "jobs": {"a": {"budget_s": True}}}, "`budget_s` must be a number", id="a bool"),
        pytest.param({"run": "r", "jobs": {"a": {"budget_s": -1}}}, "job 'a': budget_s -1 is invalid", id="below 0"),
        pytest.param(
            {"run": "r", "jobs": {"a": {"class": "x"}}},
            "job 'a': unknown class 'x': use one of gpu, ",
            id="unknown class",
        ),
        pytest.param({"run": "r", "jobs": {"a": {"needs": [1]}}}, "`needs` must be a list of names", id="needs by id"),
        pytest.param(
            {"run": "r", "jobs": {"a": {"needs": ["b"]}}}, "no job of this run is named 'b'", id="unknown job"
        ),
        pytest.param(
            {"run": "r", "jobs": {"a": {"needs": ["b"]}, "b": {"needs": ["a"]}}},
            "wait for one another",
            id="circular needs",
        ),
        pytest.param(
            {"run": "r", "jobs": {"a": {}, "b": {"queue": "load"}}},
            "cannot be in a run: submit it without",
            id="ingest",
        ),
    ],
)
def test_invalid_run_file_is_refused_whole(store: JobStore, cli: Cli, tmp_path: Path, whole: object, says: str) -> None:
    code, out, err = cli("runs", "submit", written(tmp_path, whole))

    assert (code, out) == (1, "")
    assert says in err
    assert store.jobs() == []


# --- events


def test_each_consumer_gets_every_event_once(store: JobStore, cli: Cli) -> None:
    submit(store, run_id="r1")
    complete(store, claim(store))

    first, second = cli("events", "mailer")[1].splitlines()
    assert first.partition("  ")[2] == "completed     job 1 of run r1, queue gpu, attempt 1, waited 0 s, ran 1 min"
    assert second.partition("  ")[2].startswith("run_completed job 1 of run r1")
    assert cli("events", "mailer") == (0, "", "")
    assert [each["kind"] for each in parsed(cli("events", "other", "--json")[1])] == ["completed", "run_completed"]
    store.admin.cancel(submit(store), reason="", now=NOW)
    assert [each["kind"] for each in parsed(cli("events", "mailer", "--json")[1])] == ["cancelled"]
    assert store.outbox.consumers() == {"mailer": 0, "other": 1}
    assert cli("events", "\t")[0] == 1


def test_peek_prints_every_event_and_acknowledges_none(
    store: JobStore, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.cli.events.BATCH", 2)
    for _ in range(5):
        store.admin.cancel(submit(store), reason="", now=NOW)

    first, second = (parsed(cli("events", "mailer", "--peek", "--json")[1]) for _ in range(2))

    assert [each["job_id"] for each in first] == [1, 2, 3, 4, 5]
    assert first == second == parsed(cli("events", "mailer", "--json")[1])
    assert cli("events", "mailer", "--peek") == (0, "", "")


def test_events_are_followed(store: JobStore, url: str, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    following = spawn("-m", "gpuwarden", "events", "mailer", "--follow", "--json", "--queue-db", url)
    assert following.stdout is not None

    for job_id in (submit(store), submit(store)):
        complete(store, claim(store))
        assert json.loads(following.stdout.readline())["job_id"] == job_id

    eventually(lambda: store.outbox.consumers() == {"mailer": 0}, "both are acknowledged")
    following.send_signal(signal.SIGINT)
    assert following.wait(timeout=20) == 130


def test_events_that_no_reader_took_are_printed_again(
    store: JobStore, url: str, spawn: Callable[..., subprocess.Popen[str]], cli: Cli
) -> None:
    submit(store)
    complete(store, claim(store))
    reader = spawn("-c", CLOSED, url)

    assert reader.wait(timeout=30) == 1
    assert len(cli("events", "mailer")[1].splitlines()) == 1


CLOSED = """
import os, sys
from gpuwarden.cli.main import main
read_end, write_end = os.pipe()
os.close(read_end)
os.dup2(write_end, 1)
sys.exit(main(["events", "mailer", "--queue-db", sys.argv[1]]))
"""
