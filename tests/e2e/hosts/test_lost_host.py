"""Two hosts with one queue and one ledger in PostgreSQL: one falls silent, and a gang over both of them deadlocks.

The right host's Prometheus scrapes both. The job of the silent host is held, and comes back. What is stopped stands
still as what is cut off does: it answers nobody, and goes on afterwards.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from gpuwarden.job import JobClass, State
from gpuwarden.queue import Job, Submission
from remediator.ledger.reports import EpisodeHistory
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.postgres import Postgres
from testbed.stage import Stage, stage, with_action
from testbed.workers import Database, DockerFleet, WorkerOptions
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.needs_postgres, pytest.mark.slow]

FOR_EVER_S = 3600.0
LOST_AFTER_S = 10.0
SILENCE_S = 10.0
STUCK_S = 10.0
HOLDER, SHARER, OTHER = "gpuwarden-lost-holder", "gpuwarden-lost-sharer", "gpuwarden-lost-other"
FIRST, SECOND = "gpuwarden-gang-first", "gpuwarden-gang-second"
WAITS, WORKS = "gpuwarden-gang-waits", "gpuwarden-gang-works"
GANGS = (FIRST, SECOND, WAITS, WORKS)
PROGRAMS = ("execute", "serve")

LONG = Script(picture="long", load_s=0.5, load_mib=8, steps=280, step_s=0.25)
FINE = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)
DEADLOCK = Script(
    picture="deadlock", load_s=0.2, load_mib=4, steps=42, step_s=0.1,
    wedge_attempts=1, wedge_after_step=40, wedge_spins=True,
)  # fmt: skip
"""Each rank waits for ever for the others at its first attempt, its GPU at 100 %; done at its second.

A limit needs 20 steps that are told of, and the newest that are told may be a second old, which is ten steps.
"""
BARRIER = replace(DEADLOCK, picture="barrier", spared_rank=1, slow_step=41, slow_s=FOR_EVER_S)
"""Rank 0 waits likewise, and rank 1 takes one step that is a slow one, its GPU at 93 %."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host, and its containers as the engine sees them."""

    stage: Stage
    fleet: DockerFleet


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Both of them; the left one falls silent."""

    left: Host
    right: Host

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        """The right host sees to it that it holds."""
        ledger = self.right.stage.ledger

        def log() -> str:
            accounts = [str(ledger.reports.get(each.episode_id)) for each in ledger.reports.newest()]
            return "\n".join(
                [*accounts, self.right.stage.chain.log_tail("execute"), *map(self.left.fleet.logs, (HOLDER, FIRST))]
            )

        eventually(holds, what, within_s=within_s, log=log)


@pytest.fixture(scope="module")
def hosts(work: Path, engine: Engine, postgres: Postgres) -> Iterator[Hosts]:
    postgres.create("lost_node")
    database = Database(server=postgres, name="lost_node")
    left_slots = [Slot(worker=worker, gpus=("GPU-of-both",)) for worker in (HOLDER, SHARER)]
    right_slots = [Slot(worker=OTHER, gpus=("GPU-other",))]
    left_slots += [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in (FIRST, WAITS)]
    right_slots += [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in (SECOND, WORKS)]
    with (
        short_of_patience(),
        host(work / "left", engine, database, left_slots) as left,
        host(work / "right", engine, database, right_slots) as right,
    ):
        scrape_too(right.stage, left.stage)
        yield Hosts(left=left, right=right)
    postgres.drop(database.name)


@contextmanager
def short_of_patience() -> Iterator[None]:
    """What is told of a rank that spins, it is told of soon."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPUWARDEN_EXPORTER_STUCK_MIN_S", str(STUCK_S))
        patched.setenv("GPUWARDEN_EXPORTER_STUCK_FACTOR", "1")  # on a busy machine any step may be a long one
        yield


