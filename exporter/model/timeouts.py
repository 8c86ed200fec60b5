"""How long a job may be inactive, by phase. Pure.

The job's `timeout_s` applies if set. Otherwise its stall timeout applies, and in phases that may wait for a disk at
least the host's minimum. `idle` has no limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.job import MIN_TIMEOUT_S, Phase

if TYPE_CHECKING:  # keeps driver processes small
    from gpuwarden.state_file import JobFile, LongStep

MIN_STEPS: Final = 20
MIN_PHASE_VISITS: Final = 3
ACTIVITY_LAG_S: Final = 20.0
"""How late inactivity shows: rates are averages over 10 s or more."""

Pauses = Sequence[tuple[float, float]]
"""Start and end of each pause, CLOCK_BOOTTIME seconds."""


@dataclass(frozen=True, kw_only=True)
class PhaseTimeouts:
    """Minimums of this host by phase (A2) and for stuck jobs (A14b, A19), seconds.

    Args:
        stuck_factor: multiple of the longest step or phase visit; 0 is off.
    """

    load_s: float = 300.0
    eval_s: float = 300.0
    checkpoint_s: float = 300.0
    save_s: float = 300.0
    busy_s: float = 900.0
    stuck_min_s: float = 600.0
    stuck_factor: float = 20.0

    def stall_after_s(self, job: "JobFile") -> float:
        """Seconds until a job stalls (A2, A6); 0 is never."""
        return self._limit_s(job) if job.stall_timeout_s and job.phase is not Phase.IDLE else 0.0

    def busy_timeout_s(self, job: "JobFile") -> float:
        """Seconds without a step beat for which heavy work counts in steps (A5)."""
        return self.busy_s if job.busy_timeout_s is None else job.busy_timeout_s

    def health_window_s(self, job: "JobFile", window_s: float) -> float | None:
        """Seconds for which its GPU may be idle (A7), if checked."""
        if not job.job_class.uses_gpu or job.phase is Phase.IDLE:
            return None
        own_s = window_s if job.health_window_s is None else max(MIN_TIMEOUT_S, job.health_window_s)
        return own_s if _has_plain_window(job) else max(own_s, self._limit_s(job))

    def health_grace_s(self, job: "JobFile", *, grace_s: float, window_s: float) -> float | None:
        """Seconds after its start at which that window may begin (A7).

        Until the first step, which may compile, the window begins after the grace. Later it ends after it.
        """
        if not job.job_class.uses_gpu:
            return None
        if _has_plain_window(job):
            return 0.0  # its first use of a GPU starts it
        if job.phase is Phase.LOAD or not _first_step_done(job):
            return grace_s
        return max(0.0, grace_s - (self.health_window_s(job, window_s) or 0.0))

    def stuck_after_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """Unpaused seconds without a step beat until a job is stuck, on a busy GPU too (A14b, A19).

        `None` for ranks: a healthy rank spins while another one evaluates.
        """
        return self._stuck_after_s(job, pauses) if job.ranks <= 1 else None

    def stuck_inactive_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """Seconds without other activity that it also needs."""
        after_s = self.stuck_after_s(job, pauses)
        return None if after_s is None else self._inactive_s(job, after_s)

    def gang_stuck_after_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """`stuck_after_s` of a rank whose gang is all stuck (A14b)."""
        return self._stuck_after_s(job, pauses) if is_gang_rank(job) else None

    def gang_stuck_inactive_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """`stuck_inactive_s` of a rank."""
        after_s = self.gang_stuck_after_s(job, pauses)
        return None if after_s is None else self._inactive_s(job, after_s)

    def gang_activity_lag_s(self, job: "JobFile", pauses: Pauses = ()) -> float:
        """How late its inactivity may show: at most half of its limit."""
        after_s = self.gang_stuck_after_s(job, pauses)
        return ACTIVITY_LAG_S if after_s is None else after_s - self._inactive_s(job, after_s)

    def _stuck_after_s(self, job: "JobFile", pauses: Pauses) -> float | None:
        stall_s = self.stall_after_s(job)
        owed = job.phase is Phase.STEP or job.timeout_s is not None
        applies = self.stuck_factor and stall_s
        longest_s = _longest_step_s(job, pauses) if owed else _longest_visit_s(job, pauses)
        if not applies or longest_s is None:
            return None
        return max(self.stuck_min_s, self.stuck_factor * longest_s, stall_s)

    def _inactive_s(self, job: "JobFile", after_s: float) -> float:
        return max(after_s - ACTIVITY_LAG_S, after_s / 2, self.stall_after_s(job))

    def _limit_s(self, job: "JobFile") -> float:
        if job.timeout_s is not None:
            return max(MIN_TIMEOUT_S, job.timeout_s)
        own_s = {
            Phase.LOAD: self.load_s,
            Phase.EVAL: self.eval_s,
            Phase.CHECKPOINT: self.checkpoint_s,
            Phase.SAVE: self.save_s,
        }
        return max(job.stall_timeout_s, own_s.get(job.phase, 0.0))


def is_gang_rank(job: "JobFile") -> bool:
    """Whether it is a rank of a named gang."""
    return job.ranks > 1 and job.gang is not None


def _has_plain_window(job: "JobFile") -> bool:
    """Whether it is a command without steps, with a given window."""
    given = job.after_gpu_use and job.health_window_s is not None
    return given and job.step_beat is None and job.timeout_s is None


def _first_step_done(job: "JobFile") -> bool:
    if job.phase is not Phase.STEP:
        return job.step > 0
    # The load may warm up with steps.
    return job.step > 0 and job.step_beat is not None and job.step_beat.boottime_s > job.phase_started.boottime_s


def _longest_step_s(job: "JobFile", pauses: Pauses) -> float | None:
    if job.step < MIN_STEPS:
        return None
    if job.step_max_s is None or not any(step.took_s >= job.step_max_s for step in job.longest):
        return job.step_max_s
    return _longest_unpaused_s(job.longest, pauses)


def _longest_visit_s(job: "JobFile", pauses: Pauses) -> float | None:
    # A beat in this phase may be a step.
    if len(job.stays) < MIN_PHASE_VISITS:
        return None
    visit_s = _longest_unpaused_s(job.stays, pauses)
    if job.step_beat is None or job.step_beat.boottime_s <= job.phase_started.boottime_s:
        return visit_s
    step_s = _longest_step_s(job, pauses)
    return None if step_s is None else max(visit_s, step_s)


def _longest_unpaused_s(durations: Sequence["LongStep"], pauses: Pauses) -> float:
    # Others are at most as long as the shortest of these.
    return max(min(each.took_s for each in durations), *(_unpaused_s(each, pauses) for each in durations))


def _unpaused_s(step: "LongStep", pauses: Pauses) -> float:
    if step.began_s is None:
        return step.took_s
    ended_s = step.began_s + step.took_s
    return step.took_s - sum(max(0.0, min(ended_s, to_s) - max(step.began_s, from_s)) for from_s, to_s in pauses)
