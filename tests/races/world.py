"""The hosts as they are: slots, each a container with one worker process, their GPUs, and what an exporter sees.

The truth is here, and no program under test writes it but through an engine's `stop` and `start`. A container has an
incarnation a start, a process one a birth. A killed worker's files stay and a worker that ends cleanly takes them away.
A process that cannot be killed stays on its GPU whatever is asked of the engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from gpuwarden.evidence import WorkerFacts
from remediator.actuators import ActuatorError
from remediator.clients.exporter import ExporterError, WorkerUnseenError
from remediator.plan import ContainerState
from tests.races.clocks import Clocks
from tests.remediator import builders as build

STALL_S: Final = 120.0
DEAD_AFTER_S: Final = 30.0


class Does(StrEnum):
    """What a worker process does."""

    BEGINS = "begins"  # it has not registered yet
    IDLES = "idles"
    WORKS = "works"
    BUSY = "busy"  # it sends no beat, and its GPU is at work: a long step, and healthy
    WEDGED = "wedged"  # neither beat nor GPU; its other threads go on
    FROZEN = "frozen"  # stopped by a signal, and later continued
    ENDED = "ended"


SILENT: Final = frozenset({Does.WEDGED, Does.FROZEN})


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
    before: Does = Does.BEGINS  # it froze
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
    """A worker's place: its container, and the process in it."""

    host: str
    worker: str
    gpus: tuple[str, ...]
    restarts: bool
    """Whether its engine starts the container again when that ends by itself."""

    starts: int = 0
    running: bool = False
    unkillable: bool = False
    process: Process | None = None
    strays: list[Process] = field(default_factory=list)
    """Processes of earlier incarnations that live on, outside the container."""

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
    """How a host's exporter answers."""

    FRESH = "fresh"
    SILENT = "silent"
    STALE = "stale"
    UNKNOWN = "unknown"


class World:
    """Every host's containers and workers."""

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
        self._pictures: dict[str, tuple[float, dict[str, WorkerFacts | None]]] = {}
        self._born = 0
        for slot in self.slots:
            self.start(slot)

    def slot(self, host: str, worker: str) -> Slot:
        return next(each for each in self.slots if (each.host, each.worker) == (host, worker))

    def is_wedged(self, process: Process) -> bool:
        """Whether a process is by truth what a rule may report."""
        if process.job is None or process.does not in SILENT:
            return False
        bound_s = DEAD_AFTER_S if process.does is Does.FROZEN else STALL_S
        return self.clocks.steady_s - process.since_s >= bound_s

    # --- what happens

    def start(self, slot: Slot) -> None:
        """A container that is down begins its next incarnation, with a worker that has yet to register."""
        if slot.running:
            return
        self._born += 1
        slot.starts, slot.running, slot.unkillable = slot.starts + 1, True, False
        slot.process = Process(slot=slot, number=self._born, since_s=self.clocks.steady_s, container=slot.incarnation)

    def end(self, process: Process, *, cleanly: bool) -> None:
        """A process ends; its container ends with it."""
        process.turns(Does.ENDED, self.clocks.steady_s)
        process.files = not cleanly
        if process in process.slot.strays:
            process.slot.strays.remove(process)
        if process is process.slot.process:
            process.slot.running = False

    def stray(self, slot: Slot) -> None:
        """The container is started anew, and what ran in it runs on outside."""
        if slot.process is not None and slot.process.lives:
            slot.strays.append(slot.process)
        slot.running = False
        self.start(slot)

    # --- what an exporter sees

    def answer(self, host: str, mode: Exporter) -> None:
        """From now on the exporter of `host` answers so; one that goes stale keeps its last picture."""
        self.exporters[host] = mode
        self._pictures[host] = (
            self.clocks.steady_s,
            {each.worker: self._seen(each) for each in self.slots if each.host == host},
        )

    def about(self, worker: str, *, host: str) -> WorkerFacts:
        """What a witness is told."""
        mode, slot = self.exporters[host], self.slot(host, worker)
        if mode is Exporter.SILENT:
            raise ExporterError("played: the exporter does not answer")
        if mode is Exporter.STALE:
            taken_s, picture = self._pictures[host]
            if (found := picture[worker]) is None:
                raise ExporterError("played: the exporter has no fresh look")
            return replace(found, sample_age_s=self.clocks.steady_s - taken_s + 6.0)
        seen = self._seen(slot)
        if seen is None:
            raise WorkerUnseenError(f"played: sees no worker {worker!r}")
        if mode is Exporter.UNKNOWN:
            return replace(seen, gpu_idle_s=None, gpu_unknown="played", gpu_pids=None, cpu_idle_s=None)
        return seen

    def workers(self, host: str) -> int:
        """How many workers a witness is told of, dead ones included; a picture that is stale has as many."""
        if self.exporters[host] is Exporter.SILENT:
            raise ExporterError("played: the exporter does not answer")
        return sum(self._seen(each) is not None for each in self.slots if each.host == host)

    def _seen(self, slot: Slot) -> WorkerFacts | None:
        process, now_s = slot.process, self.clocks.steady_s
        if process is None or (not process.lives and not process.files):
            return None
        inactive_s = now_s - process.since_s
        silent, held = process.does in SILENT, process.job
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
            job_id=None if held is None else held[0],
            attempt=None if held is None else held[1],
            phase=None if held is None else "step",
            stall_timeout_s=None if held is None else STALL_S,
            step_beat_age_s=None if held is None else inactive_s if silent or process.does is Does.BUSY else 0.1,
            gpus=list(slot.gpus),
            gpu_idle_s=inactive_s if silent else 0.0,
            ram_idle_s=inactive_s if silent else 0.0,
            gpu_pids=self._listed(slot.host),
            **known,
        )

    def _listed(self, host: str) -> dict[str, list[int] | None]:
        listed: dict[str, list[int] | None] = {}
        for slot in self.slots:
            for gpu in slot.gpus if slot.host == host else ():
                pids = [process.pid for process in slot.processes]
                listed[gpu] = sorted({*(listed.get(gpu) or ()), *pids})
        return listed

    # --- an engine

    def look(self, handle: str) -> ContainerState:
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
            raise ActuatorError("played: it does not die")
        if slot.running and slot.process is not None:
            self.end(slot.process, cleanly=False)