@contextmanager
def host(work: Path, engine: Engine, database: Database, slots: list[Slot]) -> Iterator[Host]:
    with stage(
        work,
        engine,
        slots,
        host=work.name,
        database=database,
        data=work.parent / "data",
        armed=True,
        dead_after_s=FOR_EVER_S,
        host_lost_after_s=LOST_AFTER_S,
        sweep_interval_s=1.0,
        queues={SHARER: "shared", FIRST: "gang", SECOND: "gang", WAITS: "barrier", WORKS: "barrier"},
        options=WorkerOptions(heartbeat_s=1.0),
    ) as scene:
        assert isinstance(scene.fleet, DockerFleet)
        yield Host(stage=scene, fleet=scene.fleet)


def scrape_too(watcher: Stage, other: Stage) -> None:
    """Have one host's Prometheus scrape another's exporter."""
    file = watcher.chain.plan.work / "prometheus.yml"
    config = yaml.safe_load(file.read_text())
    address, its_host = other.chain.exporter_url.removeprefix("http://"), other.chain.plan.host
    config["scrape_configs"][0]["static_configs"].append({"targets": [address], "labels": {"host": its_host}})
    file.write_text(yaml.safe_dump(config))
    watcher.chain.signal("prometheus", signal.SIGHUP)


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_a_silent_hosts_job_is_held_for_it_and_comes_back_by_itself(hosts: Hosts) -> None:
    left, right = hosts.left, hosts.right
    store, ledger, until = right.stage.store, right.stage.ledger, hosts.until

    def told() -> list[str]:
        found = [
            story for each in ledger.reports.newest() if (story := ledger.reports.get(each.episode_id)) is not None
        ]
        return [f"{entry.act} {entry.what}" for story in found for entry in story.entries]

    seen_for = 'count_over_time(gpuwarden_exporter_info{host="left"}[10m])'
    until(
        lambda: [each for each in right.stage.chain.query(seen_for) if int(each["value"][1]) > 25], "it was seen long"
    )
    job_id = left.stage.submit(LONG, now=time.time(), stall_timeout_s=FOR_EVER_S)
    for worker in (HOLDER, SHARER):
        left.fleet.start(worker)
    until(lambda: left.stage.armed(HOLDER), "the job runs")
    right.fleet.start(OTHER)

    left.stage.chain.signal("exporter", signal.SIGSTOP)
    until(lambda: "decided wait: executor_alive" in told(), "its exporter alone is silent, and nothing is lost by that")
    assert store.job(job_id).state is State.RUNNING

    process = left.fleet.pid(HOLDER)
    os.kill(process, signal.SIGSTOP)
    for name in PROGRAMS:
        left.stage.chain.signal(name, signal.SIGSTOP)
    until(lambda: store.job(job_id).state is State.HOST_LOST, "the host is silent altogether")
    shared = left.stage.submit(FINE, now=time.time(), stall_timeout_s=FOR_EVER_S, queue="shared")
    other = right.stage.submit(FINE, now=time.time(), stall_timeout_s=FOR_EVER_S)
    until(lambda: store.job(other).state is State.COMPLETED, "another host's worker goes on working")
    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.HOST_LOST, 1)
    assert store.job(shared).state is State.QUEUED, "its GPU may be in use"

    for name in ("exporter", *PROGRAMS):
        left.stage.chain.signal(name, signal.SIGCONT)
    os.kill(process, signal.SIGCONT)
    until(lambda: store.job(job_id).state is State.RUNNING, "it is heard of again")
    until(lambda: store.job(shared).state is State.COMPLETED, "and its GPU is not kept any more")
    until(lambda: store.job(job_id).state is State.COMPLETED, "it was run to its end")

    job = store.job(job_id)
    assert (job.attempt, job.reclaims, job.watchdog_retries) == (1, 0, 0)
    until(
        lambda: [each.outcome for each in with_action(ledger.reports.newest())] == ["mended"],
        "the episode is over",
    )
    assert [each for each in told() if each.endswith(" lose")] == ["decided lose", "did lose"]
    assert left.fleet.pid(HOLDER) == process


