"""Two workers share a container, and one stalls: a restart would also end the other.

While the other one works, only a notification is sent. Once it is done an episode opens, and the restart is refused.
"""

import shlex
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import docker
import pytest
from docker.models.containers import Container

from gpuwarden.job import JobId, State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from testbed.workers import DockerFleet
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S: Final = 5.0
STALLS: Final = "gpuwarden-shared-stalls"
WORKS: Final = "gpuwarden-shared-works"
FIRING: Final = f'ALERTS{{alertname="GpuwardenSharedJobStalled", alertstate="firing", worker="{STALLS}"}}'
QUEUES: Final = {STALLS: "stalls", WORKS: "works"}
SCRIPTS: Final = {
    STALLS: Script(picture="stalls", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2),
    WORKS: Script(picture="works", load_s=0.5, load_mib=8, steps=80, step_s=0.5),
}


@contextmanager
def shared_container(scene: Stage, engine: Engine) -> Iterator[Container]:
    """Run both workers as children of a shell in one container. The containers of the stage never start."""
    assert isinstance(scene.fleet, DockerFleet)
    attributes = [scene.fleet.container(worker).attrs for worker in QUEUES]
    programs = [shlex.join(each["Config"]["Cmd"]) for each in attributes]
    binds = {bind for each in attributes for bind in each["HostConfig"]["Binds"]}
    with closing(docker.DockerClient(base_url=engine.base_url)) as client:
        config = attributes[0]["Config"]
        environment = [each for each in config["Env"] if not each.startswith("NVIDIA_VISIBLE_DEVICES=")]
        container = client.containers.create(
            config["Image"],
            ["/bin/sh", "-c", " & ".join([*programs, "wait"])],
            labels=config["Labels"],
            environment=[*environment, f"NVIDIA_VISIBLE_DEVICES={','.join(_gpu(worker) for worker in QUEUES)}"],
            network_mode="none",
            user=config["User"],
            volumes=sorted(binds),
        )
        try:
            container.start()
            yield container
        finally:
            container.remove(force=True)


def _gpu(worker: str) -> str:
    return f"GPU-sim-{worker}"


def started_at(container: Container) -> str:
    container.reload()
    found: str = container.attrs["State"]["StartedAt"]
    return found


def test_container_is_not_restarted_while_another_worker_uses_it(work: Path, engine: Engine) -> None:
    slots = [Slot(worker=worker, gpus=(_gpu(worker),)) for worker in QUEUES]
    with stage(work, engine, slots, armed=True, stop_grace_s=1.0, queues=dict(QUEUES)) as scene:
        jobs: dict[str, JobId] = {
            worker: scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=QUEUES[worker])
            for worker, script in SCRIPTS.items()
        }

        def step_beat_age_s_of(worker: str) -> float:
            return (
                answered(lambda: scene.witness.worker_evidence(worker, host=scene.chain.plan.host)).step_beat_age_s
                or 0.0
            )

        def log() -> str:
            return scene.chain.log_tail("execute")

        with shared_container(scene, engine) as container:
            before = started_at(container)
            eventually(lambda: step_beat_age_s_of(STALLS) > 3 * SILENCE_S, "one job is stalled", within_s=90, log=log)
            eventually(lambda: scene.chain.query(FIRING), "the notification fires", within_s=30, log=log)
            other_job, no_episodes = scene.store.job(jobs[WORKS]), scene.ledger.reports.newest()
            eventually(
                lambda: [episode for episode in with_action(scene.ledger.reports.newest()) if episode.closed_at],
                "an episode opens and closes",
                within_s=120,
                log=log,
            )
            after = started_at(container)
            name = container.name
        done, stalled = (scene.store.job(jobs[worker]) for worker in (WORKS, STALLS))
        (episode,) = with_action(scene.ledger.reports.newest())

    assert (other_job.state, no_episodes) == (State.RUNNING, [])
    assert done.ended_at is not None
    assert (done.state, done.attempt) == (State.COMPLETED, 1)
    assert episode.opened_at > done.ended_at
    assert (episode.worker, episode.condition, episode.outcome) == (STALLS, "stall", "refused")
    assert episode.message is not None
    assert episode.message.startswith(f"container {name} holds 2 live workers")
    assert (stalled.state, stalled.attempt) == (State.RUNNING, 1)
    assert after == before
