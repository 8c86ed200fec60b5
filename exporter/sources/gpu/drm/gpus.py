"""AMD and Intel GPUs from the Linux kernel (docs/reference/gpus.md).

GPUs are the render nodes in /sys/class/drm/renderD*. kfd.py has the names of AMD GPUs; clients.py and kfd.py have the
processes. The GPU's values are files of its device:

    power/runtime_status    `suspended`: switched off and idle; other reads would wake it
    gpu_busy_percent        utilisation; AMD
    current_compute_partition   partitions: SPX (one), DPX, TPX, QPX, CPX; AMD
    mem_info_vram_used      bytes; AMD
    mem_info_vram_total
    hwmon/hwmonN/           temp1_input or temp2_input, millidegrees; power1_average or power1_input, and power1_cap,
                            microwatts; AMD

Sources: Documentation/ABI/testing/sysfs-devices-power, Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst,
Documentation/hwmon/sysfs-interface.rst of the kernel.

A process's utilisation is that of its clients. With a queue on an AMD GPU it is unknown, unless the whole GPU is 0 %
busy and no compute unit runs the process. On chips without that number, the GPU must have been busy before, because
some drivers always report 0.
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

from exporter.model.gpu import NO_ATTRIBUTION, Gpu, GpuFigures, GpuProcess, GpuReadings
from exporter.sources.gpu.drm.clients import FILES_MAX, PROC, Clients, GpuClients, ProcessUse
from exporter.sources.gpu.drm.kfd import NO_PART, SYS, Announce, Compute, Kfd, Node, Topology, number_in
from exporter.sources.gpu.isolated.protocol import HUNG, HUNG_FIGURES, Question
from gpuwarden import gpu_names

SOURCE: Final = "drm"
WHO: Final = "the kernel's AMD and Intel drivers"
CHILD: Final = ("-m", "exporter.sources.gpu.drm.child")
"""The child process that reads the files."""

GPU_OF_NUMBER: Final = "renderD{}"
"""Name of a GPU in log messages."""

AMD: Final = frozenset({"amdgpu"})
XCP: Final = re.compile(r"amdgpu_xcp[._][0-9]+")
"""Name of a partition's device (amdgpu_xcp_drv.c); with a dot on early kernels."""

PARTITIONS: Final = frozenset({"DPX", "TPX", "QPX", "CPX"})
"""Values of `current_compute_partition` of a partitioned GPU."""

INTEL: Final = frozenset({"i915", "xe"})
PERCENT_MAX: Final = 100

SENSORS: Final = (
    ("temperature_celsius", ("temp1_input", "temp2_input"), 1e-3, 250.0),
    ("power_watts", ("power1_average", "power1_input"), 1e-6, 10_000.0),
    ("power_limit_watts", ("power1_cap",), 1e-6, 10_000.0),
)
"""Sensors: files (the first that exists), unit, and greatest possible value."""

COMPUTE_NOT_REPORTED: Final = "the kernel does not report the compute work of each process on an AMD GPU"
PARTITIONED: Final = "it is a partition, and the kernel reports only the whole GPU"
CLIENTS_NOT_REPORTED: Final = "its driver does not report the work of every process: a newer kernel may"
COMPUTE_UNREAD: Final = "AMD's compute driver cannot be read: check /sys/class/kfd/kfd"
UNREADABLE: Final = "unreadable"
NOT_LISTED: Final = "unlisted"
UNLISTED: Final = (
    "{count} processes may use the GPU, but not all their open files can be listed: run the exporter as root "
    f"or with CAP_SYS_PTRACE (limit: {FILES_MAX} files of a process)"
)


@dataclass(frozen=True, kw_only=True)
class _Device:
    """One render node, such as `renderD128`, with its GPU's PCI address, driver, folder and nodes.

    `name` is the PCI address, or a partition's name such as `amdgpu_xcp_1`.
    """

    node: str
    name: str
    pci: str
    driver: str
    folder: Path
    nodes: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """One GPU or partition (not `whole`) in one sample."""

    index: int
    device: _Device
    compute_node: Node | None
    asleep: bool
    whole: bool


