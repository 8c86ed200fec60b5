"""Budget, stuck jobs, GPU health and dead workers, through the whole pipeline, each with a case that must not act.

A job that hangs in its load represents every job without a step beat. A process that only reads, in the same container,
represents a load from a warm page cache: the exporter measures I/O per container.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import docker
import pytest

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import JobClass, JobId, State
from gpuwarden.queue import Submission
from remediator.ledger.reports import EpisodeHistory
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from testbed.workers import DockerFleet, WorkerOptions
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

BUDGET_S: Final = 15.0
DEAD_AFTER_S: Final = 10.0
WINDOW_S: Final = 8.0
GRACE_S: Final = 8.0
NEVER_S: Final = 3600.0
STOP_GRACE_S: Final = 5.0
"""Longer than a heartbeat: then a worker sees that its job was taken, and logs its exit code."""

SILENCE_S: Final = 5.0
STUCK_S: Final = 15.0

FAST: Final[Mapping[str, Any]] = {"load_s": 0.2, "load_mib": 4, "step_s": 0.2}
BUSY: Final = Script(picture="busy", steps=9, slow_step=2, slow_s=300, **FAST)
STUCK: Final = Script(picture="stuck", steps=26, wedge_attempts=1, wedge_after_step=24, wedge_spins=True, **FAST)
"""The first attempt steps, then waits for ever with its GPU at 100 %. The second completes."""
SLOW: Final = Script(picture="slow", steps=30, slow_step=25, slow_s=300, **FAST)
"""Has one slow step, with its GPU at 93 %."""
EVALUATES: Final[Mapping[str, Any]] = {"steps": 9, "eval_every": 2, **FAST}
"""Too few steps for a known step time, and an evaluation after every second step."""
STUCK_EVAL: Final = Script(picture="stuck-eval", wedge_attempts=1, wedge_after_step=8, wedge_spins=True, **EVALUATES)
"""The first attempt waits for ever in its fourth evaluation, with its GPU at 100 %. The second completes."""
SLOW_EVAL: Final = Script(picture="slow-eval", slow_eval=8, slow_s=300, **EVALUATES)
"""Has one slow evaluation, with its GPU at 93 %."""
HANGS: Final = Script(picture="hangs", load_s=0.2, load_mib=4, load_hangs=True)
KILLED: Final = Script(picture="killed", steps=2, wedge_attempts=1, wedge_after_step=1, **FAST)
"""The first attempt hangs until it is killed. The second completes at once."""

READS: Final = """
import time
print("reading", flush=True)
while True:
    with open("/usr/bin/python3", "rb") as file:
        file.read(2 ** 20)
    time.sleep(0.2)
"""
"""Reads 5 MiB a second from the page cache, and does almost nothing else."""

STAYS_UP: Final = "{worker}; while :; do sleep 1; done"
"""A shell that outlives its worker, like a supervisor or an entry point."""

CASES: Final = (
    "budget",
    "in-time",
    "stuck",
    "slow",
    "stuck-eval",
    "slow-eval",
    "hangs",
    "warm",
    "stays-up",
    "goes-down",
    "comes-back",
    "not-ours",
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage and its containers."""

    stage: Stage
    fleet: DockerFleet
    client: docker.DockerClient

    def submit(
        self,
        case: str,
        script: Script,
        *,
        job_class: JobClass = JobClass.GPU,
        budget_s: float = NEVER_S,
        silence_s: float = NEVER_S,
    ) -> JobId:
        self.stage.submit(script, now=time.time(), stall_timeout_s=NEVER_S, queue="draws-the-picture")
        job = Submission(
            queue=case, job_class=job_class, payload=script.payload(), stall_timeout_s=silence_s, budget_s=budget_s
        )
        return self.stage.store.runs.submit(job, now=time.time())

    def facts(self, case: str) -> WorkerFacts:
        return answered(lambda: self.stage.witness.worker_evidence(worker_of(case), host=self.stage.chain.plan.host))

    def episodes(self, case: str) -> list[EpisodeHistory]:
        return [episode for episode in self.stage.ledger.reports.newest() if episode.worker == worker_of(case)]

    def first_closed(self, case: str) -> EpisodeHistory | None:
        """The first closed episode in which something was done."""
        found = [episode for episode in with_action(self.episodes(case)) if episode.closed_at is not None]
        return found[0] if found else None

    def journal_text(self, case: str) -> str:
        return "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in self.stage.journal(worker_of(case)))

    def fired_alerts(self, case: str) -> set[str]:
        found = self.stage.chain.query(f'max_over_time(ALERTS{{worker="{worker_of(case)}", alertstate="firing"}}[30m])')
        return {f"{each['metric']['alertname']} {each['metric']['condition']}" for each in found}

    def lifecycle(self, case: str) -> list[str]:
        return [what for what in self.fleet.history(worker_of(case)) if what in ("start", "stop", "die")]

    def exit_codes(self, case: str) -> list[int]:
        """The exit codes that the worker logged, one for each job that was taken from it."""
        lines = self.fleet.container(worker_of(case)).logs().decode().splitlines()
        messages = [json.loads(line) for line in lines if line.startswith("{")]
        return [line["exit_code"] for line in messages if "exit_code" in line]

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))

    def await_fixed(self, case: str) -> EpisodeHistory:
        self.until(lambda: self.first_closed(case), f"the episode of {case} is closed")
        episode = self.first_closed(case)
        assert episode is not None
        assert episode.outcome == "fixed", self.journal_text(case)
        return episode


