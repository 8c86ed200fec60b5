"""Jobs as functions, run by worker processes, and their logs."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

import gpuwarden
from gpuwarden.cli.main import main
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import JobClass, State
from gpuwarden.queue import Job, JobStore, ResultError, Submission, SubmissionError
from gpuwarden.queue.open import created, default_store
from gpuwarden.reporter import Reporter
from gpuwarden.tasks import JobFailedError, JobTimeoutError, Queue, TaskError, current
from gpuwarden.worker import job_logs
from gpuwarden.worker.main import BodyError, find_body
from tests.gpuwarden.worker.builders import run_worker
from tests.waiting import eventually

TASKS = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from gpuwarden import Queue, current

queue = Queue()

@queue.model("sdxl")
def load_sdxl():
    print("loading sdxl")
    return "pipeline"

@queue.model("flux")
def load_flux():
    print("loading flux")
    return "flux pipeline"

@queue.job(model="sdxl")
def paint(pipeline, prompt, steps=2):
    for step in current().steps(range(steps)):
        print(pipeline, prompt, step)
    current().phase("save")
    return {"picture": f"{prompt}.png", "inputs": list(current().job.inputs.values())}

@queue.job(model="flux")
def sketch(pipeline):
    return pipeline

@queue.job()
def echo(number):
    return {"loss": float(number)}

@queue.job(reports_steps=False, job_class="cpu")
def fail():
    raise RuntimeError("out of memory")

@queue.job()
def render(bad=()):
    done = []
    for item in current().items():
        with item:
            if item.name in bad:
                raise RuntimeError("no such texture")
            item.result = {"frame": item.name}
            done.append(item.name)
    return done

@queue.job()
def shout():
    subprocess.run(["echo", "from a child"], check=True)
    os.write(2, b"from native code\\n")
    print("é")

@queue.job()
def hang(started):
    print("before", flush=True)
    Path(started).touch()
    ctypes.PyDLL(None).sleep(600)  # holds the GIL
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def url(database: Path) -> str:
    """SQLite: the tests of the queue cover both databases."""
    return f"sqlite:///{database}"


@pytest.fixture
def tasks(tmp_path: Path, url: str, host_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of jobs; its queue comes from the environment."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", url)
    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", str(host_dir))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    tasks = importlib.import_module("tasks")
    yield tasks
    tasks.queue.store.close()
    sys.modules.pop("tasks", None)


@pytest.fixture
def work(tmp_path: Path, spawn: Start, tasks: ModuleType) -> Start:
    """Start `gpuwarden worker run tasks`."""
    assert tasks

    def start(*options: str) -> subprocess.Popen[str]:
        return spawn("-m", "gpuwarden", "worker", "run", "tasks", *options, stderr=tmp_path / "worker.log")

    return start


def test_function_is_submitted_and_its_result_returned(tasks: Any, work: Start) -> None:
    handle = tasks.paint.submit(prompt="a cat")
    work("--jobs-max", "1")

    assert handle.wait(timeout_s=30) == {"picture": "a cat.png", "inputs": []}
    job = handle.job()
    assert (job.model, job.job_class, job.stall_timeout_s) == ("sdxl", JobClass.GPU, 120)


def test_job_gets_the_results_of_the_jobs_it_needs(tasks: Any, work: Start) -> None:
    store: JobStore = tasks.queue.store
    jobs = {name: tasks.paint.submission(prompt=name) for name in ("first", "second")}
    ids = store.runs.submit_run("r1", jobs, needs={"second": ["first"]}, now=store.now())
    work("--jobs-max", "2")

    eventually(lambda: store.runs.state("r1") == "completed", within_s=30)
    assert store.job(ids["second"]).result["inputs"] == [{"picture": "first.png", "inputs": []}]


def test_jobs_of_a_run_share_its_items(tasks: Any, work: Start) -> None:
    store: JobStore = tasks.queue.store
    names = [f"frame-{n:02}" for n in range(12)]
    store.items.add("r1", names, now=store.now())
    ids = store.runs.submit_run("r1", {str(n): tasks.render.submission() for n in range(2)}, now=store.now())
    for n in range(2):
        work("--name", f"worker-{n}", "--jobs-max", "1")

    eventually(lambda: store.runs.state("r1") == "completed", within_s=30)
    assert sorted(name for job_id in ids.values() for name in store.job(job_id).result) == names
    assert [item.result for item in store.items.of_run("r1")] == [{"frame": name} for name in names]


def test_failed_item_is_retried_and_fails_its_job_at_the_end(tasks: Any, work: Start) -> None:
    store: JobStore = tasks.queue.store
    store.items.add("r1", ["good", "bad", "fine"], now=store.now())
    ids = store.runs.submit_run("r1", {"render": tasks.render.submission(bad=["bad"])}, now=store.now())
    work("--jobs-max", "1")

    eventually(lambda: store.job(ids["render"]).state is State.FAILED, within_s=30)
    assert store.job(ids["render"]).reason == "ItemsFailedError: 1 of the run's 3 items have failed"
    assert [(item.item, item.state, item.reason) for item in store.items.of_run("r1")] == [
        ("good", "done", None),
        ("bad", "failed", "RuntimeError: no such texture"),
        ("fine", "done", None),
    ]


def test_item_result_that_is_no_json_is_kept_in_part(tasks: Any, work: Start, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS.replace('{"frame": item.name}', '{"loss": float("nan"), "n": item.name}'))
    store: JobStore = tasks.queue.store
    store.items.add("r1", ["a"], now=store.now())
    store.runs.submit_run("r1", {"render": tasks.render.submission()}, now=store.now())
    work("--jobs-max", "1")

    eventually(lambda: store.runs.state("r1") == "completed", within_s=30)
    assert [item.result for item in store.items.of_run("r1")] == [{"loss": None, "n": "a"}]
    assert "result kept in part" in (tmp_path / "worker.log").read_text()


def test_model_stays_loaded_for_consecutive_jobs(tasks: Any, work: Start, tmp_path: Path) -> None:
    store: JobStore = tasks.queue.store
    handles = [tasks.paint.submit(prompt="a"), tasks.sketch.submit(), tasks.paint.submit(prompt="b")]
    work()

    for handle in handles:
        handle.wait(timeout_s=30)
    eventually(lambda: [row.loaded_model for row in store.admin.workers(now=store.now())] == ["flux"])
    (row,) = store.admin.workers(now=store.now())
    assert row.current_model is None
    assert (tmp_path / "worker.log").read_text().count("loading") == 0  # it prints to standard output
    assert handles[2].job().claimed_at < handles[1].job().claimed_at  # both jobs of one model come first


def test_waiter_gets_the_reason_of_a_failed_function(tasks: Any, work: Start) -> None:
    handle = tasks.fail.submit()
    work("--jobs-max", "1")

    with pytest.raises(JobFailedError, match="job 1 failed: RuntimeError: out of memory") as failed:
        handle.wait(timeout_s=30)
    assert 'raise RuntimeError("out of memory")' in str(failed.value)
    assert "gpuwarden/" not in str(failed.value), "the frames of the worker say nothing"
    assert failed.value.job.traceback == handle.job().traceback


def test_wait_that_times_out_names_the_state_and_allows_a_cancel(tasks: Any) -> None:
    handle = tasks.paint.submit(prompt="a")

    with pytest.raises(JobTimeoutError, match=r"job 1 is queued, after 0\.1 s"):
        handle.wait(timeout_s=0.1)

    assert handle.cancel()
    assert not handle.cancel()
    assert handle.state is State.CANCELLED
    with pytest.raises(JobFailedError, match="job 1 cancelled: cancelled by its submitter"):
        handle.wait()


def test_job_with_an_unknown_function_fails_and_names_the_known_ones(tasks: Any, work: Start) -> None:
    submission = tasks.paint.submission(prompt="a")
    submission.payload["task"] = "dance"
    store: JobStore = tasks.queue.store
    job_id = store.runs.submit(submission, now=store.now())
    work("--jobs-max", "1")

    eventually(lambda: store.job(job_id).state is State.FAILED, within_s=30)
    assert "names the unknown function 'dance': this queue has echo, fail, hang, paint" in (
        store.job(job_id).reason or ""
    )


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (object(), r"a job's argument 'prompt' of paint\(\) is not JSON"),
        (float("nan"), r"a job's argument 'prompt' of paint\(\) is not JSON"),
        ("x" * 2**20, r"'prompt' of paint\(\) has 1048578 bytes as JSON, more than 1048576: write the data to a file"),
        ("x" * (2**20 - 10), "a job's payload has 1048612 bytes as JSON, more than 1048576: write the data to a file"),
        ("a\0b", "'prompt' of paint\\(\\) contains a NUL character"),
    ],
    ids=["not JSON", "NaN", "too long", "too long with its name", "a NUL"],
)
def test_invalid_arguments_are_refused_at_submit(tasks: Any, argument: Any, says: str) -> None:
    with pytest.raises(SubmissionError, match=says):
        tasks.paint.submit(prompt=argument)

    assert tasks.queue.store.jobs() == []


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "missing a required argument: 'prompt'"),
        (("a cat",), {"step": 3}, "got an unexpected keyword argument 'step'"),
        (("a cat", 2, 3), {}, r"paint\(pipeline, prompt, steps=2\): too many positional arguments"),
        (("a cat",), {"prompt": "a dog"}, "multiple values for argument 'prompt'"),
    ],
)
def test_call_that_does_not_fit_the_function_stores_nothing(
    tasks: Any, args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        tasks.paint.submit(*args, **kwargs)

    assert tasks.queue.store.jobs() == []


@pytest.mark.parametrize(
    ("submitted", "payload"),
    [
        (lambda queue: queue.job()(plain).submission(1, c=3), {"arguments": {"a": 1, "c": 3}}),
        (lambda queue: queue.job()(plain).submission(a=1, b=2), {"arguments": {"a": 1, "b": 2}}),
        (lambda queue: queue.job(model="m")(plain).submission(1, c=3), {"arguments": {"b": 1, "c": 3}}),
        (lambda queue: queue.job()(positional).submission(1, 2), {"arguments": {}, "positional": [1, 2]}),
        (lambda queue: queue.job(model="m")(positional).submission(2), {"arguments": {"b": 2}}),
        (lambda queue: queue.job(model="m")(variable).submission(1, x=2), {"arguments": {"x": 2}, "positional": [1]}),
        (lambda queue: queue.job()(variable).submission(x=2), {"arguments": {"x": 2}}),
    ],
)
def test_call_is_stored_so_that_the_function_gets_it(
    submitted: Callable[[Queue], Submission], payload: dict[str, Any]
) -> None:
    queue = Queue("sqlite:///nowhere")
    queue.model("m")(lambda: "model")

    found = dict(submitted(queue).payload)

    task = queue._tasks[found.pop("task")]
    assert found == payload
    model = ["model"] if task.template.model else []
    task.function(*model, *found.get("positional", []), **found["arguments"])


def plain(a: Any, b: Any = 0, *, c: Any = 0, **more: Any) -> None: ...


def positional(a: Any, /, b: Any) -> None: ...


def variable(*args: Any, **kwargs: Any) -> None: ...


def test_result_is_what_the_function_returned_and_raises_its_failure(tasks: Any, work: Start) -> None:
    returned, failed, cut = tasks.paint.submit("a cat"), tasks.fail.submit(), tasks.echo.submit("nan")
    work("--jobs-max", "3")

    assert returned.result(timeout_s=30) == {"picture": "a cat.png", "inputs": []}
    with pytest.raises(JobFailedError, match="RuntimeError: out of memory"):
        failed.result(timeout_s=30)
    with pytest.raises(ResultError, match=r"job 3 completed: result kept in part: .*; wait\(\) returns the part"):
        cut.result(timeout_s=30)
    assert cut.wait() == {"loss": None}
    with pytest.raises(JobTimeoutError):
        tasks.echo.submit("nan").result(timeout_s=0.1)


@pytest.mark.parametrize(
    ("retries", "retry_on", "attempts"),
    [(2, OSError, 3), (2, (KeyError, ConnectionError), 3), (1, Exception, 2), (2, KeyError, 1), (0, Exception, 1)],
)
def test_failed_function_is_retried_after_the_named_exceptions(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch, retries: int, retry_on: Any, attempts: int
) -> None:
    monkeypatch.setattr("gpuwarden.job.RETRY_WAIT_S", 0)
    queue = Queue()
    queue.serve_from(store)
    task = queue.job(retries=retries, retry_on=retry_on)(refuse)
    handle = task.submit()

    run_worker(store, reporter, queue, jobs_max=attempts)

    job = handle.job()
    assert (job.state, job.attempt, job.retries) == (State.FAILED, attempts, attempts - 1)
    assert job.reason == "ConnectionRefusedError: no"


def refuse() -> None:
    raise ConnectionRefusedError("no")


@pytest.mark.parametrize("kind", ["OSError", (OSError, 3), OSError()])
def test_retry_on_takes_exception_classes_only(kind: Any) -> None:
    with pytest.raises(TaskError, match=r"retry_on .* is invalid: use an exception class or a tuple of them"):
        Queue().job(retries=1, retry_on=kind)


def test_outside_a_worker_a_job_is_its_function_and_current_raises(tasks: Any) -> None:
    assert tasks.sketch("a pipeline") == "a pipeline"
    with pytest.raises(TaskError, match="no job runs in this process"):
        current()


def test_least_recently_used_model_is_dropped_first() -> None:
    queue, loaded = Queue("sqlite:////nowhere/queue.db", models_max=2), list[str]()
    for name in "abc":
        queue.model(name)(partial(loaded.append, name))
        queue.job(model=name)(cast("Any", SimpleNamespace(__name__=name)))

    for name in "abacb":
        queue(cast("Job", SimpleNamespace(payload={"task": name}, job_id=1)), cast("Reporter", None))

    assert loaded == ["a", "b", "c", "b"]
    assert queue.loaded_model == "b"


def test_duplicate_function_names_are_refused() -> None:
    queue = Queue("sqlite:////nowhere/queue.db")
    queue.model("m")(int)
    queue.job()(test_duplicate_function_names_are_refused)

    with pytest.raises(TaskError, match="model 'm' has a loader already: int"):
        queue.model("m")(int)
    with pytest.raises(TaskError, match="two jobs of the queue are named 'test_duplicate_function_names_are_refused'"):
        queue.job()(test_duplicate_function_names_are_refused)
    with pytest.raises(TaskError, match=r"a job needs parentheses: write @queue\.job\(\)"):
        queue.job(int)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="models_max 0 is invalid"):
        Queue(models_max=0)
    with pytest.raises(TaskError, match="unknown job class 'gqu': use one of gpu, gpu_video"):
        queue.job(job_class="gqu")


def test_handler_may_be_the_only_queue_of_a_module(tasks: Any) -> None:
    assert find_body("tasks") is tasks.queue
    assert find_body("tasks:queue") is tasks.queue
    tasks.another = Queue("sqlite:////nowhere/queue.db")
    with pytest.raises(BodyError, match="it has 2 queues: name one"):
        find_body("tasks")


def test_default_queue_is_a_file_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUWARDEN_QUEUE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    assert default_store() == f"sqlite:///{tmp_path}/data/gpuwarden/queue.db"
    Queue().store.close()
    assert (tmp_path / "data/gpuwarden").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data/gpuwarden/queue.db"))
    with pytest.raises(GpuwardenError, match=r"no folder for the queue .*: set \$GPUWARDEN_QUEUE_DB"):
        created(default_store())


def test_host_without_set_up_uses_a_folder_of_this_user(
    tmp_path: Path, tasks: Any, spawn: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = tasks.sketch.submit()
    monkeypatch.delenv("GPUWARDEN_RUNTIME_DIR")
    log = tmp_path / "worker.log"
    spawn(
        "-m",
        "gpuwarden",
        "worker",
        "run",
        "tasks",
        "--jobs-max",
        "1",
        stderr=log,
        XDG_RUNTIME_DIR=str(tmp_path / "own"),
    )

    assert handle.wait(timeout_s=30) == "flux pipeline"
    assert "host not set up" in log.read_text()
    assert (tmp_path / "own/gpuwarden/host").read_text().strip() == os.uname().nodename


def test_package_exports_the_public_names_only() -> None:
    assert gpuwarden.Queue is Queue
    with pytest.raises(AttributeError, match="has no attribute 'Worker'"):
        _ = gpuwarden.Worker


# --- logs


def test_output_of_an_attempt_is_kept_from_any_writer_and_passed_on(tasks: Any, work: Start, tmp_path: Path) -> None:
    handle = tasks.shout.submit()
    worker = work("--jobs-max", "1", "--logs", str(tmp_path / "logs"))
    handle.wait(timeout_s=30)
    output, _ = worker.communicate(timeout=30)

    kept, errors = job_logs.newest(tmp_path / "logs", 1).read_text(), (tmp_path / "worker.log").read_text()

    for said, passed_on in (
        ("from a child\n", output),
        ("é\n", output),
        ("native code\n", errors),
        ("job ready", errors),
    ):
        assert said in kept
        assert said in passed_on
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert job_logs.newest(tmp_path / "logs", 1).stat().st_mode & 0o777 == 0o600


def test_log_of_a_job_that_hangs_with_the_gil_is_readable(tasks: Any, work: Start, tmp_path: Path) -> None:
    tasks.hang.submit(started=str(tmp_path / "started"))
    worker = work("--logs", str(tmp_path / "logs"))
    eventually((tmp_path / "started").exists, within_s=30)

    eventually(lambda: "before\n" in job_logs.newest(tmp_path / "logs", 1).read_text())
    worker.send_signal(signal.SIGKILL)
    worker.wait(30)
    assert "before\n" in job_logs.newest(tmp_path / "logs", 1).read_text()


def test_output_is_kept_by_default_and_found_by_the_queue(
    tasks: Any, work: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks.shout.submit()
    work("--jobs-max", "1").wait(30)

    assert main(["job", "logs", "1"]) == 0
    assert "from native code\n" in capsys.readouterr().out
    other = created(f"sqlite:///{tmp_path}/other.db")
    other.runs.submit(Submission(queue="gpu"), now=other.now())
    other.close()
    assert main(["job", "logs", "1", "--queue-db", f"sqlite:///{tmp_path}/other.db"]) == 1
    assert "gpuwarden job: job 1 is queued: no log of job 1 in" in capsys.readouterr().err


def test_output_is_not_kept_with_logs_none(tasks: Any, work: Start, capsys: pytest.CaptureFixture[str]) -> None:
    handle = tasks.shout.submit()
    work("--jobs-max", "1", "--logs", "none").wait(30)

    assert handle.state is State.COMPLETED
    assert main(["job", "logs", "1"]) == 1
    assert "no log of job 1 in" in capsys.readouterr().err


def test_full_disk_under_the_output_costs_the_output_only(tasks: Any, work: Start, tmp_path: Path) -> None:
    handle = tasks.shout.submit()
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "job-1-attempt-1.log"
    log.symlink_to("/dev/full")
    now = time.time()  # the kernel's times of files are some milliseconds behind: it would be an older queue's log
    os.utime(log, (now, now), follow_symlinks=False)
    worker = work("--jobs-max", "1", "--logs", str(tmp_path / "logs"))
    output, _ = worker.communicate(timeout=30)

    assert handle.state is State.COMPLETED
    errors = (tmp_path / "worker.log").read_text()
    assert errors.count("attempt-1.log: No space left on device\n") == 1
    assert "from native code\n" in errors
    assert "from a child\n" in output


def test_unwritable_default_folder_costs_the_output_only(
    tasks: Any, work: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    handle = tasks.shout.submit()
    work("--jobs-max", "1").wait(30)

    assert handle.state is State.COMPLETED
    assert (tmp_path / "worker.log").read_text().count("output of jobs is not kept") == 1


def test_followed_log_begins_with_its_job(tasks: Any, work: Start, spawn: Start) -> None:
    handle = tasks.shout.submit()
    follower = spawn("-m", "gpuwarden", "job", "logs", "1", "--follow")
    assert follower.stdout is not None
    work("--jobs-max", "1")

    assert any("from native code" in line for line in iter(follower.stdout.readline, ""))
    assert follower.wait(30) == 0
    assert handle.state is State.COMPLETED


def test_unwritable_log_folder_is_refused_before_a_claim(
    tasks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.worker.main.logs.configure", lambda **_: None)
    tasks.paint.submit(prompt="a")
    (tmp_path / "file").touch()

    assert main(["worker", "run", "tasks", "--logs", str(tmp_path / "file" / "logs")]) == 1
    assert "name another folder with --logs" in capsys.readouterr().err
    assert tasks.queue.store.job(1).state is State.QUEUED


def test_job_log_is_printed_and_followed_to_its_end(
    tasks: Any, work: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], spawn: Start
) -> None:
    logs = str(tmp_path / "logs")
    tasks.hang.submit(started=str(tmp_path / "started"))
    worker = work("--logs", logs)
    eventually((tmp_path / "started").exists, within_s=30)
    follower = spawn("-m", "gpuwarden", "job", "logs", "1", "--follow", "--logs", logs)
    store: JobStore = tasks.queue.store

    assert follower.stdout is not None
    assert any("before" in line for line in iter(follower.stdout.readline, ""))
    worker.kill()
    assert store.claims.register("gpu", host="box1", worker="worker-0", incarnation="new", now=store.now()) == [1]
    assert follower.wait(30) == 0

    assert main(["job", "logs", "1", "--logs", logs]) == 0
    assert "before\n" in capsys.readouterr().out
    assert main(["job", "logs", "1", "--attempt", "2", "--logs", logs]) == 1
    assert "no log of attempt 2 of job 1" in capsys.readouterr().err
