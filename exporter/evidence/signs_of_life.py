"""How long a job has shown no sign of life, and which sign was the last. Pure."""

from typing import Final

from exporter.model.container import ContainerEvidence
from exporter.model.timeouts import Patience
from gpuwarden import conditions
from gpuwarden.conditions import Sign
from gpuwarden.state_file import JobFile, Stamp


def quiet_s(
    job: JobFile,
    evidence: ContainerEvidence | None,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    apart: bool = False,
) -> float | None:
    """For how long an attempt has shown no sign of life, seconds; `None` while any that counts is unknown.

    `gpu_lost` asks for how long one of its GPUs was lost and each other one idle or lost too, instead of all idle.
    `apart` says that the evidence is of what one worker alone has done, of several that share a container.
    """
    return conditions.least(*_signs(job, evidence, now=now, gpu_lost=gpu_lost, apart=apart).values())


def _signs(
    job: JobFile,
    evidence: ContainerEvidence | None,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    apart: bool = False,
) -> dict[Sign, float | None]:
    gpu_s = None if evidence is None else evidence.gpu_lost_s if gpu_lost else evidence.gpu_idle_s
    return conditions.signs_of_life(
        job.phase,
        has_beaten=job.beat is not None,
        beat_age_s=job.beat.age_s(now) if job.beat else None,
        phase_age_s=job.phase_started.age_s(now),
        gpu_s=gpu_s,
        ram_still_s=evidence.ram_still_s if evidence else None,
        work_still_s=evidence.work_still_s if evidence else None,
        io_counts=apart,
        io_still_s=evidence.io_still_s if evidence else None,
    )


def suspicion(job: JobFile, evidence: ContainerEvidence | None, patience: Patience, *, now: Stamp) -> str | None:
    """Why a silent job is suspected of a stall but not accused (A4); `None` when it is not silent, or is wedged.

    What this sees as a sign of life restarts the silence by itself: the durations that the rule compares begin anew.
    """
    silence_s = patience.silence_s(job)
    if silence_s == 0 or job.beat is None:
        return None
    for sign, without_s in _signs(job, evidence, now=now).items():
        if without_s is None or without_s < silence_s:
            return None if sign is Sign.BEAT else _shown(sign, without_s, evidence)
    return None


_SHOWN: Final = {
    Sign.PHASE: "it went on to this phase",
    Sign.GPU: "GPU was busy or unseen",
    Sign.RAM: "RAM moved or was unseen",
    Sign.WORK: "its processes worked or were unseen",
}


def _shown(sign: Sign, without_s: float | None, evidence: ContainerEvidence | None) -> str:
    """The sign of life that a silent job shows, or may show, in words."""
    if without_s is not None:
        return f"{_SHOWN[sign]} {without_s:.0f} s ago"
    if evidence is None:
        return "its container is unknown"
    reasons = {
        Sign.GPU: evidence.gpu_unknown,
        Sign.RAM: evidence.ram_unknown,
        Sign.WORK: evidence.work_unknown,
    }
    why = reasons.get(sign)
    return f"{sign} unknown: {why.because if why else 'not measured'}"
