"""Workers that come and go as forks of one small process.

`python -m bench.exporter.tenants DIRECTORY` answers each line of stdin, and ends with it:

    start NAME CGROUP    start a worker with a monitored job in this cgroup: `PID`
    end NAME             end the worker cleanly and remove its folder: `ended`
    kill NAME            kill the worker, then remove its folder: `ended`
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
    """Client of the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, worker: str, group: Path) -> int:
        """Start a worker in this cgroup; return its pid."""
        return int(self._ask(f"start {worker} {group}"))

    def end(self, worker: str) -> None:
        """End a worker cleanly."""
        self._ask(f"end {worker}")

    def kill(self, worker: str) -> None:
        """Kill a worker."""
        self._ask(f"kill {worker}")

    def _ask(self, line: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError("the workers' process has no pipes")
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise BenchError(f"the workers' process ended at: {line}")
        return answer


@contextmanager
def tenants(directory: Path) -> Iterator[Tenants]:
    """Run the process; its workers end with it."""
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
                workers[worker] = _start(directory, worker, Path(*rest), job_id=job_id)
                print(workers[worker], flush=True)
                continue
            _end(workers.pop(worker), signal.SIGTERM if what == "end" else signal.SIGKILL)
            shutil.rmtree(directory / worker, ignore_errors=True)
            print("ended", flush=True)
    finally:
        for pid in workers.values():
            _end(pid, signal.SIGKILL)


def _start(directory: Path, worker: str, group: Path, *, job_id: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        (group / "cgroup.procs").write_text("0", encoding="ascii")  # 0 is the writing process
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


def _end(pid: int, by: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, by)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
