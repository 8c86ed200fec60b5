"""AMD's and Intel's GPUs as the Linux kernel shows them, without a library of theirs. What they mean: amd-intel.md.

Which GPUs there are is told by their render nodes, /sys/class/drm/renderD*, and their drivers; who AMD's are for people
and programs, by the compute driver's topology (exporter/sources/gpu/drm/kfd.py). Their figures are files of the device:

    power/runtime_status    `suspended` is a GPU that is switched off: it does nothing, and a question would wake it
    gpu_busy_percent        how busy the whole GPU is; AMD alone
    current_compute_partition   into how many parts it computes: SPX (one), DPX, TPX, QPX, CPX; AMD alone
    mem_info_vram_used      its own memory, bytes, in use by anyone and in all; AMD alone
    mem_info_vram_total
    hwmon/hwmonN/           temp1_input, thousandths of a degree Celsius; power1_average, else power1_input, and
                            power1_cap, millionths of a watt; AMD alone

Sources: Documentation/ABI/testing/sysfs-devices-power and Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst of
the kernel, and for units Documentation/hwmon/sysfs-interface.rst. clients.py and kfd.py find the processes of a GPU.

A process's part of the GPU's time is what its clients' engines did. What a process computes on an AMD GPU is counted by
nobody, as long as it has a queue there. Then only two things together show that it does nothing: the whole GPU is 0 %
busy; and no compute unit runs a wave of it, or, on chips that do not tell, the GPU's figure was seen over 0 % while
there were queues, so that it is none of those that never move. All else is unknown.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from exporter.model.gpu import NO_ATTRIBUTION, NODE, Gpu, GpuFigures, GpuProcess, GpuReadings
from exporter.sources.gpu.drm.clients import FILES_MAX, PROC, Clients, Held, Holders
from exporter.sources.gpu.drm.kfd import NO_PART, SYS, Asks, Compute, Kfd, Node, Topology, number_in
from exporter.sources.gpu.isolated.protocol import HUNG, HUNG_FIGURES, Question

SOURCE: Final = "drm"
WHO: Final = "the kernel's AMD and Intel drivers"
CHILD: Final = ("-m", "exporter.sources.gpu.drm.child")
"""The process that reads them: a driver can hang in a read."""

GPU_OF_NUMBER: Final = "renderD{}"
"""What people call the GPU of whose files that process says that it reads them."""

AMD: Final = frozenset({"amdgpu"})
XCP: Final = re.compile(r"amdgpu_xcp[._][0-9]+")
"""The name of a partition's device, which is always there (amdgpu_xcp_drv.c); with a dot on the first such kernels."""

PARTITIONS: Final = frozenset({"DPX", "TPX", "QPX", "CPX"})
"""What `current_compute_partition` says of an AMD GPU that is cut into parts; SPX is a whole one."""

INTEL: Final = frozenset({"i915", "xe"})
PERCENT_MAX: Final = 100

SENSORS: Final = (
    ("temperature_celsius", ("temp1_input",), 1e-3, 250.0),
    ("power_watts", ("power1_average", "power1_input"), 1e-6, 10_000.0),
    ("power_limit_watts", ("power1_cap",), 1e-6, 10_000.0),
)
"""A GPU's sensors: the files that tell each, the first that there is, its unit, and more than any GPU comes to."""

NOT_TOLD: Final = "the kernel does not tell what each process computes on an AMD GPU"
PARTITIONED: Final = "it is a part of a partitioned GPU, and the kernel's figures are of the whole"
SPEECHLESS: Final = "its driver does not tell of every process what it does: a newer kernel may"
COMPUTE_UNREAD: Final = "AMD's compute driver is there and cannot be read: look at /sys/class/kfd/kfd"
UNREADABLE: Final = "unreadable"
NOT_LISTED: Final = "unlisted"
UNLISTED: Final = (
    "the open files of {count} processes cannot be listed in whole, and each may use the GPU: run the exporter as root "
    f"or with CAP_SYS_PTRACE; of a process with more than {FILES_MAX} the others are never looked at"
)


