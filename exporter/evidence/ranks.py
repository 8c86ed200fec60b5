"""A command of several ranks, as of torchrun: the job of one rank is judged for all. Pure.

A rank that stands still may wait for an active one. A rank that only saturates its GPU waits itself.
"""

from dataclasses import dataclass, replace

from exporter.evidence import activity
from exporter.model.container import ContainerEvidence
from exporter.model.snapshot import Snapshot
from exporter.model.worker import WorkerReading
from gpuwarden import conditions
from gpuwarden.state_file import JobFile


def as_workers(reading: WorkerReading) -> list[WorkerReading]:
    """Each running rank as a worker of the container, so that its processes are found."""
    return [
        replace(
            reading,
            worker=replace(reading.worker, worker=_name(reading, job), incarnation=f"{job.attempt}/{job.process[1]}"),
            pid=job.process[0],
        )
        for job in reading.ranks
        if job.process is not None
    ]


def judge(snapshot: Snapshot) -> Snapshot:
    """Replace the job and the evidence of each command with ranks by those of the rank that decides.

    While a rank is unknown, the job of rank 0 is judged by the whole command.
    """
    if snapshot.workers is None or not any(each.ranks for each in snapshot.workers.workers):
        return snapshot
    workers: list[WorkerReading] = []
    evidence: dict[str, ContainerEvidence] = {}
    for reading in snapshot.workers.workers:
        place = snapshot.container_of(reading)
        own = [snapshot.worker_evidence.get(_name(reading, job)) for job in reading.ranks]
        known = [each for each in own if each is not None]
        if place is None or len(known) < 2 or len(known) < len(own):
            workers.append(reading)
            continue
        ranks = [_rank(job, its, snapshot) for job, its in zip(reading.ranks, known, strict=True)]
        still = [rank for rank in ranks if rank.is_still and not any(each.may_work for each in _others(rank, ranks))]
        decides = max(still, key=lambda rank: rank.step_beat_age_s or 0.0, default=ranks[0])
        others = _others(decides, ranks)
        # With `ranks`, a job is not judged as stuck: a healthy rank spins while another one evaluates.
        is_stuck = all(each.is_overdue for each in others)
        job = decides.job if is_stuck else replace(decides.job, ranks=max(2, decides.job.ranks))
        workers.append(replace(reading, job=job))
        waits = any(each.may_work for each in others)
        evidence[reading.worker.worker] = _merged(place, decides.own, waits=waits)
    return replace(snapshot, workers=replace(snapshot.workers, workers=tuple(workers)), job_evidence=evidence)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    job: JobFile
    own: ContainerEvidence
    step_beat_age_s: float | None
    may_work: bool
    is_still: bool
    is_overdue: bool


def _rank(job: JobFile, own: ContainerEvidence, snapshot: Snapshot) -> _Rank:
    now, thresholds = snapshot.taken, snapshot.thresholds
    timeouts = thresholds.timeouts
    beat_age_s = job.step_beat.age_s(now) if job.step_beat else None
    inactive_s = activity.inactive_s(job, own, timeouts, now=now, shared_container=True)
    is_stalled = conditions.is_stalled(beat_age_s, inactive_s, timeouts.stall_after_s(job))
    window_s = timeouts.health_window_s(job, thresholds.health_window_s)
    return _Rank(
        job=job,
        own=own,
        step_beat_age_s=beat_age_s,
        may_work=inactive_s is None or activity.is_rank_active(job, own, timeouts, now=now),
        is_still=is_stalled or conditions.reached(inactive_s, window_s),
        is_overdue=conditions.reached(beat_age_s, timeouts.stuck_after_s(job, own.pauses)),
    )


def _others(rank: _Rank, ranks: list[_Rank]) -> list[_Rank]:
    return [each for each in ranks if each is not rank]


def _merged(place: ContainerEvidence, own: ContainerEvidence, *, waits: bool) -> ContainerEvidence:
    """The container with the activity of one rank. While that may wait for another, its GPU counts as busy."""
    return place._replace(
        gpu_idle_s=0.0 if waits else own.gpu_idle_s,
        gpu_lost_s=None if waits else own.gpu_lost_s,
        gpu_saturated_s=own.gpu_saturated_s,
        gpu_last_busy_age_s=own.gpu_last_busy_age_s,
        gpu_unknown=own.gpu_unknown,
        ram_idle_s=conditions.least(own.ram_idle_s, own.io_idle_s),  # page cache belongs to no single rank
        ram_unknown=own.ram_unknown,
        io_idle_s=own.io_idle_s,
        page_fault_idle_s=own.page_fault_idle_s,
        cpu_idle_s=own.cpu_idle_s,
        heavy_work_idle_s=own.heavy_work_idle_s,
        work_unknown=own.work_unknown,
    )


def _name(reading: WorkerReading, job: JobFile) -> str:
    """A key that is no worker's name."""
    return f"{reading.worker.worker}/{job.local_rank}"