def worker_of(case: str) -> str:
    return f"gpuwarden-cond-{case}"


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPUWARDEN_EXPORTER_HEALTH_WINDOW_S", str(WINDOW_S))
        patched.setenv("GPUWARDEN_EXPORTER_HEALTH_GRACE_S", str(GRACE_S))
        patched.setenv("GPUWARDEN_EXPORTER_LOAD_TIMEOUT_S", str(WINDOW_S))
        patched.setenv("GPUWARDEN_EXPORTER_EVAL_TIMEOUT_S", str(SILENCE_S))
        patched.setenv("GPUWARDEN_EXPORTER_STUCK_MIN_S", str(STUCK_S))
        with stage(
            work,
            engine,
            [Slot(worker=worker_of(case), gpus=(f"GPU-sim-{case}",)) for case in CASES],
            armed=True,
            stop_grace_s=STOP_GRACE_S,
            dead_after_s=DEAD_AFTER_S,
            queues={worker_of(case): case for case in CASES},
            unmanaged=[worker_of("not-ours")],
            options=WorkerOptions(heartbeat_s=1.0),
        ) as set_up:
            fleet = set_up.fleet
            assert isinstance(fleet, DockerFleet)
            client = docker.DockerClient(base_url=engine.base_url)
            try:
                found = Scene(stage=set_up, fleet=fleet, client=client)
                run_worker_in_shell(found, "stays-up")
                fleet.container(worker_of("comes-back")).update(restart_policy={"Name": "always"})
                set_up.start_workers()
                yield found
            finally:
                client.close()


def run_worker_in_shell(scene: Scene, case: str) -> None:
    """Create the container again, with a shell that runs the worker."""
    before = scene.fleet.container(worker_of(case))
    config, host = before.attrs["Config"], before.attrs["HostConfig"]
    command = STAYS_UP.format(worker=" ".join(config["Cmd"]))
    before.remove(force=True)
    scene.fleet._containers[worker_of(case)] = scene.client.containers.create(
        config["Image"],
        ["/bin/sh", "-c", command],
        name=worker_of(case),
        labels=config["Labels"],
        environment=config["Env"],
        network_mode="none",
        user=config["User"],
        volumes=host["Binds"],
    )


def await_armed(scene: Scene, case: str) -> WorkerFacts:
    """Wait until the worker's job has loaded; return its evidence."""
    scene.until(lambda: scene.stage.armed(worker_of(case)), f"{case} is armed")
    return scene.facts(case)


def kill(scene: Scene, case: str) -> None:
    """Send a worker SIGKILL, as the OOM killer does."""
    (pid,) = [
        found.pid for found in read_workers(scene) if found.worker.worker == worker_of(case) and found.pid is not None
    ]
    os.kill(pid, signal.SIGKILL)


def read_workers(scene: Scene) -> Any:
    from exporter.sources import workers  # noqa: PLC0415

    return workers.read(scene.stage.chain.directory).workers


