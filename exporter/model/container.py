"""Containers, what their labels ask for, and what was measured of each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from exporter.model.unknown import Unknown
from gpuwarden import conditions

NOTHING_YET: Final[Mapping[str, Any]] = MappingProxyType({})


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
    managed: bool | None = None
    """Whether it opted in to being stopped and started; `None` where no label says so: services, pods, processes."""
    tenancy: Tenancy = field(default_factory=Tenancy)
    namespace: str | None = None
    pod: str | None = None
    group: str | None = None
    """The directory of its cgroup, where whoever lists it knows it already."""
    listed: bool = True
    """Whether whoever runs it still tells of it; where not, it is known by its cgroup."""


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


class RamUse(NamedTuple):
    """A container's RAM at one moment, bytes, or why it is unknown; the fields of `cgroup.Memory` have their names."""

    usage_bytes: int | None
    anon_bytes: int | None = None
    working_set_bytes: int | None = None
    oom_kills: int | None = None
    """How many of its processes the kernel has killed for want of memory, in this incarnation."""
    unknown: Unknown | None = None


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
    ram: RamUse
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
    peak_bytes: Mapping[str, int] = NOTHING_YET
    """The most memory that it was seen to hold on each GPU, in this incarnation."""
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
    def ram_bytes(self) -> int | None:
        """The RAM that it uses, bytes; `None` is unknown."""
        return self.ram.usage_bytes

    @property
    def work_still_s(self) -> float | None:
        """For how long its processes have done no work: I/O, page faults and CPU time all still; `None` is unknown."""
        return conditions.least(self.io_still_s, self.fault_still_s, self.cpu_still_s)

    @property
    def unmoved_s(self) -> float | None:
        """For how long nothing of it has moved, though its GPU may be fully used; `None` is unknown."""
        return conditions.unmoved_s(
            gpu_pegged_s=self.gpu_pegged_s,
            gpu_not_seen_busy_s=self.gpu_not_seen_busy_s,
            cpu_still_s=self.cpu_still_s,
            ram_still_s=self.ram_still_s,
            io_still_s=self.io_still_s,
            fault_still_s=self.fault_still_s,
        )

    @property
    def spinning_s(self) -> float | None:
        """For how long its GPU has been fully used without a pause and nothing else has moved; `None` is unknown."""
        return conditions.spinning_s(
            gpu_pegged_s=self.gpu_pegged_s,
            ram_still_s=self.ram_still_s,
            io_still_s=self.io_still_s,
            fault_still_s=self.fault_still_s,
        )


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
