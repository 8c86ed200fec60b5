"""Which rank of a command decides, and when it counts as standing still."""

from typing import Any

import pytest

from exporter.evidence import activity, ranks
from exporter.model.container import ContainerEvidence
from exporter.model.snapshot import Snapshot
from exporter.model.worker import WorkerReading
from gpuwarden import conditions
from gpuwarden.job import Phase
from gpuwarden.state_file import JobFile
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

STILL = build.evidence()
"""Everything idle for 200 s or longer."""
SPINS = build.evidence(gpu_idle_s=0.0, gpu_saturated_s=400.0)
WORKS = build.evidence(gpu_idle_s=0.0)


def rank(number: int, **changes: Any) -> JobFile:
    """A rank whose last step was 150 s ago, of a job with a stall timeout of 120 s."""
    given = {"step_beat": build.ago(150.0), "local_rank": number, "local_ranks": 2, "process": (100 + number, 7)}
    return build.job_file(**{**given, **changes})


def judged(*found: tuple[JobFile, ContainerEvidence | None], place: ContainerEvidence = WORKS) -> Snapshot:
    jobs = tuple(job for job, _ in found)
    own = {f"w0/{job.local_rank}": each for job, each in found if each is not None}
    seen = build.sighting(job=jobs[0], ranks=jobs)
    return ranks.judge(build.snapshot(seen, containers=(place,), worker_evidence=own))


def stalled_rank(snapshot: Snapshot) -> int | None:
    """The rank that the rules call stalled."""
    reading = only(snapshot)
    job, timeouts = reading.job, snapshot.thresholds.timeouts
    assert job is not None
    beat_age_s = job.step_beat.age_s(snapshot.taken) if job.step_beat else None
    inactive_s = activity.inactive_s(job, snapshot.evidence_of_job(reading), timeouts, now=snapshot.taken)
    return job.local_rank if conditions.is_stalled(beat_age_s, inactive_s, timeouts.stall_after_s(job)) else None


def only(snapshot: Snapshot) -> WorkerReading:
    assert snapshot.workers is not None
    (found,) = snapshot.workers.workers
    return found


@pytest.mark.behaviour("A5")
@pytest.mark.parametrize(
    ("other", "seen", "stalled"),
    [
        pytest.param({}, STILL, 1, id="both stand still"),
        pytest.param({}, SPINS, 1, id="the other spins: it waits"),
        pytest.param({"step_beat": build.ago(5.0)}, STILL, None, id="the other steps"),
        pytest.param({"phase": Phase.SAVE}, build.evidence(cpu_idle_s=3.0), None, id="the other saves"),
        pytest.param({"phase": Phase.EVAL}, WORKS, None, id="the other evaluates on its GPU"),
        pytest.param({}, build.evidence(ram_idle_s=10.0), None, id="the other loads"),
        pytest.param({}, build.evidence(gpu_idle_s=None), None, id="the GPU of the other is unknown"),
        pytest.param({"step_beat": None, "phase": "load"}, build.evidence(io_idle_s=2.0), None, id="the other starts"),
    ],
)  # fmt: skip
def test_rank_that_stands_still_is_stalled_unless_another_may_work(
    other: dict[str, Any], seen: ContainerEvidence, stalled: int | None
) -> None:
    assert stalled_rank(judged((rank(0, **other), seen), (rank(1, step_beat=build.ago(155.0)), STILL))) == stalled


@pytest.mark.parametrize("seen", [None, WORKS, build.evidence(io_idle_s=3.0)], ids=["unknown", "works", "writes"])
def test_rank_with_activity_of_its_own_is_not_stalled(seen: ContainerEvidence | None) -> None:
    assert stalled_rank(judged((rank(0), SPINS), (rank(1), seen))) is None


def test_without_evidence_of_each_rank_the_command_is_judged_as_a_whole() -> None:
    assert stalled_rank(judged((rank(0), STILL), (rank(1), None), place=STILL)) == 0
    assert stalled_rank(judged((rank(0), STILL), (rank(1), None), place=WORKS)) is None


@pytest.mark.behaviour("A14b")
@pytest.mark.parametrize(("other_s", "limit_s"), [(5.0, None), (700.0, None), (900.0, 800.0)])
def test_ranks_that_spin_are_stuck_together(other_s: float, limit_s: float | None) -> None:
    steps: dict[str, Any] = {"step": 100, "step_max_s": 40.0}
    found = judged(
        (rank(0, step_beat=build.ago(900.0), **steps), SPINS), (rank(1, step_beat=build.ago(other_s), **steps), SPINS)
    )

    job = only(found).job

    assert job is not None
    assert found.thresholds.timeouts.stuck_after_s(job) == limit_s
