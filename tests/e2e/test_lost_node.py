"""Two hosts with one queue and one ledger in PostgreSQL; one falls silent, and its job is held, and comes back.

The right host's Prometheus scrapes both. What is stopped stands still as what is cut off does: it answers nobody, and
goes on afterwards.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deploy.demo.body import Script
from deploy.engine import Engine
from deploy.fleet import Database, DockerFleet, Habits
from deploy.postgres import Postgres
from deploy.simulator import Slot
from deploy.stage import Stage, of_consequence, stage
from gpuwarden.job import State
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.needs_postgres]

FOR_EVER_S = 3600.0
LOST_AFTER_S = 10.0
HOLDER, SHARER, OTHER = "gpuwarden-lost-holder", "gpuwarden-lost-sharer", "gpuwarden-lost-other"
PROGRAMS = ("execute", "serve")

LONG = Script(picture="long", load_s=0.5, load_mib=8, steps=280, step_s=0.25)
FINE = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)


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


@pytest.fixture
def hosts(work: Path, engine: Engine, postgres: Postgres) -> Iterator[Hosts]:
    postgres.create("lost_node")
    database = Database(server=postgres, name="lost_node")
    left_slots = [Slot(worker=worker, gpus=("GPU-of-both",)) for worker in (HOLDER, SHARER)]
    right_slots = [Slot(worker=OTHER, gpus=("GPU-other",))]
    with (
        host(work / "left", engine, database, left_slots) as left,
        host(work / "right", engine, database, right_slots) as right,
    ):
        scrape_too(right.stage, left.stage)
        yield Hosts(left=left, right=right)
    postgres.drop(database.name)


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
        node_lost_after_s=LOST_AFTER_S,
        tend_s=1.0,
        queues={SHARER: "shared"},
        habits=Habits(heartbeat_s=1.0),
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
    store, ledger = right.stage.store, right.stage.ledger

    def until(holds: object, what: str, within_s: float = 120) -> None:
        def log() -> str:
            accounts = [str(ledger.story(each.episode_id)) for each in ledger.stories()]
            return "\n".join([*accounts, right.stage.chain.log_tail("execute"), left.fleet.logs(HOLDER)])

        eventually(holds, what, within_s=within_s, log=log)  # type: ignore[arg-type]

    def told() -> list[str]:
        found = [story for each in ledger.stories() if (story := ledger.story(each.episode_id)) is not None]
        return [f"{entry.act} {entry.step}" for story in found for entry in story.entries]

    seen_for = 'count_over_time(gpuwarden_exporter_info{host="left"}[10m])'
    until(
        lambda: [each for each in right.stage.chain.query(seen_for) if int(each["value"][1]) > 25], "it was seen long"
    )
    job_id = left.stage.submit(LONG, now=time.time(), stall_timeout_s=FOR_EVER_S)
    left.stage.start_workers()
    until(lambda: left.stage.armed(HOLDER), "the job runs")
    right.stage.start_workers()

    left.stage.chain.signal("exporter", signal.SIGSTOP)
    until(lambda: "decided wait: heard" in told(), "its exporter alone is silent, and nothing is lost by that")
    assert store.job(job_id).state is State.RUNNING

    process = left.fleet.pid(HOLDER)
    os.kill(process, signal.SIGSTOP)
    for name in PROGRAMS:
        left.stage.chain.signal(name, signal.SIGSTOP)
    until(lambda: store.job(job_id).state is State.NODE_LOST, "the host is silent altogether")
    shared = left.stage.submit(FINE, now=time.time(), stall_timeout_s=FOR_EVER_S, queue="shared")
    other = right.stage.submit(FINE, now=time.time(), stall_timeout_s=FOR_EVER_S)
    until(lambda: store.job(other).state is State.COMPLETED, "another host's worker goes on working")
    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.NODE_LOST, 1)
    assert store.job(shared).state is State.QUEUED, "its GPU may be in use"

    for name in ("exporter", *PROGRAMS):
        left.stage.chain.signal(name, signal.SIGCONT)
    os.kill(process, signal.SIGCONT)
    until(lambda: store.job(job_id).state is State.RUNNING, "it is heard of again")
    until(lambda: store.job(shared).state is State.COMPLETED, "and its GPU is not kept any more")
    until(lambda: store.job(job_id).state is State.COMPLETED, "it was run to its end")

    job = store.job(job_id)
    assert (job.attempt, job.reclaims, job.watchdog_retries) == (1, 0, 0)
    until(lambda: [each.outcome for each in of_consequence(ledger.stories())] == ["mended"], "the episode is over")
    assert [each for each in told() if each.endswith(" lose")] == ["decided lose", "did lose"]
    assert left.fleet.pid(HOLDER) == process
