"""A job under `gpuwarden run` has no stall timeout and no health window before its first use of a GPU."""

from dataclasses import replace

import pytest

from exporter.evidence import gpu_use
from exporter.model.container import ContainerEvidence
from exporter.model.timeouts import PhaseTimeouts
from exporter.model.worker import WorkerReading, WorkerReadings
from gpuwarden.job import JobClass
from gpuwarden.state_file import JobFile
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

SUPERVISOR = 4100
USED = {
    "no memory and no busy time": ({}, {}, False),
    "memory of 0": ({"GPU-0": 0}, {"GPU-0": 0.0}, False),
    "memory": ({"GPU-0": 0, "GPU-1": 1}, {}, True),
    "busy time": ({}, {"GPU-0": 0.1}, True),
}


def guarded(**changes: object) -> WorkerReading:
    """A command under `gpuwarden run`: its supervisor holds the lock, outside of a container."""
    job = build.job_file(after_gpu_use=True, budget_s=600.0, stall_timeout_s=120.0)
    return build.sighting(**({"job": job, "pid": SUPERVISOR, "container_id": None} | changes))


def tree(pid: int = SUPERVISOR, **changes: object) -> ContainerEvidence:
    """The evidence of a process tree."""
    container = build.container(kind="process", id=f"process:{pid}:77", pid=pid)
    return build.evidence(container=container, **changes)


def job_of(sighting: WorkerReading, *containers: ContainerEvidence) -> JobFile | None:
    found = gpu_use.without_limits_before_use(WorkerReadings(workers=(sighting,)), containers)
    assert found is not None
    (worker,) = found.workers
    assert replace(worker, job=None) == replace(sighting, job=None)
    return worker.job


def is_limited(job: JobFile | None) -> bool:
    """Whether the stall timeout and the health window apply to it."""
    assert job is not None
    assert job.budget_s == 600.0, "the budget always applies"
    has_window = PhaseTimeouts().health_window_s(job, 60.0) is not None
    assert has_window == (job.stall_timeout_s > 0), "both or none"
    return has_window


@pytest.mark.parametrize(("peak_bytes", "busy_s", "limited"), USED.values(), ids=USED)
def test_limits_apply_after_the_first_use(peak_bytes: dict[str, int], busy_s: dict[str, float], limited: bool) -> None:
    sighting, used = guarded(), tree(peak_bytes=peak_bytes, busy_s=busy_s)

    assert is_limited(job_of(sighting, used)) is limited


def test_gpu_use_of_another_process_tree_does_not_count() -> None:
    other = tree(SUPERVISOR + 1, peak_bytes={"GPU-0": 1})

    assert not is_limited(job_of(guarded(), other))
    assert not is_limited(job_of(guarded(), tree(), other))


def test_job_in_a_container_counts_by_its_container() -> None:
    inside = guarded(container_id=build.DOCKER_ID, pid=4001)

    assert is_limited(job_of(inside, build.evidence(peak_bytes={"GPU-0": 1})))
    assert not is_limited(job_of(inside, build.evidence()))
    assert not is_limited(job_of(inside, tree(4001, peak_bytes={"GPU-0": 1}))), "this is another container"


def test_dead_worker_has_used_no_gpu() -> None:
    assert not is_limited(job_of(guarded(alive=False, pid=None), tree(peak_bytes={"GPU-0": 1})))


def test_other_jobs_keep_their_limits() -> None:
    """They are the jobs of a queue."""
    plain, idle = build.sighting(), build.sighting(job=None)
    found = WorkerReadings(workers=(plain, idle, guarded()))

    answer = gpu_use.without_limits_before_use(found, ())

    assert answer is not None
    assert answer.workers[:2] == (plain, idle)
    assert answer.workers[2].job is not None
    assert answer.workers[2].job.job_class is JobClass.CPU


@pytest.mark.parametrize("found", [None, WorkerReadings(workers=()), WorkerReadings(workers=(build.sighting(),))])
def test_readings_without_such_a_job_are_unchanged(found: WorkerReadings | None) -> None:
    assert gpu_use.without_limits_before_use(found, ()) is found
