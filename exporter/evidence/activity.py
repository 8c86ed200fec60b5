"""How long a job has been inactive. Pure."""

from typing import Final

from exporter.model.container import ContainerEvidence
from exporter.model.timeouts import PhaseTimeouts
from gpuwarden import conditions
from gpuwarden.conditions import Sign
from gpuwarden.state_file import JobFile, Stamp

RANK_ACTIVE_S: Final = 60.0


def inactive_s(
    job: JobFile,
    evidence: ContainerEvidence | None,
    timeouts: PhaseTimeouts,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    shared_container: bool = False,
) -> float | None:
    """Seconds without any activity of an attempt; `None` while any that counts is unknown.

    The evidence is of its container, or in a shared one of its worker. A lost GPU counts as idle with `gpu_lost`.
    """
    return conditions.least(
        *_seconds_without(
            job, evidence, timeouts, now=now, gpu_lost=gpu_lost, shared_container=shared_container
        ).values()
    )


def _seconds_without(
    job: JobFile,
    evidence: ContainerEvidence | None,
    timeouts: PhaseTimeouts,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    shared_container: bool = False,
) -> dict[Sign, float | None]:
    gpu_s = None if evidence is None else evidence.gpu_lost_s if gpu_lost else evidence.gpu_idle_s
    return conditions.activity(
        job.phase,
        has_beaten=job.step_beat is not None,
        step_beat_age_s=job.step_beat.age_s(now) if job.step_beat else None,
        phase_age_s=job.phase_started.age_s(now),
        gpu_s=gpu_s,
        ram_idle_s=evidence.ram_idle_s if evidence else None,
        work_idle_s=evidence.work_idle_s if evidence else None,
        heavy_work_idle_s=evidence.heavy_work_idle_s if evidence else None,
        busy_timeout_s=timeouts.busy_timeout_s(job),
        # Page cache of a shared container belongs to no single worker.
        more={Sign.IO: evidence.io_idle_s if evidence else None} if shared_container else {},
    )


def is_rank_active(job: JobFile, evidence: ContainerEvidence | None, timeouts: PhaseTimeouts, *, now: Stamp) -> bool:
    """Whether a rank did something within `RANK_ACTIVE_S`: its gang may wait for it (A14b).

    A new phase and a saturated GPU prove nothing: waiting ranks spin.
    """
    signs = _seconds_without(job, evidence, timeouts, now=now)
    del signs[Sign.PHASE]
    if evidence is not None and conditions.reached(evidence.gpu_saturated_s, RANK_ACTIVE_S):
        del signs[Sign.GPU]
    return any(without_s is not None and without_s < RANK_ACTIVE_S for without_s in signs.values())


def not_stalled_reason(
    job: JobFile, evidence: ContainerEvidence | None, timeouts: PhaseTimeouts, *, now: Stamp
) -> str | None:
    """Why a job without step beats is not reported as stalled (A4); `None` if it beats or stalls."""
    limit_s = timeouts.stall_after_s(job)
    if limit_s == 0 or job.step_beat is None:
        return None
    for sign, without_s in _seconds_without(job, evidence, timeouts, now=now).items():
        if without_s is None or without_s < limit_s:
            return None if sign is Sign.BEAT else _describe(sign, without_s, evidence)
    return None


_DESCRIPTIONS: Final = {
    Sign.PHASE: "the phase changed",
    Sign.GPU: "GPU was busy or unknown",
    Sign.RAM: "RAM changed or was unknown",
    Sign.WORK: "its processes worked or were unknown",
    Sign.HEAVY_WORK: "its processes worked hard or were unknown",
}


def _describe(sign: Sign, without_s: float | None, evidence: ContainerEvidence | None) -> str:
    if without_s is not None:
        return f"{_DESCRIPTIONS[sign]} {without_s:.0f} s ago"
    if evidence is None:
        return "its container is unknown"
    reasons = {
        Sign.GPU: evidence.gpu_unknown,
        Sign.RAM: evidence.ram_unknown,
        Sign.WORK: evidence.work_unknown,
        Sign.HEAVY_WORK: evidence.work_unknown,
    }
    why = reasons.get(sign)
    return f"{sign} unknown: {why.message if why else 'not measured'}"
