"""GPU memory of each container by host pids (C8): the whole exporter and real containers.

The containers, the worker and the process outside of them are real. A fake NVML library reports what each host pid
holds.
"""

import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import docker
import pytest
from docker.models.containers import Container
from prometheus_client.parser import text_string_to_metric_families

from exporter.evidence.vram_budgets import BUDGET_LABEL, MANAGED_LABEL, PROTECTED_LABEL
from gpuwarden import cgroup
from testbed.docker_engine import Engine
from testbed.worker_image import worker_image
from tests.exporter.conftest import StartWorker
from tests.exporter.sources.gpu.test_nvml_program import Scrape, running
from tests.nvml.driver import Card, Driver
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_compiler, pytest.mark.needs_docker, pytest.mark.slow]

GIB: Final = 2**30
RETURNING: Final = "gpu_memory_reclaiming_bytes"
SLEEPS: Final = 3
"""Processes in each container: a shell and two sleeps."""

TENANTS: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]] = {
    "budget": ({BUDGET_LABEL: "1024", MANAGED_LABEL: "true"}, {"NVIDIA_VISIBLE_DEVICES": "0"}),
    "protected": ({BUDGET_LABEL: "2048", PROTECTED_LABEL: "true"}, {"NVIDIA_VISIBLE_DEVICES": "all"}),
    "without-budget": ({MANAGED_LABEL: "true"}, {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}),
    "not-ours": ({}, {}),
}
"""Labels and environment of each kind of container, by its name; the last has no GPU."""


@contextmanager
def tenants(client: docker.DockerClient) -> Iterator[Mapping[str, tuple[str, list[int]]]]:
    """A container of each kind: its full id, and the host pids of its processes, the first process first."""
    image = worker_image(client, extra={})
    with ExitStack() as stack:
        found: dict[str, tuple[str, list[int]]] = {}
        for name, (labels, environment) in TENANTS.items():
            started = client.containers.run(
                image,
                ["sh", "-c", "sleep 600 & sleep 600 & wait"],
                name=f"gpuwarden-c8-{name}",
                detach=True,
                network_mode="none",
                labels=dict(labels),
                environment=dict(environment),
            )
            stack.callback(started.remove, force=True)

            def pids(started: Container = started) -> list[int] | None:
                started.reload()
                first = started.attrs["State"]["Pid"]
                group = cgroup.directory(first, started.attrs["Id"])
                all_of_it = cgroup.processes(group) if group else frozenset()
                return [first, *sorted(all_of_it - {first})] if len(all_of_it) == SLEEPS else None

            found[name] = str(started.id), eventually(pids, f"{name} has its processes")
        yield found


