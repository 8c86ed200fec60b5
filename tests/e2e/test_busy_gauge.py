"""The gauge of busy workers falls at once when a worker is killed, and then counts the new worker."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gpuwarden.job import FRESH_S, State
from testbed.demo.job_body import Script
from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.stage import stage
from tests.asking import PLAIN
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

WORKER = "gpuwarden-process-a"
SERIES = "gpuwarden_queue_workers_busy{"
GRACE_S = 5.0


def busy_workers(url: str) -> float | None:
    """The gauge, summed over all queues; `None` while it is absent."""
    page = httpx.get(f"{url}/metrics", trust_env=False, verify=PLAIN, timeout=10).text
    found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(SERIES)]
    return sum(found) if found else None


def await_time(holds: Callable[[], bool], what: str, log: Callable[[], str]) -> float:
    eventually(holds, within_s=90, what=what, log=log)
    return time.time()


@pytest.mark.behaviour("A12")
def test_busy_gauge_falls_when_a_worker_is_killed_and_counts_the_new_one(tmp_path: Path) -> None:
    script = Script(picture="first", load_s=0.3, load_mib=4, steps=16, step_s=0.5, wedge_attempts=1, wedge_after_step=2)
    slots = [Slot(worker=WORKER, gpus=("GPU-sim-0",))]
    # The grace period and the job are long enough for a check that is seconds late.
    with stage(tmp_path, NoEngine(reason="a test"), slots, armed=True, stop_grace_s=GRACE_S) as scene:
        url, log = scene.chain.remediator_url, lambda: scene.chain.log_tail("execute")
        scene.start_workers()
        eventually(lambda: busy_workers(url) == 0, "an idle worker is not busy", log=log)
        job_id = scene.submit(script, now=time.time(), stall_timeout_s=3)
        await_time(lambda: busy_workers(url) == 1, "the worker is busy", log)

        fell_at = await_time(lambda: busy_workers(url) == 0, "the gauge fell", log)
        (row,) = scene.store.admin.workers(now=scene.store.now())
        job = scene.store.job(job_id)

        def find_fence() -> float | None:  # the queue is written first, then the ledger
            return next((each.at for each in scene.journal(WORKER) if (each.act, each.step) == ("did", "fence")), None)

        fenced_at = eventually(find_fence, "the fence is in the ledger", log=log)

        assert abs(fell_at - fenced_at) < FRESH_S / 3, "the gauge did not fall because the row became old"
        assert job.state in (State.FENCING, State.QUEUED, State.RUNNING), "the job has not ended"
        assert row.worker == WORKER
        await_time(lambda: busy_workers(url) == 1, "the new worker is busy", log)
        await_time(lambda: scene.store.job(job_id).state is State.COMPLETED, "the job is fixed", log)
        assert scene.store.job(job_id).attempt == 2
        await_time(lambda: busy_workers(url) == 0, "the new worker is idle", log)
