"""Answers of the exporter's `/evidence`. Pure.

    GET /evidence?worker=NAME      ->  `WorkerFacts` as JSON; 404 for an unknown worker
    GET /evidence?container=NAME   ->  `ServerFacts` as JSON; null container fields if it does not run
    GET /evidence?tenant=NAME      ->  `OnDemandFacts` as JSON; 404 if unknown

Durations are seconds, sizes bytes, ratios 0 to 1. `null` means unknown, and `*_unknown` says why.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from gpuwarden.errors import GpuwardenError

if TYPE_CHECKING:  # only readers need pydantic; the exporter must stay small
    from pydantic import TypeAdapter


class FactsError(GpuwardenError):
    """An answer of `/evidence` is invalid."""


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """One container at one moment."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True, "allow_inf_nan": False}

    host: str
    sample_age_s: float
    # Without a container, the worker's process tree. After a death, its last container.
    container_kind: str | None
    container: str | None
    container_id: str | None
    container_incarnation: str | None
    gpus: list[str] | None
    gpu_simulated: bool | None
    gpu_idle_s: float | None
    gpu_unknown: str | None
    # Time with the same GPUs saturated and the others idle; time since one was busy.
    gpu_saturated_s: float | None = None
    gpu_last_busy_age_s: float | None = None
    ram_bytes: int | None
    ram_idle_s: float | None
    ram_unknown: str | None
    io_idle_s: float | None
    page_fault_idle_s: float | None
    container_cpu_idle_s: float | None
    heavy_work_idle_s: float | None = None
    work_unknown: str | None
    # Pids by GPU UUID; null if unreadable.
    gpu_pids: dict[str, list[int] | None] | None
    # Time with one GPU lost and the others idle or lost; time since each was lost.
    gpu_lost_s: float | None = None
    lost_gpus_s: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerFacts(ContainerFacts):
    """One worker and its job at one moment."""

    worker: str
    alive: bool | None
    worker_incarnation: str
    worker_pid: int | None = None
    # Owner of its file; whether its pid or start time is gone, if dead.
    worker_uid: int | None = None
    process_ended: bool | None = None
    heartbeat_age_s: float | None
    # Time without CPU time; time with a free lock and an old heartbeat; limit of both.
    cpu_idle_s: float | None
    dead_s: float | None
    dead_after_s: float
    container_workers: int | None
    job_id: int | None
    attempt: int | None
    phase: str | None
    phase_age_s: float | None
    step: int | None
    local_rank: int | None = None
    elapsed_s: float | None
    budget_s: float | None
    stall_timeout_s: float | None
    busy_timeout_s: float | None = None
    # Limits without a step beat and without other activity.
    stuck_after_s: float | None = None
    stuck_idle_s: float | None = None
    gang_stuck_after_s: float | None = None
    gang_stuck_idle_s: float | None = None
    step_beat_age_s: float | None
    # Limits of GPU inactivity in this phase (A7).
    health_window_s: float | None
    health_grace_s: float | None
    # False: an alert only.
    health_acts: bool | None = None


@dataclass(frozen=True, kw_only=True)
class VramShareFacts:
    """A container's share of a GPU's memory."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True}

    container: str
    incarnation: str
    used_bytes: int | None
    budget_bytes: int | None
    # Whether its labels allow a recycle.
    recyclable: bool


@dataclass(frozen=True, kw_only=True)
class GpuMemoryFacts:
    """Memory of one GPU at one moment."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True}

    gpu: str
    size_bytes: int | None
    free_bytes: int | None
    # Budget excesses within `tie_bytes` count as equal.
    floor_bytes: int
    tie_bytes: int
    tenants: list[VramShareFacts]
    # Memory of ended processes that the driver has not freed.
    reclaiming_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServerFacts(ContainerFacts):
    """One container by name, its server's probe, and its GPUs' memory."""

    probe: str | None
    # Workers whose files name this container, dead ones too.
    workers: int | None
    # Of this incarnation; time without an answer; its limit.
    answered: bool | None
    probe_failing_s: float | None
    restart_after_s: float | None
    server_fault_idle_s: float | None = None
    probe_unknown: str | None
    cards: list[GpuMemoryFacts] | None
    # Other containers that may be recycled, without further facts.
    unseen: list[str]
    # Missing GPUs with an unknown UUID, not in `gpus`.
    nameless_gpus: list[str] | None


@dataclass(frozen=True, kw_only=True)
class OnDemandGpuFacts:
    """Memory of a GPU that a tenant on demand may use."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True}

    gpu: str
    free_bytes: int | None
    # What others that are on still need.
    reclaiming_bytes: int | None
    reserved_bytes: int
    floor_bytes: int

    @property
    def room_bytes(self) -> int | None:
        """What is free for it."""
        if self.free_bytes is None or self.reclaiming_bytes is None:
            return None
        return self.free_bytes - self.reclaiming_bytes - self.reserved_bytes

    @property
    def is_short(self) -> bool | None:
        """Whether it is under its floor."""
        if self.free_bytes is None or self.reclaiming_bytes is None:
            return None
        return self.free_bytes + self.reclaiming_bytes < self.floor_bytes


@dataclass(frozen=True, kw_only=True)
class OnDemandFacts:
    """One tenant on demand at one moment."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True, "allow_inf_nan": False}

    host: str
    sample_age_s: float
    tenant: str
    kind: str
    handle: str
    on: bool
    # Null with an invalid annotation.
    needed_bytes: int | None
    invalid: str | None
    # Times on or off, with room, short of memory, without GPU use.
    state_s: float
    room_s: float | None
    short_s: float | None
    idle_s: float | None
    cards: list[OnDemandGpuFacts]
    # Limits.
    after_s: float
    idle_after_s: float
    min_s: float


_Facts = TypeVar("_Facts", WorkerFacts, ServerFacts, OnDemandFacts)


def render(facts: ContainerFacts | OnDemandFacts) -> str:
    """Render one JSON object."""
    return json.dumps(asdict(facts), allow_nan=False)


def parse(text: str) -> WorkerFacts:
    """Parse an answer about a worker.

    Raises:
        FactsError: a field is missing or invalid.
    """
    return _parse(WorkerFacts, text)


def parse_server(text: str) -> ServerFacts:
    """Parse an answer about a server; see `parse`."""
    return _parse(ServerFacts, text)


def parse_on_demand(text: str) -> OnDemandFacts:
    """See `parse`."""
    return _parse(OnDemandFacts, text)


@cache
def _readers() -> "dict[type, TypeAdapter[Any]]":
    from pydantic import TypeAdapter  # noqa: PLC0415 - as above

    return {each: TypeAdapter(each) for each in (WorkerFacts, ServerFacts, OnDemandFacts)}


def _parse(wanted: type[_Facts], text: str) -> _Facts:
    from pydantic import ValidationError  # noqa: PLC0415 - as above

    try:
        found: _Facts = _readers()[wanted].validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "missing":
            reason = f"lacks {name!r}: is it of another version?"
        elif name:
            reason = f"has {ascii(first['input'])[:80]} for {name!r}: {first['msg']}"
        else:
            reason = f"cannot be read: {first['msg']}"
        raise FactsError(f"the exporter's evidence {reason}") from None
    return found
