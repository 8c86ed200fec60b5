"""What the sources read in one look at the host, and the snapshot that the collectors and `/evidence` publish.

Values only. Unknown is `None` with its reason beside it; a measured nothing is a 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from exporter.model.thresholds import Thresholds

if TYPE_CHECKING:  # not for the processes that ask drivers: they know GPUs alone, and are to be small
    from gpuwarden.state_file import JobFile, Stamp, TaskFile, WorkerFile


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Why a figure does not exist: `reason` is a fixed word for a label, `because` a sentence for people."""

    reason: str
    because: str


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


@lru_cache(maxsize=2)
def _places(listed: tuple[tuple[int, ...], ...]) -> Mapping[int, Sequence[int]]:
    """By pid, the places of the lists that it is on: those of one look are mostly those of the next."""
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
class Probe:
    """How a server is asked: `docker`, by its own health check, or `http`, for `target` at `port` of its own address.

    `silence_s` is how long it may not answer, seconds.
    """

    kind: str
    silence_s: float
    port: int = 0
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What Docker's own health check of a container has told last.

    `newest` names its newest result and is empty before the first, `passed` says how that one came out, and `fresh_s`
    is how long it can stand before another is overdue, seconds.
    """

    status: str
    failing_streak: int
    newest: str
    passed: bool
    fresh_s: float


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a container's labels ask for, where they ask for anything, and how it can be asked now."""

    probe: Probe | Unknown
    address: str | None = None
    health: Health | None = None


@dataclass(frozen=True, kw_only=True)
class Tenancy:
    """What a container may hold of each of its GPUs' memory, bytes, `None` where nobody says.

    `recyclable`: its owner lets it be stopped for that memory's sake. `invalid`: a budget is meant and cannot be read.
    """

    budget_bytes: int | None = None
    recyclable: bool = False
    invalid: Unknown | None = None


@dataclass(frozen=True, kw_only=True)
class Container:
    """One place where managed work lives: an engine's container, a systemd service, or a worker's own process tree.

    `incarnation` changes whenever what runs in it is another: full id and StartedAt; pod uid, full id and restart
    count; unit and invocation id; pid, start ticks and boot id.
    `gpu_request` is what it asked for, as NVIDIA_VISIBLE_DEVICES spells it: `all`, indexes or UUIDs; then render nodes,
    such as `renderD128`, or `dri` for all of them; `None` for none. `all` is all of NVIDIA's; and what runs outside of
    any engine has it where it names none, and then sees every GPU of a host without NVIDIA's.
    `folders` are the subdirectories of `$GPUWARDEN_DIR` that are mounted into it. One that is down has pid 0. What is
    `paused` runs, and nothing in it gets any time.
    """

    kind: str
    id: str
    name: str
    incarnation: str
    pid: int
    gpu_request: tuple[str, ...] | None
    image: str | None = None
    folders: tuple[str, ...] = ()
    server: Server | None = None
    paused: bool = False
    tenancy: Tenancy = field(default_factory=Tenancy)
    namespace: str | None = None
    pod: str | None = None
    group: str | None = None
    """The directory of its cgroup, where whoever lists it knows it already."""
    listed: bool = True
    """Whether whoever runs it still tells of it; where not, it is known by its cgroup."""