@dataclass(frozen=True, kw_only=True)
class _Device:
    """One render node, such as `renderD128`: its GPU's PCI address, driver and folder, and all nodes of that GPU.

    `name` is the device's own: that address, or a partition's, such as `amdgpu_xcp_1`, whose GPU has the rest.
    """

    node: str
    name: str
    pci: str
    driver: str
    folder: Path
    nodes: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """One GPU at one look. `compute_node` is its place in AMD's topology; what is not `whole` is a part of a GPU."""

    index: int
    device: _Device
    compute_node: Node | None
    asleep: bool
    whole: bool


class DrmGpus:
    """Reads the GPUs of some drivers; one thread at a time.

    Args:
        drivers: whose.
        sys: where the kernel shows them.
        proc: where it shows who has them open.
        asks: told the minor number of a GPU's render node before any file of it is read, and `None` once none is.
    """

    def __init__(
        self, drivers: frozenset[str], *, sys: Path = SYS, proc: Path = PROC, asks: Asks = lambda _: None
    ) -> None:
        self._drivers = drivers
        self._asks = asks
        self._drm = sys / "class/drm"
        self._bus = sys / "bus/pci/devices"
        self._kfd = Kfd(sys=sys, asks=asks)
        self._clients = Clients(proc=proc, asks=asks)
        self._names: dict[tuple[str, str], str] = {}
        self._moved: set[str] = set()

    def drivers_found(self) -> frozenset[str]:
        """The drivers, of those that are read, that drive a GPU now. No driver is called: links tell it."""
        return frozenset(device.driver for device in self._devices(Topology(nodes={}, whole=True)))

    def read(self, question: Question | None = None) -> GpuReadings:
        """Every GPU of these drivers, or the one that the question is about.

        Raises:
            OSError: processes cannot be listed.
        """
        try:
            return self._read(question or Question())
        finally:
            self._asks(None)

    def _read(self, question: Question) -> GpuReadings:
        if question.without:  # before any file of theirs
            question = _of_whole_gpus(question, self._devices(self._kfd.topology()))
        topology = self._kfd.topology()
        devices = self._devices(topology)
        question = _of_whole_gpus(question, devices)
        computing = self._kfd.processes(question) if topology.nodes else {}
        asleep = frozenset(
            name
            for device in devices
            if question.is_about(_minor(device.node)) and self._is_asleep(device)
            for name in device.nodes
        )
        places = {name: _minor(device.node) for device in devices for name in device.nodes}
        places.update((device.node, _minor(device.node)) for device in devices)
        holders = self._clients.look(time.monotonic(), asleep=asleep, places=places, question=question)
        parts = Counter(device.pci for device in devices)
        gpus: list[Gpu] = []
        for index, device in enumerate(sorted(devices, key=partial(_rank, topology))):
            place = _minor(device.node)
            node = topology.nodes.get(place) if device.driver in AMD else None
            is_asked = question.is_about(place)
            if is_asked:
                self._asks(place)
            seen = _Seen(
                index=index,
                device=device,
                compute_node=node,
                asleep=device.node in asleep,
                whole=parts[device.pci] == 1 and not (is_asked and _is_partitioned(device)),
            )
            if not is_asked:
                if place in question.without:
                    gpus.append(_left_out(seen))
                continue
            if device.driver not in AMD:
                gpus.append(self._intel(seen, holders))
            elif computing is None or (node is None and not topology.whole):
                gpus.append(self._amd(seen, None, holders))
            else:
                gpus.append(self._amd(seen, {} if node is None else computing.get(node.gpu_id, {}), holders))
        unlisted = tuple(sorted(holders.unlisted)) if gpus else ()
        return GpuReadings(source=SOURCE, gpus=tuple(gpus), unlisted=unlisted)

    def _is_asleep(self, device: _Device) -> bool:
        self._asks(_minor(device.node))
        asleep = _text(device, "power/runtime_status") == "suspended"
        self._asks(None)
        return asleep

    def _devices(self, topology: Topology) -> list[_Device]:
        try:
            nodes_of_drm = list(self._drm.iterdir())
        except FileNotFoundError:  # a kernel without any GPU
            return []
        found: list[_Device] = []
        for node in nodes_of_drm:
            if not NODE.fullmatch(node.name):
                continue
            try:
                own = node.resolve(strict=True).parent.parent
                folder = self._card(topology.nodes.get(_minor(node.name))) if XCP.fullmatch(own.name) else own
                driver = (folder / "driver").readlink().name
                nodes = frozenset(each.name for each in (own / "drm").iterdir())
            except OSError:  # it has no driver, is just taken out, or is for a partition that is not made
                continue
            if driver in self._drivers:
                device = _Device(
                    node=node.name, name=own.name, pci=folder.name, driver=driver, folder=folder, nodes=nodes
                )
                found.append(device)
        return found

    def _card(self, place: Node | None) -> Path:
        """The folder of the GPU that a partition is of.

        Raises:
            OSError: there is no such partition, or no such GPU.
        """
        for address in place.addresses if place else ():
            with suppress(OSError):
                return (self._bus / address).resolve(strict=True)
        raise FileNotFoundError

    def _amd(self, seen: _Seen, computing: Mapping[int, Compute] | None, holders: Holders) -> Gpu:
        device = seen.device
        ratio = used = size = None
        figures = GpuFigures()
        if seen.whole:
            ratio = 0.0 if seen.asleep else _busy_ratio(device)
            figures = GpuFigures() if seen.asleep else _figures(device)
            used = number_in(f"{device.folder}/mem_info_vram_used")
            size = number_in(f"{device.folder}/mem_info_vram_total")
        processes: tuple[GpuProcess, ...] | None = None
        unknown: str | None = COMPUTE_UNREAD
        untold = _untold(device, ratio, used, size, asleep=seen.asleep) if seen.whole else {}
        if computing is None:
            untold["processes"] = UNREADABLE
        else:
            if ratio and any(part.queues for part in computing.values()):
                self._moved.add(device.node)
            held = _held(holders, device) if seen.whole else {}
            processes = tuple(
                GpuProcess(
                    pid=pid,
                    utilization_ratio=self._amd_ratio(seen, ratio, pid, computing.get(pid, NO_PART), held, holders),
                    memory_bytes=_amd_bytes(computing.get(pid), held.get(pid)),
                )
                for pid in sorted(computing.keys() | held.keys())
            )
            unknown = _why_unknown(seen, ratio, processes, computing, holders)
            if seen.whole and any(each.pid in holders.unlisted for each in processes):
                untold["process_utilization"] = NOT_LISTED
        if untold:
            figures = replace(figures, unknown={**figures.unknown, **untold})
        return Gpu(
            uuid=_uuid(seen),
            index=seen.index,
            name=self._name(seen),
            utilization_ratio=ratio,
            memory_used_bytes=used,
            memory_size_bytes=size,
            memory_free_bytes=None if used is None or size is None else max(0, size - used),
            processes=processes,
            unknown=unknown,
            source=device.driver,
            node=device.node,
            other_names=_also(device),
            attribution=_attribution(seen),
            figures=figures,
        )

    def _amd_ratio(
        self, seen: _Seen, ratio: float | None, pid: int, part: Compute, held: Mapping[int, Held], holders: Holders
    ) -> float | None:
        """A process's part of an AMD GPU's time: the greater of what it drew and what it computed."""
        if not seen.whole or pid in holders.unlisted:
            return None
        if part.queues != 0 and not self._computes_nothing(seen, ratio, pid):
            return None
        return _busiest(held.get(pid, Held()).shares)

    def _computes_nothing(self, seen: _Seen, ratio: float | None, pid: int) -> bool:
        if ratio != 0.0 or seen.compute_node is None:
            return False
        units = self._kfd.occupied_units(pid, seen.compute_node.gpu_id)
        return seen.device.node in self._moved if units is None else units == 0

    def _intel(self, seen: _Seen, holders: Holders) -> Gpu:
        """Nobody tells how busy the whole GPU is, so it is what all of its clients did, where all of them are known."""
        held = _held(holders, seen.device)
        ratio: float | None = None
        unknown: str | None = None
        figures = GpuFigures()
        if seen.asleep:
            ratio = 0.0
        elif holders.unlisted:
            unknown = UNLISTED.format(count=len(holders.unlisted))
            figures = GpuFigures(unknown={"utilization": NOT_LISTED})
        elif any(each.shares is None for each in held.values()):
            unknown = SPEECHLESS
            figures = GpuFigures(unknown={"utilization": "not_told"})
        else:
            engines: Counter[str] = Counter()
            for each in held.values():
                engines.update(each.shares or {})
            ratio = _busiest(engines)
        return Gpu(
            uuid=_uuid(seen),
            index=seen.index,
            name=self._name(seen),
            utilization_ratio=ratio,
            memory_used_bytes=None,
            memory_size_bytes=None,
            processes=tuple(
                GpuProcess(pid=pid, utilization_ratio=_busiest(each.shares), memory_bytes=each.local_bytes)
                for pid, each in sorted(held.items())
            ),
            unknown=unknown,
            source=seen.device.driver,
            node=seen.device.node,
            other_names=_also(seen.device),
            figures=figures,
        )

    def _name(self, seen: _Seen) -> str:
        """What people call it, as far as the kernel knows: the board's name, the chip's, or the numbers of PCI."""
        device = seen.device
        key = device.pci, device.node
        if key not in self._names:
            chip = seen.compute_node.name if seen.compute_node else ""
            numbers = f"{_text(device, 'vendor')}:{_text(device, 'device')}".replace("0x", "")
            self._names[key] = _text(device, "product_name") or chip or f"PCI {numbers}"
        return self._names[key]


