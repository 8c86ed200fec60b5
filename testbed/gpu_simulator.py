"""Write the file of `--simulate-gpu` from the work that jobs launch.

A job launches work by `gpu-work.json` in its worker's state folder: a busy-until time and a memory size
(`testbed.demo.job_body.launch`). If a process stops launching or dies, its GPU becomes idle. Pids are the holders of
the workers' kernel locks, so attribution from pid to container is real.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from exporter.sources import workers
from gpuwarden.files import atomic_write

GPU_BYTES: Final = 16 * 2**30
INTERVAL_S: Final = 0.2
BUSY_RATIO: Final = 0.9
WORK_FILE: Final = "gpu-work.json"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker and its GPUs."""

    worker: str
    gpus: tuple[str, ...]


class SimulatedGpus:
    """Updates the simulation file in a thread.

    Args:
        unreadable: GPUs whose processes the driver does not list.
        stuck: GPUs with a process that the driver lists for ever.
        busy: GPUs with a busy process of no worker.
        held: by GPU, memory of processes of no worker while they live, bytes by pid.
    """

    def __init__(self, path: Path, *, directory: Path, slots: Sequence[Slot]) -> None:
        self.path = path
        self.unreadable: frozenset[str] = frozenset()
        self.stuck: Mapping[str, int] = {}
        self.busy: Mapping[str, int] = {}
        self.held: Mapping[str, Mapping[int, int]] = {}
        self._directory = directory
        self._slots = slots
        self._uuids = list(dict.fromkeys(gpu for slot in slots for gpu in slot.gpus))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._update_loop, name="simulated-gpus", daemon=True)

    def __enter__(self) -> Self:
        """Write the file once and start the thread."""
        self.write()
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop the thread. The file stays."""
        self._closing.set()
        self._thread.join(timeout=5)

    def write(self) -> None:
        """Write the current work of all live workers."""
        pids = {sighting.worker.worker: sighting.pid for sighting in workers.read(self._directory).workers}
        on_gpu: dict[str, list[dict[str, Any]]] = {uuid: [] for uuid in self._uuids}
        for slot in self._slots:
            pid = pids.get(slot.worker)
            work = self._work(slot.worker)
            if pid is not None and work is not None:
                for gpu in slot.gpus:
                    on_gpu[gpu].append({"pid": pid, **work})
        for gpu, pid in self.stuck.items():
            if pid not in {process["pid"] for process in on_gpu[gpu]}:
                on_gpu[gpu].append({"pid": pid, "utilization_ratio": 0.0, "memory_bytes": 0})
        for gpu, pid in self.busy.items():
            on_gpu[gpu].append({"pid": pid, "utilization_ratio": BUSY_RATIO, "memory_bytes": 2**30})
        for gpu, holders in self.held.items():
            on_gpu[gpu] += [
                {"pid": pid, "utilization_ratio": 0.0, "memory_bytes": size}
                for pid, size in holders.items()
                if Path("/proc", str(pid)).is_dir()
            ]
        found = {"gpus": [self._gpu(index, uuid, on_gpu[uuid]) for index, uuid in enumerate(self._uuids)]}
        atomic_write(self.path, json.dumps(found))

    def _update_loop(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            with suppress(OSError):  # a worker's folder may change while it is read: retry
                self.write()

    def _work(self, worker: str) -> Mapping[str, Any] | None:
        try:
            work = json.loads((self._directory / worker / WORK_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        busy = time.clock_gettime(time.CLOCK_BOOTTIME) < work["busy_until_s"]
        return {"utilization_ratio": work["ratio"] if busy else 0.0, "memory_bytes": work["memory_bytes"]}

    def _gpu(self, index: int, uuid: str, processes: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "uuid": uuid,
            "index": index,
            "name": "Simulated GPU",
            "utilization_ratio": min(1.0, sum(process["utilization_ratio"] for process in processes)),
            "memory_used_bytes": sum(process["memory_bytes"] for process in processes),
            "memory_size_bytes": GPU_BYTES,
            "processes": None if uuid in self.unreadable else processes,
        }
