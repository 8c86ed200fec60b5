"""How long a job has shown no sign of life, and which sign was the last. Pure."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from exporter.model.container import ContainerEvidence
from exporter.model.timeouts import Patience
from gpuwarden.state_file import JobFile, Stamp


class _Sign(StrEnum):
    """By what a job shows that it lives."""

    BEAT = "beat"
    PHASE = "phase"
    GPU = "GPU"
    RAM = "RAM"
    IO = "I/O"
    WORK = "work"


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
    known_s: list[float] = []
    for _, without_s in _signs(job, evidence, now=now, gpu_lost=gpu_lost, apart=apart):
        if without_s is None:
            return None
        known_s.append(without_s)
    return min(known_s)


def _signs(
    job: JobFile,
    evidence: ContainerEvidence | None,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    apart: bool = False,
) -> Iterator[tuple[_Sign, float | None]]:
    """Each sign of life that counts, and for how long an attempt has been without it, seconds; `None` is unknown.

    The one definition of quiet, for the stall (A2 to A5) and for GPU health (A7). Beats count once there was one. All
    of it lies within one phase: what is life in one, such as the work of its processes, is none in another, and what
    was life in the phase before does not show in the durations of this one. Of a worker that is told `apart` I/O counts
    in each: a container's page cache is part of its RAM, but of nobody's in it.
    """
    if job.beat is not None:
        yield _Sign.BEAT, job.beat.age_s(now)
    yield _Sign.PHASE, job.phase_started.age_s(now)
    if evidence is None:
        yield _Sign.GPU, None
    else:
        yield _Sign.GPU, evidence.gpu_lost_s if gpu_lost else evidence.gpu_idle_s
        yield _Sign.RAM, evidence.ram_still_s
        if apart:
            yield _Sign.IO, evidence.io_still_s
        if job.phase.counts_work:
            yield _Sign.WORK, evidence.work_still_s


def suspicion(job: JobFile, evidence: ContainerEvidence | None, patience: Patience, *, now: Stamp) -> str | None:
    """Why a silent job is suspected of a stall but not accused (A4); `None` when it is not silent, or is wedged.

    What this sees as a sign of life restarts the silence by itself: the durations that the rule compares begin anew.
    """
    silence_s = patience.silence_s(job)
    if silence_s == 0 or job.beat is None:
        return None
    for sign, without_s in _signs(job, evidence, now=now):
        if without_s is None or without_s < silence_s:
            return None if sign is _Sign.BEAT else _shown(sign, without_s, evidence)
    return None


_SHOWN: Final = {
    _Sign.PHASE: "it went on to this phase",
    _Sign.GPU: "GPU was busy or unseen",
    _Sign.RAM: "RAM moved or was unseen",
    _Sign.WORK: "its processes worked or were unseen",
}


def _shown(sign: _Sign, without_s: float | None, evidence: ContainerEvidence | None) -> str:
    """The sign of life that a silent job shows, or may show, in words."""
    if without_s is not None:
        return f"{_SHOWN[sign]} {without_s:.0f} s ago"
    if evidence is None:
        return "its container is unknown"
    reasons = {
        _Sign.GPU: evidence.gpu_unknown,
        _Sign.RAM: evidence.ram_unknown,
        _Sign.WORK: evidence.work_unknown,
    }
    why = reasons.get(sign)
    return f"{sign} unknown: {why.because if why else 'not measured'}"
