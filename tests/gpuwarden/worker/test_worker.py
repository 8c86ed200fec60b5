"""A worker in this process: registration, the job file, gangs and GPUs."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuwarden import logs, state_file
from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.errors import WorkerStopping
from gpuwarden.format import TRACE_MAX_BYTES
from gpuwarden.job import JobId, State
from gpuwarden.queue import Job, JobStore, ReplacedError, Submission
from gpuwarden.reporter import Reporter
from gpuwarden.worker import worker as worker_module
from gpuwarden.worker.main import BodyError, find_body, gpus_named
from gpuwarden.worker.worker import Stop
from tests.gpuwarden.worker.builders import nothing_to_do, run_worker, submit


def test_failing_watch_does_not_end_the_worker(
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


def test_first_beat_comes_between_load_and_work(store: JobStore, reporter: Reporter) -> None:
    submit(store)
    beats: list[object] = []

    def beat() -> object:
        return json.loads((reporter.folder / "w1.job.json").read_text())["step_beat"]

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        beats.append(beat())
        return lambda: beats.append(beat())

    run_worker(store, reporter, body)

    assert beats[0] is None
    assert beats[1] is not None


def published_gang(store: JobStore, reporter: Reporter) -> tuple[str | None, int, int]:
    """Gang, rank and number of ranks in the job file of the next job."""
    files: list[state_file.JobFile] = []

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        return lambda: files.append(state_file.parse_job((reporter.folder / "w1.job.json").read_text()))

    run_worker(store, reporter, body)

    (job,) = files
    return job.gang, job.rank, job.ranks


def test_job_file_names_rank_gang_and_number_of_ranks(store: JobStore, reporter: Reporter) -> None:
    gang = store.runs.submit(Submission(queue="gpu", ranks=2, run_id="night"), now=0)

    assert published_gang(store, reporter) == (f"{gang}@0.000/night", 0, 2)


def test_second_rank_names_the_same_gang(store: JobStore, reporter: Reporter) -> None:
    gang = store.runs.submit(Submission(queue="gpu", ranks=2, run_id="night"), now=0)
    store.claims.claim("gpu", host="box2", worker="w2", incarnation="i2", now=0)

    assert published_gang(store, reporter) == (f"{gang}@0.000/night", 1, 2)


def test_gangs_of_one_number_differ_by_submit_time(tmp_path: Path, reporter: Reporter) -> None:
    named = set()
    for queue, submitted_at in (("one", 1700000000.25), ("other", 1700000000.5)):
        with closing(JobStore.open(f"sqlite:///{tmp_path / queue}.db")) as store:
            store.runs.submit(Submission(queue="gpu", ranks=2, run_id="night"), now=submitted_at)
            named.add(published_gang(store, reporter)[0])

    assert named == {"1@1700000000.250/night", "1@1700000000.500/night"}


def test_gang_of_the_longest_run_name_keeps_its_number(store: JobStore, reporter: Reporter) -> None:
    gang = store.runs.submit(Submission(queue="gpu", ranks=2, run_id="r" * state_file.TEXT_MAX), now=0)

    named, _, _ = published_gang(store, reporter)

    assert named is not None
    assert named.startswith(f"{gang}@0.000/rrr")


def test_job_of_one_rank_has_no_gang(store: JobStore, reporter: Reporter) -> None:
    store.runs.submit(Submission(queue="gpu", run_id="night"), now=0)

    assert published_gang(store, reporter) == (None, 0, 1)


def test_handler_is_found_by_module_and_function() -> None:
    assert find_body("gpuwarden.procfs:start_ticks").__name__ == "start_ticks"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param("def load(:\n", "cannot import 'broken_handler': ", id="syntax"),
        pytest.param("\nunknown_name\n", "NameError: name 'unknown_name' is not defined", id="name"),
    ],
)
def test_handler_that_fails_to_import_names_its_line(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken_handler.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BodyError, match=re.escape(says)) as refused:
        find_body("broken_handler:load")
    assert f"in {file}, line {1 if 'load' in source else 2}" in str(refused.value)


@pytest.mark.parametrize("target", ["", ":", "gpuwarden.procfs", "gpuwarden.procfs:", ":load", "gpuwarden.procfs:PROC"])
def test_invalid_handler_is_refused(target: str) -> None:
    with pytest.raises(BodyError):
        find_body(target)


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        pytest.param({}, "", id="no GPU"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "all"}, "", id="all"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, "", id="numbers"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-a,GPU-b", id="of the container"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-a, 1,MIG-c"}, "GPU-a,MIG-c", id="a mixture"),
        pytest.param(
            {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b", "CUDA_VISIBLE_DEVICES": "GPU-b"}, "GPU-b", id="of the process"
        ),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "GPU-a", "CUDA_VISIBLE_DEVICES": "0"}, "GPU-a", id="the first of one"),
        pytest.param({"GPUWARDEN_GPUS": "GPU-c", "CUDA_VISIBLE_DEVICES": "GPU-b"}, "GPU-c", id="ours before all"),
    ],
)
def test_worker_gpus_are_the_uuids_in_its_environment(env: dict[str, str], gpus: str) -> None:
    assert gpus_named(env) == gpus


def test_worker_registers_its_gpus_before_it_claims(store: JobStore, reporter: Reporter) -> None:
    submit(store)
    blocked: list[object] = []

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker=None, reason="D state", now=1)
        blocked.append(store.gpu_quarantine.quarantine_of(host="box1", worker="w1"))
        return lambda: None

    run_worker(store, reporter, body, gpus=("GPU-a",))

    assert blocked[0] is not None


def test_replaced_worker_claims_nothing(store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, other = submit(store), submit(store)
    complete = store.claims.complete

    def replaced_after(*arguments: Any, **named: Any) -> bool:
        accepted = complete(*arguments, **named)
        store.claims.register("gpu", host="box1", worker="w1", incarnation="next", now=2)
        return accepted

    monkeypatch.setattr(store.claims, "complete", replaced_after)

    with pytest.raises(ReplacedError):
        run_worker(store, reporter, nothing_to_do, jobs_max=2, heartbeat_s=0)

    assert [store.job(each).state for each in (job_id, other)] == [State.COMPLETED, State.QUEUED]


def test_registration_is_retried(store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_failure_with_invalid_characters_is_stored_readably(store: JobStore, reporter: Reporter) -> None:
    job_id = submit(store)

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        raise RuntimeError("a\0b\udcff")

    run_worker(store, reporter, body)

    assert store.job(job_id).reason == "RuntimeError: a\\x00b\\udcff"


def test_end_of_the_traceback_is_kept_with_the_job(store: JobStore, reporter: Reporter) -> None:
    job_id = submit(store)

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        raise RuntimeError("é" * 10_000 + "a\0b\udcff")

    run_worker(store, reporter, body)

    kept = store.job(job_id).traceback
    assert kept is not None
    assert TRACE_MAX_BYTES - 2 < len(kept.encode()) <= TRACE_MAX_BYTES
    assert kept.endswith("éa\\x00b\\udcff")


ODD: Any = ("odd", (1, 2, 3, 4))
"""Attributes of a SyntaxError that Python cannot print."""


class Panic(BaseException):
    """As PyO3 turns a Rust panic into."""


class TextlessError(Exception):
    def __str__(self) -> str:
        raise Panic


@pytest.mark.parametrize("where", ["load", "work"])
@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        pytest.param(Panic("index out of bounds"), "Panic: index out of bounds", id="Rust panic"),
        pytest.param(asyncio.CancelledError("timeout"), "CancelledError: timeout", id="cancelled"),
        pytest.param(KeyboardInterrupt(), "KeyboardInterrupt: ", id="interrupt"),
        pytest.param(GeneratorExit(), "GeneratorExit: ", id="generator"),
        pytest.param(SystemExit("no data"), "SystemExit: no data", id="exit with a text"),
        pytest.param(SystemExit(3), "SystemExit: 3", id="exit with a code"),
        pytest.param(SyntaxError(*ODD), "SyntaxError: odd (line 2)", id="no traceback"),
        pytest.param(
            TextlessError(), "TextlessError: the text of this TextlessError cannot be read: Panic", id="no text"
        ),
    ],
)
def test_whatever_a_job_raises_fails_only_this_job(
    store: JobStore, reporter: Reporter, raised: BaseException, reason: str, where: str
) -> None:
    first, second = submit(store, bad=True), submit(store)

    def fail() -> None:
        raise raised

    def body(job: Job, _report: Reporter) -> Callable[[], None]:
        if job.payload and where == "load":
            fail()
        return fail if job.payload else lambda: None

    run_worker(store, reporter, body, jobs_max=2)

    assert [(store.job(each).state, store.job(each).reason) for each in (first, second)] == [
        (State.FAILED, reason),
        (State.COMPLETED, None),
    ]


@pytest.mark.parametrize("code", [0, None])
def test_job_that_exits_with_0_completes(store: JobStore, reporter: Reporter, code: int | None) -> None:
    job_id = submit(store)

    run_worker(store, reporter, lambda *_: lambda: sys.exit(code))

    assert (store.job(job_id).state, store.job(job_id).result) == (State.COMPLETED, None)


@pytest.mark.usefixtures("log_settings")
def test_result_that_is_no_json_is_kept_in_part(
    store: JobStore, reporter: Reporter, capfd: pytest.CaptureFixture[str]
) -> None:
    job_id = submit(store)
    logs.configure()

    run_worker(store, reporter, lambda *_: lambda: {"loss": float("nan"), "picture": Path("/data/cat.png")})

    job = store.job(job_id)
    assert (job.state, job.result) == (State.COMPLETED, {"loss": None, "picture": "/data/cat.png"})
    assert str(job.reason).startswith("result kept in part: a job's result is not JSON: ")
    assert "result kept in part" in capfd.readouterr().err


def test_handler_whose_import_exits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exiting_handler.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(BodyError, match="cannot import 'exiting_handler': SystemExit: 0, in "):
        find_body("exiting_handler:load")


def test_worker_claims_its_next_job_with_its_last_result(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [submit(store) for _ in range(3)]
    calls = noted(store, monkeypatch)

    run_worker(store, reporter, nothing_to_do, jobs_max=3, heartbeat_s=60)

    assert [store.job(each).state for each in jobs] == [State.COMPLETED] * 3
    assert calls == ["heartbeat", "claim", "complete_and_claim", "complete_and_claim", "complete", "heartbeat"]


def test_worker_with_a_due_heartbeat_completes_its_job_alone(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store)
    submit(store)
    calls = noted(store, monkeypatch)

    run_worker(store, reporter, nothing_to_do, jobs_max=2, heartbeat_s=0)

    assert calls == ["heartbeat", "claim", "complete", "heartbeat"] * 2


def noted(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the next calls of a worker's main thread."""
    found: list[str] = []

    def passing(name: str) -> Callable[..., Any]:
        its = getattr(store.claims, name)

        def call(*args: Any, **how: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                found.append(name)
            return its(*args, **how)

        return call

    for name in ("heartbeat", "claim", "complete", "complete_and_claim"):
        monkeypatch.setattr(store.claims, name, passing(name))
    return found


def test_stop_after_a_claim_with_a_result_gives_the_job_back(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = submit(store), submit(store)
    stop, complete_and_claim = Stop(), store.claims.complete_and_claim

    def interrupted(*args: Any, **how: Any) -> Any:
        stop.requested = True
        return complete_and_claim(*args, **how)

    monkeypatch.setattr(store.claims, "complete_and_claim", interrupted)

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, nothing_to_do, stop=stop, jobs_max=2, heartbeat_s=60)

    assert store.job(first).state is State.COMPLETED
    again = store.job(second)
    assert (again.state, again.attempt, again.reason) == (State.QUEUED, 1, "released by its worker")
