"""Jobs without step beats that must not be restarted, next to a stalled job that must be."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import JobClass, State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S = 5.0
FAST = {"load_s": 0.5, "load_mib": 8, "step_s": 0.2}
STALL = Script(picture="wedge", wedge_attempts=1, wedge_after_step=2, steps=4, **FAST)  # type: ignore[arg-type]
CONTROL = "gpuwarden-alone-control"

SCRIPTS: Mapping[str, Script] = {
    "control": STALL,
    "loading": Script(picture="loading", load_s=400, load_mib=6000),
    "never-armed": Script(picture="never-armed", load_s=0.5, load_mib=8, load_hangs=True),
    "slow-busy": Script(picture="slow-busy", steps=9, slow_step=2, slow_s=300, **FAST),  # type: ignore[arg-type]
    "staging": Script(picture="staging", steps=9, slow_step=2, slow_s=300, idle_slow=True, churn_mib=96, **FAST),  # type: ignore[arg-type]
    "unknown": STALL,
    "one-unknown": STALL,
    "video": STALL,
    "no-steps": STALL,
}
UNCHECKED: Mapping[str, tuple[JobClass, bool]] = {
    "video": (JobClass.GPU_VIDEO, True),
    "no-steps": (JobClass.GPU, False),
}
UNREADABLE = frozenset({"GPU-sim-unknown", "GPU-sim-one-unknown-1"})


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The stage once the control is fixed and the other jobs have had no step beat for twice the time allowed."""

    scene: Stage
    before: Mapping[str, str]
    jobs: Mapping[str, int]

    def facts(self, name: str) -> WorkerFacts:
        return answered(lambda: self.scene.witness.worker_evidence(_worker(name), host=self.scene.chain.plan.host))

    def is_untouched(self, name: str) -> bool:
        worker = _worker(name)
        episodes = [episode for episode in self.scene.ledger.reports.newest() if episode.worker == worker]
        job = self.scene.store.job(self.jobs[name])
        is_same = self.scene.fleet.incarnation(worker) == self.before[worker]
        alerts = self.scene.chain.query(f'max_over_time(ALERTS{{worker="{worker}", alertstate="firing"}}[10m])')
        return is_same and not episodes and not alerts and (job.state, job.attempt) == (State.RUNNING, 1)


@pytest.fixture(scope="module")
def watched(work: Path, engine: Engine) -> Iterator[Watched]:
    slots = [
        Slot(
            worker=_worker(name),
            gpus=(f"GPU-sim-{name}", f"GPU-sim-{name}-1") if name == "one-unknown" else (f"GPU-sim-{name}",),
        )
        for name in SCRIPTS
    ]
    queues = {_worker(name): name for name in SCRIPTS}
    with stage(work, engine, slots, armed=True, stop_grace_s=1.0, queues=queues) as scene:
        scene.gpus.unreadable = UNREADABLE
        jobs = {
            name: scene.submit(
                script,
                now=time.time(),
                stall_timeout_s=SILENCE_S,
                queue=name,
                job_class=UNCHECKED.get(name, (JobClass.GPU, True))[0],
                reports_steps=UNCHECKED.get(name, (JobClass.GPU, True))[1],
            )
            for name, script in SCRIPTS.items()
        }
        before = scene.start_workers()
        watched = Watched(scene=scene, before=before, jobs=jobs)
        eventually(
            lambda: scene.store.job(jobs["control"]).state is State.COMPLETED and not scene.ledger.episodes.list_open(),
            within_s=90,
            what="the control is fixed",
            log=lambda: scene.chain.log_tail("execute"),
        )
        without_beat = [name for name in SCRIPTS if name not in ("control", "loading", "never-armed")]
        eventually(
            lambda: all((watched.facts(name).step_beat_age_s or 0) > 2 * SILENCE_S for name in without_beat),
            within_s=60,
            what="the others have no step beat for twice the time allowed",
        )
        yield watched


@pytest.mark.behaviour("A5")
def test_control_in_the_same_setup_is_fixed(watched: Watched) -> None:
    job = watched.scene.store.job(watched.jobs["control"])
    outcomes = [
        episode.outcome for episode in with_action(watched.scene.ledger.reports.newest()) if episode.worker == CONTROL
    ]

    assert (job.state, job.attempt) == (State.COMPLETED, 2)
    assert outcomes == ["fixed"]
    assert watched.scene.fleet.incarnation(CONTROL) != watched.before[CONTROL]