@pytest.fixture(scope="module")
def loading_jobs(scene: Scene) -> Mapping[str, JobId]:
    """Two jobs of a video model hang in their load. One is in a container that also reads."""
    jobs = {case: scene.submit(case, HANGS, job_class=JobClass.GPU_VIDEO) for case in ("hangs", "warm")}
    start_reader(scene)
    return jobs


def start_reader(scene: Scene) -> None:
    """Start a process that reads in the container of `warm`."""
    container = scene.fleet.container(worker_of("warm"))
    scene.client.api.exec_start(
        scene.client.api.exec_create(container.id, ["/usr/bin/python3", "-c", READS])["Id"], detach=True
    )


def reader_pid(scene: Scene) -> int:
    """The pid of the process that reads, in the host's pid namespace."""
    rows = scene.fleet.container(worker_of("warm")).top(ps_args="-ww -eo pid,args")  # not cut at $COLUMNS
    at = rows["Titles"].index("PID")
    (pid,) = [
        int(row[at]) for row in rows["Processes"] if "time.sleep" in row[-1]
    ]  # never 0, which addresses every process
    return pid


@pytest.mark.behaviour("A1")
@pytest.mark.behaviour("A18")
def test_busy_job_over_its_budget_is_requeued_and_one_in_time_is_not(scene: Scene) -> None:
    late = scene.submit("budget", BUSY, budget_s=BUDGET_S)
    in_time = scene.submit("in-time", BUSY)

    episode = scene.await_fixed("budget")

    assert (episode.condition, episode.job_id, episode.attempt) == ("budget", late, 1)
    assert scene.fired_alerts("budget") == {"GpuwardenJobOverBudget budget"}
    assert f"of a budget of {BUDGET_S:.1f} s" in scene.journal_text("budget")
    job = scene.stage.store.job(late)
    assert job.watchdog_retries > 0
    assert 75 in scene.exit_codes("budget")
    assert scene.facts("in-time").gpu_idle_s == 0  # busy like the other one
    assert (scene.fired_alerts("in-time"), scene.episodes("in-time")) == (set(), [])
    assert (scene.stage.store.job(in_time).state, scene.stage.store.job(in_time).attempt) == (State.RUNNING, 1)


@pytest.mark.behaviour("A14b")
@pytest.mark.parametrize(
    ("stuck_case", "stuck_script", "slow_case", "slow_script", "text"),
    [
        pytest.param("stuck", STUCK, "slow", SLOW, "stuck: no step for", id="in-steps"),
        pytest.param(
            "stuck-eval", STUCK_EVAL, "slow-eval", SLOW_EVAL, "stuck in phase eval: no step for", id="in-evaluation"
        ),
    ],
)
def test_stuck_job_is_requeued_and_a_slow_one_is_not(
    scene: Scene, stuck_case: str, stuck_script: Script, slow_case: str, slow_script: Script, text: str
) -> None:
    stuck = scene.submit(stuck_case, stuck_script, silence_s=SILENCE_S)
    slow = scene.submit(slow_case, slow_script, silence_s=SILENCE_S)

    episode = scene.await_fixed(stuck_case)

    assert (episode.condition, episode.job_id, episode.attempt) == ("stall", stuck, 1)
    assert scene.fired_alerts(stuck_case) == {"GpuwardenJobStuck stall"}
    assert text in scene.journal_text(stuck_case)
    assert "GPU saturated" in scene.journal_text(stuck_case)
    assert 76 in scene.exit_codes(stuck_case)
    scene.until(lambda: scene.stage.store.job(stuck).state is State.COMPLETED, "the second attempt is done")
    scene.until(
        lambda: (scene.facts(slow_case).step_beat_age_s or 0) > 2 * STUCK_S, "the slow job takes twice the time allowed"
    )
    facts = scene.facts(slow_case)
    assert facts.stuck_after_s is not None
    assert facts.stuck_after_s < (facts.step_beat_age_s or 0)
    assert (facts.gpu_idle_s, facts.gpu_saturated_s) == (0, 0)  # busy but not saturated
    assert (scene.fired_alerts(slow_case), scene.episodes(slow_case)) == (set(), [])
    assert scene.stage.store.job(slow).attempt == 1


