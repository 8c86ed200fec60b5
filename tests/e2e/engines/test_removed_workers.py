"""Workers in containers with `--rm`: the engine removes them when they stop, and only their owner starts others."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import docker
import pytest
from docker.errors import DockerException, NotFound
from docker.models.containers import Container

from gpuwarden.job import State
from remediator.ledger.reports import EpisodeHistory
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from testbed.workers import DockerFleet
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S: Final = 5.0
TIMEOUT_S: Final = 30.0
"""Also how long an owner has to start the next container."""

ALONE: Final = "gpuwarden-removed-alone"
OWNED: Final = "gpuwarden-removed-owned"


class Owner:
    """Runs a worker as `docker run --rm` in a service does: it starts the next container when one has ended."""

    def __init__(self, client: docker.DockerClient, fleet: DockerFleet, worker: str, *, again: bool) -> None:
        self._client = client
        self._fleet = fleet
        self._worker = worker
        self._attrs = fleet.container(worker).attrs
        fleet.container(worker).remove()
        self._replace().start()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if again:
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _replace(self) -> Container:
        config = self._attrs["Config"]
        made: Container = self._client.containers.create(
            config["Image"],
            config["Cmd"],
            name=self._worker,
            labels=config["Labels"],
            environment=config["Env"],
            user=config["User"],
            network_mode="none",
            volumes=self._attrs["HostConfig"]["Binds"],
            auto_remove=True,
        )
        self._fleet._containers[self._worker] = made
        return made

    def _run(self) -> None:
        while not self._closing.wait(0.5):
            try:
                self._client.containers.get(self._worker)
            except NotFound:
                self._replace().start()
            except DockerException:
                continue


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Stage]:
    """Each worker hangs once. Nothing starts the first again; the second has an owner."""
    slots = [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in (ALONE, OWNED)]
    queues = {worker: worker for worker in (ALONE, OWNED)}
    with ExitStack() as stack:
        set_up = stack.enter_context(
            stage(
                work,
                engine,
                slots,
                armed=True,
                queues=queues,
                stop_grace_s=1.0,
                settle_timeout_s=TIMEOUT_S,
                restart_timeout_s=TIMEOUT_S,
            )
        )
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine.base_url)))
        assert isinstance(set_up.fleet, DockerFleet)
        for worker in (ALONE, OWNED):
            script = Script(
                picture=worker, load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2
            )
            set_up.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=worker)
            stack.callback(Owner(client, set_up.fleet, worker, again=worker == OWNED).close)
        yield set_up


def test_worker_that_its_owner_starts_again_is_fixed(scene: Stage) -> None:
    eventually(
        lambda: scene.store.job(2).state is State.COMPLETED and episodes(scene, OWNED)[-1].outcome,
        "the next container completes the job",
        within_s=90,
        log=lambda: scene.chain.log_tail("execute"),
    )

    (episode,) = episodes(scene, OWNED)
    assert (episode.outcome, episode.message) == ("fixed", "it was restarted, and its job is settled")
    assert given_up(scene, OWNED) == []


def test_worker_that_stays_down_is_not_called_fixed_and_raises_an_alert(scene: Stage) -> None:
    eventually(
        lambda: given_up(scene, ALONE), "the alert fires", within_s=120, log=lambda: scene.chain.log_tail("execute")
    )

    (episode,) = episodes(scene, ALONE)
    (held,) = scene.ledger.reports.list_held()
    assert (episode.outcome, held.worker, held.reason) == (None, ALONE, "given_up")
    assert held.message == f"{ALONE} is gone, and its restart was given up"
    assert scene.store.job(1).state is State.QUEUED


def episodes(scene: Stage, worker: str) -> list[EpisodeHistory]:
    return with_action([each for each in scene.ledger.reports.newest() if each.worker == worker])


def given_up(scene: Stage, worker: str) -> list[dict[str, Any]]:
    return scene.chain.query(f'ALERTS{{alertname="GpuwardenRestartGivenUp", worker="{worker}", alertstate="firing"}}')
