"""Budget, GPU health and dead workers through the whole chain, each beside what must be left alone in the same set-up.

A body that hangs while it loads stands in for every job that never beats. What works beside it in the same container,
with I/O alone, stands in for a load from a warm page cache: the exporter goes by the container.
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
"""Longer than a heartbeat, at which a worker sees that its job was taken, and says what it ends with."""

SILENCE_S: Final = 5.0
STUCK_S: Final = 15.0

FAST: Final[Mapping[str, Any]] = {"load_s": 0.2, "load_mib": 4, "step_s": 0.2}
BUSY: Final = Script(picture="busy", steps=9, slow_step=2, slow_s=300, **FAST)
STUCK: Final = Script(picture="stuck", steps=26, wedge_attempts=1, wedge_after_step=24, wedge_spins=True, **FAST)
"""Steps, and then waits for ever at its first attempt, its GPU at 100 %; done at its second."""
SLOW: Final = Script(picture="slow", steps=30, slow_step=25, slow_s=300, **FAST)
"""Takes one step that is a slow one, its GPU at 93 %."""
EVALUATES: Final[Mapping[str, Any]] = {"steps": 9, "eval_every": 2, **FAST}
"""Fewer steps than tell how long one takes, and an evaluation after every second one."""
STUCK_EVAL: Final = Script(picture="stuck-eval", wedge_attempts=1, wedge_after_step=8, wedge_spins=True, **EVALUATES)
"""Waits for ever in the fourth evaluation of its first attempt, its GPU at 100 %; done at its second."""
SLOW_EVAL: Final = Script(picture="slow-eval", slow_eval=8, slow_s=300, **EVALUATES)
"""Evaluates slowly there, its GPU at 93 %."""
HANGS: Final = Script(picture="hangs", load_s=0.2, load_mib=4, load_hangs=True)
KILLED: Final = Script(picture="killed", steps=2, wedge_attempts=1, wedge_after_step=1, **FAST)
"""Hangs at its first attempt, and is killed there; done in no time at its second."""

READS: Final = """
import time
print("reading", flush=True)
while True:
    with open("/usr/bin/python3", "rb") as file:
        file.read(2 ** 20)
    time.sleep(0.2)
"""
"""Reads 5 MiB a second out of the page cache, and does nothing else to speak of."""

STAYS_UP: Final = "{worker}; while :; do sleep 1; done"
"""A shell that outlives the worker it runs, as a supervisor or an entry point may."""

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

    def stories(self, case: str) -> list[EpisodeHistory]:
        return [story for story in self.stage.ledger.reports.newest() if story.worker == worker_of(case)]

    def first(self, case: str) -> EpisodeHistory | None:
        """The first episode of which something came, once it is closed."""
        found = [story for story in with_action(self.stories(case)) if story.closed_at is not None]
        return found[0] if found else None

    def told(self, case: str) -> str:
        return "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in self.stage.journal(worker_of(case)))

    def fired(self, case: str) -> set[str]:
        found = self.stage.chain.query(f'max_over_time(ALERTS{{worker="{worker_of(case)}", alertstate="firing"}}[30m])')
        return {f"{each['metric']['alertname']} {each['metric']['condition']}" for each in found}

    def happened(self, case: str) -> list[str]:
        return [what for what in self.fleet.history(worker_of(case)) if what in ("start", "stop", "die")]

    def exit_codes(self, case: str) -> list[int]:
        """What the worker said it ended with, each time its job was taken from it."""
        lines = self.fleet.container(worker_of(case)).logs().decode().splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{")]
        return [line["exit_code"] for line in told if "exit_code" in line]

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))

    def first_mended(self, case: str) -> EpisodeHistory:
        self.until(lambda: self.first(case), f"{case} is over")
        story = self.first(case)
        assert story is not None
        assert story.outcome == "mended", self.told(case)
        return story


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
                outlive_its_worker(found, "stays-up")
                fleet.container(worker_of("comes-back")).update(restart_policy={"Name": "always"})
                set_up.start_workers()
                yield found
            finally:
                client.close()


def outlive_its_worker(scene: Scene, case: str) -> None:
    """Make a container anew in which a shell runs the worker."""
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


def armed(scene: Scene, case: str) -> WorkerFacts:
    """What is seen of a worker once its job has loaded."""
    scene.until(lambda: scene.stage.armed(worker_of(case)), f"{case} is armed")
    return scene.facts(case)


def kill(scene: Scene, case: str) -> None:
    """SIGKILL for a worker, as the OOM killer does."""
    (pid,) = [
        sighting.pid
        for sighting in workers_seen(scene)
        if sighting.worker.worker == worker_of(case) and sighting.pid is not None
    ]
    os.kill(pid, signal.SIGKILL)


def workers_seen(scene: Scene) -> Any:
    from exporter.sources import workers  # noqa: PLC0415

    return workers.read(scene.stage.chain.directory).workers


@pytest.fixture(scope="module")
def loads(scene: Scene) -> Mapping[str, JobId]:
    """Two jobs of a video model that hang while they load, one of them in a container that reads meanwhile."""
    jobs = {case: scene.submit(case, HANGS, job_class=JobClass.GPU_VIDEO) for case in ("hangs", "warm")}
    reads(scene)
    return jobs


def reads(scene: Scene) -> None:
    """Start to read in the container of `warm`."""
    container = scene.fleet.container(worker_of("warm"))
    scene.client.api.exec_start(
        scene.client.api.exec_create(container.id, ["/usr/bin/python3", "-c", READS])["Id"], detach=True
    )


def reader(scene: Scene) -> int:
    """The pid of what reads, by the host's numbers."""
    rows = scene.fleet.container(worker_of("warm")).top(ps_args="-ww -eo pid,args")  # whole, whatever $COLUMNS says
    at = rows["Titles"].index("PID")
    (pid,) = [int(row[at]) for row in rows["Processes"] if "time.sleep" in row[-1]]  # never 0, which is everybody
    return pid