@pytest.mark.behaviour("A7")
@pytest.mark.behaviour("A18")
def test_video_job_without_a_step_beat_meets_gpu_health(scene: Scene, loading_jobs: Mapping[str, JobId]) -> None:
    episode = scene.await_fixed("hangs")

    assert (episode.condition, episode.job_id, episode.attempt) == ("health", loading_jobs["hangs"], 1)
    assert scene.fired_alerts("hangs") == {"GpuwardenJobUnhealthy health"}
    assert "I/O, page faults and CPU inactive" in scene.journal_text("hangs")
    assert scene.stage.store.job(loading_jobs["hangs"]).watchdog_retries > 0
    assert 78 in scene.exit_codes("hangs")


@pytest.mark.behaviour("A5")
@pytest.mark.behaviour("A7")
def test_load_is_not_restarted_while_it_reads(scene: Scene, loading_jobs: Mapping[str, JobId]) -> None:
    scene.until(
        lambda: (scene.facts("warm").elapsed_s or 0) > 2 * (WINDOW_S + GRACE_S), "the load takes twice its timeout"
    )

    def idle_s() -> float:
        facts = scene.facts("warm")
        return min(facts.gpu_idle_s or 0, facts.ram_idle_s or 0, facts.page_fault_idle_s or 0)

    scene.until(lambda: idle_s() > WINDOW_S, "for a whole window it does nothing but read")
    facts = scene.facts("warm")
    assert facts.phase == "load"
    assert facts.io_idle_s is not None
    assert facts.io_idle_s < WINDOW_S
    assert (scene.fired_alerts("warm"), scene.episodes("warm")) == (set(), [])
    assert scene.stage.store.job(loading_jobs["warm"]).attempt == 1

    os.kill(reader_pid(scene), signal.SIGKILL)  # control: only the reads stop

    assert scene.await_fixed("warm").condition == "health"
    assert scene.fired_alerts("warm") == {"GpuwardenJobUnhealthy health"}


@pytest.mark.behaviour("A14")
@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(
    ("case", "lifecycle"),
    [
        pytest.param("stays-up", ["start", "die", "stop", "start"], id="container-stays-up"),
        pytest.param("goes-down", ["start", "die", "start"], id="container-stops"),
    ],
)
def test_job_of_a_killed_worker_is_requeued_and_its_container_started(
    scene: Scene, case: str, lifecycle: list[str]
) -> None:
    job_id = scene.submit(case, KILLED)
    before = await_armed(scene, case)

    kill(scene, case)

    episode = scene.await_fixed(case)
    assert (episode.condition, episode.job_id, episode.attempt) == ("dead_worker", job_id, 1)
    assert scene.fired_alerts(case) == {"GpuwardenWorkerGone dead_worker"}
    scene.until(lambda: scene.stage.store.job(job_id).state is State.COMPLETED, "the job is done")
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    assert scene.lifecycle(case) == lifecycle
    assert f"stop {before.container}" not in scene.journal_text(case) or case == "stays-up"
    assert "worker dead: process ended" in scene.stage.chain.log("exporter")


@pytest.mark.behaviour("A14")
def test_worker_that_docker_restarts_is_not_acted_on(scene: Scene) -> None:
    job_id = scene.submit("comes-back", KILLED)
    await_armed(scene, "comes-back")

    kill(scene, "comes-back")

    scene.until(lambda: scene.stage.store.job(job_id).state is State.COMPLETED, "the job is done")
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 0, 1)
    assert scene.lifecycle("comes-back") == ["start", "die", "start"]
    assert scene.episodes("comes-back") == []


@pytest.mark.behaviour("A14")
def test_dead_worker_in_an_unmanaged_container_is_not_restarted(scene: Scene) -> None:
    scene.submit("not-ours", KILLED)
    await_armed(scene, "not-ours")

    kill(scene, "not-ours")

    scene.until(lambda: scene.first_closed("not-ours"), "the restart is refused")
    assert [episode.outcome for episode in with_action(scene.episodes("not-ours"))] == ["refused"]
    facts = scene.facts("not-ours")
    assert (facts.alive, facts.container, facts.container_workers) == (False, worker_of("not-ours"), 0)
    assert scene.lifecycle("not-ours") == ["start", "die"]
