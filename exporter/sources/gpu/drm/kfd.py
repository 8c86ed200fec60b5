"""AMD's compute driver in /sys/class/kfd/kfd: its GPUs, and the processes that compute on them.

    topology/generation_id              changes with the topology
    topology/nodes/N/gpu_id             the GPU's number below; 0 is a CPU
    topology/nodes/N/name               the chip's name
    topology/nodes/N/properties         `key value`: drm_render_minor, unique_id (0 without one), domain and
                                        location_id (PCI address; the same for partitions of a GPU)
    proc/PID/vram_GPUID                 memory of the process there, bytes
    proc/PID/queues/Q/gpuid             the GPU of a queue of the process
    proc/PID/stats_GPUID/cu_occupancy   compute units that run it right now; only some chips

Sources: drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c of the kernel.

Work in queues bypasses the kernel, so utilisation is unknown. Reading cu_occupancy stops every queue of the GPU.
"""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.sources.gpu.isolated.protocol import Question

SYS: Final = Path("/sys")

Announce = Callable[[int | None], None]
"""Called with the render node's minor number before files of a GPU are read; `None` after."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One GPU or partition. On some kernels a partition's number replaces the PCI function."""

    gpu_id: int
    number: int
    name: str
    unique_id: int | None
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """GPUs by minor number of the render node; not `whole` if one is unreadable."""

    nodes: Mapping[int, Node]
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One process's memory and number of queues on one GPU; `None` is unknown."""

    vram_bytes: int | None
    queues: int | None


RELIST_LOOKS: Final = 5
READ_BYTES: Final = 4096

CONTENT_MAX: Final = 4 * READ_BYTES
"""Longest file that is read: fdinfo lists every lock of a process."""

NO_PART: Final = Compute(vram_bytes=0, queues=0)


class Kfd:
    """Reads the compute driver, if present."""

    def __init__(self, *, sys: Path = SYS, announce: Announce = lambda _: None) -> None:
        self._root = sys / "class/kfd/kfd"
        self._announce = announce
        self._generation: str | None = None
        self._topology = Topology(nodes={}, whole=True)
        self._looks = 0
        self._queues: dict[str, int] = {}
        self._nowhere: set[tuple[str, int]] = set()

    def topology(self) -> Topology:
        """The topology, read again when its generation changes."""
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
        """Use of each GPU, by `gpu_id`, then by pid. Processes without use are checked less often."""
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
        for place, gpu_id in gpu_ids.items():  # by GPU: each change of GPU is a message
            for pid, queues in queues_of.items():
                here = None if queues is None else queues.count(gpu_id)
                if here == 0 and (pid, gpu_id) in self._nowhere and int(pid) % RELIST_LOOKS != turn:
                    part = NO_PART
                else:
                    self._announce(place)
                    part = self._part(pid, gpu_id, here)
                if part == NO_PART:
                    nowhere.add((pid, gpu_id))
                elif part.vram_bytes is not None or (self._root / "proc" / pid).exists():
                    found[gpu_id][int(pid)] = part
        self._announce(None)
        self._queues, self._nowhere = kept, nowhere
        return found

    def _part(self, pid: str, gpu_id: int, queues: int | None) -> Compute:
        # A process has no file for a GPU that it may not use.
        file = f"{self._root}/proc/{pid}/vram_{gpu_id}"
        vram_bytes = number_in(file)
        if vram_bytes is None and queues == 0 and not Path(file).exists():
            return NO_PART
        return Compute(vram_bytes=vram_bytes, queues=queues)

    def _queues_of(self, pid: str, kept: dict[str, int]) -> list[int] | None:
        """The GPU of each queue; `None` if one cannot be read."""
        on: list[int] = []
        try:
            with os.scandir(f"{self._root}/proc/{pid}/queues") as entries:
                for entry in entries:
                    # A queue stays on its GPU, so one read is enough.
                    key = f"{entry.path}:{entry.inode()}"
                    gpu_id = self._queues.get(key)
                    try:
                        if gpu_id is None:
                            self._announce(None)  # its GPU is still unknown
                            gpu_id = int(content(f"{entry.path}/gpuid"))
                    except FileNotFoundError:  # it just ended
                        continue
                    kept[key] = gpu_id
                    on.append(kept[key])
        except (OSError, ValueError):
            return None
        return on

    def occupied_units(self, pid: int, gpu_id: int) -> int | None:
        """Compute units that run a process now."""
        return number_in(f"{self._root}/proc/{pid}/stats_{gpu_id}/cu_occupancy")


def content(file: str) -> bytes:
    """Read a kernel file, in half the time of `Path.read_bytes`.

    Raises:
        OSError: it cannot be read, or is too long.
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
    """Read a number; `None` if there is none."""
    try:
        return int(content(file))
    except (OSError, ValueError):
        return None


def _addresses(domain: int, location: int) -> tuple[str, ...]:
    """The PCI address of a location (PCI_DEVID in include/linux/pci.h), and of the device's first function."""
    place = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    return f"{place}.{location & 7}", f"{place}.0"


def _names(folder: Path) -> list[str] | None:
    try:
        return sorted((entry.name for entry in folder.iterdir() if entry.name.isdecimal()), key=int)
    except OSError:
        return None
