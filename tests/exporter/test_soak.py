"""Thousands of samples and scrapes with short-lived containers: ended ones are not published and leave no state."""

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
"""Blocks of memory that may be added in so many scrapes; one block per container would be 4,500.

The least growth of fifteen parts counts: a leak grows in all of them. Python's own caches grow once, by about a hundred
blocks.
"""


def short_lived(number: int) -> Container:
    """A container with its name, id and incarnation, whose processes cannot be listed."""
    full_id = f"{number:064x}"
    return build.container(id=full_id, name=churn.name(number), incarnation=f"{full_id}@{number}", pid=os.getpid())


@pytest.mark.nightly
def test_thousands_of_scrapes_with_short_lived_containers_leave_no_state(house: Path) -> None:
    # A separate process: objects of other tests would change the count.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        names, grown = alone.submit(soak, house).result()

    assert names == {churn.name(number) for number in churn.alive(SCRAPES, at_a_time=AT_A_TIME)}
    assert grown <= GROWTH_MAX


def soak(house: Path) -> tuple[frozenset[str], int]:
    """The containers published in the end, and the growth of the memory in use after the warm-up, blocks."""
    docker = Docker()
    # A separate host: the containers of this machine do not count.
    host = Host(house.parent / "host")
    host.process(os.getpid(), "system.slice/none.service")
    gpus = build.gpus(build.gpu(0), build.gpu(1))
    look = sampler(
        house, containers={"docker": docker}, gpus=lambda: gpus, places=host.places(), unlisted=host.unlisted()
    )
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(look.latest, host="box-1", thresholds=Thresholds()))

    # One second per sample as in production, so that all windows are full after the warm-up.
    real, at_s = clock.stamp, 0.0

    def stamp() -> Stamp:
        now = real()
        return replace(now, boottime_s=now.boottime_s + at_s, unix_s=now.unix_s + at_s)

    def scrape(step: int) -> bytes:
        nonlocal at_s
        at_s = float(step)
        docker.listing = Docker(*(short_lived(number) for number in churn.alive(step, at_a_time=AT_A_TIME))).listing
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
