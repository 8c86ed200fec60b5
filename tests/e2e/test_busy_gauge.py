"""The busy gauge, through the whole chain: it falls at once when a worker is killed, and counts its replacement."""

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


def busy(url: str) -> float | None:
    """What the gauge says, of all queues together; `None` while it is absent."""
    page = httpx.get(f"{url}/metrics", trust_env=False, verify=PLAIN, timeout=10).text
    found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(SERIES)]
    return sum(found) if found else None


def when(holds: Callable[[], bool], what: str, log: Callable[[], str]) -> float:
    eventually(holds, within_s=90, what=what, log=log)
    return time.time()


@pytest.mark.behaviour("A12")
def test_the_busy_gauge_falls_at_once_when_a_wedged_worker_is_killed_and_counts_its_replacement(tmp_path: Path) -> None:
    script = Script(picture="first", load_s=0.3, load_mib=4, steps=16, step_s=0.5, wedge_attempts=1, wedge_after_step=2)
    slots = [Slot(worker=WORKER, gpus=("GPU-sim-0",))]
    # What is looked for is there for a grace, and for as long as the job takes: a look may come seconds late.
    with stage(tmp_path, NoEngine(because="a test"), slots, armed=True, stop_grace_s=GRACE_S) as scene:
        url, log = scene.chain.remediator_url, lambda: scene.chain.log_tail("execute")
        scene.start_workers()
        eventually(lambda: busy(url) == 0, "an idle worker is not busy", log=log)
        job_id = scene.submit(script, now=time.time(), stall_timeout_s=3)
        when(lambda: busy(url) == 1, "it is busy", log)

        fell_at = when(lambda: busy(url) == 0, "the gauge fell", log)
        (row,) = scene.store.admin.workers(now=scene.store.now())
        again = scene.store.job(job_id)

        def fenced() -> float | None:  # the queue is told first, and then the ledger
            return next((each.at for each in scene.journal(WORKER) if (each.act, each.step) == ("did", "fence")), None)

        fenced_at = eventually(fenced, "the fence is in the ledger", log=log)

        assert abs(fell_at - fenced_at) < FRESH_S / 3, "not by its row growing old"
        assert again.state in (State.FENCING, State.QUEUED, State.RUNNING), "the job is not over"
        assert row.worker == WORKER
        when(lambda: busy(url) == 1, "the replacement is busy", log)
        when(lambda: scene.store.job(job_id).state is State.COMPLETED, "the job was mended", log)
        assert scene.store.job(job_id).attempt == 2
        when(lambda: busy(url) == 0, "the replacement is idle", log)
