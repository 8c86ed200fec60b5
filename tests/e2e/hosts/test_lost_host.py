"""Two hosts with one queue and one ledger in PostgreSQL: one host becomes silent, and a gang on both deadlocks.

The Prometheus of the right host scrapes both. The job of the silent host is held and then continues.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpuwarden.job import JobClass, State
from gpuwarden.queue import Job, Submission
from remediator.ledger.reports import EpisodeHistory
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.postgres import Postgres
from testbed.stage import Stage, with_action
from testbed.workers import Database
from tests.e2e.hosts.stages import FINE, LONG, NEVER_S, PROGRAMS, Host, Hosts, add_scrape_target, host

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.needs_postgres, pytest.mark.slow]

SILENCE_S = 10.0
STUCK_S = 10.0
SCRAPED_S = 180.0
"""Without a gateway, a host is silent so long after its last scrape."""
HOLDER, SHARER, OTHER = "gpuwarden-lost-holder", "gpuwarden-lost-sharer", "gpuwarden-lost-other"
FIRST, SECOND = "gpuwarden-gang-first", "gpuwarden-gang-second"
WAITING, WORKING = "gpuwarden-gang-waits", "gpuwarden-gang-works"
GANGS = (FIRST, SECOND, WAITING, WORKING)
QUEUES = {SHARER: "shared", FIRST: "gang", SECOND: "gang", WAITING: "barrier", WORKING: "barrier"}

DEADLOCK = Script(
    picture="deadlock", load_s=0.2, load_mib=4, steps=42, step_s=0.1,
    wedge_attempts=1, wedge_after_step=40, wedge_spins=True,
)  # fmt: skip
"""In the first attempt each rank waits for ever for the others, its GPU at 100 %. The second attempt completes.

A limit needs 20 steps that the exporter has seen, and its newest sample may be ten steps old.
"""
BARRIER = replace(DEADLOCK, picture="barrier", spared_rank=1, slow_step=41, slow_s=NEVER_S)
"""Rank 0 waits in the same way, while rank 1 has one slow step with its GPU at 93 %."""


@pytest.fixture(scope="module")
def hosts(work: Path, engine: Engine, postgres: Postgres) -> Iterator[Hosts]:
    postgres.create("lost_node")
    database = Database(server=postgres, name="lost_node")
    left_slots = [Slot(worker=worker, gpus=("GPU-of-both",)) for worker in (HOLDER, SHARER)]
    right_slots = [Slot(worker=OTHER, gpus=("GPU-other",))]
    left_slots += [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in (FIRST, WAITING)]
    right_slots += [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in (SECOND, WORKING)]
    with (
        short_limits(),
        host(work / "left", engine, database, left_slots, QUEUES) as left,
        host(work / "right", engine, database, right_slots, QUEUES) as right,
    ):
        add_scrape_target(right.stage, left.stage)
        yield Hosts(left=left, right=right)
    postgres.drop(database.name)


@contextmanager
def short_limits() -> Iterator[None]:
    """Shorten the limits for a rank that is stuck."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPUWARDEN_EXPORTER_STUCK_MIN_S", str(STUCK_S))
        patched.setenv("GPUWARDEN_EXPORTER_STUCK_FACTOR", "1")  # on a busy machine any step may be long
        yield


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_job_of_a_silent_host_is_held_and_continues(hosts: Hosts) -> None:
    left, right = hosts.left, hosts.right
    store, ledger, until = right.stage.store, right.stage.ledger, hosts.until

    def read_journal() -> list[str]:
        found = [
            episode for each in ledger.reports.newest() if (episode := ledger.reports.get(each.episode_id)) is not None
        ]
        return [f"{entry.act} {entry.what}" for episode in found for entry in episode.entries]

    seen = 'up{job="gpuwarden-exporter", host="left"} == 1'
    until(lambda: right.stage.chain.query(seen), "the left host is scraped")
    job_id = left.stage.submit(LONG, now=time.time(), stall_timeout_s=NEVER_S)
    for worker in (HOLDER, SHARER):
        left.fleet.start(worker)
    until(lambda: left.stage.armed(HOLDER), "the job runs")
    process = left.fleet.pid(HOLDER)
    os.kill(process, signal.SIGSTOP)
    left.stage.chain.signal("exporter", signal.SIGSTOP)
    right.fleet.start(OTHER)
    until(
        lambda: "decided wait: executor_alive" in read_journal(),
        "the remediator is not silent, so the host is not lost",
        within_s=SCRAPED_S + 120,
    )
    assert store.job(job_id).state is State.RUNNING

    for name in PROGRAMS:
        left.stage.chain.signal(name, signal.SIGSTOP)
    until(lambda: store.job(job_id).state is State.HOST_LOST, "the host is lost")
    shared = left.stage.submit(FINE, now=time.time(), stall_timeout_s=NEVER_S, queue="shared")
    other = right.stage.submit(FINE, now=time.time(), stall_timeout_s=NEVER_S)
    until(lambda: store.job(other).state is State.COMPLETED, "the worker of the other host still works")
    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.HOST_LOST, 1)
    assert store.job(shared).state is State.QUEUED, "the GPU may be in use"

    for name in ("exporter", *PROGRAMS):
        left.stage.chain.signal(name, signal.SIGCONT)
    os.kill(process, signal.SIGCONT)
    until(lambda: store.job(job_id).state is State.RUNNING, "the job runs again")
    until(lambda: store.job(shared).state is State.COMPLETED, "its GPU can be used again")
    until(lambda: store.job(job_id).state is State.COMPLETED, "the job completes")

    job = store.job(job_id)
    assert (job.attempt, job.reclaims, job.watchdog_retries) == (1, 0, 0)
    until(
        lambda: [each.outcome for each in with_action(ledger.reports.newest())] == ["fixed"],
        "the episode is closed",
    )
    assert [each for each in read_journal() if each.endswith(" lose")] == ["decided lose", "did lose"]
    assert left.fleet.pid(HOLDER) == process


