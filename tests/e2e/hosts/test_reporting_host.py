"""A host that Prometheus does not scrape: its exporter reports to a central gateway. It falls silent under a job.

Suspended processes behave like those of a host that is cut off. Prometheus of the other host scrapes the gateway.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml

from gpuwarden.job import State
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.tokens import Scope
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.postgres import Postgres
from testbed.stage import with_action
from testbed.workers import Database
from tests.e2e.hosts.stages import FINE, LONG, LOST_AFTER_S, NEVER_S, PROGRAMS, Hosts, host
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.needs_postgres, pytest.mark.slow]

HOLDER, SHARER, OTHER = "gpuwarden-reports-holder", "gpuwarden-reports-sharer", "gpuwarden-reports-other"
LOST_WITHIN_S = 240.0
"""A report is published for 75 s: so long its host counts as scraped."""


@pytest.fixture
def hosts(work: Path, engine: Engine, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """The left host reports; the Prometheus of the right one scrapes itself and the gateway."""
    postgres.create("reports")
    database = Database(server=postgres, name="reports")
    with ExitStack() as stack:
        queue = database.url
        url = start_gateway(stack, work, queue)
        with closing(JobStore.open(queue)) as store:
            token = store.host_tokens.enrol("left", scopes=[Scope.REPORTS], now=store.now())
        (work / "token").write_text(token)
        right = stack.enter_context(host(work / "right", engine, database, [slot(OTHER, "other")], {}))
        monkeypatch.setenv("GPUWARDEN_EXPORTER_PUSH", url)
        monkeypatch.setenv("GPUWARDEN_EXPORTER_TOKEN_FILE", str(work / "token"))
        monkeypatch.setenv("GPUWARDEN_EXPORTER_PUSH_INTERVAL_S", "1")
        slots = [slot(worker, "of-both") for worker in (HOLDER, SHARER)]
        left = stack.enter_context(host(work / "left", engine, database, slots, {SHARER: "shared"}))
        file = right.stage.chain.plan.work / "prometheus.yml"
        config = yaml.safe_load(file.read_text())
        config["scrape_configs"].append(
            {
                "job_name": "gpuwarden-reports",
                "honor_labels": True,
                "metrics_path": "/reports",
                "static_configs": [{"targets": [url.removeprefix("http://")]}],
            }
        )
        file.write_text(yaml.safe_dump(config))
        right.stage.chain.signal("prometheus", signal.SIGHUP)
        yield Hosts(left=left, right=right)
    postgres.drop(database.name)


def slot(worker: str, gpu: str) -> Slot:
    return Slot(worker=worker, gpus=(f"GPU-{gpu}",))


def start_gateway(stack: ExitStack, work: Path, queue: str) -> str:
    """Start a central gateway, and return its address."""
    log = work / "central.log"
    with log.open("wb") as output:
        its = ["gateway", "central", "--queue-db", queue, "--port", "0", "--host-lost-after-s", str(LOST_AFTER_S)]
        process = subprocess.Popen([sys.executable, "-m", "gpuwarden", *its], stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.kill)
    eventually(lambda: "gateway ready" in log.read_text(), "the gateway is ready", within_s=60, log=log.read_text)
    found = re.search(r'"port": (\d+)', log.read_text())
    assert found is not None
    return f"http://127.0.0.1:{found[1]}"


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_job_of_a_host_whose_reports_end_is_held_and_continues(hosts: Hosts) -> None:
    left, right, until = hosts.left, hosts.right, hosts.until
    store, ledger = right.stage.store, right.stage.ledger
    published = 'count_over_time(gpuwarden_exporter_info{host="left", instance="left"}[10m])'
    until(
        lambda: [each for each in right.stage.chain.query(published) if int(each["value"][1]) > 25],
        "reports of the left host were scraped long enough",
    )
    job_id = left.stage.submit(LONG, now=time.time(), stall_timeout_s=NEVER_S)
    for worker in (HOLDER, SHARER):
        left.fleet.start(worker)
    until(lambda: left.stage.armed(HOLDER), "the job runs")
    known = f'gpuwarden_job_id{{host="left", worker="{HOLDER}"}}'
    until(lambda: right.stage.chain.query(known), "the other host's Prometheus knows the job")
    right.fleet.start(OTHER)

    processes = [left.fleet.pid(worker) for worker in (HOLDER, SHARER)]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    for name in ("exporter", *PROGRAMS):
        left.stage.chain.signal(name, signal.SIGSTOP)
    until(lambda: store.job(job_id).state is State.HOST_LOST, "the host is lost", within_s=LOST_WITHIN_S)
    assert not right.stage.chain.query('up{host="left", instance="left"} == 1')
    assert right.stage.chain.query('gpuwarden_gateway_host_lost{host="left"} == 1')
    shared = left.stage.submit(FINE, now=time.time(), stall_timeout_s=NEVER_S, queue="shared")
    other = right.stage.submit(FINE, now=time.time(), stall_timeout_s=NEVER_S)
    until(lambda: store.job(other).state is State.COMPLETED, "the worker of the other host still works")
    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.HOST_LOST, 1)
    assert store.job(shared).state is State.QUEUED, "the GPU may be in use"

    for name in ("exporter", *PROGRAMS):
        left.stage.chain.signal(name, signal.SIGCONT)
    for process in processes:
        os.kill(process, signal.SIGCONT)
    until(lambda: store.job(job_id).state is State.COMPLETED, "the job completes")
    until(lambda: right.stage.chain.query('up{host="left", instance="left"} == 1'), "the host reports again")

    job = store.job(job_id)
    assert (job.attempt, job.reclaims, job.watchdog_retries) == (1, 0, 0)
    until(
        lambda: [each.outcome for each in with_action(ledger.reports.newest())] == ["fixed"],
        "the episode is closed",
    )
    assert [left.fleet.pid(worker) for worker in (HOLDER, SHARER)] == processes