@pytest.fixture
def outside_process() -> Iterator[int]:
    """The pid of a process in no container."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def held(found: Scrape, series: str = "container_gpu_memory_bytes") -> dict[tuple[str, ...], int]:
    """The known values of a series, bytes, by the values of its labels."""
    return {
        tuple(sample.labels[name] for name in sorted(sample.labels)): int(sample.value)
        for family in text_string_to_metric_families(found.text)
        for sample in family.samples
        if sample.name == f"gpuwarden_{series}" and not math.isnan(sample.value)
    }


def of_gpu(found: Scrape, series: str, gpu: str) -> int:
    return held(found, f"gpu_{series}")[gpu,]


def test_memory_of_an_ended_process_returns_when_the_driver_frees_it(house: Path, driver: Driver) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        card = Card(used_bytes=10 * GIB + 7, compute={process.pid: 8 * GIB, os.getpid(): 2 * GIB})
        driver.answer(card)
        given = ("--docker", "none", "--nvml", "on", "--vram-return-s", 10)
        with running(house, *given, env=driver.environment) as exporter:
            first = held(exporter.until(lambda at: ("GPU-0",) in held(at, "gpu_memory_used_bytes")), RETURNING)
            before = exporter.until(lambda at: ("GPU-0",) in held(at, RETURNING))
            process.kill()
            process.wait()
            driver.answer(replace(card, compute={os.getpid(): 2 * GIB}))
            ended = exporter.until(lambda at: of_gpu(at, "unlisted_memory_bytes", "GPU-0") == 8 * GIB + 7)
            driver.answer(replace(card, used_bytes=3 * GIB, compute={os.getpid(): 2 * GIB}))
            partly = exporter.until(lambda at: of_gpu(at, "memory_used_bytes", "GPU-0") == 3 * GIB)
    finally:
        process.kill()
        process.wait()

    assert first == {}
    assert held(before, RETURNING) == {("GPU-0",): 0}
    assert held(ended, RETURNING) == {("GPU-0",): 8 * GIB}
    assert held(partly, RETURNING) == {("GPU-0",): GIB - 7}


@pytest.mark.behaviour("C8")
def test_memory_of_each_kind_of_container_adds_up_to_the_byte(
    house: Path,
    driver: Driver,
    engine: Engine,
    client: docker.DockerClient,
    start_worker: StartWorker,
    outside_process: int,
) -> None:
    worker = start_worker("w0").pid
    with (
        tenants(client) as there,
        running(house, "--docker", engine.base_url, "--nvml", "on", env=driver.environment) as exporter,
        running(house, "--docker", "none", "--nvml", "on", env=driver.environment) as without_engine,
    ):
        pids = {name: own for name, (_, own) in there.items()}
        first = Card(
            used_bytes=15 * GIB + 7,
            compute={
                pids["budget"][0]: GIB + 1,
                pids["protected"][1]: 2 * GIB + 3,
                pids["protected"][2]: 5,
                pids["not-ours"][2]: 3 * GIB + 11,
                worker: 13,
                outside_process: GIB + 17,
                1: 19,  # pid 1 of the host: each container has its own pid 1
            },
            # Memory of a process on two lists counts once.
            graphics={pids["protected"][1]: 2 * GIB + 3, pids["not-ours"][0]: 23},
        )
        second = Card(uuid="GPU-1", used_bytes=4 * GIB, compute={pids["without-budget"][0]: 4 * GIB - 29})
        driver.answer(first, second)
        found = exporter.until(lambda at: len(held(at)) == 7 and of_gpu(at, "memory_used_bytes", "GPU-1") == 4 * GIB)
        ids = {name: full_id[:12] for name, (full_id, _) in there.items()}
        by_cgroup = without_engine.until(
            lambda at: {(ids[name], "GPU-0") for name in ("budget", "not-ours")} <= held(at).keys()
        )

    assert held(found) == {
        ("gpuwarden-c8-budget", "GPU-0"): GIB + 1,
        ("gpuwarden-c8-protected", "GPU-0"): 2 * GIB + 8,
        ("gpuwarden-c8-protected", "GPU-1"): 0,
        ("gpuwarden-c8-not-ours", "GPU-0"): 3 * GIB + 34,
        ("gpuwarden-c8-without-budget", "GPU-1"): 4 * GIB - 29,
        ("w0", "GPU-0"): 13,
        ("w0", "GPU-1"): 0,
    }
    assert of_gpu(found, "uncontained_memory_bytes", "GPU-0") == GIB + 36
    assert of_gpu(found, "uncontained_memory_bytes", "GPU-1") == 0
    assert of_gpu(found, "unlisted_memory_bytes", "GPU-1") == 29
    assert held(found, "container_gpu_memory_budget_bytes") == {
        ("gpuwarden-c8-budget",): GIB, ("gpuwarden-c8-protected",): 2 * GIB,
    }  # fmt: skip
    assert held(found, "container_gpu_memory_over_budget_bytes") == {
        ("gpuwarden-c8-budget", "GPU-0"): 1, ("gpuwarden-c8-protected", "GPU-0"): 8,
    }  # fmt: skip
    for page in (found, by_cgroup):
        for gpu in ("GPU-0", "GPU-1"):
            containers = sum(size for (_, on), size in held(page).items() if on == gpu)
            rest = of_gpu(page, "uncontained_memory_bytes", gpu) + of_gpu(page, "unlisted_memory_bytes", gpu)
            assert containers + rest == of_gpu(page, "memory_used_bytes", gpu)
    assert held(by_cgroup)[ids["not-ours"], "GPU-0"] == 3 * GIB + 34


def test_container_without_a_gpu_is_idle_only_while_its_use_is_known(
    house: Path, driver: Driver, engine: Engine, client: docker.DockerClient, outside_process: int
) -> None:
    def last_busy_age_s(at: Scrape) -> float | None:
        return at("container_gpu_last_busy_age_seconds", container="gpuwarden-c8-not-ours")

    with (
        tenants(client),
        running(house, "--docker", engine.base_url, "--nvml", "on", env=driver.environment) as exporter,
    ):
        driver.answer(Card(used_bytes=GIB, compute={outside_process: GIB}))
        exporter.until(lambda at: (last_busy_age_s(at) or 0.0) > 1.0)
        driver.answer(Card(used_bytes=GIB), but=("error 0 nvmlDeviceGetComputeRunningProcesses 999",))
        at_s: list[float] = []
        unknown = exporter.until(
            lambda at: last_busy_age_s(at) is None, meanwhile=lambda: at_s.append(time.monotonic())
        )
        driver.answer(Card(used_bytes=GIB, compute={outside_process: GIB}))
        restarted = exporter.until(lambda at: last_busy_age_s(at) is not None)
        known_for_s = time.monotonic() - at_s[-1]

    assert unknown("container_memory_bytes", container="gpuwarden-c8-not-ours") is not None
    assert (last_busy_age_s(restarted) or 0.0) < known_for_s + 0.5  # one sample
