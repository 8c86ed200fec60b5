"""Stalls two workers in services of systemd, one of them managed, and prints the results as JSON.

    python -m tests.e2e.engines.systemd_workers WORK

test_systemd runs this in the namespaces of a private systemd.
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

STALLED = "gpuwarden-systemd-stalled"
UNMANAGED = "gpuwarden-systemd-unmanaged"
STALLS = Script(picture="first", load_s=0.3, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)


def main(work: Path) -> None:
    slots = [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in (STALLED, UNMANAGED)]
    queues = {worker: worker for worker in (STALLED, UNMANAGED)}
    with stage(work, Services(), slots, armed=True, stop_grace_s=1.0, queues=queues, unmanaged=(UNMANAGED,)) as scene:
        fleet, host = scene.fleet, scene.chain.plan.host
        assert isinstance(fleet, SystemdFleet)
        jobs = {
            worker: scene.submit(STALLS, now=time.time(), stall_timeout_s=3, queue=worker)
            for worker in (STALLED, UNMANAGED)
        }
        first = scene.start_workers()
        eventually(lambda: scene.armed(STALLED) and scene.armed(UNMANAGED), "both jobs run", within_s=60)
        evidence = {worker: scene.witness.worker_evidence(worker, host=host) for worker in (STALLED, UNMANAGED)}
        eventually(
            lambda: (
                scene.store.job(jobs[STALLED]).state is State.COMPLETED
                and [
                    episode.outcome
                    for episode in with_action(scene.ledger.reports.newest())
                    if episode.worker == STALLED
                ]
                == ["fixed"]
            ),
            within_s=90,
            what="the job is fixed",
            log=lambda: scene.chain.log_tail("execute"),
        )
        results = {
            worker: {
                "kind": evidence[worker].container_kind,
                "container": evidence[worker].container_id,
                "same_incarnation_seen": evidence[worker].container_incarnation == first[worker],
                "ram_bytes": evidence[worker].ram_bytes,
                "restarted": fleet.incarnation(worker) != first[worker],
                "lives": fleet.lives(worker),
                "attempt": scene.store.job(jobs[worker]).attempt,
                "step_beat_age_s": scene.witness.worker_evidence(worker, host=host).step_beat_age_s,
            }
            for worker in (STALLED, UNMANAGED)
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
