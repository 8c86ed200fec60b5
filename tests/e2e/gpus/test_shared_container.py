"""Two workers in one container, through the whole chain: what would mend one that wedges would end the other.

While that one goes on people are told and nobody is accused; once it is done the one that wedged is, and is left to
a person.
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
WEDGES: Final = "gpuwarden-shared-wedges"
GOES_ON: Final = "gpuwarden-shared-goes-on"
TOLD: Final = f'ALERTS{{alertname="GpuwardenSharedJobStalled", alertstate="firing", worker="{WEDGES}"}}'
QUEUES: Final = {WEDGES: "wedges", GOES_ON: "goes-on"}
SCRIPTS: Final = {
    WEDGES: Script(picture="wedges", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2),
    GOES_ON: Script(picture="goes-on", load_s=0.5, load_mib=8, steps=80, step_s=0.5),
}


@contextmanager
def both(scene: Stage, engine: Engine) -> Iterator[Container]:
    """A container for the two workers, who are children of a shell, in place of the stage's own, which never start."""
    assert isinstance(scene.fleet, DockerFleet)
    apart = [scene.fleet.container(worker).attrs for worker in QUEUES]
    programs = [shlex.join(each["Config"]["Cmd"]) for each in apart]
    binds = {bind for each in apart for bind in each["HostConfig"]["Binds"]}
    with closing(docker.DockerClient(base_url=engine.base_url)) as client:
        its = apart[0]["Config"]
        own = [each for each in its["Env"] if not each.startswith("NVIDIA_VISIBLE_DEVICES=")]
        container = client.containers.create(
            its["Image"],
            ["/bin/sh", "-c", " & ".join([*programs, "wait"])],
            labels=its["Labels"],
            environment=[*own, f"NVIDIA_VISIBLE_DEVICES={','.join(_gpu(worker) for worker in QUEUES)}"],
            network_mode="none",
            user=its["User"],
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


def test_a_worker_that_shares_a_container_is_not_stopped_for_the_other(work: Path, engine: Engine) -> None:
    slots = [Slot(worker=worker, gpus=(_gpu(worker),)) for worker in QUEUES]
    with stage(work, engine, slots, armed=True, stop_grace_s=1.0, queues=dict(QUEUES)) as scene:
        jobs: dict[str, JobId] = {
            worker: scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=QUEUES[worker])
            for worker, script in SCRIPTS.items()
        }

        def silent_s(worker: str) -> float:
            return (
                answered(lambda: scene.witness.worker_evidence(worker, host=scene.chain.plan.host)).step_beat_age_s
                or 0.0
            )

        def log() -> str:
            return scene.chain.log_tail("execute")

        with both(scene, engine) as container:
            before = started_at(container)
            eventually(lambda: silent_s(WEDGES) > 3 * SILENCE_S, "one is silent for long", within_s=90, log=log)
            eventually(lambda: scene.chain.query(TOLD), "people are told of it", within_s=30, log=log)
            going_on, none_yet = scene.store.job(jobs[GOES_ON]), scene.ledger.reports.newest()
            eventually(
                lambda: [story for story in with_action(scene.ledger.reports.newest()) if story.closed_at],
                "it is accused, and that comes to its end",
                within_s=120,
                log=log,
            )
            after = started_at(container)
            name = container.name
        done, wedged = (scene.store.job(jobs[worker]) for worker in (GOES_ON, WEDGES))
        (story,) = with_action(scene.ledger.reports.newest())

    assert (going_on.state, none_yet) == (State.RUNNING, [])
    assert done.ended_at is not None
    assert (done.state, done.attempt) == (State.COMPLETED, 1)
    assert story.opened_at > done.ended_at
    assert (story.worker, story.condition, story.outcome) == (WEDGES, "stall", "refused")
    assert story.message is not None
    assert story.message.startswith(f"container {name} holds 2 live workers")
    assert (wedged.state, wedged.attempt) == (State.RUNNING, 1)
    assert after == before
