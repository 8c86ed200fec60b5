"""GPUs as their drivers show them: figures, processes, MIG instances, and what is unknown of each. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple


class GpuProcess(NamedTuple):
    """One process on a GPU's list. `pid` is in the host's namespace; unknown figures are `None`.

    `utilization_ratio` is its part of what the GPU's own utilisation is of.
    """

    pid: int
    utilization_ratio: float | None
    memory_bytes: int | None
    busiest_ratio: float | None = None
    """The most that any engine did for it, copies and video too, where that is more: it decides whether it is idle."""


RATIO_DIGITS: Final = 9
"""Ratios are sums and differences of whole percents: what binary fractions add to 0.90 - 0.85 is not over 0.05."""


THROTTLE_REASONS: Final = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""Why a GPU's clocks can be below what they could be: the bits of nvmlClocksThrottleReasons, the lowest first."""


WATCHED: Final = ("gpu", "utilization", "memory", "processes", "process_utilization")
"""What `GpuFigures.unknown` names besides sensors and error counters: figures without which nobody can tell what is
done on a GPU; `gpu` is all of one that cannot be asked. Nothing is named that nobody ever tells of such a GPU: of an
instance how busy it is, of Intel's GPUs their memory."""


UNREMARKED: Final = frozenset({"hung", "asleep", "not_told"})
"""Why one of them may be unknown without a word of it on the page `/`: a call that hangs is logged by what killed it,
and the others come and go with what runs there."""


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """A GPU's sensors and error counters. What is `None` is unknown; `unknown` has a fixed word why, by figure.

    `throttled` names why its clocks are held down, if anything does. ECC errors are counted since the driver was
    loaded, and, as `lifetime`, since the GPU was made; rows are remapped for good. `pcie_errors` has a count of each
    kind that the GPU and its driver tell.
    """

    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    throttled: Sequence[str] | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_lifetime_corrected: int | None = None
    ecc_lifetime_uncorrected: int | None = None
    remapped_rows_corrected: int | None = None
    remapped_rows_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    pcie_replays: int | None = None
    pcie_errors: Mapping[str, int] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MigInstance:
    """Which part of a GPU an instance is: `number` counts the instances of the GPU `parent` (its UUID).

    Compute instances of one GPU instance share its memory: each of them `shares_memory`, and is told all of it.
    """

    parent: str
    number: int
    gpu_instance: int
    compute_instance: int
    shares_memory: bool = False


UNTOLD: Final = "none"
"""The attribution of a part of a GPU of which no figure tells how busy it is: an instance (MIG), a partition."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one instance of it (MIG), which then has `mig` and the `index` of the GPU.

    `processes` is `None` when the driver could not list them, with the reason in `unknown`. `source` tells its figures,
    where that is not the source of all readings. `node` is its render node, such as `renderD128`: GPUs that have one
    are asked for by it, and not by their index. `attribution` is `device` where nobody tells what each process computes
    on it, `none` where nobody tells what is done on it at all, and else `process`.
    """

    uuid: str
    index: int
    name: str
    utilization_ratio: float | None
    memory_used_bytes: int | None
    memory_size_bytes: int | None
    processes: tuple[GpuProcess, ...] | None
    unknown: str | None = None
    memory_free_bytes: int | None = None
    """As the driver tells it: used and free are less than the whole where it keeps some for itself."""
    source: str | None = None
    node: str | None = None
    also: tuple[str, ...] = ()
    """By what else it is given to a container."""
    attribution: str = "process"
    figures: GpuFigures = field(default_factory=GpuFigures)
    xids_watched: bool = False
    """Whether its driver's error reports are waited for: none so far is then a measured nothing."""
    mig: MigInstance | None = None
    lost: bool | None = False
    """Whether its driver says that it is lost; `None` where that is unknown, for it cannot be asked just now."""

    @property
    def number(self) -> str:
        """How the host counts it: `0`, or `0:1` for the second instance of the first GPU."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig.number}"

    @property
    def place(self) -> int:
        """By which number its driver is asked about it: its index, or the minor number of its render node."""
        return self.index if self.node is None else int(self.node.removeprefix("renderD"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What a container can be given it by: UUID, node or number, and how drivers before R470 named instances."""
        if self.node is not None:
            return self.uuid, self.node, *self.also
        if self.mig is None:
            return self.uuid, self.number
        older = f"MIG-{self.mig.parent}/{self.mig.gpu_instance}/{self.mig.compute_instance}"
        return self.uuid, self.number, older

    @property
    def hangs(self) -> bool:
        """Whether calls about it do not return, so that nobody asks about it."""
        return self.figures.unknown.get("gpu") == "hung"

    @property
    def unwatched(self) -> Mapping[str, str]:
        """Why figures are unknown without which nobody can tell what is done on it, by figure; none of `UNREMARKED`."""
        unknown = self.figures.unknown
        return {each: unknown[each] for each in WATCHED if each in unknown and unknown[each] not in UNREMARKED}

    @cached_property
    def by_pid(self) -> Mapping[int, Sequence[GpuProcess]]:
        """The processes on its list by pid: none where it could not be listed. Each container of a host looks here."""
        listed = self.processes or ()
        found: dict[int, tuple[GpuProcess, ...]] = dict(zip(self.pids, zip(listed, strict=True), strict=True))
        if len(found) < len(listed):  # one of them is there twice: of hundreds each second hardly any is
            found = {}
            for process in listed:
                found[process.pid] = (*found.get(process.pid, ()), process)
        return found

    @cached_property
    def pids(self) -> tuple[int, ...]:
        """The pids on its list, in its order; none where it could not be listed."""
        return tuple([process[0] for process in self.processes or ()])

    @cached_property
    def listed_ratio(self) -> float | None:
        """What the processes on its list do of it, together; `None` where that is unknown of any of them."""
        known = [process[1] for process in self.processes or ()]
        return None if self.processes is None or None in known else float(sum(filter(None, known)))

    @cached_property
    def unattributed_ratio(self) -> float | None:
        """What it does beyond the processes on its list, less than 0 where they are told to do more than it does.

        `None` when either is unknown.
        """
        if self.utilization_ratio is None or self.listed_ratio is None:
            return None
        return round(self.utilization_ratio - self.listed_ratio, RATIO_DIGITS)

    @cached_property
    def hidden_ratio(self) -> float | None:
        """What it does that none of the processes on its list can have done: beyond the engine that did most for each.

        Whether a driver counts copies and video as the GPU's own time is not known, so they may be that time; `None`
        when either is unknown.
        """
        if (beyond := self.unattributed_ratio) is None:
            return None
        more = [each for each in self.processes or () if each[3] is not None]  # of hundreds each second mostly nobody
        others = ((each.busiest_ratio or 0.0) - (each.utilization_ratio or 0.0) for each in more)
        return round(beyond - sum(others), RATIO_DIGITS) if more else beyond

    @cached_property
    def listed_bytes(self) -> int | None:
        """What the processes on its list hold of its memory, together; `None` where that is unknown of any of them."""
        known = [process.memory_bytes for process in self.processes or ()]
        return None if self.processes is None or None in known else sum(used or 0 for used in known)


