"""Start isolated drivers and read from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from exporter.model.gpu import GpuReadings
from exporter.sources.gpu.isolated import processes
from exporter.sources.gpu.isolated.process import Driver, DriverProcess
from exporter.sources.gpu.isolated.protocol import DriverError
from exporter.sources.gpu.isolated.supervisor import IsolatedDriver

Start = Callable[..., IsolatedDriver]


@contextmanager
def starting(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(answer_s=…, wait_s=…)`: a source whose processes use that driver. They end with the test."""
    monkeypatch.setattr(processes, "RESTART_FIRST_S", 0.05)
    started: list[IsolatedDriver] = []

    def begin(*, answer_s: float = 20.0, wait_s: float = 20.0) -> IsolatedDriver:
        started.append(IsolatedDriver(driver, answer_s=answer_s, wait_s=wait_s))
        return started[-1]

    try:
        yield begin
    finally:
        for each in started:
            each.close()


def asking(source: IsolatedDriver) -> int:
    """The pid of the current process."""
    assert isinstance(source._processes.main, DriverProcess)
    return source._processes.main.process.pid


def refused(source: IsolatedDriver) -> str:
    """The reason for which the next read fails, as it must."""
    with pytest.raises(DriverError) as error:
        source.read()
    return str(error.value)


def answered(source: IsolatedDriver) -> GpuReadings | None:
    """The result of the next read; `None` if it fails."""
    try:
        return source.read()
    except DriverError:
        return None