@pytest.mark.behaviour("A3")
@pytest.mark.behaviour("A5")
def test_loading_job_is_not_restarted(watched: Watched) -> None:
    facts = watched.facts("loading")

    assert watched.is_untouched("loading")
    assert (facts.phase, facts.step_beat_age_s) == ("load", None)
    assert facts.elapsed_s is not None
    assert facts.elapsed_s > 2 * SILENCE_S
    assert facts.gpu_idle_s is not None
    assert facts.gpu_idle_s > SILENCE_S
    assert facts.ram_idle_s is not None
    assert facts.ram_idle_s < SILENCE_S


@pytest.mark.behaviour("A3")
def test_job_that_is_not_monitored_yet_is_not_restarted(watched: Watched) -> None:
    def idle_s() -> float:
        facts = watched.facts("never-armed")
        return min(facts.gpu_idle_s or 0, facts.ram_idle_s or 0)

    eventually(lambda: idle_s() > SILENCE_S, within_s=60, what="its GPU and RAM are idle for the time allowed")

    assert watched.is_untouched("never-armed")
    assert watched.facts("never-armed").step_beat_age_s is None
    armed = watched.scene.chain.query(f'gpuwarden_job_step_beat_age_seconds{{worker="{_worker("never-armed")}"}}')
    assert [each["value"][1] for each in armed] == ["NaN"]


@pytest.mark.behaviour("A4")
@pytest.mark.behaviour("A5")
def test_slow_step_with_a_busy_gpu_is_suspected_and_not_restarted(watched: Watched) -> None:
    assert watched.is_untouched("slow-busy")
    assert watched.facts("slow-busy").gpu_idle_s == 0
    suspicion = f'gpuwarden_job_stall_suspected{{worker="{_worker("slow-busy")}"}} == 1'
    eventually(lambda: watched.scene.chain.query(suspicion), "the job is suspected")


@pytest.mark.behaviour("A5")
def test_step_that_moves_ram_with_an_idle_gpu_is_not_restarted(watched: Watched) -> None:
    facts = watched.facts("staging")

    assert watched.is_untouched("staging")
    assert facts.gpu_idle_s is not None
    assert facts.gpu_idle_s > SILENCE_S
    assert facts.ram_idle_s is not None
    assert facts.ram_idle_s < SILENCE_S


@pytest.mark.behaviour("A5")
@pytest.mark.parametrize("name", ["unknown", "one-unknown"])
def test_stalled_job_with_an_unreadable_gpu_is_not_restarted(watched: Watched, name: str) -> None:
    facts = watched.facts(name)

    assert watched.is_untouched(name)
    assert facts.gpu_idle_s is None
    assert facts.gpu_unknown is not None
    series = watched.scene.chain.query(f'gpuwarden_container_gpu_idle_seconds{{container="{_worker(name)}"}}')
    assert [each["value"][1] for each in series] == ["NaN"]
    count = f'gpuwarden_container_unknown_samples_total{{container="{_worker(name)}",field="gpu"}} > 0'
    eventually(lambda: watched.scene.chain.query(count), "the unknown samples are counted")


@pytest.mark.behaviour("A6")
@pytest.mark.parametrize("name", UNCHECKED)
def test_stalled_video_job_and_job_without_steps_have_only_a_budget(watched: Watched, name: str) -> None:
    facts = watched.facts(name)

    assert watched.is_untouched(name)
    assert facts.gpu_idle_s is not None
    assert facts.ram_idle_s is not None
    assert min(facts.gpu_idle_s, facts.ram_idle_s, facts.step_beat_age_s or 0) > SILENCE_S
    (timeout,) = watched.scene.chain.query(f'gpuwarden_job_stall_timeout_seconds{{worker="{_worker(name)}"}}')
    assert timeout["value"][1] == "NaN"


@pytest.mark.behaviour("A5")
def test_stalled_jobs_are_fixed_once_their_gpus_can_be_read(watched: Watched) -> None:
    """Control of the two jobs above: only the GPUs become readable."""
    watched.scene.gpus.unreadable = frozenset()

    eventually(
        lambda: all(
            watched.scene.store.job(watched.jobs[name]).state is State.COMPLETED for name in ("unknown", "one-unknown")
        ),
        within_s=60,
        what="both jobs are fixed",
        log=lambda: watched.scene.chain.log_tail("execute"),
    )


def _worker(name: str) -> str:
    return f"gpuwarden-alone-{name}"