@pytest.mark.behaviour("A1")
@pytest.mark.behaviour("A18")
def test_a_busy_job_over_its_budget_is_tripped_and_one_in_time_is_not(scene: Scene) -> None:
    late = scene.submit("budget", BUSY, budget_s=BUDGET_S)
    in_time = scene.submit("in-time", BUSY)

    story = scene.first_mended("budget")

    assert (story.condition, story.job_id, story.attempt) == ("budget", late, 1)
    assert scene.fired("budget") == {"GpuwardenJobOverBudget budget"}
    assert f"of a budget of {BUDGET_S:.1f} s" in scene.told("budget")
    job = scene.stage.store.job(late)
    assert job.watchdog_retries > 0
    assert 75 in scene.exit_codes("budget")
    assert scene.facts("in-time").gpu_idle_s == 0  # busy, as the other was
    assert (scene.fired("in-time"), scene.stories("in-time")) == (set(), [])
    assert (scene.stage.store.job(in_time).state, scene.stage.store.job(in_time).attempt) == (State.RUNNING, 1)


@pytest.mark.behaviour("A14b")
@pytest.mark.parametrize(
    ("wedges", "works", "is_slow", "slowly", "says"),
    [
        pytest.param("stuck", STUCK, "slow", SLOW, "stuck: no step for", id="in its steps"),
        pytest.param(
            "stuck-eval", STUCK_EVAL, "slow-eval", SLOW_EVAL, "stuck in phase eval: no step for", id="in an evaluation"
        ),
    ],
)
def test_a_job_that_is_busy_but_stuck_is_tripped_and_a_slow_one_is_not(
    scene: Scene, wedges: str, works: Script, is_slow: str, slowly: Script, says: str
) -> None:
    stuck = scene.submit(wedges, works, silence_s=SILENCE_S)
    slow = scene.submit(is_slow, slowly, silence_s=SILENCE_S)

    story = scene.first_mended(wedges)

    assert (story.condition, story.job_id, story.attempt) == ("stall", stuck, 1)
    assert scene.fired(wedges) == {"GpuwardenJobStuck stall"}
    assert says in scene.told(wedges)
    assert "GPU saturated" in scene.told(wedges)
    assert 76 in scene.exit_codes(wedges)
    scene.until(lambda: scene.stage.store.job(stuck).state is State.COMPLETED, "its second attempt is done")
    scene.until(
        lambda: (scene.facts(is_slow).step_beat_age_s or 0) > 2 * STUCK_S, "it takes twice as long as is allowed"
    )
    facts = scene.facts(is_slow)
    assert facts.stuck_after_s is not None
    assert facts.stuck_after_s < (facts.step_beat_age_s or 0)
    assert (facts.gpu_idle_s, facts.gpu_saturated_s) == (0, 0)  # busy, and no more than that
    assert (scene.fired(is_slow), scene.stories(is_slow)) == (set(), [])
    assert scene.stage.store.job(slow).attempt == 1


