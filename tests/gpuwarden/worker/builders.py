"""Submissions with a payload, and a worker in this process."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuwarden.job import JobId, State
from gpuwarden.queue import Job, JobStore, Submission
from gpuwarden.reporter import Reporter
from gpuwarden.worker.settings import Settings
from gpuwarden.worker.worker import Stop, Worker
from tests.waiting import eventually

Spawn = Callable[..., subprocess.Popen[str]]


def submit(store: JobStore, **payload: Any) -> JobId:
    return store.runs.submit(Submission(queue="gpu", model="sd-xl", payload=payload), now=0)


def reaches(store: JobStore, job_id: JobId, state: State) -> Callable[[], bool]:
    return lambda: store.job(job_id).state is state


def state_files(host_dir: Path) -> set[str]:
    return {path.name for path in (host_dir / "w1").iterdir() if not path.is_socket()}


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


def gateway(spawn: Spawn, host_dir: Path, url: str, *options: str) -> subprocess.Popen[str]:
    """Start a gateway, with its log in the host's folder."""
    log = host_dir / "gateway.log"
    process = spawn(
        *("-m", "gpuwarden", "gateway", "host", "--queue-db", url, "--runtime-dir", str(host_dir), "--port", "0"),
        *options,
        stderr=log,
        XDG_DATA_HOME=str(host_dir / "data"),
    )
    eventually(lambda: "gateway ready" in log.read_text(), "the gateway is ready", log=log.read_text)
    return process


def nothing_to_do(_job: Job, _report: Reporter) -> Callable[[], None]:
    return lambda: None
