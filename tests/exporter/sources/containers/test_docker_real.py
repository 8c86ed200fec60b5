"""Containers of a real Docker engine."""

import re
import signal
from pathlib import Path
from typing import Any

import docker
import pytest

from exporter.model.container import ContainerEvidence
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources.containers import docker as containers
from gpuwarden import cgroup
from testbed.docker_engine import Engine
from testbed.worker_image import worker_image
from tests.exporter import builders as build
from tests.exporter.sources.containers.docker_daemon import listing_of, polling
from tests.waiting import eventually

ALLOCATES = """
import signal
def allocate(*_):
    held.append(b"x" * (64 << 20))
    print("allocated", flush=True)
held = []
signal.signal(signal.SIGUSR1, allocate)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.needs_docker
def test_real_daemon_has_events(engine: Engine, client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "CALM_S", 60.0)
    monkeypatch.setattr(containers, "FRESH_S", 60.0)
    image = worker_image(client, extra={})
    name = "gpuwarden-watched"

    def states() -> dict[str, bool]:
        found = listing_of(source)
        return {} if found is None else {each.name: each.paused for each in found.containers.values()}

    with polling(engine.base_url) as source:
        eventually(lambda: source._is_calm)
        real = client.containers.run(image, ["sleep", "60"], detach=True, network_mode="none", name=name)
        try:
            eventually(lambda: states().get(name) is False)
            real.pause()
            eventually(lambda: states().get(name))
            real.unpause()
            eventually(lambda: states().get(name) is False)
            real.rename("gpuwarden-renamed")
            eventually(lambda: "gpuwarden-renamed" in states())
            real.kill()
            eventually(lambda: "gpuwarden-renamed" not in states())
        finally:
            real.remove(force=True)


@pytest.mark.needs_docker
def test_real_restart_is_another_incarnation(engine: Engine, client: docker.DockerClient, house: Path) -> None:
    image = worker_image(client, extra={})
    command = ["python3", "-c", ALLOCATES]
    real = client.containers.run(image, command, detach=True, network_mode="none", environment={"A": "1"})
    with polling(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def seen(*, started_at: str) -> ContainerEvidence | None:
            for each in sampler.sample().containers:
                if each.container.incarnation == f"{real.id}@{started_at}" and each.ram_bytes is not None:
                    return each
            return None

        try:
            eventually(lambda: b"ready" in real.logs())
            real.reload()
            first = eventually(lambda: seen(started_at=real.attrs["State"]["StartedAt"]))
            real.kill(signal.SIGUSR1)
            eventually(lambda: b"allocated" in real.logs())
            grown = eventually(lambda: seen(started_at=real.attrs["State"]["StartedAt"]))
            real.restart(timeout=0)
            real.reload()
            second = eventually(lambda: seen(started_at=real.attrs["State"]["StartedAt"]))
        finally:
            real.remove(force=True)

    assert (first.container.kind, first.container.id, first.container.name) == ("docker", real.id, real.name)
    assert first.container.image == image
    assert re.fullmatch(rf"{real.id}@20\d\d-.*Z", first.container.incarnation)
    assert first.container.gpu_request is None
    assert grown.ram_bytes is not None
    assert first.ram_bytes is not None
    assert 60 * build.MIB < grown.ram_bytes - first.ram_bytes < 80 * build.MIB
    assert second.container.id == first.container.id
    assert second.container.incarnation != first.container.incarnation
    assert second.container.pid != first.container.pid
    assert second.ram_idle_s == 0.0


def in_a_slot(client: docker.DockerClient, house: Path, script: str) -> Any:
    """A container that runs this script, with our package and the folder `slot` mounted."""
    (house / "slot").mkdir()
    return client.containers.run(
        worker_image(client, extra={"/app/gpuwarden": Path(cgroup.__file__).parent}),
        ["python3", "-c", script],
        detach=True,
        network_mode="none",
        volumes={str(house / "slot"): {"bind": "/run/gpuwarden/slot", "mode": "rw"}},
    )


@pytest.mark.needs_docker
def test_kernel_links_a_worker_to_its_container(engine: Engine, client: docker.DockerClient, house: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from gpuwarden.reporter import Reporter\n"
        "Reporter(Path('/run/gpuwarden'), worker='w0', queue='gpu', subdirectory='slot').open()\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    real = in_a_slot(client, house, script)
    with polling(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def place() -> ContainerEvidence | None:
            snapshot = sampler.sample()
            assert snapshot.workers is not None
            return next(filter(None, map(snapshot.container_of, snapshot.workers.workers)), None)

        try:
            eventually(lambda: b"ready" in real.logs())
            found = eventually(place)
            real.kill(signal.SIGKILL)
            eventually(
                lambda: [each.alive for each in (sampler.sample().workers or build.NO_WORKERS).workers] == [False]
            )
        finally:
            real.remove(force=True)

    assert found.container.id == real.id


@pytest.mark.needs_docker
def test_paused_real_container_has_no_durations(engine: Engine, client: docker.DockerClient, house: Path) -> None:
    real = client.containers.run(worker_image(client, extra={}), ["sleep", "600"], detach=True, network_mode="none")
    with polling(engine.base_url) as source:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": source}, gpus=None, thresholds=Thresholds()
        )

        def still_s(*, paused: bool) -> float | None:
            found = [each for each in sampler.sample().containers if each.container.id == real.id]
            assert all(each.ram_idle_s is None for each in found if each.container.paused)
            return next((each.ram_idle_s or 0.0 for each in found if each.container.paused is paused), None)

        try:
            eventually(lambda: (still_s(paused=False) or 0.0) > 0.5)
            real.pause()
            eventually(lambda: still_s(paused=True) is not None)
            real.unpause()
            first_s = eventually(lambda: None if (found := still_s(paused=False)) is None else (found,))
        finally:
            real.remove(force=True)

    assert first_s == (0.0,)
