"""`gpuwarden up --worker MODULE:N`: workers that run, are started again and stop with `up`."""

import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpuwarden.job import State
from gpuwarden.queue import JobStore, Submission
from gpuwarden.supervisor import files
from tests.e2e.running import Run, free_ports, is_running, up
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

JOBS = """
import os, time
from gpuwarden import Queue
queue = Queue(name="pool")

@queue.job()
def gpu_of(pause_s):
    time.sleep(pause_s)
    return os.environ["CUDA_VISIBLE_DEVICES"]
"""


def task(pause_s: float) -> Submission:
    return Submission(queue="pool", payload={"task": "gpu_of", "arguments": {"pause_s": pause_s}})


def holder(run: Run, worker: str) -> int:
    try:
        return files.lock_holder(run.data / "run" / worker, worker)[1] or 0
    except OSError:
        return 0


def test_workers_run_in_up_are_started_again_and_give_their_job_back_when_it_stops(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOBS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = ("--worker", "train:2", "--gpus", "GPU-a,GPU-b")
    with up(tmp_path, free_ports(), *options, cwd=tmp_path, env=environment) as run:
        run.ready()
        assert f"2 workers of train, log {run.data / 'log' / 'workers-train.log'}" in run.output()
        with closing(JobStore.open(f"sqlite:///{run.data}/queue/queue.db")) as store:
            done = store.runs.submit(task(0.0), now=store.now())
            eventually(lambda: store.job(done).state is State.COMPLETED, "a job is done", within_s=30, log=run.output)
            assert store.job(done).result in ("GPU-a", "GPU-b")
            first = holder(run, "train-0")
            os.kill(first, signal.SIGKILL)
            eventually(lambda: holder(run, "train-0") not in (0, first), "the worker runs again", within_s=30)

            long = store.runs.submit(task(1000.0), now=store.now())
            eventually(lambda: store.job(long).state is State.RUNNING, "a job runs", within_s=30)
            workers = [holder(run, name) for name in ("train-0", "train-1")]
            assert run.stop() == 0

            assert store.job(long).state is State.QUEUED
        assert not any(is_running(pid) for pid in workers)


def test_handler_that_does_not_exist_ends_up_with_its_reason(tmp_path: Path) -> None:
    with up(tmp_path, free_ports(), "--worker", "no_such_module:2") as run:
        assert run.process.wait(timeout=90) == 1

    assert "no handler at 'no_such_module'" in run.output()
