"""Conditions of jobs, for the exporter and the remediator. Pure.

Ages and limits are seconds. `None` is unknown and meets no condition. A limit of 0 turns it off.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from gpuwarden.job import Phase


class Sign(StrEnum):
    """Kinds of a job's activity."""

    BEAT = "beat"
    PHASE = "phase"
    GPU = "GPU"
    RAM = "RAM"
    IO = "I/O"
    WORK = "work"
    HEAVY_WORK = "heavy work"


_WORK_COUNTS: Final = frozenset(phase for phase in Phase if phase.counts_work)


def reached(age_s: float | None, limit_s: float | None) -> bool:
    """Whether an age has reached its limit."""
    return age_s is not None and bool(limit_s) and age_s >= (limit_s or 0.0)


def least(*ages_s: float | None) -> float | None:
    """The smallest age, if all are known."""
    known_s = [each for each in ages_s if each is not None]
    return min(known_s) if len(known_s) == len(ages_s) else None


def activity(
    phase: str | None,
    *,
    has_beaten: bool,
    step_beat_age_s: float | None,
    phase_age_s: float | None,
    gpu_s: float | None,
    ram_idle_s: float | None,
    work_idle_s: float | None,
    heavy_work_idle_s: float | None,
    busy_timeout_s: float | None,
    more: Mapping[Sign, float | None] = MappingProxyType({}),
) -> dict[Sign, float | None]:
    """Time without each kind of activity that counts (A2 to A5, A7), seconds.

    `gpu_s` is the time for which all GPUs are idle or lost. Heavy work counts in steps until the busy timeout.
    """
    signs: dict[Sign, float | None] = {Sign.BEAT: step_beat_age_s} if has_beaten else {}
    signs |= {Sign.PHASE: phase_age_s, Sign.GPU: gpu_s, Sign.RAM: ram_idle_s}
    if phase in _WORK_COUNTS:
        signs[Sign.WORK] = work_idle_s
    if phase == Phase.STEP and not _busy_for_too_long(step_beat_age_s, phase_age_s, busy_timeout_s):
        signs[Sign.HEAVY_WORK] = heavy_work_idle_s
    return {**signs, **more}


def server_fault_idle_s(
    heavy_page_fault_idle_s: float | None, probe_failing_s: float | None, busy_timeout_s: float
) -> float | None:
    """Time without the page faults of a compilation; after the busy timeout, without an answer."""
    over = probe_failing_s is not None and probe_failing_s >= busy_timeout_s
    return probe_failing_s if over else heavy_page_fault_idle_s


def _busy_for_too_long(step_beat_age_s: float | None, phase_age_s: float | None, busy_timeout_s: float | None) -> bool:
    known_s = [each for each in (step_beat_age_s, phase_age_s) if each is not None]
    return busy_timeout_s is not None and bool(known_s) and min(known_s) >= busy_timeout_s


def no_progress_s(
    *,
    gpu_saturated_s: float | None,
    gpu_last_busy_age_s: float | None,
    cpu_idle_s: float | None,
    ram_idle_s: float | None,
    io_idle_s: float | None,
    page_fault_idle_s: float | None,
) -> float | None:
    """How long a container has made no progress (A14b, A19).

    RAM, I/O and page faults are idle. The GPU is saturated, as in a spinning hang, or GPU and CPU are idle.
    """
    at_rest_s = least(gpu_last_busy_age_s, cpu_idle_s)
    known_s = [each for each in (gpu_saturated_s, at_rest_s) if each is not None]
    return least(max(known_s), ram_idle_s, io_idle_s, page_fault_idle_s) if known_s else None


def is_stalled(step_beat_age_s: float | None, inactive_s: float | None, silence_s: float | None) -> bool:
    """Whether a job had no activity for its stall timeout (A2)."""
    return reached(least(step_beat_age_s, inactive_s), silence_s)


def is_stuck(step_beat_age_s: float | None, after_s: float | None, rest_s: float | None, still_s: float | None) -> bool:
    """Whether a job had no step beat and no progress for far longer than its steps take (A14b, A19).

    `rest_s` is `no_progress_s` of a single job, `spinning_s` of a gang's rank.
    """
    return reached(step_beat_age_s, after_s) and reached(rest_s, still_s)


def spinning_s(
    *, gpu_saturated_s: float | None, ram_idle_s: float | None, io_idle_s: float | None, page_fault_idle_s: float | None
) -> float | None:
    """How long a GPU has been saturated with nothing else active (A14b)."""
    return least(gpu_saturated_s, ram_idle_s, io_idle_s, page_fault_idle_s)


def rank_spinning_s(step_beat_age_s: float | None, rest_s: float | None, late_s: float) -> float | None:
    """One value that reaches `after_s` when a gang's rank is stuck (A14b).

    `late_s` is `after_s - still_s`.
    """
    if rest_s == 0.0:
        return None if step_beat_age_s is None else 0.0
    return least(step_beat_age_s, None if rest_s is None else rest_s + late_s)


def is_unhealthy(
    inactive_s: float | None, window_s: float | None, elapsed_s: float | None, grace_s: float | None
) -> bool:
    """Whether a GPU job was inactive for a window after its grace period (A7)."""
    grown_s = None if elapsed_s is None or grace_s is None else elapsed_s - grace_s
    return reached(least(inactive_s, grown_s), window_s)


def is_overdue(
    *,
    elapsed_s: float | None,
    budget_s: float | None,
    step_beat_age_s: float | None,
    silence_s: float | None,
    inactive_s: float | None,
    quiet_gpu_lost_s: float | None,
    window_s: float | None,
    heartbeat_age_s: float | None,
    dead_s: float | None,
    dead_after_s: float | None,
) -> bool:
    """Whether any age has reached its limit."""
    return (
        reached(elapsed_s, budget_s)
        or reached(step_beat_age_s, silence_s)
        or reached(inactive_s, window_s)
        or reached(quiet_gpu_lost_s, window_s)
        or reached(heartbeat_age_s, dead_after_s)
        or reached(dead_s, dead_after_s)
    )
