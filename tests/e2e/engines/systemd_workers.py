"""Two wedged workers in services of the systemd beside this, one of them opted in; what became of them, as JSON.

    python -m tests.e2e.engines.systemd_workers WORK

Run by test_systemd in the namespaces of a systemd of its own.
"""

import json
import sys
import time
from pathlib import Path

from gpuwarden.job import State
from testbed.demo.job_body import Script
from testbed.gpu_simulator import Slot
from testbed.stage import stage, with_action
from testbed.workers import Services, SystemdFleet
from tests.waiting import eventually

WEDGED = "gpuwarden-systemd-wedged"
UNMANAGED = "gpuwarden-systemd-unmanaged"
WEDGE = Script(picture="first", load_s=0.3, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)


def main(work: Path) -> None:
    slots = [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in (WEDGED, UNMANAGED)]
    queues = {worker: worker for worker in (WEDGED, UNMANAGED)}
    with stage(work, Services(), slots, armed=True, stop_grace_s=1.0, queues=queues, unmanaged=(UNMANAGED,)) as scene:
        fleet, host = scene.fleet, scene.chain.plan.host
        assert isinstance(fleet, SystemdFleet)
        jobs = {
            worker: scene.submit(WEDGE, now=time.time(), stall_timeout_s=3, queue=worker)
            for worker in (WEDGED, UNMANAGED)
        }
        before = scene.start_workers()
        eventually(lambda: scene.armed(WEDGED) and scene.armed(UNMANAGED), "both jobs run", within_s=60)
        seen = {worker: scene.witness.worker_evidence(worker, host=host) for worker in (WEDGED, UNMANAGED)}
        eventually(
            lambda: (
                scene.store.job(jobs[WEDGED]).state is State.COMPLETED
                and [story.outcome for story in with_action(scene.ledger.reports.newest()) if story.worker == WEDGED]
                == ["mended"]
            ),
            within_s=90,
            what="the job was mended",
            log=lambda: scene.chain.log_tail("execute"),
        )
        told = {
            worker: {
                "kind": seen[worker].container_kind,
                "container": seen[worker].container_id,
                "same_incarnation_seen": seen[worker].container_incarnation == before[worker],
                "ram_bytes": seen[worker].ram_bytes,
                "restarted": fleet.incarnation(worker) != before[worker],
                "lives": fleet.lives(worker),
                "attempt": scene.store.job(jobs[worker]).attempt,
                "step_beat_age_s": scene.witness.worker_evidence(worker, host=host).step_beat_age_s,
            }
            for worker in (WEDGED, UNMANAGED)
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
