"""Thousands of looks and scrapes while containers come and go: nothing of those that are gone is published, or kept."""

import gc
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bench.exporter import churn
from exporter.collectors.registry import SnapshotCollector
from exporter.http.exposition import render
from exporter.model.container import Container
from exporter.model.thresholds import Thresholds
from gpuwarden import clock
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter.sources.containers.test_cgroups import Host
from tests.exporter.test_sampler import Docker, sampler

SCRAPES = 7_500
WARM = 3_000
PARTS = 15
AT_A_TIME = 4
GROWTH_MAX = 50
"""Blocks of memory that may be more after so many scrapes: one for each container that came would be 4,500.

By the least of fifteen parts: what is kept of each container is more in all of them, while what Python comes to need
once, and keeps, is a step of a hundred or so in two or three.
"""


def tenant(number: int) -> Container:
    """A container of its own name, id and incarnation, whose processes cannot be listed."""
    full_id = f"{number:064x}"
    return build.container(id=full_id, name=churn.name(number), incarnation=f"{full_id}@{number}", pid=os.getpid())


@pytest.mark.nightly
def test_thousands_of_scrapes_with_containers_that_come_and_go_leave_nothing_behind(house: Path) -> None:
    # In a process of its own: what other tests have left in this one comes and goes by itself.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        names, grown = alone.submit(soak, house).result()

    assert names == {churn.name(number) for number in churn.alive(SCRAPES, at_a_time=AT_A_TIME)}
    assert grown <= GROWTH_MAX


def soak(house: Path) -> tuple[frozenset[str], int]:
    """The containers that are published in the end, and by how many blocks the memory in use grows from warm on."""
    docker = Docker()
    # On a host of its own: what comes and goes on this machine is no part of it.
    host = Host(house.parent / "host")
    host.process(os.getpid(), "system.slice/none.service")
    gpus = build.gpus(build.gpu(0), build.gpu(1))
    look = sampler(
        house, containers={"docker": docker}, gpus=lambda: gpus, places=host.places(), unlisted=host.unlisted()
    )
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(look.latest, host="box-1", thresholds=Thresholds()))

    # A second apart, as in earnest: what is kept of the last seconds is full once it is warm, however fast this runs.
    real, at_s = clock.stamp, 0.0

    def stamp() -> Stamp:
        now = real()
        return replace(now, boottime_s=now.boottime_s + at_s, unix_s=now.unix_s + at_s)

    def scrape(step: int) -> bytes:
        nonlocal at_s
        at_s = float(step)
        docker.listing = Docker(*(tenant(number) for number in churn.alive(step, at_a_time=AT_A_TIME))).listing
        look.sample()
        return render(registry.collect())

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    def after(steps: range) -> int:
        for step in steps:
            scrape(step)
        return blocks()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "stamp", stamp)
        part = (SCRAPES - WARM) // PARTS
        used = [after(range(WARM)), *(after(range(at, at + part)) for at in range(WARM, SCRAPES, part))]
        page = scrape(SCRAPES)
        grown = PARTS * min(after - before for before, after in pairwise(used))

    return churn.named(page), grown
