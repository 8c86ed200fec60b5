"""`gpuwarden worker run --processes N` with real workers and jobs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwarden import procfs
from gpuwarden.job import JobId, State
from gpuwarden.queue import JobStore
from gpuwarden.supervisor import files
from gpuwarden.supervisor.pool import names, visible
from tests.waiting import eventually

JOBS = """
import os, time
from gpuwarden import Queue
queue = Queue(name="pool")
HELD = open("held", "a")

@queue.job()
def gpu_of(pause_s):
    time.sleep(pause_s)
    return {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
"""


@contextmanager
def pool(folder: Path, *options: str, handler: str = "jobs") -> Iterator[subprocess.Popen[str]]:
    (folder / "host").write_text("host1\n")
    (folder / "jobs.py").write_text(JOBS)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuwarden", "worker", "run", handler, "--name", "w", *options),
            *("--queue-db", f"sqlite:///{folder}/queue.db"),
        ],
        cwd=folder,
        env={
            **os.environ,
            "GPUWARDEN_RUNTIME_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join((str(folder), *sys.path)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids(folder: Path, workers: Sequence[str]) -> list[int]:
    """The pids of the workers that hold their locks; 0 for others."""
    found = []
    for worker in workers:
        try:
            found.append(files.lock_holder(folder / worker, worker)[1] or 0)
        except OSError:
            found.append(0)
    return found


@pytest.mark.slow
def test_each_worker_is_started_again_after_any_end_and_sigterm_stops_all(tmp_path: Path) -> None:
    with pool(tmp_path, "--processes", "2") as process:
        workers = ["w-0", "w-1"]
        eventually(lambda: all(pids(tmp_path, workers)), "both workers run")
        first, other = pids(tmp_path, workers)

        os.kill(first, signal.SIGKILL)
        eventually(lambda: pids(tmp_path, workers)[0] not in (0, first), "the killed worker runs again", within_s=15)
        assert pids(tmp_path, workers)[1] == other
        held = {each.readlink() for each in Path("/proc", str(process.pid), "fd").iterdir()}
        assert tmp_path / "held" not in held, "the supervisor keeps nothing of the handler's module"
        file = files.supervised(tmp_path / "w-1", "w-1", holder=other)
        assert file is not None
        assert (file.process.pid, file.supervisor.pid, file.restarts) == (other, process.pid, True)
        status = Path("/proc", str(other), "status")
        eventually(lambda: "SigBlk:\t0000000000000000" in status.read_text(), "its jobs get SIGCHLD")

        process.terminate()
        said = process.communicate(timeout=20)[0]

    assert process.returncode == 0, said
    assert (
        '"worker": "w-0", "reason": "killed by SIGKILL", "after_s": 1.0, "event": "worker ended; started again"' in said
    )
    assert pids(tmp_path, workers) == [0, 0]


@pytest.mark.slow
def test_cancelled_job_costs_its_worker_seconds(tmp_path: Path) -> None:
    with pool(tmp_path, "--processes", "1", "--heartbeat-s", "1") as process:
        store = JobStore.open(f"sqlite:///{tmp_path}/queue.db")
        eventually(lambda: all(pids(tmp_path, ["w"])), "the worker runs")
        first = pids(tmp_path, ["w"])
        submit = [sys.executable, "-c", "import jobs; print(jobs.gpu_of.submit(pause_s=1000).job_id)"]
        environment = {**os.environ, "GPUWARDEN_QUEUE_DB": f"sqlite:///{tmp_path}/queue.db"}
        found = subprocess.run(submit, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        job_id = JobId(int(found.stdout))
        eventually(lambda: store.job(job_id).state is State.RUNNING, "the job runs")

        store.admin.cancel(job_id, reason="a test", now=store.now())
        eventually(lambda: pids(tmp_path, ["w"])[0] not in (0, *first), "a new worker runs")
        store.close()
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.slow
def test_workers_whose_supervisor_was_killed_end(tmp_path: Path) -> None:
    with pool(tmp_path, "--processes", "1") as process:
        eventually(lambda: all(pids(tmp_path, ["w"])), "the worker runs")
        (pid,) = pids(tmp_path, ["w"])
        process.kill()

        eventually(lambda: not Path("/proc", str(pid)).exists() or procfs.is_zombie(pid), "the worker ends")


@pytest.mark.parametrize("gpus", [("--gpus", "GPU-1,GPU-2,GPU-3"), ("--gpus=GPU-1,GPU-2,GPU-3",), ("--gpus", "0,1,2")])
def test_gpus_are_one_for_each_process(tmp_path: Path, gpus: tuple[str, ...]) -> None:
    with pool(tmp_path, "--processes", "2", *gpus) as process:
        said = process.communicate(timeout=20)[0]

    assert process.returncode == 2
    assert "--gpus names 3 GPUs for 2 processes: name one for each" in said


def test_handler_that_cannot_be_imported_ends_the_pool_at_once(tmp_path: Path) -> None:
    with pool(tmp_path, "--processes", "2", handler="jobs:nothing") as process:
        said = process.communicate(timeout=20)[0]

    assert process.returncode == 1
    assert "nothing" in said
    assert not (tmp_path / "w-0").exists()


def test_names_and_visible_gpus() -> None:
    assert (names("w", 1), names("w", 2)) == (["w"], ["w-0", "w-1"])
    assert visible("GPU-1") == {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "HIP_VISIBLE_DEVICES": "GPU-1",
        "ZE_AFFINITY_MASK": "GPU-1",
    }