@pytest.mark.behaviour("A14b")
def test_deadlocked_gang_is_requeued_and_a_waiting_gang_is_not(hosts: Hosts) -> None:
    left, right, until = hosts.left, hosts.right, hosts.until
    store, ledger = right.stage.store, right.stage.ledger

    def list_gang_episodes() -> list[EpisodeHistory]:
        return [each for each in with_action(ledger.reports.newest()) if each.worker in GANGS]

    # A worker that loses its job exits, and Docker starts it again.
    right.fleet.container(SECOND).update(restart_policy={"Name": "on-failure"})
    barrier, gang = submit(right.stage, BARRIER, queue="barrier"), submit(right.stage, DEADLOCK, queue="gang")
    left.fleet.start(WAITING)
    left.fleet.start(FIRST)
    firsts = [barrier[0].job_id, gang[0].job_id]  # each worker claims the first job of its queue
    until(lambda: all(store.job(each).state is State.RUNNING for each in firsts), "ranks 0 run on the left host")
    right.fleet.start(WORKING)
    right.fleet.start(SECOND)

    until(lambda: [each for each in list_gang_episodes() if each.closed_at], "the gang is fixed")
    until(lambda: all(store.job(rank.job_id).state is State.COMPLETED for rank in gang), "the second attempt is done")

    (episode,) = list_gang_episodes()
    assert (episode.host, episode.worker, episode.condition, episode.outcome) == ("left", FIRST, "gang", "fixed")
    assert (episode.job_id, episode.attempt) == (gang[0].job_id, 1)
    ends = [store.job(rank.job_id) for rank in gang]
    assert [(job.attempt, job.watchdog_retries, job.reclaims) for job in ends] == [(2, 1, 0)] * 2
    expected = {f"GpuwardenGangStuck of left/{FIRST}, rank 0"}
    assert fired_alerts(right) == expected
    assert fired_alerts(left) == set(), "its Prometheus has no data of the other rank"
    assert [count_starts(left, FIRST), count_starts(right, SECOND)] == [2, 2]
    assert "stopping at once" in right.fleet.logs(SECOND)
    # Rank 1 has a limit too, and no step for as long. The only difference is that its GPU is not saturated.
    query = (
        f'gpuwarden_gang_rank_spinning_seconds{{worker="{WAITING}"}} > {2 * STUCK_S}'
        f' and on () gpuwarden_job_step_beat_age_seconds{{worker="{WORKING}"}} > {2 * STUCK_S}'
        f' and on () gpuwarden_gang_rank_stuck_after_seconds{{worker="{WORKING}"}} <= {2 * STUCK_S}'
        f' and on () gpuwarden_gang_rank_spinning_seconds{{worker="{WORKING}"}} == 0'
    )
    until(lambda: right.stage.chain.query(query), "the waiting rank waits for twice the limit")
    assert fired_alerts(right) == expected
    assert [each.episode_id for each in list_gang_episodes()] == [episode.episode_id]
    ends = [store.job(rank.job_id) for rank in barrier]
    assert [(job.state, job.attempt) for job in ends] == [(State.RUNNING, 1)] * 2
    assert [count_starts(left, WAITING), count_starts(right, WORKING)] == [1, 1]


def submit(scene: Stage, script: Script, *, queue: str) -> list[Job]:
    """Submit a job of two ranks."""
    scene.draw(script)
    job = Submission(queue=queue, job_class=JobClass.GPU, payload=script.payload(), stall_timeout_s=SILENCE_S, ranks=2)
    return scene.store.queries.of_gang(scene.store.runs.submit(job, now=time.time()))


def fired_alerts(place: Host) -> set[str]:
    """The alerts with a remedy that fired for a worker of a gang, in the Prometheus of one host."""
    acting = 'ALERTS{worker=~"gpuwarden-gang-.*", alertstate="firing", remedy!=""}'
    alerts = [each["metric"] for each in place.stage.chain.query(f"max_over_time({acting}[30m])")]
    return {f"{each['alertname']} of {each['host']}/{each['worker']}, rank {each.get('rank')}" for each in alerts}


def count_starts(place: Host, worker: str) -> int:
    return place.fleet.history(worker).count("start")
