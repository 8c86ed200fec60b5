"""A job body that writes its side effects to a log (`bench/chaos/log.py`) outside of the queue."""

import json
import os
import time
from collections.abc import Callable

from gpuwarden.queue import Job
from gpuwarden.reporter import Reporter

LOG_VARIABLE = "CHAOS_LOG"


def load(job: Job, report: Reporter) -> Callable[[], None]:
    """Load a job whose payload has its number of `steps`, `step_s`, and whether it `fails` at the end."""
    log = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def leave(step: int) -> None:
        line = {"job": job.job_id, "attempt": job.attempt, "pid": os.getpid(), "step": step, "at_s": time.monotonic()}
        os.write(log, json.dumps(line).encode() + b"\n")

    def work() -> None:
        try:
            leave(0)
            for step in range(1, job.payload["steps"] + 1):
                time.sleep(job.payload["step_s"])
                report.step()
                leave(step)
        finally:
            os.close(log)
        if job.payload["fails"]:
            raise RuntimeError("the payload says so")

    return work
