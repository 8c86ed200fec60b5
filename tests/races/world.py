"""Simulated hosts: slots, each a container with one worker process, their GPUs, and the samples of the exporters.

The programs under test change this state only by `stop` and `start` of an engine. Each start of a container and each
process is a new incarnation. A killed worker leaves its files, and a worker that exits removes them. An unkillable
process stays on its GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from gpuwarden.evidence import WorkerFacts
from remediator.actuators import ActuatorError
from remediator.clients.exporter import WorkerUnseenError
from remediator.clients.exporter_access import ExporterError
from remediator.plan import ContainerState
from tests.races.clocks import Clocks
from tests.remediator import builders as build

STALL_S: Final = 120.0
DEAD_AFTER_S: Final = 30.0


class Does(StrEnum):
    """The activity of a worker process."""

    BEGINS = "begins"  # not registered yet
    IDLES = "idles"
    WORKS = "works"
    BUSY = "busy"  # healthy in a long step: the GPU works, without a step beat
    STALLED = "stalled"  # without a step beat, GPU idle; other threads run
    FROZEN = "frozen"  # suspended by a signal, later resumed
    ENDED = "ended"


SILENT: Final = frozenset({Does.STALLED, Does.FROZEN})


@dataclass(eq=False, kw_only=True)
class Process:
    """One incarnation of a worker."""

    slot: "Slot"
    number: int
    does: Does = Does.BEGINS
    since_s: float = 0.0
    container: str
    """The container's incarnation."""

    job: tuple[int, int] | None = None
    next_renewal_s: float = 0.0
    before: Does = Does.BEGINS  # the last change
    files: bool = True

    @property
    def incarnation(self) -> str:
        return f"i{self.number}"

    @property
    def pid(self) -> int:
        return 4000 + self.number

    @property
    def lives(self) -> bool:
        return self.does is not Does.ENDED

    def turns(self, does: Does, now_s: float) -> None:
        if does is not self.does:
            self.before, self.does, self.since_s = self.does, does, now_s

    def __repr__(self) -> str:
        return f"{self.slot}/{self.incarnation} ({self.does}, job {self.job})"


@dataclass(eq=False, kw_only=True)
class Slot:
    """A configured worker: its container, and the process in it."""

    host: str
    worker: str
    gpus: tuple[str, ...]
    restarts: bool
    """Whether the engine restarts the container after the process exits."""

    starts: int = 0
    running: bool = False
    unkillable: bool = False
    process: Process | None = None
    strays: list[Process] = field(default_factory=list)
    """Live processes of earlier incarnations, outside of the container."""

    @property
    def handle(self) -> str:
        return f"{self.host}-{self.worker}".ljust(64, "0")

    @property
    def incarnation(self) -> str:
        return f"{self.handle}@{self.starts}"

    @property
    def processes(self) -> Iterator[Process]:
        for each in (self.process, *self.strays):
            if each is not None and each.lives:
                yield each

    def __repr__(self) -> str:
        return f"{self.host}/{self.worker}"


class Exporter(StrEnum):
    """How the exporter of a host answers."""

    FRESH = "fresh"
    SILENT = "silent"
    STALE = "stale"
    UNKNOWN = "unknown"


