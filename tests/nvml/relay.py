"""Serve the simulated driver's file through the fake NVIDIA library, so that an exporter reads NVML."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.standalone.stack import Chain
from tests.nvml.driver import Card, Driver, Sample

GPU_IS_LOST: Final = 15


class Relay:
    """Copies the simulated GPUs to the fake driver; GPUs in `lost` are lost.

    `kept` is the memory of an ended process which stays in use: UUID and bytes by pid.
    """

    def __init__(self, simulation: Path, driver: Driver) -> None:
        self.lost: frozenset[str] = frozenset()
        self.kept: Mapping[int, tuple[str, int]] = {}
        self._simulation = simulation
        self._driver = driver

    def stands_in(self, chain: Chain) -> None:
        """Restart the chain's exporter with the fake NVIDIA driver."""
        chain.stop("exporter")
        chain.plan = replace(chain.plan, simulate_gpu=None)
        with pytest.MonkeyPatch.context() as of_exporter:
            for name, value in self._driver.environment.items():
                of_exporter.setenv(name, value)
            chain.start_exporter()

    def hand_on(self) -> None:
        gpus: list[dict[str, Any]] = json.loads(self._simulation.read_text(encoding="ascii"))["gpus"]
        lost = [f"error {gpu['index']} * {GPU_IS_LOST}" for gpu in gpus if gpu["uuid"] in self.lost]
        kept = self.kept
        self._driver.answer(*(_card(gpu, kept) for gpu in gpus), but=tuple(lost))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Copy each change until the end."""
        closing = threading.Event()

        def go_on() -> None:
            while not closing.wait(0.1):
                with suppress(OSError, ValueError):
                    self.hand_on()

        thread = threading.Thread(target=go_on, name="relay", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join(timeout=5)


def _card(gpu: dict[str, Any], kept: Mapping[int, tuple[str, int]]) -> Card:
    processes = gpu["processes"]
    busy = {each["pid"]: round(100 * each["utilization_ratio"]) for each in processes}
    return Card(
        uuid=gpu["uuid"],
        utilization=max(busy.values(), default=0),
        used_bytes=sum(each["memory_bytes"] for each in processes)
        + sum(size for pid, (uuid, size) in kept.items() if uuid == gpu["uuid"] and pid not in busy),
        compute={each["pid"]: each["memory_bytes"] for each in processes},
        samples=tuple(
            Sample(pid=pid, timestamp_us=time.time_ns() // 1000, sm=percent) for pid, percent in busy.items()
        ),
    )
