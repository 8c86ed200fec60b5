"""What an exporter testifies about one worker, or one server, when its host's remediator asks: `/evidence`.

    GET /evidence?worker=NAME      ->  one JSON object, the fields of `WorkerFacts`; 404 when the worker is not known
    GET /evidence?container=NAME   ->  one JSON object, the fields of `ServerFacts`; all but the host's own are null
                                       when no container of that name runs

Durations are seconds, sizes bytes, ratios 0 to 1. `null` always means unknown, never zero, and an unknown that matters
is explained in `gpu_unknown`, `ram_unknown`, `work_unknown` or `probe_unknown`. Facts are as old as `sample_age_s`; the
reader decides what is fresh.

Pure: text in, values out.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from gpuwarden.errors import GpuwardenError

if TYPE_CHECKING:  # what reads the facts needs it; the exporter, which renders them, is to be small
    from pydantic import TypeAdapter


class FactsError(GpuwardenError):
    """An answer of `/evidence` cannot be read."""


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """One container at one moment, whoever lives in it, and what the driver lists on the host's GPUs."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True, "allow_inf_nan": False}

    host: str
    sample_age_s: float
    # For a worker in no container, its own process tree. Of a dead one the container it was in, where that is known.
    container_kind: str | None
    container: str | None
    container_id: str | None
    container_incarnation: str | None
    # The container's signs of life.
    gpus: list[str] | None
    gpu_simulated: bool | None
    gpu_idle_s: float | None
    gpu_unknown: str | None
    # For how long the same of its GPUs have been fully taken by it and the others idle; and for how long none was
    # measured to do anything for it. An exporter of before these fields tells neither.
    gpu_saturated_s: float | None = None
    gpu_last_busy_age_s: float | None = None
    ram_bytes: int | None
    ram_idle_s: float | None
    ram_unknown: str | None
    # For how long its processes have kept under the rates of I/O, page faults and CPU time that tell work.
    io_idle_s: float | None
    page_fault_idle_s: float | None
    container_cpu_idle_s: float | None
    work_unknown: str | None
    # The processes that the driver lists on each of the host's GPUs, by UUID; null for a GPU that could not be asked,
    # and null as a whole when none could.
    gpu_pids: dict[str, list[int] | None] | None
    # For how long one of the container's GPUs has been lost while each other one was idle or lost too, null where none
    # is lost or another is unknown; and for how long each lost GPU of the host has been so, by UUID. An exporter of
    # before these fields tells neither.
    gpu_lost_s: float | None = None
    lost_gpus_s: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerFacts(ContainerFacts):
    """One worker, its job and its container, at one moment."""

    worker: str
    alive: bool | None
    worker_incarnation: str
    # The process that holds its lock, by the host's numbers; an exporter of before this field tells none.
    worker_pid: int | None = None
    # Null for a heartbeat of another boot, which has no age, and for nothing else.
    heartbeat_age_s: float | None
    # For how long its process has been seen to use no CPU time; for how long its lock has been seen free beside its
    # files and its heartbeat unmoved, in one incarnation of its container; and how long a worker that owns a job may go
    # with either.
    cpu_idle_s: float | None
    dead_s: float | None
    dead_after_s: float
    # How many live workers there are in it, null where there may be others than those that are known: it can be freed
    # for a worker that has it alone.
    container_workers: int | None
    # The attempt; all null while the worker runs none.
    job_id: int | None
    attempt: int | None
    phase: str | None
    phase_age_s: float | None
    step: int | None
    elapsed_s: float | None
    budget_s: float | None
    stall_timeout_s: float | None
    # After how long without a beat it is stuck though its GPU is unknown or pegged, and for how long its container must
    # then have shown no other sign of life; null where that is not said, and by an exporter of before these fields.
    stuck_after_s: float | None = None
    stuck_still_s: float | None = None
    # The same of one rank of a gang, which is stuck only if every other rank is too: no host alone can tell that.
    gang_stuck_after_s: float | None = None
    gang_stuck_still_s: float | None = None
    step_beat_age_s: float | None
    # How long its container may stay without a sign of life, and how long after its start that begins at the soonest,
    # for its load; null for a job without a GPU, the former also while it says that it is idle. Like the silence
    # allowed, 0 where silence is not policed, they are those of the phase that it is in.
    health_window_s: float | None
    health_grace_s: float | None