def _of_whole_gpus(question: Question, devices: list[_Device]) -> Question:
    """The same, without all parts of each GPU of which one is left out: they hang together, and cost one deadline."""
    hung = {device.pci for device in devices if _minor(device.node) in question.without}
    parts = (_minor(device.node) for device in devices if device.pci in hung)
    return replace(question, without=question.without | frozenset(parts))


def _left_out(seen: _Seen) -> Gpu:
    """One of whose files none is read: it stays on the list, so that who was given it is not judged without it.

    Who it is is told by what is no file of its own: by the compute driver's topology, and links.
    """
    return Gpu(
        uuid=_uuid(seen),
        index=seen.index,
        name=seen.compute_node.name if seen.compute_node else "",
        utilization_ratio=None,
        memory_used_bytes=None,
        memory_size_bytes=None,
        processes=None,
        unknown=HUNG,
        source=seen.device.driver,
        node=seen.device.node,
        other_names=_also(seen.device),
        attribution=_attribution(seen) if seen.device.driver in AMD else "process",
        lost=None,
        figures=HUNG_FIGURES,
    )


def _is_partitioned(device: _Device) -> bool:
    """Whether an AMD GPU says that it is cut into partitions (amdgpu_gfx_compute_mode_desc in amdgpu_gfx.h)."""
    return _text(device, "current_compute_partition") in PARTITIONS


