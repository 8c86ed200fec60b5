"""How long a job may show no sign of life, by its phase: the one definition, for the series and for `/evidence`.

What the job itself asks for in its phase counts first (`patience_s`). Else it is the silence that its owner allows, and
in `load`, `eval`, `checkpoint` and `save` no less than this host allows there: one of them may wait for a disk or a
service that does nothing for its processes to show. In `idle` a job says that it has nothing to do, and owes no sign of
life: its budget, and that its worker lives, hold on. Pure.
"""

from dataclasses import dataclass

from gpuwarden.job import Phase
from gpuwarden.statefile import JobFile


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What this host allows, seconds.

    Args:
        load_s: silence in the phase `load`, of a job that is armed already (A2).
        eval_s: silence in the phase `eval`.
        checkpoint_s: silence in the phase `checkpoint`.
        save_s: silence in the phase `save`.
    """

    load_s: float = 300.0
    eval_s: float = 300.0
    checkpoint_s: float = 300.0
    save_s: float = 300.0

    def silence_s(self, job: JobFile) -> float:
        """The silence this job is allowed now; 0 while the stall condition does not police it (A2, A6)."""
        return self._allowed_s(job) if job.stall_timeout_s and job.phase is not Phase.IDLE else 0.0

    def window_s(self, job: JobFile, health_window_s: float) -> float | None:
        """How long it may do nothing with its GPU: never less than it may be silent (A7).

        `None` while GPU health does not watch it.
        """
        if not job.job_class.uses_gpu or job.phase is Phase.IDLE:
            return None
        return max(health_window_s, self._allowed_s(job))

    def _allowed_s(self, job: JobFile) -> float:
        if job.patience_s is not None:
            return job.patience_s
        own_s = {
            Phase.LOAD: self.load_s,
            Phase.EVAL: self.eval_s,
            Phase.CHECKPOINT: self.checkpoint_s,
            Phase.SAVE: self.save_s,
        }
        return max(job.stall_timeout_s, own_s.get(job.phase, 0.0))
