"""A host with containers and wedged workers, at the two seams an executor has to it: the witness and the actuator.

It keeps the rules of the real one: a stop ends an incarnation and a start begins the next, a killed worker's files stay
and a worker that ends cleanly takes them away, and what does not run is on no GPU.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.evidence import ServerFacts, WorkerFacts
from remediator.actuators import ActuatorError
from remediator.clients.exporter import ExporterError, WorkerUnseenError
from remediator.plan import ContainerState
from tests.remediator import builders as build


@dataclass
class Box:
    """One container with one worker in it, wedged until it is stopped."""

    worker: str
    job_id: int | None = 7
    attempt: int | None = 1
    managed: bool = True
    ends_cleanly: bool = False
    unkillable: bool = False
    wedged: bool = True
    worker_incarnation: str = "i1"
    running: bool = True
    starts: int = 0
    stops: int = 0
    calls: list[str] = field(default_factory=list)
    processes: frozenset[int] = frozenset()
    """Real ones that stand for those of its first life."""

    @property
    def handle(self) -> str:
        return self.worker.ljust(64, "0")

    @property
    def incarnation(self) -> str:
        return f"{self.handle}@{self.starts}"

    @property
    def pids(self) -> frozenset[int]:
        if self.processes and self.running and not self.starts:
            return self.processes
        return frozenset({4000 + self.starts * 100 + int(self.worker[1])}) if self.running else frozenset()


class World:
    """The witness and the actuator of one host."""

    def __init__(self, *boxes: Box) -> None:
        self.boxes = {box.worker: box for box in boxes}
        self.silent = False
        self.engine_down = False
        self.gpu_lost = False
        self.gpu_lost_s = 300.0
        self.before_stop: Callable[[Box], None] = lambda _: None
        self._lock = threading.Lock()

    def _box(self, handle: str) -> Box:
        return next(box for box in self.boxes.values() if box.handle == handle)

    # --- the witness

    def count_containers(self) -> int:
        return len(self.boxes)

    def worker_evidence(self, worker: str, *, host: str) -> WorkerFacts:
        if self.silent:
            raise ExporterError("the exporter does not answer")
        box = self.boxes.get(worker)
        first = box is not None and box.starts == 0
        if box is None or (first and not box.running and box.ends_cleanly):
            raise WorkerUnseenError(f"sees no worker {worker!r}")
        life: dict[str, Any] = {}
        if not box.wedged:
            life = {"step_beat_age_s": 0.1, "gpu_idle_s": 0.0}
        if not first:
            life |= {"worker_incarnation": "i2", "job_id": None, "attempt": None, "step_beat_age_s": None}
        elif not box.running:
            life |= {"alive": False, "container_incarnation": None, "container_id": None, "container": None}
        if first and box.running and box.processes:
            life["worker_pid"] = min(box.processes)
        if box.running:
            life |= {"container": box.worker, "container_id": box.handle, "container_incarnation": box.incarnation}
        if self.gpu_lost:
            life |= {"gpu_pids": {"GPU-0": None}, "lost_gpus_s": {"GPU-0": self.gpu_lost_s}, "gpu_idle_s": None}
            if first and box.running and box.wedged:
                life |= {"gpu_lost_s": 300.0, "ram_idle_s": 300.0, "phase_age_s": 300.0, "step_beat_age_s": 300.0}
        default = {"job_id": box.job_id, "attempt": box.attempt, "worker_incarnation": box.worker_incarnation}
        gpu_pids = {"GPU-0": sorted(pid for each in self.boxes.values() for pid in each.pids)}
        return build.evidence(**{"host": host, "worker": worker, "gpu_pids": gpu_pids, **default, **life})

    def container_evidence(self, container: str, *, host: str) -> ServerFacts:
        if self.silent:
            raise ExporterError("the exporter does not answer")
        box = self.boxes[container]
        gpu_pids = {"GPU-0": sorted(pid for each in self.boxes.values() for pid in each.pids)}
        place: dict[str, Any] = {"container_id": None, "container_incarnation": None, "unanswered_s": None}
        if box.running:
            place = {"container_id": box.handle, "container_incarnation": box.incarnation}
            place["unanswered_s"] = 130.0 if box.wedged else 0.0
        return build.server(host=host, container=container, gpu_pids=gpu_pids, **place)

    def close(self) -> None:
        pass

    # --- the actuator

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        if self.engine_down:
            raise ActuatorError("the engine does not answer")
        box = self._box(handle)
        return build.container(
            handle=handle, name=box.worker, incarnation=box.incarnation, running=box.running, managed=box.managed,
            pids=box.pids, cgroup=cgroup or (f"/sys/fs/cgroup/gone/{handle}" if self.gpu_lost else None),
        )  # fmt: skip

    def stop(self, handle: str, *, grace_s: float) -> None:
        assert grace_s == 0
        box = self._box(handle)
        box.calls.append("stop")
        self.before_stop(box)
        if box.unkillable:
            raise ActuatorError("it does not die")
        with self._lock:
            box.stops += box.running
            box.running = False

    def start(self, handle: str) -> None:
        box = self._box(handle)
        box.calls.append("start")
        with self._lock:
            if not box.running:
                box.starts += 1
                box.running = True
                box.wedged = False
