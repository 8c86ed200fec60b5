"""How long a job may show no sign of life, by its phase: the one definition, for the series and for `/evidence`.

What the job itself asks for in its phase counts first (`patience_s`), as 30 s where it is less. Else it is the silence
that its owner allows, and in `load`, `eval`, `checkpoint` and `save` no less than this host allows there: one of them
may wait for a disk or a service that does nothing for its processes to show. In `idle` a job says that it has nothing
to do, and owes no sign of life: its budget, and that its worker lives, hold on. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.job import Phase

if TYPE_CHECKING:  # not for the processes that ask drivers, which load this with their readings
    from gpuwarden.state_file import JobFile, LongStep

STEPS_MIN: Final = 20
"""Steps after which a job's own step time is known: the first ones compile, and fill caches."""

STAYS_MIN: Final = 3
"""Stays in a phase after which the job's own time there is known: the first one compiles, and two may be chance."""

ASKED_MIN_S: Final = 30.0
"""What a job asks for in its phase is no less than this, seconds: as long as a process that lives may leave nothing to
see (`--dead-after-s`). Its last sign of life may be told 1 s late, and is seen at a look a second apart; what it does
is known as an average over 10 s; a batch that is made ready, or a collection of garbage, takes seconds."""

STILL_LATE_S: Final = 20.0
"""A stuck job must be without other signs of life for this much less than without a step, seconds: rates of work are
averages over 10 s and more, so that they show late that it did nothing any more after its last step. Never for less
than the silence that it is allowed, which begins with whatever was its last sign of life."""

Pauses = Sequence[tuple[float, float]]
"""From when until when a container was paused, CLOCK_BOOTTIME seconds."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What this host allows, seconds.

    Args:
        load_s: silence in the phase `load`, of a job that is armed already (A2).
        eval_s: silence in the phase `eval`.
        checkpoint_s: silence in the phase `checkpoint`.
        save_s: silence in the phase `save`.
        stuck_floor_s: no job is stuck sooner than this after its last sign of getting on (A14b, A19).
        stuck_steps: nor sooner than so many times the longest step it has taken in this attempt, or, in a phase that
            owes none, its longest earlier stay there; 0: none is stuck.
    """

    load_s: float = 300.0
    eval_s: float = 300.0
    checkpoint_s: float = 300.0
    save_s: float = 300.0
    stuck_floor_s: float = 600.0
    stuck_steps: float = 20.0

    def silence_s(self, job: "JobFile") -> float:
        """The silence this job is allowed now; 0 while the stall condition does not police it (A2, A6)."""
        return self._allowed_s(job) if job.stall_timeout_s and job.phase is not Phase.IDLE else 0.0

    def window_s(self, job: "JobFile", health_window_s: float) -> float | None:
        """How long it may do nothing with its GPU: never less than it may be silent (A7).

        `None` while GPU health does not watch it.
        """
        if not job.job_class.uses_gpu or job.phase is Phase.IDLE:
            return None
        return max(health_window_s, self._allowed_s(job))

    def grace_s(self, job: "JobFile", *, grace_s: float, window_s: float) -> float | None:
        """How long after its start the window of GPU health begins at the soonest (A7); `None` of a job without a GPU.

        The host's grace is for its load and for its first step, which may compile or load for minutes: until that is
        done, no window counts that began in the grace. After it, none that ended in it.
        """
        if not job.job_class.uses_gpu:
            return None
        if job.phase is Phase.LOAD or not _has_stepped(job):
            return grace_s
        return max(0.0, grace_s - (self.window_s(job, window_s) or 0.0))

    def stuck_after_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """After how long without a beat it is stuck though its GPU is unknown or reads busy (A14b, A19).

        `pauses` are those of its container: the time of one is no part of the step or stay that it fell into.

        `None` while that is not told, or cannot be said, as in `_stuck_after_s`, and of one rank of a gang: at a
        barrier a healthy rank waits for another, and spins as long as that one evaluates or writes a checkpoint.
        """
        return self._stuck_after_s(job, pauses) if job.ranks <= 1 else None

    def stuck_still_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """For how long one that is stuck must have shown no other sign of life; `None` as `stuck_after_s`."""
        after_s = self.stuck_after_s(job, pauses)
        return None if after_s is None else self._still_s(job, after_s)

    def gang_stuck_after_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """After how long without a beat a rank is stuck if every other rank of its gang is too (A14b).

        The limit of a job that is alone. `None` as of such a one, of one that is no rank of a gang, and of one that
        does not say of which.
        """
        return self._stuck_after_s(job, pauses) if is_rank(job) else None

    def gang_stuck_still_s(self, job: "JobFile", pauses: Pauses = ()) -> float | None:
        """For how long such a rank must have shown no other sign of life; `None` as `gang_stuck_after_s`."""
        after_s = self.gang_stuck_after_s(job, pauses)
        return None if after_s is None else self._still_s(job, after_s)

    def gang_stuck_late_s(self, job: "JobFile", pauses: Pauses = ()) -> float:
        """How late it may show that such a rank moves no more, seconds: never more than half of its limit."""
        after_s = self.gang_stuck_after_s(job, pauses)
        return STILL_LATE_S if after_s is None else after_s - self._still_s(job, after_s)

    def _stuck_after_s(self, job: "JobFile", pauses: Pauses) -> float | None:
        """`None` while it is not told, or cannot be said.

        So it is of a job that is not policed for stalls, that has not taken enough steps to know their time, or is in a
        phase that owes no steps and neither has said how long that may take nor been there often enough to know.
        """
        silence_s = self.silence_s(job)
        owed = job.phase is Phase.STEP or job.patience_s is not None
        told = self.stuck_steps and silence_s
        longest_s = _longest_step_s(job, pauses) if owed else _longest_stay_s(job, pauses)
        if not told or longest_s is None:
            return None
        return max(self.stuck_floor_s, self.stuck_steps * longest_s, silence_s)

    def _still_s(self, job: "JobFile", after_s: float) -> float:
        return max(after_s - STILL_LATE_S, after_s / 2, self.silence_s(job))

    def _allowed_s(self, job: "JobFile") -> float:
        if job.patience_s is not None:
            return max(ASKED_MIN_S, job.patience_s)
        own_s = {
            Phase.LOAD: self.load_s,
            Phase.EVAL: self.eval_s,
            Phase.CHECKPOINT: self.checkpoint_s,
            Phase.SAVE: self.save_s,
        }
        return max(job.stall_timeout_s, own_s.get(job.phase, 0.0))