@dataclass(frozen=True, kw_only=True)
class WorkerSighting:
    """One worker's files and lock. `alive` is the lock: held, free, or `None` when it could not be tested.

    `pid` is the lock holder's in the host's namespace; `container_id` its container, `None` when in none or unknown.
    Of a dead worker it is the container it was in, where that is still known; `folder` is its files' subdirectory.
    """

    worker: "WorkerFile"
    job: "JobFile | None"
    alive: bool | None
    pid: int | None
    container_id: str | None
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """All the CPU time that one process has used, over every thread it had, clock ticks.

    With `start_ticks`, when it started, a pid names one process until the next boot. `uninterruptible` is whether its
    main thread waits in the kernel for what must not be interrupted, as for storage: its state is D.
    """

    start_ticks: int
    used_ticks: int
    uninterruptible: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessWork:
    """What one process has done since it started, all its threads and the children it has waited for together.

    `io_bytes` is what it read and wrote, from the page cache or a disk, `None` where the kernel will not say; `faults`
    are page faults, minor and major.
    """

    start_ticks: int
    io_bytes: int | None
    faults: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerReadings:
    """Every worker of the host, and what could not be read: (reason, how many).

    `such_as` says which file is the first of a reason, and what is wrong with it. `unread` are the folders with workers
    that are left out here, though they may live.
    """

    workers: tuple[WorkerSighting, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    such_as: Mapping[str, str] = field(default_factory=dict)
    duplicates: int = 0
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TaskSighting:
    """One task of another runner's, and whether its process is there; `None` where that cannot be told."""

    task: "TaskFile"
    alive: bool | None


@dataclass(frozen=True, kw_only=True)
class TaskReadings:
    """Every task of other runners, and what could not be read: (reason, how many); `such_as` as of workers."""

    tasks: tuple[TaskSighting, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    such_as: Mapping[str, str] = field(default_factory=dict)


class GpuShare(NamedTuple):
    """One container's part of one GPU; `None` is unknown.

    `busiest_ratio` is what decides whether it is idle there: the most that any engine did for its listed processes;
    `None` where that is its `utilization_ratio`. It stays, be it 0, where that is not told because what the GPU does
    cannot be told apart: nothing is known of it there but what is listed.
    `attributed` is whether what the GPU does can be told apart as far as the container is concerned; `None` where it is
    not known that the GPU does anything, though its driver can tell.
    """

    gpu: str
    utilization_ratio: float | None
    memory_bytes: int | None
    attributed: bool | None = None
    busiest_ratio: float | None = None


_NOTHING_YET: Final[Mapping[str, Any]] = MappingProxyType({})


class ContainerEvidence(NamedTuple):
    """One container's figures, and for how long it has shown no sign of life, seconds; `None` is unknown.

    A full host has one made anew of each container at each look: as a dataclass that costs three times as much.
    """

    container: Container
    shares: tuple[GpuShare, ...]
    gpus: tuple[str, ...]
    gpu_idle_s: float | None
    gpu_unknown: Unknown | None
    busy_s: Mapping[str, float]
    ram_bytes: int | None
    ram_anon_bytes: int | None
    ram_working_set_bytes: int | None
    ram_still_s: float | None
    ram_unknown: Unknown | None
    io_still_s: float | None = None
    fault_still_s: float | None = None
    cpu_still_s: float | None = None
    work_unknown: Unknown | None = None
    gpu_pegged_s: float | None = None
    """For how long the same of its GPUs have been fully taken by it, without a pause, and the others idle."""
    gpu_not_seen_busy_s: float | None = None
    """For how long none of its GPUs was measured to do anything for it: each was idle, or unknown, or it is on none."""
    peak_bytes: Mapping[str, int] = _NOTHING_YET
    """The most memory that it was seen to hold on each GPU, in this incarnation."""
    oom_kills: int | None = None
    """How many of its processes the kernel has killed for want of memory, in this incarnation."""
    lost_gpus: tuple[str, ...] = ()
    """Which of the GPUs that it was given are lost."""
    gpu_lost_s: float | None = None
    """For how long one of its GPUs has been lost and each other one idle or lost too, seconds; `None` while none is
    lost, or another is unknown."""
    nameless: tuple[str, ...] = ()
    """By what it was given GPUs that are missing and whose UUIDs nobody knows."""
    pauses: tuple[tuple[float, float], ...] = ()
    """From when until when it was seen paused, CLOCK_BOOTTIME seconds, as far as it was looked at without a gap."""

    @property
    def work_still_s(self) -> float | None:
        """For how long its processes have done no work: I/O, page faults and CPU time all still; `None` is unknown."""
        if self.io_still_s is None or self.fault_still_s is None or self.cpu_still_s is None:
            return None
        return min(self.io_still_s, self.fault_still_s, self.cpu_still_s)

    @property
    def unmoved_s(self) -> float | None:
        """For how long nothing of it has moved, though its GPU may spin (A14b, A19); `None` is unknown.

        Its RAM, I/O and page faults were still all that time, and its GPU was pegged: what waits for ever holds it, and
        a process may spin beside it. Or its GPU was never seen busy, being idle or unknown: unknown is not idle, so its
        processes used no CPU time either.
        """
        if self.ram_still_s is None or self.io_still_s is None or self.fault_still_s is None:
            return None
        at_rest_s = None
        if self.gpu_not_seen_busy_s is not None and self.cpu_still_s is not None:
            at_rest_s = min(self.gpu_not_seen_busy_s, self.cpu_still_s)
        known_s = [each for each in (self.gpu_pegged_s, at_rest_s) if each is not None]
        return min(max(known_s), self.ram_still_s, self.io_still_s, self.fault_still_s) if known_s else None

    @property
    def spinning_s(self) -> float | None:
        """For how long its GPU has been pegged without a pause and nothing else of it has moved; `None` is unknown."""
        signs_s = (self.gpu_pegged_s, self.ram_still_s, self.io_still_s, self.fault_still_s)
        known_s = [each for each in signs_s if each is not None]
        return min(known_s) if len(known_s) == len(signs_s) else None


@dataclass(frozen=True, kw_only=True)
class ServerEvidence:
    """One server, and what came of asking it. `probe` says why, where it is not asked; `None` is unknown.

    `workers` is how many workers' files name its container as theirs: then it is theirs, and no server.
    """

    container: Container
    probe: Probe | Unknown
    workers: int | None
    answered: bool | None = None
    unanswered_s: float | None = None
    unknown: Unknown | None = None
    because: str = ""
    """Why the newest asking counts as no answer."""


@dataclass(frozen=True, kw_only=True)
class GpuTotals:
    """What has been seen of one GPU so far: how long it was busy, seconds, and its unknown samples.

    `unknown` counts them by (figure, reason).
    """

    busy_s: float | None = None
    unknown: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DriverHealth:
    """How asking the drivers of one source went so far, and what they have reported unasked: NVIDIA's alone does.

    Of the processes that ask, `killed` are those of which a call did not return, and `abandoned` those of them that
    still hang in it, beyond any signal. `xids` counts the errors that it reported, by GPU and NVIDIA's number for them.
    """

    killed: int = 0
    abandoned: int = 0
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a process was asked for what it has told last, monotonic, and how long its answer took, both in seconds."""

    asked_s: float
    took_s: float


@dataclass(frozen=True, kw_only=True)
class SourceHealth:
    """How one source's last reading went, why it failed where it did, and when one last went well, Unix seconds.

    Of engines, which are asked in threads of their own, it is the listing: what that took, and when it was taken. Of
    drivers, which are asked in processes of their own, it is the answer: what that took, and when it was asked for.
    """

    source: str
    success: bool
    duration_s: float
    because: str | None = None
    succeeded_unix_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything known at `taken`, immutable: scrapes and `/evidence` read it and change nothing."""

    host: str
    taken: "Stamp"
    gpus: GpuReadings | None
    workers: WorkerReadings | None
    containers: tuple[ContainerEvidence, ...]
    sources: tuple[SourceHealth, ...]
    thresholds: Thresholds
    """By which the evidence was judged."""
    ended: tuple[ContainerEvidence, ...] = ()
    """Where dead workers were, as far as that does not run any more: identity, and no figures."""
    dead_s: Mapping[str, float] = field(default_factory=dict)
    """For how long each dead worker's lock has been seen free beside its files, seconds, by worker."""
    cpu_still_s: Mapping[int, float] = field(default_factory=dict)
    """For how long each lock holder's process has used no CPU time, seconds, by pid; one not here is unknown."""
    servers: tuple[ServerEvidence, ...] | None = None
    """The containers that are to be asked as servers; `None` when containers cannot be listed."""
    tasks: TaskReadings | None = None
    """The tasks of other runners; `None` when no folder of theirs is given, or none can be read."""
    drivers: Mapping[str, DriverHealth] = field(default_factory=dict)
    """By the source whose drivers are asked in a process of its own."""
    gpu_totals: Mapping[str, GpuTotals] = field(default_factory=dict)
    """What has been counted of each GPU, by UUID."""
    unplaced: tuple[GpuShare, ...] = ()
    """What the processes on each GPU's list have of it that are in none of the containers; empty where it is not known
    of every container which processes are in it."""
    returning_bytes: Mapping[str, int] = field(default_factory=dict)
    """How much of each GPU's memory processes held that have ended and the driver counts as in use still, by UUID; of
    one not here unknown."""
    gpu_lost_s: Mapping[str, float] = field(default_factory=dict)
    """For how long each GPU has been lost, seconds, by UUID; 0 for one that is there, and of one not here unknown."""
    lost_gpus: tuple[str, ...] = ()
    """The GPUs that are lost, by UUID; without those that have not told theirs."""
    unseen: tuple[str, ...] = ()
    """Containers that run and may be ranked by their VRAM budgets, of which nothing more is known."""
    apart: Mapping[str, ContainerEvidence] = field(default_factory=dict)
    """By worker, of each that shares its container with another live one: the same of what counts as its own processes,
    its RAM without the page cache. A worker that has its container to itself is not here."""
    unknown: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """How many samples so far left something unknown, by (container, what, reason)."""
    took_s: float | None = None
    """How long the look took, seconds."""

    def container_of(self, sighting: WorkerSighting) -> ContainerEvidence | None:
        """The container a worker lives in, or its own process tree; of a dead one, where it was."""
        by_id, by_pid = self._places
        if sighting.container_id is not None:
            return by_id.get(sighting.container_id)
        return None if sighting.pid is None else by_pid.get(sighting.pid)

    def grace_s(self, job: "JobFile") -> float | None:
        """How long after its start a window of GPU health begins at the soonest (A7); `None` of a job without a GPU."""
        limits = self.thresholds
        return limits.patience.grace_s(job, grace_s=limits.health_grace_s, window_s=limits.health_window_s)

    def cpu_still_of(self, sighting: WorkerSighting) -> float | None:
        """For how long a worker's process has been seen to use no CPU time, seconds."""
        return None if sighting.pid is None else self.cpu_still_s.get(sighting.pid)

    @cached_property
    def _places(self) -> tuple[Mapping[str, ContainerEvidence], Mapping[int, ContainerEvidence]]:
        """Containers by id, and process trees by the pid of their worker: asked several times for each worker."""
        by_id = {each.container.id: each for each in (*self.ended, *self.containers)}
        trees = (each for each in self.containers if each.container.kind == "process")
        return by_id, {each.container.pid: each for each in trees}