def _places(listed: tuple[tuple[int, ...], ...]) -> Mapping[int, Sequence[int]]:
    """By pid, the places of the lists that it is on."""
    found: dict[int, tuple[int, ...]] = {}
    for place, pids in enumerate(listed):
        here = (place,)
        for pid in pids:
            before = found.setdefault(pid, here)
            if before[-1] != place:
                found[pid] = before + here
    return found


UNIDENTIFIED: Final = "unidentified-"
"""How the name of a GPU begins that has not told its UUID; its index follows."""


ALL_NODES: Final = "dri"
"""How a container asks for every GPU that has a render node: by the folder of all nodes."""


NODE: Final = re.compile(r"renderD[0-9]+")
"""The name of a render node (Documentation/gpu/drm-uapi.rst of the kernel)."""


NUMBERED: Final = "gpu"
"""The source of the GPUs that go by their index: NVIDIA's."""


WITH_NODES: Final = "drm"
"""The source of the GPUs that go by their render node: AMD's and Intel's."""


@dataclass(frozen=True, kw_only=True)
class GpuReadings:
    """Every GPU of the host, from one source, `simulated` or the name of a driver's interface; or of several together.

    `failed` are those of them that did not answer: their GPUs are missing here. `gone` are the render nodes of
    GPUs that were read before and are not here, with their UUIDs. `nvidia_unread`: something of NVIDIA's is on the
    host, or may be, and none of its GPUs is here. `unlisted` are the pids of which it could not be told which GPUs with
    a render node they have open, `None` where there are too many to name. `dropped` are the UUIDs of those that were
    read before, whose driver answers and lists them no more.
    """

    source: str
    gpus: tuple[Gpu, ...]
    failed: tuple[str, ...] = ()
    gone: Mapping[str, str] = field(default_factory=dict)
    nvidia_unread: bool = False
    unlisted: tuple[int, ...] | None = ()
    dropped: tuple[str, ...] = ()

    @cached_property
    def asked(self) -> dict[tuple[tuple[str, ...], bool], object]:
        """What each request resolves to, as far as `exporter.evidence.container_history` has worked it out."""
        return {}

    @cached_property
    def by_name(self) -> Mapping[str, Sequence[int]]:
        """By each of these names, the places of the GPUs in `gpus` that are given by it."""
        found: dict[str, list[int]] = {}
        for place, gpu in enumerate(self.gpus):
            for name in gpu.names:
                found.setdefault(name, []).append(place)
        return found

    @cached_property
    def by_pid(self) -> Mapping[int, Sequence[int]]:
        """By pid, the places of the GPUs in `gpus` that list it."""
        return _places(tuple([gpu.pids for gpu in self.gpus]))

    @cached_property
    def there(self) -> frozenset[str]:
        """The UUIDs of those that are no lost ones for sure."""
        return frozenset(gpu.uuid for gpu in self.gpus if gpu.lost is False)

    def those_there(self, uuids: tuple[str, ...]) -> tuple[str, ...]:
        """Of these GPUs those that are no lost ones for sure."""
        there = self.there
        return uuids if there.issuperset(uuids) else tuple(uuid for uuid in uuids if uuid in there)

    @cached_property
    def hung(self) -> frozenset[str]:
        """The UUIDs of those that are left out because calls about them do not return."""
        return frozenset(gpu.uuid for gpu in self.gpus if gpu.hangs)

    @cached_property
    def nodes_are_known(self) -> bool:
        """Whether a GPU with a render node is here, was read before, or may be there unread."""
        return bool(self.gone) or WITH_NODES in self.failed or any(gpu.node is not None for gpu in self.gpus)

    @cached_property
    def numbered(self) -> frozenset[str]:
        """The UUIDs of NVIDIA's: those that go by an index."""
        return frozenset(gpu.uuid for gpu in self.gpus if gpu.node is None)


@dataclass(frozen=True, kw_only=True)
class GpuTotals:
    """What has been seen of one GPU so far: how long it was busy, seconds, and its unknown samples.

    `unknown` counts them by (figure, reason).
    """

    busy_s: float | None = None
    unknown: Mapping[tuple[str, str], int] = field(default_factory=dict)