def _rank(topology: Topology, device: _Device) -> tuple[bool, int, str]:
    """GPUs that compute come first and as AMD's runtime numbers them, then the others by their PCI address."""
    node = topology.nodes.get(_minor(device.node)) if device.driver in AMD else None
    return node is None, node.number if node else 0, f"{device.pci} {device.node}"


def _minor(node: str) -> int:
    return int(node.removeprefix("renderD"))


def _uuid(seen: _Seen) -> str:
    """As ROCR_VISIBLE_DEVICES names it; by its PCI address where the chip has no number of its own."""
    number = seen.compute_node.unique_id if seen.compute_node else None
    name = f"pci-{seen.device.pci}" if number is None else f"GPU-{number:016x}"
    return name if seen.whole else f"{name}/{seen.device.node}"


def _also(device: _Device) -> tuple[str, ...]:
    """Its own name, by which AMD's device plugin gives it, and its other nodes, such as `card0`, as Intel's does."""
    return device.name, *sorted(device.nodes - {device.node})


def _busy_ratio(device: _Device) -> float | None:
    percent = number_in(f"{device.folder}/gpu_busy_percent")
    return percent / PERCENT_MAX if percent is not None and 0 <= percent <= PERCENT_MAX else None


def _untold(
    device: _Device, ratio: float | None, used: int | None, size: int | None, *, asleep: bool
) -> dict[str, str]:
    """Why the figures of a whole GPU are not told: a file that there is not is one that the driver does not have."""
    files = {"utilization": [] if ratio is not None else ["gpu_busy_percent"]}
    files["memory"] = [
        name for name, told in (("mem_info_vram_used", used), ("mem_info_vram_total", size)) if told is None
    ]
    return {
        figure: "asleep" if asleep else UNREADABLE if any((device.folder / name).exists() for name in names)
        else "not_supported"
        for figure, names in files.items()
        if names
    }  # fmt: skip