class World:
    """The containers and workers of all hosts."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.slots = [
            Slot(host="box1", worker="w1", gpus=("GPU-10",), restarts=False),
            Slot(host="box1", worker="w2", gpus=("GPU-10", "GPU-11"), restarts=True),
            Slot(host="box2", worker="w3", gpus=("GPU-20",), restarts=True),
            Slot(host="box2", worker="w4", gpus=("GPU-21",), restarts=False),
        ]
        self.hosts = ("box1", "box2")
        self.exporters = dict.fromkeys(self.hosts, Exporter.FRESH)
        self.engines_down: set[str] = set()
        self._samples: dict[str, tuple[float, dict[str, WorkerFacts | None]]] = {}
        self._processes_started = 0
        for slot in self.slots:
            self.start(slot)

    def slot(self, host: str, worker: str) -> Slot:
        return next(each for each in self.slots if (each.host, each.worker) == (host, worker))

    def is_stalled(self, process: Process) -> bool:
        """Whether a rule may report the process."""
        if process.job is None or process.does not in SILENT:
            return False
        timeout_s = DEAD_AFTER_S if process.does is Does.FROZEN else STALL_S
        return self.clocks.steady_s - process.since_s >= timeout_s

    # --- events

    def start(self, slot: Slot) -> None:
        """Start a stopped container, with a worker that has not registered yet."""
        if slot.running:
            return
        self._processes_started += 1
        slot.starts, slot.running, slot.unkillable = slot.starts + 1, True, False
        slot.process = Process(
            slot=slot, number=self._processes_started, since_s=self.clocks.steady_s, container=slot.incarnation
        )

    def end(self, process: Process, *, cleanly: bool) -> None:
        """End a process, and the container with it."""
        process.turns(Does.ENDED, self.clocks.steady_s)
        process.files = not cleanly
        if process in process.slot.strays:
            process.slot.strays.remove(process)
        if process is process.slot.process:
            process.slot.running = False

    def stray(self, slot: Slot) -> None:
        """Restart a container while its old process keeps running outside."""
        if slot.process is not None and slot.process.lives:
            slot.strays.append(slot.process)
        slot.running = False
        self.start(slot)

    # --- the exporter

    def answer(self, host: str, mode: Exporter) -> None:
        """Set the answers of an exporter. A stale one keeps its last sample."""
        self.exporters[host] = mode
        self._samples[host] = (
            self.clocks.steady_s,
            {each.worker: self._read_worker(each) for each in self.slots if each.host == host},
        )

    def read_evidence(self, worker: str, *, host: str) -> WorkerFacts:
        """Return the evidence about a worker."""
        mode, slot = self.exporters[host], self.slot(host, worker)
        if mode is Exporter.SILENT:
            raise ExporterError("played: the exporter does not answer")
        if mode is Exporter.STALE:
            taken_s, sample = self._samples[host]
            if (found := sample[worker]) is None:
                raise ExporterError("played: the exporter has no fresh sample")
            return replace(found, sample_age_s=self.clocks.steady_s - taken_s + 6.0)
        facts = self._read_worker(slot)
        if facts is None:
            raise WorkerUnseenError(f"played: no worker {worker!r}")
        if mode is Exporter.UNKNOWN:
            return replace(facts, gpu_idle_s=None, gpu_unknown="played", gpu_pids=None, cpu_idle_s=None)
        return facts

    def count_workers(self, host: str) -> int:
        """Count the workers that the exporter reports, with dead ones. A stale sample has as many."""
        if self.exporters[host] is Exporter.SILENT:
            raise ExporterError("played: the exporter does not answer")
        return sum(self._read_worker(each) is not None for each in self.slots if each.host == host)

    def _read_worker(self, slot: Slot) -> WorkerFacts | None:
        process, now_s = slot.process, self.clocks.steady_s
        if process is None or (not process.lives and not process.files):
            return None
        inactive_s = now_s - process.since_s
        silent, job = process.does in SILENT, process.job
        frozen = process.does is Does.FROZEN or not process.lives
        known: dict[str, Any] = dict.fromkeys(
            ("container_kind", "container", "container_id", "container_incarnation", "container_workers")
        )
        if process.lives:
            known = {"container": slot.worker, "container_id": slot.handle, "container_incarnation": slot.incarnation}
        return build.evidence(
            host=slot.host,
            worker=slot.worker,
            alive=process.lives,
            worker_incarnation=process.incarnation,
            heartbeat_age_s=inactive_s if frozen else 1.0,
            cpu_idle_s=inactive_s if frozen else 0.0,
            dead_after_s=DEAD_AFTER_S,
            job_id=None if job is None else job[0],
            attempt=None if job is None else job[1],
            phase=None if job is None else "step",
            stall_timeout_s=None if job is None else STALL_S,
            step_beat_age_s=None if job is None else inactive_s if silent or process.does is Does.BUSY else 0.1,
            gpus=list(slot.gpus),
            gpu_idle_s=inactive_s if silent else 0.0,
            ram_idle_s=inactive_s if silent else 0.0,
            gpu_pids=self._list_gpu_pids(slot.host),
            **known,
        )

    def _list_gpu_pids(self, host: str) -> dict[str, list[int] | None]:
        pids_of: dict[str, list[int] | None] = {}
        for slot in self.slots:
            for gpu in slot.gpus if slot.host == host else ():
                pids = [process.pid for process in slot.processes]
                pids_of[gpu] = sorted({*(pids_of.get(gpu) or ()), *pids})
        return pids_of

    # --- the engine

    def inspect(self, handle: str) -> ContainerState:
        slot = self.by_handle(handle)
        pids = frozenset({slot.process.pid}) if slot.running and slot.process else frozenset()
        return build.container(
            handle=handle, name=slot.worker, incarnation=slot.incarnation, running=slot.running, pids=pids,
            cgroup=f"/cgroup/{slot.worker}",
        )  # fmt: skip

    def by_handle(self, handle: str) -> Slot:
        slot = next(each for each in self.slots if each.handle == handle)
        if slot.host in self.engines_down:
            raise ActuatorError("played: the engine does not answer")
        return slot

    def stop(self, slot: Slot) -> None:
        if slot.unkillable:
            raise ActuatorError("played: the process cannot be killed")
        if slot.running and slot.process is not None:
            self.end(slot.process, cleanly=False)
