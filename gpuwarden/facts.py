"""What an exporter testifies about one worker when its host's remediator asks: the answer of `/evidence`.

    GET /evidence?worker=NAME   ->  one JSON object, the fields of `WorkerFacts`; 404 when the worker is not known

Durations are seconds, sizes bytes, ratios 0 to 1. `null` always means unknown, never zero, and an unknown that matters
is explained in `gpu_unknown`, `ram_unknown` or `work_unknown`. Facts are as old as `sample_age_s`; the reader decides
what is fresh.

Pure: text in, values out.
"""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gpuwarden.errors import GpuwardenError


class FactsError(GpuwardenError):
    """An answer of `/evidence` cannot be read."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """One worker, its job and its container, at one moment."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)

    host: str
    worker: str
    sample_age_s: float
    alive: bool | None
    worker_incarnation: str
    heartbeat_age_s: float | None
    # For how long its process has been seen to use no CPU time; for how long its lock has been seen free beside its
    # files, in one incarnation of its container; and how long a worker that owns a job may go with either.
    cpu_still_s: float | None
    dead_s: float | None
    dead_after_s: float
    # The container the lock's holder lives in; for a worker in none, its own process tree. Of a dead one the container
    # it was in, where that is still known.
    container_kind: str | None
    container: str | None
    container_id: str | None
    container_incarnation: str | None
    # How many live workers there are in it: it can be freed for a worker that has it alone.
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
    beat_age_s: float | None
    # How long its container may stay without a sign of life, and the grace for its load; null for a job without a GPU.
    health_window_s: float | None
    health_grace_s: float | None
    # The container's signs of life.
    gpus: list[str] | None
    gpu_simulated: bool | None
    gpu_idle_s: float | None
    gpu_unknown: str | None
    ram_bytes: int | None
    ram_still_s: float | None
    ram_unknown: str | None
    # For how long its processes have kept under the rates of I/O, page faults and CPU time that tell work.
    io_still_s: float | None
    fault_still_s: float | None
    container_cpu_still_s: float | None
    work_unknown: str | None
    # The processes that the driver lists on each of the host's GPUs, by UUID; null for a GPU that could not be asked,
    # and null as a whole when none could.
    gpu_pids: dict[str, list[int] | None] | None


_FACTS: Final = TypeAdapter(WorkerFacts)


def render(facts: WorkerFacts) -> str:
    """One JSON object."""
    return json.dumps(asdict(facts), allow_nan=False)


def parse(text: str) -> WorkerFacts:
    """Read an answer; fields this version does not know are ignored.

    Raises:
        FactsError: a field is missing, of another type, or no finite number; the message names the first.
    """
    try:
        return _FACTS.validate_json(text)
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
