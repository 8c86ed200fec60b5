"""A job body that works until a file exists. It writes its start, steps and end to a log outside of the queue."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpuwarden.queue import Job
from gpuwarden.reporter import Reporter

STEP_S: Final = 0.2


def load(job: Job, report: Reporter) -> Callable[[], None]:
    """Load a job whose payload has the paths `log` and `until`."""

    def write(word: str) -> None:
        log = os.open(job.payload["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(log, f"{word}\n".encode())
        os.close(log)

    def work() -> None:
        write("start")
        while not Path(job.payload["until"]).exists():
            time.sleep(STEP_S)
            report.step()
        write("end")

    return work