@pytest.mark.behaviour("A14b")
def test_a_deadlocked_gang_over_two_hosts_is_requeued_as_one_and_a_waiting_one_is_not(hosts: Hosts) -> None:
    left, right, until = hosts.left, hosts.right, hosts.until
    store, ledger = right.stage.store, right.stage.ledger

    def told() -> list[EpisodeHistory]:
        return [each for each in with_action(ledger.reports.newest()) if each.worker in GANGS]

    # Whose job is taken from it ends by itself, and Docker starts it again.
    right.fleet.container(SECOND).update(restart_policy={"Name": "on-failure"})
    barrier, gang = submit(right.stage, BARRIER, queue="barrier"), submit(right.stage, DEADLOCK, queue="gang")
    left.fleet.start(WAITS)
    left.fleet.start(FIRST)
    firsts = [barrier[0].job_id, gang[0].job_id]  # whoever comes takes the first that is there
    until(lambda: all(store.job(each).state is State.RUNNING for each in firsts), "ranks 0 run on the left host")
    right.fleet.start(WORKS)
    right.fleet.start(SECOND)

    until(lambda: [each for each in told() if each.closed_at], "it is mended")
    until(lambda: all(store.job(rank.job_id).state is State.COMPLETED for rank in gang), "its second attempt is done")

    (story,) = told()
    assert (story.host, story.worker, story.condition, story.outcome) == ("left", FIRST, "gang", "mended")
    assert (story.job_id, story.attempt) == (gang[0].job_id, 1)
    ends = [store.job(rank.job_id) for rank in gang]
    assert [(job.attempt, job.watchdog_retries, job.reclaims) for job in ends] == [(2, 1, 0)] * 2
    accused = {f"GpuwardenGangStuck of left/{FIRST}, rank 0"}
    assert fired(right) == accused
    assert fired(left) == set(), "of the other rank its Prometheus knows nothing"
    assert [starts(left, FIRST), starts(right, SECOND)] == [2, 2]
    assert "stopping at once" in right.fleet.logs(SECOND)
    # Rank 1 has a limit too, and has been as long without a step: that its GPU is not pegged is all that speaks for it.
    waits = (
        f'gpuwarden_gang_rank_spinning_seconds{{worker="{WAITS}"}} > {2 * STUCK_S}'
        f' and on () gpuwarden_job_step_beat_age_seconds{{worker="{WORKS}"}} > {2 * STUCK_S}'
        f' and on () gpuwarden_gang_rank_stuck_after_seconds{{worker="{WORKS}"}} <= {2 * STUCK_S}'
        f' and on () gpuwarden_gang_rank_spinning_seconds{{worker="{WORKS}"}} == 0'
    )
    until(lambda: right.stage.chain.query(waits), "one that waits does so for twice as long as the others were given")
    assert fired(right) == accused
    assert [each.episode_id for each in told()] == [story.episode_id]
    ends = [store.job(rank.job_id) for rank in barrier]
    assert [(job.state, job.attempt) for job in ends] == [(State.RUNNING, 1)] * 2
    assert [starts(left, WAITS), starts(right, WORKS)] == [1, 1]


def submit(scene: Stage, script: Script, *, queue: str) -> list[Job]:
    """Queue a job of two ranks."""
    scene.draw(script)
    job = Submission(queue=queue, job_class=JobClass.GPU, payload=script.payload(), stall_timeout_s=SILENCE_S, ranks=2)
    return scene.store.queries.of_gang(scene.store.runs.submit(job, now=time.time()))


def fired(place: Host) -> set[str]:
    """What fired about a worker of a gang and asks for a remedy, by a host's own Prometheus."""
    acting = 'ALERTS{worker=~"gpuwarden-gang-.*", alertstate="firing", remedy!=""}'
    told = [each["metric"] for each in place.stage.chain.query(f"max_over_time({acting}[30m])")]
    return {f"{each['alertname']} of {each['host']}/{each['worker']}, rank {each.get('rank')}" for each in told}


def starts(place: Host, worker: str) -> int:
    return place.fleet.history(worker).count("start")
