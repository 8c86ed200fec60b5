"""Fixtures: worker processes, their log, and a reporter."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.reporter import Reporter
from tests.gpuwarden.worker.builders import Spawn, gateway
from tests.waiting import eventually

BODIES = """
import ctypes, sys, time
from pathlib import Path
from gpuwarden.db import engine
from gpuwarden.queue import JobStore
from gpuwarden.worker import worker

engine.BUSY_TIMEOUT_S = 0.2
JobStore.idle_claim_s = 0.5
worker.RETRY_S = 0.2
not_callable = 3

def load(job, report):
    def work():
        do = job.payload.get("do", "write")
        if do == "write":
            Path(job.payload["out"]).write_text(str(job.attempt))
        elif do == "raise":
            raise RuntimeError("out of memory \\udcff")
        elif do == "assert":
            raise RuntimeError("CUDA error: device-side assert triggered")
        elif do == "exit":
            sys.exit(3)
        elif do == "await":  # wait for a file
            while not Path(job.payload["out"]).exists():
                report.step()
                time.sleep(0.01)
        elif do == "block":  # a C call that releases the GIL and never returns
            ctypes.CDLL(None).sleep(600)
    return work

def cannot_load(job, report):
    raise ValueError("no such model")
"""
"""Handlers that follow the job's payload. A locked queue fails after 0.2 s."""


@pytest.fixture
def url(database: Path) -> str:
    """SQLite: other tests cover what differs on PostgreSQL."""
    return f"sqlite:///{database}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Log file of the worker."""
    return tmp_path / "worker.log"


@pytest.fixture
def door(request: pytest.FixtureRequest, spawn: Spawn, host_dir: Path, url: str) -> str:
    """How a worker reaches the queue: its database's URL, or `gateway`, which then runs."""
    if getattr(request, "param", "database") == "database":
        return url
    gateway(spawn, host_dir, url)
    return "gateway"


@pytest.fixture
def start(spawn: Spawn, tmp_path: Path, host_dir: Path, door: str, log: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a worker with an empty log, and wait until it is ready or logs the given text."""
    (tmp_path / "bodies.py").write_text(BODIES)

    def run(
        *more: str, body: str = "bodies:load", store: str = door, says: str = "worker ready"
    ) -> subprocess.Popen[str]:
        options = ["--name", "w1", "--handler", body, "--queue-db", store, "--runtime-dir", str(host_dir)]
        arguments = ["-m", "gpuwarden", "worker", "run", *options, "--heartbeat-s", "0.2", *more]
        process = spawn(*arguments, stderr=log, PYTHONPATH=str(tmp_path))
        eventually(lambda: says in log.read_text(), "the worker is ready", log=log.read_text)
        return process

    return run


@pytest.fixture
def reporter(host_dir: Path) -> Iterator[Reporter]:
    with Reporter(host_dir, worker="w1", queue="gpu") as opened:
        yield opened