class DrmGpus:
    """Reads the GPUs of some drivers, in one thread at a time.

    Args:
        drivers: their names.
        sys: the sysfs.
        proc: the proc file system.
        announce: called with the GPU (minor number of its render node) before a file of it is read; `None` after.
    """

    def __init__(
        self, drivers: frozenset[str], *, sys: Path = SYS, proc: Path = PROC, announce: Announce = lambda _: None
    ) -> None:
        self._drivers = drivers
        self._announce = announce
        self._drm = sys / "class/drm"
        self._bus = sys / "bus/pci/devices"
        self._kfd = Kfd(sys=sys, announce=announce)
        self._clients = Clients(proc=proc, announce=announce)
        self._names: dict[tuple[str, str], str] = {}
        self._was_busy: set[str] = set()

    def drivers_found(self) -> frozenset[str]:
        """The drivers that have a GPU now, by links, without a driver call."""
        return frozenset(device.driver for device in self._devices(Topology(nodes={}, whole=True)))

    def read(self, question: Question | None = None) -> GpuReadings:
        """Read every GPU, or those of the question.

        Raises:
            OSError: processes cannot be listed.
        """
        try:
            return self._read(question or Question())
        finally:
            self._announce(None)

    def _read(self, question: Question) -> GpuReadings:
        if question.without:  # before any of their files is read
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
        holders = self._clients.read(time.monotonic(), asleep=asleep, places=places, question=question)
        parts = Counter(device.pci for device in devices)
        gpus: list[Gpu] = []
        for index, device in enumerate(sorted(devices, key=partial(_rank, topology))):
            place = _minor(device.node)
            node = topology.nodes.get(place) if device.driver in AMD else None
            is_asked = question.is_about(place)
            if is_asked:
                self._announce(place)
            seen = _Seen(
                index=index,
                device=device,
                compute_node=node,
                asleep=device.node in asleep,
                whole=parts[device.pci] == 1 and not (is_asked and _is_partitioned(device)),
            )
            if not is_asked:
                if place in question.without:
                    gpus.append(_hung_gpu(seen))
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
        self._announce(_minor(device.node))
        asleep = _text(device, "power/runtime_status") == "suspended"
        self._announce(None)
        return asleep

    def _devices(self, topology: Topology) -> list[_Device]:
        try:
            nodes_of_drm = list(self._drm.iterdir())
        except FileNotFoundError:  # no GPU
            return []
        found: list[_Device] = []
        for node in nodes_of_drm:
            if not gpu_names.NODE.fullmatch(node.name):
                continue
            try:
                own = node.resolve(strict=True).parent.parent
                folder = self._card(topology.nodes.get(_minor(node.name))) if XCP.fullmatch(own.name) else own
                driver = (folder / "driver").readlink().name
                nodes = frozenset(each.name for each in (own / "drm").iterdir())
            except OSError:  # no driver, just removed, or an unused partition
                continue
            if driver in self._drivers:
                device = _Device(
                    node=node.name, name=own.name, pci=folder.name, driver=driver, folder=folder, nodes=nodes
                )
                found.append(device)
        return found

    def _card(self, place: Node | None) -> Path:
        # Raises OSError without such a partition or GPU.
        for address in place.addresses if place else ():
            with suppress(OSError):
                return (self._bus / address).resolve(strict=True)
        raise FileNotFoundError

    def _amd(self, seen: _Seen, computing: Mapping[int, Compute] | None, holders: GpuClients) -> Gpu:
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
        missing = _missing_metrics(device, ratio, used, size, asleep=seen.asleep) if seen.whole else {}
        if computing is None:
            missing["processes"] = UNREADABLE
        else:
            if ratio and any(part.queues for part in computing.values()):
                self._was_busy.add(device.node)
            held = _use_by_pid(holders, device) if seen.whole else {}
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
                missing["process_utilization"] = NOT_LISTED
        if missing:
            figures = replace(figures, unknown={**figures.unknown, **missing})
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
            other_names=_other_names(device),
            attribution=_attribution(seen),
            figures=figures,
        )

    def _amd_ratio(
        self,
        seen: _Seen,
        ratio: float | None,
        pid: int,
        part: Compute,
        held: Mapping[int, ProcessUse],
        holders: GpuClients,
    ) -> float | None:
        """A process's share of an AMD GPU's time."""
        if not seen.whole or pid in holders.unlisted:
            return None
        if part.queues != 0 and not self._computes_nothing(seen, ratio, pid):
            return None
        return _busiest(held.get(pid, ProcessUse()).shares)

    def _computes_nothing(self, seen: _Seen, ratio: float | None, pid: int) -> bool:
        if ratio != 0.0 or seen.compute_node is None:
            return False
        units = self._kfd.occupied_units(pid, seen.compute_node.gpu_id)
        return seen.device.node in self._was_busy if units is None else units == 0

    def _intel(self, seen: _Seen, holders: GpuClients) -> Gpu:
        # The driver reports no utilisation of the GPU, so it is the sum of all clients, if they are known.
        held = _use_by_pid(holders, seen.device)
        ratio: float | None = None
        unknown: str | None = None
        figures = GpuFigures()
        if seen.asleep:
            ratio = 0.0
        elif holders.unlisted:
            unknown = UNLISTED.format(count=len(holders.unlisted))
            figures = GpuFigures(unknown={"utilization": NOT_LISTED})
        elif any(each.shares is None for each in held.values()):
            unknown = CLIENTS_NOT_REPORTED
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
            other_names=_other_names(seen.device),
            figures=figures,
        )

    def _name(self, seen: _Seen) -> str:
        """The board's name, the chip's, or the PCI ids."""
        device = seen.device
        key = device.pci, device.node
        if key not in self._names:
            chip = seen.compute_node.name if seen.compute_node else ""
            numbers = f"{_text(device, 'vendor')}:{_text(device, 'device')}".replace("0x", "")
            self._names[key] = _text(device, "product_name") or chip or f"PCI {numbers}"
        return self._names[key]