def _figures(device: _Device) -> GpuFigures:
    """What its sensors tell; those of a GPU that sleeps are not asked, which would wake it."""
    try:
        folders = sorted((device.folder / "hwmon").iterdir())
    except OSError:
        folders = []
    found: dict[str, Any] = {}
    for figure, names, unit, most in SENSORS:
        told = (number_in(f"{folder}/{name}") for folder in folders for name in names)
        value = next((each * unit for each in told if each is not None), None)
        if value is not None and 0 <= value <= most:
            found[figure] = value
    return GpuFigures(**found, unknown={figure: UNREADABLE for figure, *_ in SENSORS if figure not in found})


def _text(device: _Device, name: str) -> str:
    try:
        return (device.folder / name).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _held(holders: Holders, device: _Device) -> Mapping[int, Held]:
    """Who holds a GPU; what cannot be told of one of a process's files is unknown of the process."""
    found = dict(holders.by_gpu.get(device.pci, {}))
    for name in device.nodes:
        found.update(holders.by_gpu.get(name, {}))
    return found


def _busiest(shares: Mapping[str, float] | None) -> float | None:
    return None if shares is None else min(1.0, max(shares.values(), default=0.0))


def _amd_bytes(part: Compute | None, held: Held | None) -> int | None:
    """What a process holds: the two figures share what it computes with, so the greater and not the sum."""
    sizes = ([part.vram_bytes] if part else []) + ([held.local_bytes] if held else [])
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


def _attribution(seen: _Seen) -> str:
    if not seen.whole:
        return NO_ATTRIBUTION
    return "process" if seen.compute_node is None else "device"


def _why_unknown(
    seen: _Seen,
    ratio: float | None,
    processes: tuple[GpuProcess, ...],
    computing: Mapping[int, Compute],
    holders: Holders,
) -> str | None:
    if not seen.whole:
        return PARTITIONED
    if ratio is None:
        return "its driver does not tell how busy it is"
    unmeasured = {each.pid for each in processes if each.utilization_ratio is None}
    if not unmeasured:
        return None
    if unmeasured & holders.unlisted:
        return UNLISTED.format(count=len(holders.unlisted))
    return NOT_TOLD if any(pid in computing for pid in unmeasured) else SPEECHLESS
