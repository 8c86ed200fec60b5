"""When a job is silent, quiet, stuck or overdue: one definition of each, for the exporter and the remediator.

The exporter publishes these figures as series, the rules compare them, and the remediator confirms an alert by the same
functions. Ages and limits are in seconds. An age that is `None` is unknown, and then no condition is met. A limit that
is `None` or 0 judges nothing. Pure.
"""

from enum import StrEnum
from typing import Final

from gpuwarden.job import Phase


class Sign(StrEnum):
    """By what a job shows that it lives."""

    BEAT = "beat"
    PHASE = "phase"
    GPU = "GPU"
    RAM = "RAM"
    IO = "I/O"
    WORK = "work"


_WORK_COUNTS: Final = frozenset(phase for phase in Phase if phase.counts_work)


def reached(age_s: float | None, limit_s: float | None) -> bool:
    """Whether an age has reached its limit."""
    return age_s is not None and bool(limit_s) and age_s >= (limit_s or 0.0)


def least(*ages_s: float | None) -> float | None:
    """The least of them, `None` where one is unknown."""
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
    io_counts: bool = False,
    io_idle_s: float | None = None,
) -> dict[Sign, float | None]:
    """Each sign of life that counts, and for how long a job has been without it (A2 to A5, A7).

    All of it lies within one phase: work of processes is a sign of life in some phases and none in others, and the ages
    do not tell what counted in the phase before.

    Args:
        phase: what the job does now.
        has_beaten: beats count once there was one.
        step_beat_age_s: time since the last beat.
        phase_age_s: time since the job entered its phase.
        gpu_s: for how long every GPU has been idle, or for a lost GPU, lost or idle.
        ram_idle_s: for how long RAM has not moved.
        work_idle_s: for how long I/O, page faults and CPU time have been still.
        io_counts: whether I/O counts in each phase. It does for one worker of several in a container, because the page
            cache is part of the container's RAM and of no worker's.
        io_idle_s: for how long I/O has been still.
    """
    signs: dict[Sign, float | None] = {Sign.BEAT: step_beat_age_s} if has_beaten else {}
    signs |= {Sign.PHASE: phase_age_s, Sign.GPU: gpu_s, Sign.RAM: ram_idle_s}
    if io_counts:
        signs[Sign.IO] = io_idle_s
    if phase in _WORK_COUNTS:
        signs[Sign.WORK] = work_idle_s
    return signs


def no_progress_s(
    *,
    gpu_saturated_s: float | None,
    gpu_last_busy_age_s: float | None,
    cpu_idle_s: float | None,
    ram_idle_s: float | None,
    io_idle_s: float | None,
    page_fault_idle_s: float | None,
) -> float | None:
    """For how long nothing of a container has moved, though its GPU may be fully used (A14b, A19); `None` is unknown.

    RAM, I/O and page faults were still, and the GPU was fully used without a pause: a job that waits for ever holds it,
    and its process may spin. Or the GPU was never seen busy, being idle or unknown. Unknown is not idle, so then the
    processes used no CPU time either.
    """
    at_rest_s = least(gpu_last_busy_age_s, cpu_idle_s)
    known_s = [each for each in (gpu_saturated_s, at_rest_s) if each is not None]
    return least(max(known_s), ram_idle_s, io_idle_s, page_fault_idle_s) if known_s else None


def is_stalled(step_beat_age_s: float | None, inactive_s: float | None, silence_s: float | None) -> bool:
    """Without a beat, and without any other sign of life, for the silence that is allowed (A2)."""
    return reached(least(step_beat_age_s, inactive_s), silence_s)


def is_stuck(step_beat_age_s: float | None, after_s: float | None, rest_s: float | None, still_s: float | None) -> bool:
    """Without a beat for far longer than its own steps took, and at rest for almost as long (A14b, A19).

    Args:
        step_beat_age_s: time since the last beat.
        after_s: time without a beat after which it is stuck.
        rest_s: of a job that is alone its `no_progress_s`, of a rank of a gang its `spinning_s`.
        still_s: for how long it must have been at rest.
    """
    return reached(step_beat_age_s, after_s) and reached(rest_s, still_s)


def spinning_s(
    *, gpu_saturated_s: float | None, ram_idle_s: float | None, io_idle_s: float | None, page_fault_idle_s: float | None
) -> float | None:
    """For how long a GPU has been fully used without a pause and nothing else has moved (A14b); `None` is unknown."""
    return least(gpu_saturated_s, ram_idle_s, io_idle_s, page_fault_idle_s)


def rank_spinning_s(step_beat_age_s: float | None, rest_s: float | None, late_s: float) -> float | None:
    """One figure for a rank of a gang, which reaches `after_s` when the rank `is_stuck` (A14b).

    Args:
        step_beat_age_s: time since the last beat.
        rest_s: the rank's `spinning_s`.
        late_s: how late it may show that nothing moves: `after_s - still_s`.
    """
    if rest_s == 0.0:
        return None if step_beat_age_s is None else 0.0
    return least(step_beat_age_s, None if rest_s is None else rest_s + late_s)


def is_unhealthy(
    inactive_s: float | None, window_s: float | None, elapsed_s: float | None, grace_s: float | None
) -> bool:
    """A GPU job without a sign of life for a whole window, which began after the grace for its load (A7)."""
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
    """Whether any age of a job has reached a limit: each condition of a job takes at least that.

    So the exporter names no job to the rules while all is well. `after_s` of a stuck job is never less than
    `silence_s`.
    """
    return (
        reached(elapsed_s, budget_s)
        or reached(step_beat_age_s, silence_s)
        or reached(inactive_s, window_s)
        or reached(quiet_gpu_lost_s, window_s)
        or reached(heartbeat_age_s, dead_after_s)
        or reached(dead_s, dead_after_s)
    )
