"""`gpuwarden up` with faults: killed, or without Docker, the ledger, its disk, or one of its parts.

During a fault no action is taken, and `gpuwarden status` says what is wrong and what to do. A worker that stalls during
the fault is restarted afterwards, once. Each worker stalls once, so its container's history belongs to that stall.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpuwarden.job import State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from tests.e2e.faulty import HOST, PICTURE, SILENCE_S, Disk, Host, Site, StoppableEngine, host, locked, small_disk
from tests.e2e.running import Run, free_ports, up
from tests.waiting import eventually

pytestmark = [
    pytest.mark.needs_docker,
    pytest.mark.needs_parts,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk and start an engine"),
    pytest.mark.nightly,
]

WORKERS = tuple(f"gpuwarden-faults-{name}" for name in ("ledger", "disk", "frozen", "killed", "healthy"))
LEDGER, DISK, FROZEN, KILLED, HEALTHY = WORKERS
HEALTHY_JOB = Script(picture=PICTURE, load_s=0.2, load_mib=1, steps=2000, step_s=0.5)
HEALTHY_SILENCE_S = 10.0
"""Shorter than any fault here, and longer than a busy machine delays a healthy process."""

LOCKED_S = 15.0
DISK_MIB = 160
"""Size of the ledger's disk: `gpuwarden status` accepts it as large enough."""


@pytest.fixture(scope="module")
def workers_and_disk(work: Path, engine: Engine) -> Iterator[tuple[Host, Disk]]:
    """Workers, and a small disk for the ledger."""
    with (
        small_disk(work / "data" / "ledger", size=f"{DISK_MIB}m") as disk,
        host(work, engine.base_url, WORKERS) as site,
    ):
        yield site, disk


@pytest.fixture(scope="module")
def running(workers_and_disk: tuple[Host, Disk]) -> Iterator[tuple[Host, Disk, Run]]:
    """The same with `up`, and with a job that stays healthy during all tests."""
    site, disk = workers_and_disk
    with site.up() as run:
        healthy = site.submit(HEALTHY, HEALTHY_JOB, stall_timeout_s=HEALTHY_SILENCE_S)
        incarnation = site.fleet.incarnation(HEALTHY)
        site.await_no_needs()
        yield site, disk, run
        job_state, reported_workers = site.state(healthy), site.reported_workers()
        assert (job_state, site.fleet.incarnation(HEALTHY)) == (State.RUNNING, incarnation)
        assert HEALTHY not in reported_workers
        assert run.stop() == 0


def test_up_that_is_killed_at_any_moment_restarts_a_worker_once(tmp_path: Path, engine: Engine) -> None:
    worker = "gpuwarden-faults-kill"
    with host(tmp_path, engine.base_url, [worker]) as site:
        with site.starting() as run:
            eventually((run.data / "parts.json").exists, "up has begun to start", log=run.output)
        eventually(lambda: not site.processes(), "the parts that it had started end too")
        with site.up() as run:
            kill_everything(site, run)  # idle
        job_id = site.submit(worker)
        with site.up() as run:
            eventually(lambda: "decided stop" in site.acts(worker), "a stop has begun", within_s=90, log=run.output)
            kill_everything(site, run)
        assert "decided start" not in site.acts(worker)
        with site.up() as run:
            eventually(lambda: "did requeue" in site.acts(worker), "the job is requeued", within_s=90, log=run.output)
        with site.up() as run:
            site.check_fixed(worker, job_id, run, stops_asked=2)  # by the killed executor and by the next one
            site.await_no_needs()
            assert run.stop() == 0


def test_worker_that_stalls_while_docker_is_stopped_is_restarted_later(tmp_path: Path) -> None:
    stalled, healthy = "gpuwarden-faults-docker", "gpuwarden-faults-docker-healthy"
    with (
        StoppableEngine(tmp_path / "engine") as engine,
        host(tmp_path, engine.url, [stalled, healthy]) as site,
        site.up() as run,
    ):
        healthy_job = site.submit(healthy, HEALTHY_JOB, stall_timeout_s=HEALTHY_SILENCE_S)
        site.await_no_needs()
        incarnations = {worker: site.fleet.incarnation(worker) for worker in (stalled, healthy)}

        engine.stop()
        job_id = site.submit(stalled)
        eventually(lambda: site.silent_s(stalled) > 2 * SILENCE_S, "the job stalls", within_s=90)
        site.await_needs("source_docker", "check that Docker runs")
        assert site.state(job_id) is State.RUNNING
        assert not {"decided begin", "did fence"} & set(site.acts(stalled))

        engine.start()
        site.check_fixed(stalled, job_id, run, known_starts=1)
        site.await_no_needs()
        assert site.fleet.incarnation(stalled) != incarnations[stalled]
        assert site.fleet.incarnation(healthy) == incarnations[healthy]
        assert site.state(healthy_job) is State.RUNNING
        assert site.reported_workers() <= {stalled}
        assert run.stop() == 0