@pytest.mark.behaviour("A7")
@pytest.mark.behaviour("A18")
def test_a_video_job_without_a_first_beat_is_tripped_by_gpu_health(scene: Scene, loads: Mapping[str, JobId]) -> None:
    story = scene.first_mended("hangs")

    assert (story.condition, story.job_id, story.attempt) == ("health", loads["hangs"], 1)
    assert scene.fired("hangs") == {"GpuwardenJobUnhealthy health"}
    assert "I/O, page faults and CPU inactive" in scene.told("hangs")
    assert scene.stage.store.job(loads["hangs"]).watchdog_retries > 0
    assert 78 in scene.exit_codes("hangs")


@pytest.mark.behaviour("A5")
@pytest.mark.behaviour("A7")
def test_a_load_that_reads_is_left_alone_until_it_stops(scene: Scene, loads: Mapping[str, JobId]) -> None:
    scene.until(lambda: (scene.facts("warm").elapsed_s or 0) > 2 * (WINDOW_S + GRACE_S), "twice its time has gone")

    facts = scene.facts("warm")
    assert facts.phase == "load"
    assert min(facts.gpu_idle_s or 0, facts.ram_idle_s or 0) > WINDOW_S
    assert (facts.page_fault_idle_s or 0, facts.io_idle_s or 0) > (WINDOW_S, -1)
    assert facts.io_idle_s is not None
    assert facts.io_idle_s < WINDOW_S
    assert (scene.fired("warm"), scene.stories("warm")) == (set(), [])
    assert scene.stage.store.job(loads["warm"]).attempt == 1

    os.kill(reader(scene), signal.SIGKILL)  # the control: the same job in the same container

    assert scene.first_mended("warm").condition == "health"
    assert scene.fired("warm") == {"GpuwardenJobUnhealthy health"}


@pytest.mark.behaviour("A14")
@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(
    ("case", "happened"),
    [
        pytest.param("stays-up", ["start", "die", "stop", "start"], id="in a container that stays up"),
        pytest.param("goes-down", ["start", "die", "start"], id="and its container goes down with it"),
    ],
)
def test_a_killed_workers_job_is_settled_and_container_started(scene: Scene, case: str, happened: list[str]) -> None:
    job_id = scene.submit(case, KILLED)
    before = armed(scene, case)

    kill(scene, case)

    story = scene.first_mended(case)
    assert (story.condition, story.job_id, story.attempt) == ("dead_worker", job_id, 1)
    assert scene.fired(case) == {"GpuwardenWorkerGone dead_worker"}
    scene.until(lambda: scene.stage.store.job(job_id).state is State.COMPLETED, "its job is done")
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    assert scene.happened(case) == happened
    assert f"stop {before.container}" not in scene.told(case) or case == "stays-up"
    assert "worker dead: process ended" in scene.stage.chain.log("exporter")


@pytest.mark.behaviour("A14")
def test_a_worker_whose_container_docker_restarts_is_not_raced(scene: Scene) -> None:
    job_id = scene.submit("comes-back", KILLED)
    armed(scene, "comes-back")

    kill(scene, "comes-back")

    scene.until(lambda: scene.stage.store.job(job_id).state is State.COMPLETED, "its job is done")
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 0, 1)
    assert scene.happened("comes-back") == ["start", "die", "start"]
    assert scene.stories("comes-back") == []


@pytest.mark.behaviour("A14")
def test_a_dead_worker_whose_container_did_not_opt_in_is_seen_and_left_as_it_is(scene: Scene) -> None:
    scene.submit("not-ours", KILLED)
    armed(scene, "not-ours")

    kill(scene, "not-ours")

    scene.until(lambda: scene.first("not-ours"), "it is refused")
    assert [story.outcome for story in with_action(scene.stories("not-ours"))] == ["refused"]
    facts = scene.facts("not-ours")
    assert (facts.alive, facts.container, facts.container_workers) == (False, worker_of("not-ours"), 0)
    assert scene.happened("not-ours") == ["start", "die"]
