"""AMD's compute driver as it shows itself in /sys/class/kfd/kfd: which GPUs there are, and who computes on them.

    topology/generation_id              another number once the topology has changed
    topology/nodes/N/gpu_id             the GPU's number in all that follows; 0 is a CPU
    topology/nodes/N/name               the chip's name
    topology/nodes/N/properties         lines of `key value`: drm_render_minor, unique_id (0 where it has none), domain
                                        and location_id (its place on the PCI bus; parts of one GPU have the same)
    proc/PID/vram_GPUID                 memory of that GPU that the process holds, bytes; of every GPU that it may use
    proc/PID/queues/Q/gpuid             of which GPU a queue is that the process submits its work to
    proc/PID/stats_GPUID/cu_occupancy   how many compute units run a wave of it at this very moment; only some chips

Sources: drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c (kfd_procfs_show, kfd_procfs_queue_show,
kfd_procfs_stats_show, kfd_get_cu_occupancy) of the kernel.

A process submits its work to its queues past the kernel, so nobody counts how long it runs: there is no utilisation
here. cu_occupancy is none either. It is one moment, and asking for it stops at every queue of the GPU.
"""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.sources.gpu.isolated.protocol import Question

SYS: Final = Path("/sys")

Asks = Callable[[int | None], None]
"""Told whose files are read next, by the minor number of the GPU's render node; `None` is nobody's."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One GPU of the topology, or a part of one. `unique_id` is `None` where the chip has none.

    `addresses` are what its PCI address may be: some kernels put the number of a part in place of the function.
    """

    gpu_id: int
    number: int
    name: str
    unique_id: int | None
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The GPUs of the compute driver by the minor number of their render node; not `whole` where one is unreadable."""

    nodes: Mapping[int, Node]
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One process's part in one GPU. `vram_bytes` and `queues`, how many it has there, are `None` where unknown."""

    vram_bytes: int | None
    queues: int | None


RELIST_LOOKS: Final = 5
READ_BYTES: Final = 4096
"""A page: no file of sysfs is longer, and hardly one of fdinfo."""

CONTENT_MAX: Final = 4 * READ_BYTES
"""Bytes of a longer one that are read: fdinfo has a line of every lock, of which a process may take any number."""

NO_PART: Final = Compute(vram_bytes=0, queues=0)