def test_locked_ledger_and_queue_are_reported_and_the_worker_restarted_later(running: tuple[Host, Disk, Run]) -> None:
    site, _, run = running
    with ExitStack() as locks:
        locks.enter_context(locked(site.database("ledger")))  # before an alert can be accepted
        job_id = site.submit(LEDGER)
        eventually(lambda: site.state(job_id) is State.RUNNING, "the job is claimed")
        locks.enter_context(locked(site.database("queue")))
        began_s = time.monotonic()
        site.await_needs(
            "ledger: another process holds the write lock",
            f"find that process with `fuser {site.data}/ledger/ledger.db`",
            "queue: another process holds the write lock",
            f"find that process with `fuser {site.data}/queue/queue.db`",
        )
        eventually(lambda: count_503(run) > 0, "the webhook answers 503", within_s=90, log=run.output)
        eventually(
            lambda: time.monotonic() - began_s > LOCKED_S, "the lock was held long enough", within_s=2 * LOCKED_S
        )
        assert LEDGER not in site.reported_workers()

    site.check_fixed(LEDGER, job_id, run)
    site.await_no_needs()


def test_alerts_are_sent_again_after_a_full_ledger_disk(running: tuple[Host, Disk, Run]) -> None:
    site, disk, run = running
    refused = count_503(run)
    disk.fill()
    job_id = site.submit(DISK)
    eventually(lambda: count_503(run) >= refused + 2, "the webhook answers 503, and is called again", within_s=90)
    site.await_needs("ledger: only 0 MiB free on the disk of", "free some space")
    assert site.state(job_id) is State.RUNNING
    assert DISK not in site.reported_workers()

    disk.free()
    site.check_fixed(DISK, job_id, run)
    site.await_no_needs()


def test_hung_prometheus_and_alertmanager_are_reported(running: tuple[Host, Disk, Run]) -> None:
    site, _, run = running
    before = run.pids()
    with suspended(before["alertmanager"]):
        job_id = site.submit(FROZEN)
        eventually(lambda: FROZEN in run.get("prometheus", "/api/v1/alerts"), "Prometheus has the alert", within_s=90)
        with suspended(before["prometheus"]):
            site.await_needs("prometheus: Prometheus is unreachable at", "alertmanager: Alertmanager is unreachable at")
            assert FROZEN not in site.reported_workers()

    site.check_fixed(FROZEN, job_id, run)
    site.await_no_needs()
    assert run.pids() == before


def test_worker_that_stalls_while_prometheus_is_down_is_restarted(running: tuple[Host, Disk, Run]) -> None:
    site, _, run = running
    killed = {part: run.pids()[part] for part in ("prometheus", "alertmanager")}
    job_id = site.submit(KILLED)
    with suspended(run.process.pid):  # before `up` can start them again
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        needs = site.needs()

    for part in killed:
        assert any(need.startswith(f"{part}: ") and "start it" in need for need in needs), needs
        run.await_output(f"up: {part} restarted")
    site.check_fixed(KILLED, job_id, run)
    site.await_no_needs()
    assert not set(killed.values()) & set(run.pids().values())


def test_up_survives_a_full_data_disk(tmp_path: Path) -> None:
    data, ports = tmp_path / "data", free_ports()
    with (
        small_disk(data, size=f"{DISK_MIB}m") as disk,
        up(tmp_path, ports, "--host", HOST, data=data) as run,
    ):
        site = Site(folder=tmp_path, docker="none", ports=ports)
        run.ready()
        site.await_no_needs()
        assert run.post_alert("w1")
        eventually(lambda: site.reported_workers() == {"w1"}, "an alert is delivered", log=run.output)

        before = run.pids()
        disk.fill()
        site.await_needs(
            "ledger: only 0 MiB free on the disk of", "queue: only 0 MiB free on the disk of", "free some space"
        )
        run.post_alert("w2")
        eventually(lambda: count_503(run) >= 2, "the webhook answers 503, and is called again", within_s=90)
        assert site.reported_workers() == {"w1"}

        disk.free()
        free_at = time.time()
        eventually(
            lambda: site.reported_workers() == {"w1", "w2"}, "the alert is delivered", within_s=90, log=run.output
        )
        eventually(lambda: (run.sample(time.time()) or 0) > free_at, "Prometheus stores scrapes again", within_s=90)
        site.await_no_needs()
        assert run.pids() == before
        assert run.stop() == 0


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process, so that it neither answers nor ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_everything(site: Host, run: Run) -> None:
    """Kill `up` and its parts at once, as in a power failure."""
    for pid in (run.process.pid, *site.processes()):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    eventually(lambda: not site.processes(), "all processes are dead")


def count_503(run: Run) -> float:
    """Webhook calls that were answered with 503 because the ledger did not accept them."""
    found = re.search(r'webhook_rejected_total\{reason="ledger"\} (\S+)', run.get("remediator", "/metrics"))
    return float(found[1]) if found else 0.0
