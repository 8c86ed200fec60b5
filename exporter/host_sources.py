"""Read every source of the host for one sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter.model.gpu import GpuReadings
from exporter.model.worker import TaskReadings, WorkerReadings
from exporter.source_runner import SourceRunner
from exporter.sources import workers
from exporter.sources.containers.directory import Listings
from exporter.sources.containers.poller import Listing
from exporter.sources.containers.systemd import Units
from exporter.sources.tasks import Tasks


class Engine(Protocol):
    """Lists the running containers of one kind."""

    def latest(self) -> Listing:
        """The newest listing; raises OSError without one."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers of all sources; `None` if one failed or does not exist."""

    workers: WorkerReadings | None
    gpus: Mapping[str, GpuReadings | None]
    tasks: TaskReadings | None
    listings: Listings


class HostSources:
    """The sources of one host.

    Args:
        runner: runs each source.
        directory: `$GPUWARDEN_RUNTIME_DIR`.
        units: finds the services of workers.
        gpus: reads GPUs, by source.
        engines: list containers, by kind.
        tasks: reads the tasks of other runners, if configured.
    """

    def __init__(
        self,
        runner: SourceRunner,
        *,
        directory: Path,
        units: Units,
        gpus: Mapping[str, Callable[[], GpuReadings]],
        engines: Mapping[str, Engine],
        tasks: Tasks | None,
    ) -> None:
        self._runner = runner
        self._directory = directory
        self._units = units
        self._gpus = gpus
        self._engines = engines
        self._tasks = tasks

    def read(self) -> Answers:
        """Read each source once."""
        ask = self._runner.read
        self._runner.begin()
        found = ask("workers", lambda: workers.read(self._directory))
        if found is not None:
            found = self._units.place(found)
        self._runner.ask_drivers()
        return Answers(
            workers=found,
            gpus={source: ask(source, read) for source, read in self._gpus.items()},
            tasks=None if self._tasks is None else ask("tasks", self._tasks.read),
            listings={kind: ask(kind, engine.latest) for kind, engine in self._engines.items()},
        )