@dataclass(frozen=True, kw_only=True)
class TenantFacts:
    """One container's part in one GPU's memory, at one moment."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True}

    container: str
    incarnation: str
    # Null is unknown; and null for a container that was given no budget.
    used_bytes: int | None
    budget_bytes: int | None
    # Whether its owner lets it be stopped for its memory's sake: it opted in, and is not protected.
    recyclable: bool


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """One GPU's memory, at one moment, and every container that has a part in it."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True}

    gpu: str
    # Null where the driver does not say.
    size_bytes: int | None
    free_bytes: int | None
    # Free memory under the floor is too little; two who are over their budgets by amounts this close are level.
    floor_bytes: int
    tie_bytes: int
    tenants: list[TenantFacts]
    # What processes held that have ended, and the driver counts as in use still; null is unknown, and an exporter of
    # before this field tells none.
    returning_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServerFacts(ContainerFacts):
    """One container by its name, what came of asking the server in it, and its GPUs' memory, at one moment.

    `container` is the name that was asked for; its id and incarnation are null when no container of that name runs.
    """

    # How it is asked, `http` or `docker`; null where it did not opt in, or what its labels ask for cannot be done.
    probe: str | None
    # How many workers have files here that name it as theirs, dead ones included; null when there may be others than
    # those that are known.
    workers: int | None
    # Whether it has answered in this incarnation, as far as this exporter saw; for how long it has been asked without
    # an answer; and how much of that its owner allows.
    answered: bool | None
    unanswered_s: float | None
    silence_allowed_s: float | None
    probe_unknown: str | None
    # The memory of every GPU that it has a part in; null where no GPU is read, and an exporter of before this field
    # tells none.
    cards: list[CardFacts] | None = None
    # The names of others on this host that by their labels may be stopped for their memory's sake, and of which nothing
    # more is known; null is unknown, and an exporter of before this field tells none.
    unseen: list[str] | None = None
    # By what it was given GPUs that are missing and whose UUIDs nobody knows: they are not among `gpus`. An exporter of
    # before this field tells none.
    nameless_gpus: list[str] | None = None


_Facts = TypeVar("_Facts", WorkerFacts, ServerFacts)


def render(facts: ContainerFacts) -> str:
    """One JSON object."""
    return json.dumps(asdict(facts), allow_nan=False)


def parse(text: str) -> WorkerFacts:
    """Read an answer about a worker; fields this version does not know are ignored.

    Raises:
        FactsError: a field is missing, of another type, or no finite number; the message names the first.
    """
    return _parse(WorkerFacts, text)


def parse_server(text: str) -> ServerFacts:
    """Read an answer about a server, as `parse` does one about a worker.

    Raises:
        FactsError: as `parse`.
    """
    return _parse(ServerFacts, text)


@cache
def _readers() -> "dict[type, TypeAdapter[Any]]":
    from pydantic import TypeAdapter  # noqa: PLC0415 - as above

    return {each: TypeAdapter(each) for each in (WorkerFacts, ServerFacts)}


def _parse(wanted: type[_Facts], text: str) -> _Facts:
    from pydantic import ValidationError  # noqa: PLC0415 - as above

    try:
        found: _Facts = _readers()[wanted].validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "missing":
            because = f"lacks {name!r}: is it of another version?"
        elif name:
            because = f"has {ascii(first['input'])[:80]} for {name!r}: {first['msg']}"
        else:
            because = f"cannot be read: {first['msg']}"
        raise FactsError(f"the exporter's evidence {because}") from None
    return found
