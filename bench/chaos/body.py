"""The job body of the chaos: it leaves its side effects in a log (`bench/chaos/log.py`) that is no queue's."""

import json
import os
import time
from collections.abc import Callable

from gpuwarden.queue import Job
from gpuwarden.reporter import Reporter

LOG_VARIABLE = "CHAOS_LOG"


def load(job: Job, report: Reporter) -> Callable[[], None]:
    """The payload says how many steps it has, how long each takes (`step_s`), and whether it fails after them."""
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
            raise RuntimeError("as its payload says")

    return work
