"""What an exporter testifies about one worker when its host's remediator asks: the answer of `/evidence`.

    GET /evidence?worker=NAME   ->  one JSON object, the fields of `WorkerFacts`; 404 when the worker is not known

Durations are seconds, sizes bytes, ratios 0 to 1. `null` always means unknown, never zero, and an unknown that matters
is explained in `gpu_unknown` or `ram_unknown`. Facts are as old as `sample_age_s`; the reader decides what is fresh.

Pure: text in, values out.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, get_args, get_origin, get_type_hints

from gpuwarden.errors import GpuwardenError


class FactsError(GpuwardenError):
    """An answer of `/evidence` cannot be read."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """One worker, its job and its container, at one moment."""

    host: str
    worker: str
    sample_age_s: float
    alive: bool | None
    worker_incarnation: str
    heartbeat_age_s: float | None
    # The container the lock's holder lives in; for a worker in none, its own process tree.
    container_kind: str | None
    container: str | None
    container_id: str | None
    container_incarnation: str | None
    # The attempt; all null while the worker runs none.
    job_id: int | None
    attempt: int | None
    phase: str | None
    step: int | None
    elapsed_s: float | None
    budget_s: float | None
    stall_timeout_s: float | None
    beat_age_s: float | None
    # The container's signs of life.
    gpus: list[str] | None
    gpu_simulated: bool | None
    gpu_idle_s: float | None
    gpu_unknown: str | None
    ram_bytes: int | None
    ram_still_s: float | None
    ram_unknown: str | None
    # The processes that the driver lists on each of the host's GPUs, by UUID; null for a GPU that could not be asked,
    # and null as a whole when none could.
    gpu_pids: dict[str, list[int] | None] | None


_HINTS: Final = get_type_hints(WorkerFacts)


def render(facts: WorkerFacts) -> str:
    """One JSON object."""
    return json.dumps(asdict(facts), allow_nan=False)


def parse(text: str) -> WorkerFacts:
    """Read an answer; fields this version does not know are ignored.

    Raises:
        FactsError: a field is missing or of another type.
    """
    try:
        found: Any = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FactsError(f"the exporter's evidence is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FactsError("the exporter's evidence is not a JSON object")
    values: dict[str, Any] = {}
    for field in fields(WorkerFacts):
        if field.name not in found:
            raise FactsError(f"the exporter's evidence lacks {field.name!r}: is it of another version?")
        values[field.name] = _checked(field.name, found[field.name])
    return WorkerFacts(**values)


def _checked(name: str, value: Any) -> Any:
    hint = _HINTS[name]
    allowed = get_args(hint) if type(None) in get_args(hint) else (hint,)
    plain = {float: (int, float), int: (int,), str: (str,), bool: (bool,), type(None): (type(None),)}
    for kind in allowed:
        if kind in plain:
            if isinstance(value, plain[kind]) and (kind is bool or not isinstance(value, bool)):
                return _finite(name, value) if kind is float else value
        elif isinstance(value, dict) and get_origin(kind) is dict:
            if all(
                pids is None or (isinstance(pids, list) and all(type(pid) is int for pid in pids))
                for pids in value.values()
            ):
                return value
        elif (
            isinstance(value, list)
            and get_origin(kind) is list
            and all(type(entry) in get_args(kind) for entry in value)
        ):
            return value
    shown = f"a {type(value).__name__}" if isinstance(value, list | dict) else ascii(value)[:80]
    raise FactsError(f"the exporter's evidence has {shown} for {name!r}")


def _finite(name: str, value: Any) -> float:
    """A number that compares: one past every float would make any age look fresh, or any silence long."""
    if not -1e18 < value < 1e18:
        raise FactsError(f"the exporter's evidence has {ascii(value)[:80]} for {name!r}")
    return float(value)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
