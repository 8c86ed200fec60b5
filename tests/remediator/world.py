"""A fake host with containers and hung workers: the exporter and the actuator of an executor.

A start begins a new incarnation. A killed worker leaves its files, one that exits removes them. A stopped container
has no GPU processes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.evidence import ServerFacts, WorkerFacts
from remediator.actuators import ActuatorError
from remediator.clients.exporter import Targets, WorkerUnseenError
from remediator.clients.exporter_access import ExporterError
from remediator.plan import ContainerState
from tests.remediator import builders as build


@dataclass
class Box:
    """One container with one worker, which hangs until it is stopped."""

    worker: str
    job_id: int | None = 7
    attempt: int | None = 1
    managed: bool = True
    ends_cleanly: bool = False
    unkillable: bool = False
    hung: bool = True
    worker_incarnation: str = "i1"
    running: bool = True
    starts: int = 0
    stops: int = 0
    calls: list[str] = field(default_factory=list)
    processes: frozenset[int] = frozenset()
    """Real processes of the first incarnation, if any."""

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
    """The exporter and the actuator of one host."""

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

    # --- the exporter

    def list_targets(self) -> Targets:
        return Targets(containers=len(self.boxes), names=frozenset(self.boxes))

    def worker_evidence(self, worker: str, *, host: str) -> WorkerFacts:
        if self.silent:
            raise ExporterError("the exporter does not answer")
        box = self.boxes.get(worker)
        first = box is not None and box.starts == 0
        if box is None or (first and not box.running and box.ends_cleanly):
            raise WorkerUnseenError(f"sees no worker {worker!r}")
        changes: dict[str, Any] = {}
        if not box.hung:
            changes = {"step_beat_age_s": 0.1, "gpu_idle_s": 0.0}
        if not first:
            changes |= {"worker_incarnation": "i2", "job_id": None, "attempt": None, "step_beat_age_s": None}
        if not box.running:
            changes |= {"alive": False, "container_incarnation": None, "container_id": None, "container": None}
        if first and box.running and box.processes:
            changes["worker_pid"] = min(box.processes)
        if box.running:
            changes |= {"container": box.worker, "container_id": box.handle, "container_incarnation": box.incarnation}
        if self.gpu_lost:
            changes |= {"gpu_pids": {"GPU-0": None}, "lost_gpus_s": {"GPU-0": self.gpu_lost_s}, "gpu_idle_s": None}
            if first and box.running and box.hung:
                changes |= {"gpu_lost_s": 300.0, "ram_idle_s": 300.0, "phase_age_s": 300.0, "step_beat_age_s": 300.0}
        default = {"job_id": box.job_id, "attempt": box.attempt, "worker_incarnation": box.worker_incarnation}
        gpu_pids = {"GPU-0": sorted(pid for each in self.boxes.values() for pid in each.pids)}
        return build.evidence(**{"host": host, "worker": worker, "gpu_pids": gpu_pids, **default, **changes})

    def container_evidence(self, container: str, *, host: str) -> ServerFacts:
        if self.silent or container not in self.boxes:
            raise ExporterError("the exporter does not answer")
        box = self.boxes[container]
        gpu_pids = {"GPU-0": sorted(pid for each in self.boxes.values() for pid in each.pids)}
        place: dict[str, Any] = {"container_id": None, "container_incarnation": None, "probe_failing_s": None}
        if box.running:
            place = {"container_id": box.handle, "container_incarnation": box.incarnation}
            place["probe_failing_s"] = 130.0 if box.hung else 0.0
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
                box.hung = False
