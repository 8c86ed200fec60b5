"""Workers in Podman containers are detected and restarted, and their jobs requeued."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.job import State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine, NoEngine, podman_engine
from testbed.gpu_simulator import Slot
from testbed.stage import stage, with_action
from testbed.workers import DockerFleet
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_podman, pytest.mark.needs_parts, pytest.mark.slow]

STALLED = "gpuwarden-podman-stalled"
UNMANAGED = "gpuwarden-podman-unmanaged"
STALLS = Script(picture="first", load_s=0.3, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with podman_engine(tmp_path_factory.mktemp("podman")) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.reason)
        yield found


def test_stalled_podman_worker_is_restarted_and_its_job_finished(tmp_path: Path, podman: Engine) -> None:
    slots = [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in (STALLED, UNMANAGED)]
    queues = {worker: worker for worker in (STALLED, UNMANAGED)}
    with stage(tmp_path, podman, slots, armed=True, stop_grace_s=1.0, queues=queues, unmanaged=(UNMANAGED,)) as scene:
        fleet = scene.fleet
        assert isinstance(fleet, DockerFleet)
        jobs = {
            worker: scene.submit(STALLS, now=time.time(), stall_timeout_s=3, queue=worker)
            for worker in (STALLED, UNMANAGED)
        }
        first = scene.start_workers()
        eventually(lambda: scene.armed(STALLED) and scene.armed(UNMANAGED), "both jobs run", within_s=60)
        evidence = scene.witness.worker_evidence(STALLED, host=scene.chain.plan.host)

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

        facts = scene.witness.worker_evidence(UNMANAGED, host=scene.chain.plan.host)
        ram = scene.chain.query(f'last_over_time(gpuwarden_container_memory_bytes{{container="{STALLED}"}}[10m])')
        assert (evidence.container_kind, evidence.container_id) == ("podman", first[STALLED].partition("@")[0])
        assert evidence.ram_bytes is not None
        assert evidence.ram_bytes > 2**20
        assert int(ram[0]["value"][1]) > 2**20
        assert scene.store.job(jobs[STALLED]).attempt == 2
        assert fleet.history(STALLED).count("start") == 2
        assert fleet.incarnation(STALLED) != first[STALLED]
        (episode_id,) = [
            episode.episode_id for episode in with_action(scene.ledger.reports.newest()) if episode.worker == STALLED
        ]
        (capture,) = scene.ledger.captures.of_episode(episode_id)
        assert [log["source"] for log in capture.document["logs"]] == ["the container's log"]
        # Control: stalled as long, in a container that is not managed.
        assert facts.step_beat_age_s is not None
        assert facts.step_beat_age_s > 3
        assert fleet.incarnation(UNMANAGED) == first[UNMANAGED]
        assert scene.store.job(jobs[UNMANAGED]).attempt == 1