class Kfd:
    """Reads the compute driver; without one there is nothing to find.

    Args:
        sys: where that is.
        asks: told before a file of one GPU's is read, and `None` once none is any more.
    """

    def __init__(self, *, sys: Path = SYS, asks: Asks = lambda _: None) -> None:
        self._root = sys / "class/kfd/kfd"
        self._asks = asks
        self._generation: str | None = None
        self._topology = Topology(nodes={}, whole=True)
        self._looks = 0
        self._queues: dict[str, int] = {}
        self._nowhere: set[tuple[str, int]] = set()

    def topology(self) -> Topology:
        """The GPUs of the topology, read anew when its generation is another."""
        try:
            generation = (self._root / "topology/generation_id").read_text(encoding="ascii")
        except FileNotFoundError:  # no such driver
            return Topology(nodes={}, whole=True)
        except (OSError, ValueError):
            return Topology(nodes={}, whole=False)
        if generation != self._generation:
            self._topology = self._read()
            self._generation = generation if self._topology.whole else None
        return self._topology

    def _read(self) -> Topology:
        folder = self._root / "topology/nodes"
        names = _names(folder)
        found: dict[int, Node] = {}
        whole = names is not None
        for name in names or ():
            try:
                gpu_id = int((folder / name / "gpu_id").read_text(encoding="ascii"))
                if gpu_id:
                    lines = (folder / name / "properties").read_text(encoding="ascii").splitlines()
                    properties = dict(line.split(maxsplit=1) for line in lines)
                    found[int(properties["drm_render_minor"])] = Node(
                        gpu_id=gpu_id,
                        number=int(name),
                        name=(folder / name / "name").read_text(encoding="ascii").strip(),
                        unique_id=int(properties.get("unique_id", "0")) or None,
                        addresses=_addresses(int(properties.get("domain", "0")), int(properties["location_id"])),
                    )
            except (OSError, ValueError, KeyError):
                whole = False
        return Topology(nodes=found, whole=whole)

    def processes(self, question: Question | None = None) -> Mapping[int, Mapping[int, Compute]] | None:
        """Who computes on each GPU that is asked about: by `gpu_id`, then by pid; `None` where the list cannot be read.

        A process that is gone by now is left out. Where one had no part, it is looked for at each `RELIST_LOOKS`th
        look, or once it has a queue there.
        """
        pids = _names(self._root / "proc")
        if pids is None:
            return None
        asked = question or Question()
        gpu_ids = {place: node.gpu_id for place, node in self._topology.nodes.items() if asked.is_about(place)}
        found: dict[int, dict[int, Compute]] = {gpu_id: {} for gpu_id in gpu_ids.values()}
        kept: dict[str, int] = {}
        nowhere: set[tuple[str, int]] = set()
        turn = self._looks % RELIST_LOOKS
        self._looks += 1
        queues_of = {pid: self._queues_of(pid, kept) for pid in pids}
        for place, gpu_id in gpu_ids.items():  # GPU by GPU: each change of the GPU that is asked about is a message
            for pid, queues in queues_of.items():
                here = None if queues is None else queues.count(gpu_id)
                if here == 0 and (pid, gpu_id) in self._nowhere and int(pid) % RELIST_LOOKS != turn:
                    part = NO_PART
                else:
                    self._asks(place)
                    part = self._part(pid, gpu_id, here)
                if part == NO_PART:
                    nowhere.add((pid, gpu_id))
                elif part.vram_bytes is not None or (self._root / "proc" / pid).exists():
                    found[gpu_id][int(pid)] = part
        self._asks(None)
        self._queues, self._nowhere = kept, nowhere
        return found

    def _part(self, pid: str, gpu_id: int, queues: int | None) -> Compute:
        """A process's part in one GPU. Of a GPU that it may not use it has no file at all."""
        file = f"{self._root}/proc/{pid}/vram_{gpu_id}"
        vram_bytes = number_in(file)
        if vram_bytes is None and queues == 0 and not Path(file).exists():
            return NO_PART
        return Compute(vram_bytes=vram_bytes, queues=queues)

    def _queues_of(self, pid: str, kept: dict[str, int]) -> list[int] | None:
        """The GPU of each queue of a process; `None` where one of them cannot be read."""
        on: list[int] = []
        try:
            with os.scandir(f"{self._root}/proc/{pid}/queues") as entries:
                for entry in entries:
                    # A queue stays on its GPU, and the kernel numbers each folder anew: one read tells it for good.
                    key = f"{entry.path}:{entry.inode()}"
                    gpu_id = self._queues.get(key)
                    try:
                        if gpu_id is None:
                            self._asks(None)  # of which GPU that is nobody knows yet
                            gpu_id = int(content(f"{entry.path}/gpuid"))
                    except FileNotFoundError:  # it ended in between
                        continue
                    kept[key] = gpu_id
                    on.append(kept[key])
        except (OSError, ValueError):
            return None
        return on

    def occupied_units(self, pid: int, gpu_id: int) -> int | None:
        """How many compute units run a wave of a process right now; `None` where the chip does not tell."""
        return number_in(f"{self._root}/proc/{pid}/stats_{gpu_id}/cu_occupancy")


def content(file: str) -> bytes:
    """A file of the kernel's, whole; in half the time of `Path.read_bytes`, which counts where there are hundreds.

    Raises:
        OSError: it cannot be read, or is longer than any that tells of a GPU.
    """
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        while part := os.read(opened, READ_BYTES):
            parts.append(part)
            if len(parts) > CONTENT_MAX // READ_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), file)
        return b"".join(parts)
    finally:
        os.close(opened)


def number_in(file: str) -> int | None:
    """The whole number that a file of the kernel's holds; `None` where it cannot be read, or holds something else."""
    try:
        return int(content(file))
    except (OSError, ValueError):
        return None


def _addresses(domain: int, location: int) -> tuple[str, ...]:
    """A place on the PCI bus as the kernel names it: as it is, and the first function of that device.

    The lower 16 bits are the bus, device and function (PCI_DEVID in include/linux/pci.h).
    """
    place = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    return f"{place}.{location & 7}", f"{place}.0"


def _names(folder: Path) -> list[str] | None:
    try:
        return sorted((entry.name for entry in folder.iterdir() if entry.name.isdecimal()), key=int)
    except OSError:
        return None
