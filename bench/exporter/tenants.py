"""Workers of containers that come and go: forks of one small process, so that many of them cost next to nothing.

`python -m bench.exporter.tenants DIRECTORY` reads lines and answers each with one:

    start NAME CGROUP    a worker of this name, in this cgroup before it has written anything, with a job that is armed
                         and steps: `PID`
    end NAME             it ends cleanly and takes its files with it, and what is left of its folder goes: `ended`
    kill NAME            the same, but that it is killed and its files stay for a moment: `ended`

It ends when its stdin does, and all workers with it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from bench.crowd import start_job
from bench.figures import BenchError
from gpuwarden.job import Phase
from gpuwarden.reporter import Reporter

STEP_S: Final = 0.5


class Tenants:
    """The process, asked from this side of its pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, worker: str, group: Path) -> int:
        """A worker in this cgroup; its pid."""
        return int(self._asked(f"start {worker} {group}"))

    def end(self, worker: str) -> None:
        """It ends cleanly."""
        self._asked(f"end {worker}")

    def kill(self, worker: str) -> None:
        """It is killed."""
        self._asked(f"kill {worker}")

    def _asked(self, line: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError("the workers' process has no pipes")
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise BenchError(f"the workers' process ended at: {line}")
        return answer


@contextmanager
def tenants(directory: Path) -> Iterator[Tenants]:
    """It runs, and ends with all of its workers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.exporter.tenants", str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Tenants(process)
    finally:
        process.communicate()


def _main(directory: Path) -> None:
    workers: dict[str, int] = {}
    try:
        for job_id, line in enumerate(sys.stdin):
            what, worker, *rest = line.split()
            if what == "start":
                workers[worker] = _started(directory, worker, Path(*rest), job_id=job_id)
                print(workers[worker], flush=True)
                continue
            _ended(workers.pop(worker), signal.SIGTERM if what == "end" else signal.SIGKILL)
            shutil.rmtree(directory / worker, ignore_errors=True)
            print("ended", flush=True)
    finally:
        for pid in workers.values():
            _ended(pid, signal.SIGKILL)


def _started(directory: Path, worker: str, group: Path, *, job_id: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        (group / "cgroup.procs").write_text("0", encoding="ascii")  # 0 is whoever writes
        report = Reporter(directory, worker=worker, queue="gpu").open()

        def close(_signal: int, _frame: FrameType | None) -> None:
            report.close()
            os._exit(0)

        signal.signal(signal.SIGTERM, close)
        start_job(report, job_id=job_id)
        report.phase(Phase.STEP)
        while True:
            report.step()
            time.sleep(STEP_S)
    finally:
        os._exit(1)


def _ended(pid: int, by: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, by)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
