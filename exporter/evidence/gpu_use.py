"""Jobs whose stall and health count only after their first use of a GPU. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from exporter.model.container import ContainerEvidence
from exporter.model.worker import WorkerReading, WorkerReadings
from gpuwarden.job import JobClass


def without_limits_before_use(
    found: WorkerReadings | None, containers: Sequence[ContainerEvidence]
) -> WorkerReadings | None:
    """Such a job has no stall timeout and no health window until then: only its budget ends it."""
    if found is None or not any(each.job is not None and each.job.after_gpu_use for each in found.workers):
        return found
    used = {each.container.id for each in containers if any(each.peak_bytes.values()) or any(each.busy_s.values())}
    used_pids = {each.container.pid for each in containers if each.container.id in used}
    return replace(found, workers=tuple(_limited(each, used, used_pids) for each in found.workers))


def _limited(sighting: WorkerReading, used: set[str], used_pids: set[int]) -> WorkerReading:
    job = sighting.job
    has_used = sighting.container_id in used or (sighting.container_id is None and sighting.pid in used_pids)
    if job is None or not job.after_gpu_use or has_used:
        return sighting
    return replace(sighting, job=replace(job, stall_timeout_s=0.0, job_class=JobClass.CPU), ranks=())
