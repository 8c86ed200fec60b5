"""Two hosts with one queue and one ledger in PostgreSQL, and the remediator of one host is down.

Each host is a separate stage with its key, runtime folder, exporter and executor. They share only the database.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from gpuwarden.job import EXIT_DISOWNED, FENCE_S, REQUEUE_PRIORITY, JobId, State
from remediator.ledger.journal import Entry
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.postgres import Postgres
from testbed.stage import Stage, stage, with_action
from testbed.workers import Database, DockerFleet, WorkerOptions
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.needs_postgres, pytest.mark.slow]

SILENCE_S = 5.0
NEVER_S = 3600.0
TIMEOUT_S = 16.0
STALLED, RESCUER = "gpuwarden-two-stalled", "gpuwarden-two-rescuer"
SLEEPER, HEIR = "gpuwarden-two-sleeper", "gpuwarden-two-heir"

STALL = Script(picture="stall", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)
STEADY = Script(picture="steady", load_s=0.5, load_mib=8, steps=20, step_s=0.25)
FINE = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host, and its containers as the engine sees them."""

    stage: Stage
    fleet: DockerFleet

    def lifecycle(self, worker: str) -> list[str]:
        return [what for what in self.fleet.history(worker) if what in ("start", "stop", "die")]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Both hosts, the job that stalled on the left one, and the job of the suspended worker on the right one."""

    left: Host
    right: Host
    stalled: JobId
    orphaned: JobId
    fenced_at: float

    def until(self, holds: Callable[[], bool], what: str, within_s: float = 120) -> None:
        until(holds, what, self.right, within_s=within_s)

    def entries(self) -> list[Entry]:
        return self.left.stage.journal(STALLED)


def until(holds: Callable[[], bool], what: str, place: Host, within_s: float = 120) -> None:
    def log() -> str:
        logs = [place.fleet.logs(slot.worker) for slot in place.stage.slots]
        return "\n".join([place.stage.chain.log_tail("execute"), *logs])

    eventually(holds, what, within_s=within_s, log=log)


@pytest.fixture(scope="module")
def hosts(work: Path, engine: Engine, postgres: Postgres) -> Iterator[Hosts]:
    """The left executor is killed between a fence and its record. A worker of the right host is suspended then."""
    postgres.create("two_hosts")
    database = Database(server=postgres, name="two_hosts")
    with (
        host(work / "left", engine, database, [STALLED]) as left,
        host(work / "right", engine, database, [RESCUER, SLEEPER, HEIR]) as right,
    ):
        stalled = left.stage.submit(STALL, now=time.time(), stall_timeout_s=SILENCE_S)
        orphaned = right.stage.submit(STEADY, now=time.time(), stall_timeout_s=NEVER_S, queue="sleepy")
        left.fleet.start(STALLED)
        right.fleet.start(SLEEPER)
        until(lambda: left.stage.armed(STALLED) and right.stage.armed(SLEEPER), "both jobs are monitored", right)
        os.kill(right.fleet.pid(SLEEPER), signal.SIGSTOP)
        right.fleet.start(RESCUER)
        right.fleet.start(HEIR)
        with ExitStack() as ledger:
            with locked(database, "SELECT 1 FROM jobs WHERE job_id = %s FOR UPDATE", stalled):
                until(lambda: waits_for_a_lock(database), "the executor is about to fence", left)
                ledger.enter_context(locked(database, "SELECT 1 FROM episodes WHERE worker = %s FOR UPDATE", STALLED))
            until(lambda: left.stage.store.job(stalled).state is State.FENCING, "the job is fenced", left)
            fenced_at = left.stage.store.now()
            left.stage.chain.kill("execute")
        yield Hosts(left=left, right=right, stalled=stalled, orphaned=orphaned, fenced_at=fenced_at)
    postgres.drop(database.name)


@contextmanager
def host(work: Path, engine: Engine, database: Database, workers: list[str]) -> Iterator[Host]:
    with stage(
        work,
        engine,
        [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in workers],
        host=work.name,
        database=database,
        data=work.parent / "data",
        armed=True,
        dead_after_s=NEVER_S,
        stop_grace_s=1.0,
        settle_timeout_s=TIMEOUT_S,
        sweep_interval_s=1.0,
        queues=dict.fromkeys((SLEEPER, HEIR), "sleepy"),
        options=WorkerOptions(heartbeat_s=1.0, lease_s=5.0),
    ) as scene:
        assert isinstance(scene.fleet, DockerFleet)
        yield Host(stage=scene, fleet=scene.fleet)


@contextmanager
def locked(database: Database, rows: LiteralString, which: int | str) -> Iterator[None]:
    """Lock these rows."""
    with closing(psycopg.connect(database.url.replace("+psycopg", ""))) as connection:
        connection.execute(rows, [which])
        yield


def waits_for_a_lock(database: Database) -> bool:
    with closing(psycopg.connect(database.url.replace("+psycopg", ""))) as connection:
        waiting = connection.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND datname = %s",
            [database.name],
        ).fetchone()
        return waiting is not None and waiting[0] > 0


def test_other_host_requeues_a_fenced_job_of_a_dead_executor(hosts: Hosts) -> None:
    store = hosts.left.stage.store
    assert store.job(hosts.stalled).state is State.FENCING

    hosts.until(lambda: store.job(hosts.stalled).state is State.COMPLETED, "the job completes", within_s=180)

    job = store.job(hosts.stalled)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 0, 1)
    assert '"attempt": 2' in hosts.right.fleet.logs(RESCUER)
    assert job.claimed_at is not None
    assert job.claimed_at - hosts.fenced_at >= FENCE_S
    assert {"requeue", "stop", "start"}.isdisjoint(entry.step for entry in hosts.entries())


@pytest.mark.behaviour("A15")
def test_restarted_executor_finishes_the_restart_of_its_container(hosts: Hosts) -> None:
    hosts.left.stage.chain.start_executor()

    hosts.until(lambda: not hosts.left.stage.ledger.episodes.list_open(), "the episode is closed")
    assert [each.outcome for each in with_action(hosts.left.stage.ledger.reports.newest())] == ["fixed"]
    assert hosts.left.lifecycle(STALLED) == ["start", "die", "stop", "start"]
    assert {entry.host for entry in hosts.entries()} == {"left"}
    hosts.right.fleet.container(RESCUER).stop(timeout=1)
    again = hosts.left.stage.submit(FINE, now=time.time(), stall_timeout_s=NEVER_S)
    hosts.until(lambda: hosts.left.stage.store.job(again).state is State.COMPLETED, "its worker completes another job")


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
def test_worker_that_resumes_without_its_claim_exits_and_writes_nothing(hosts: Hosts) -> None:
    scene, fleet = hosts.right.stage, hosts.right.fleet
    hosts.until(lambda: scene.store.job(hosts.orphaned).state is State.COMPLETED, "another worker completes the job")
    record, output = scene.store.job(hosts.orphaned), scene.data / f"{STEADY.picture}.clean.pgm"
    written = output.stat()

    os.kill(fleet.pid(SLEEPER), signal.SIGCONT)

    hosts.until(lambda: not fleet.pid(SLEEPER), "the worker has exited")
    assert fleet.container(SLEEPER).attrs["State"]["ExitCode"] == EXIT_DISOWNED
    assert "stopping at once" in fleet.logs(SLEEPER)
    assert (record.attempt, record.reclaims, record.watchdog_retries) == (2, 1, 0)
    assert record.priority == REQUEUE_PRIORITY
    assert scene.store.job(hosts.orphaned) == record
    assert output.stat() == written
    assert not [each for each in scene.ledger.reports.newest() if each.worker == SLEEPER]
