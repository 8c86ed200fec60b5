"""Thousands of looks and scrapes while containers come and go: nothing of those that are gone is published, or kept."""

import gc
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from prometheus_client import CollectorRegistry

from bench.exporter import churn
from exporter.evidence import Thresholds
from exporter.readings import Container
from exporter.rendering import Renderer
from exporter.scrape import SnapshotCollector
from tests.exporter import builders as build
from tests.exporter.test_sampler import Docker, sampler

SCRAPES = 5_000
WARM = 500
AT_A_TIME = 4
GROWTH_MAX = 200
"""Blocks of memory that may be more after so many scrapes: one for each container that came would be 4,500."""


def tenant(number: int) -> Container:
    """A container of its own name, id and incarnation, whose processes cannot be listed."""
    full_id = f"{number:064x}"
    return build.container(id=full_id, name=churn.name(number), incarnation=f"{full_id}@{number}", pid=os.getpid())


def test_five_thousand_scrapes_with_containers_that_come_and_go_leave_nothing_behind(house: Path) -> None:
    # In a process of its own: what other tests have left in this one comes and goes by itself.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        names, grown = alone.submit(soak, house).result()

    assert names == {churn.name(number) for number in churn.alive(SCRAPES - 1, at_a_time=AT_A_TIME)}
    assert grown <= GROWTH_MAX


def soak(house: Path) -> tuple[frozenset[str], int]:
    """The containers that are published in the end, and by how many blocks the memory in use has grown."""
    docker = Docker()
    look = sampler(house, containers={"docker": docker}, gpus=lambda: build.gpus(build.gpu(0), build.gpu(1)))
    registry, renderer = CollectorRegistry(), Renderer()
    registry.register(SnapshotCollector(look.latest, host="box-1", thresholds=Thresholds()))

    def scrape(step: int) -> bytes:
        docker.listing = Docker(*(tenant(number) for number in churn.alive(step, at_a_time=AT_A_TIME))).listing
        look.sample()
        return renderer.render(registry.collect(), openmetrics=False)

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    for number in range(WARM):
        scrape(number)
    warm = blocks()
    for number in range(WARM, SCRAPES):
        page = scrape(number)
    grown = blocks() - warm

    return churn.named(page), grown