def _of_whole_gpus(question: Question, devices: list[_Device]) -> Question:
    """Leave out all partitions of a GPU with one that hangs: each would cost a timeout."""
    hung = {device.pci for device in devices if _minor(device.node) in question.without}
    parts = (_minor(device.node) for device in devices if device.pci in hung)
    return replace(question, without=question.without | frozenset(parts))


def _hung_gpu(seen: _Seen) -> Gpu:
    # Stays in the readings, so that a container with this GPU is judged with it. No device file is read.
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
        other_names=_other_names(seen.device),
        attribution=_attribution(seen) if seen.device.driver in AMD else "process",
        lost=None,
        figures=HUNG_FIGURES,
    )


def _is_partitioned(device: _Device) -> bool:
    """Whether an AMD GPU has partitions (amdgpu_gfx_compute_mode_desc in amdgpu_gfx.h)."""
    return _text(device, "current_compute_partition") in PARTITIONS


def _rank(topology: Topology, device: _Device) -> tuple[bool, int, str]:
    """Order: compute GPUs as AMD's runtime numbers them, then others by PCI address."""
    node = topology.nodes.get(_minor(device.node)) if device.driver in AMD else None
    return node is None, node.number if node else 0, f"{device.pci} {device.node}"


def _minor(node: str) -> int:
    return int(node.removeprefix("renderD"))


def _uuid(seen: _Seen) -> str:
    """Its name in ROCR_VISIBLE_DEVICES, or its PCI address."""
    number = seen.compute_node.unique_id if seen.compute_node else None
    name = f"pci-{seen.device.pci}" if number is None else f"GPU-{number:016x}"
    return name if seen.whole else f"{name}/{seen.device.node}"


def _other_names(device: _Device) -> tuple[str, ...]:
    """Its other names: AMD's device plugin uses the device name, Intel's other nodes such as `card0`."""
    return device.name, *sorted(device.nodes - {device.node})


def _busy_ratio(device: _Device) -> float | None:
    percent = number_in(f"{device.folder}/gpu_busy_percent")
    return percent / PERCENT_MAX if percent is not None and 0 <= percent <= PERCENT_MAX else None


def _missing_metrics(
    device: _Device, ratio: float | None, used: int | None, size: int | None, *, asleep: bool
) -> dict[str, str]:
    # A missing file means that the driver does not support it.
    files = {"utilization": [] if ratio is not None else ["gpu_busy_percent"]}
    files["memory"] = [
        name
        for name, value_or_none in (("mem_info_vram_used", used), ("mem_info_vram_total", size))
        if value_or_none is None
    ]
    return {
        figure: "asleep" if asleep else UNREADABLE if any((device.folder / name).exists() for name in names)
        else "not_supported"
        for figure, names in files.items()
        if names
    }  # fmt: skip


def _figures(device: _Device) -> GpuFigures:
    """Read the sensors; must not be called for a sleeping GPU."""
    try:
        folders = sorted((device.folder / "hwmon").iterdir())
    except OSError:
        folders = []
    found: dict[str, Any] = {}
    for figure, names, unit, most in SENSORS:
        value_or_none = (number_in(f"{folder}/{name}") for folder in folders for name in names)
        value = next((each * unit for each in value_or_none if each is not None), None)
        if value is not None and 0 <= value <= most:
            found[figure] = value
    return GpuFigures(**found, unknown={figure: UNREADABLE for figure, *_ in SENSORS if figure not in found})


def _text(device: _Device, name: str) -> str:
    try:
        return (device.folder / name).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _use_by_pid(holders: GpuClients, device: _Device) -> Mapping[int, ProcessUse]:
    """Use of a GPU by process."""
    found = dict(holders.by_gpu.get(device.pci, {}))
    for name in device.nodes:
        found.update(holders.by_gpu.get(name, {}))
    return found


def _busiest(shares: Mapping[str, float] | None) -> float | None:
    return None if shares is None else min(1.0, max(shares.values(), default=0.0))


def _amd_bytes(part: Compute | None, held: ProcessUse | None) -> int | None:
    # The two numbers overlap, so the greater one counts.
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
    holders: GpuClients,
) -> str | None:
    if not seen.whole:
        return PARTITIONED
    if ratio is None:
        return "its driver does not report its utilisation"
    unmeasured = {each.pid for each in processes if each.utilization_ratio is None}
    if not unmeasured:
        return None
    if unmeasured & holders.unlisted:
        return UNLISTED.format(count=len(holders.unlisted))
    return COMPUTE_NOT_REPORTED if any(pid in computing for pid in unmeasured) else CLIENTS_NOT_REPORTED
