"""Many workers with real processes, state files and locks. As forks they take a few megabytes each.

`python -m bench.crowd DIRECTORY GPU COUNT` forks COUNT workers with a job each, and ends with its stdin.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from bench.figures import wait_until
from exporter.sources import workers
from gpuwarden.job import JobClass, Phase
from gpuwarden.reporter import Reporter

GPUS: Final = 8
READY_S: Final = 60.0


@contextmanager
def crowd(directory: Path, simulation: Path, count: int) -> Iterator[None]:
    """Run `count` workers on `GPUS` simulated GPUs, each with a monitored job after its first step."""
    shares = [count // GPUS + (index < count % GPUS) for index in range(GPUS)]
    parents = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.crowd", str(directory), str(index), str(share)],
            env={**os.environ, "NVIDIA_VISIBLE_DEVICES": f"GPU-sim-{index}"},
            stdin=subprocess.PIPE,
        )
        for index, share in enumerate(shares)
    ]
    try:
        wait_until(lambda: _count_running(directory) == count, within_s=READY_S, what=f"{count} workers run")
        pids = iter([each.pid for each in workers.read(directory).workers])  # in the order of the GPUs
        gpus = [_gpu(index, list(islice(pids, share))) for index, share in enumerate(shares)]
        simulation.write_text(json.dumps({"gpus": gpus}), encoding="ascii")
        yield
    finally:
        for parent in parents:
            parent.communicate()  # closes stdin


def start_job(report: Reporter, *, job_id: int) -> None:
    """Start a monitored job with the default limits of a GPU job."""
    report.start_job(
        job_id=job_id, attempt=1, job_class=JobClass.GPU, model="model", budget_s=3600.0, stall_timeout_s=120.0
    )
    report.ready()


def _count_running(directory: Path) -> int:
    return sum(1 for each in workers.read(directory).workers if each.alive and each.job and each.job.step)


def _gpu(index: int, pids: list[int | None]) -> dict[str, object]:
    share = {"utilization_ratio": 0.9 / max(1, len(pids)), "memory_bytes": 2**28}
    return {
        "uuid": f"GPU-sim-{index}",
        "index": index,
        "utilization_ratio": 0.9 if pids else 0.0,
        "memory_used_bytes": len(pids) * 2**28,
        "memory_size_bytes": 80 * 2**30,
        "processes": [{"pid": pid, **share} for pid in pids],
    }


def _main(directory: Path, gpu: int, count: int) -> None:
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            report = Reporter(directory, worker=f"worker-{gpu}-{number:03}", queue="gpu").open()
            start_job(report, job_id=number)
            report.step()
            report.phase(Phase.STEP)  # writes the step at once
            sys.stdin.buffer.read()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