def is_rank(job: "JobFile") -> bool:
    """Whether it is a rank of a gang, and says of which: one that an older worker runs does not."""
    return job.ranks > 1 and job.gang is not None


def _has_stepped(job: "JobFile") -> bool:
    """Whether a step is done for sure since its load: in its steps a beat that came after those began.

    A step of a load, to warm up, is not told from others by their number.
    """
    if job.phase is not Phase.STEP:
        return job.step > 0
    return job.step > 0 and job.beat is not None and job.beat.boottime_s > job.phase_started.boottime_s


def _longest_step_s(job: "JobFile", pauses: Pauses) -> float | None:
    """How long its longest step took, without its pauses; `None` while it has taken too few to know."""
    if job.step < STEPS_MIN:
        return None
    if job.step_max_s is None or not any(step.took_s >= job.step_max_s for step in job.longest):
        return job.step_max_s
    return _longest_s(job.longest, pauses)


def _longest_stay_s(job: "JobFile", pauses: Pauses) -> float | None:
    """How long its longest earlier stay in its phase took, without its pauses; `None` after too few to know.

    One that steps there may have gone on to its steps without saying so, and then a step may take as long as any.
    """
    if len(job.stays) < STAYS_MIN:
        return None
    stay_s = _longest_s(job.stays, pauses)
    if job.beat is None or job.beat.boottime_s <= job.phase_started.boottime_s:
        return stay_s
    step_s = _longest_step_s(job, pauses)
    return None if step_s is None else max(stay_s, step_s)


def _longest_s(told: Sequence["LongStep"], pauses: Pauses) -> float:
    """How long the longest took, without the time for which its container was seen paused; never too little.

    A process that was paused cannot tell that from a step that took so long. The longest are told one by one, so each
    is known without its pauses; no other one is longer than the shortest of those was with them.
    """
    return max(min(each.took_s for each in told), *(_unpaused_s(each, pauses) for each in told))


def _unpaused_s(step: "LongStep", pauses: Pauses) -> float:
    if step.began_s is None:
        return step.took_s
    ended_s = step.began_s + step.took_s
    return step.took_s - sum(max(0.0, min(ended_s, to_s) - max(step.began_s, from_s)) for from_s, to_s in pauses)
