"""`gpuwarden up` with what fails beneath it: killed in the middle, without Docker, ledger, disk, or one of its parts.

Nothing is done meanwhile, `gpuwarden status` says what is wrong and what to do, and what wedged meanwhile is mended
afterwards, once. Each worker has one wedge, so that its container's history is that wedge's.
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
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts, and an engine of one's own, are root's"),
    pytest.mark.nightly,
]

WORKERS = tuple(f"gpuwarden-faults-{name}" for name in ("ledger", "disk", "frozen", "killed", "healthy"))
LEDGER, DISK, FROZEN, KILLED, HEALTHY = WORKERS
HEALTHY_JOB = Script(picture=PICTURE, load_s=0.2, load_mib=1, steps=2000, step_s=0.5)
HEALTHY_SILENCE_S = 10.0
"""Shorter than any fault here, and longer than a machine keeps a process that works from going on."""

LOCKED_S = 15.0
DISK_MIB = 160
"""Of the ledger's disk: over what `gpuwarden status` finds too little."""


@pytest.fixture(scope="module")
def ground(work: Path, engine: Engine) -> Iterator[tuple[Host, Disk]]:
    """Workers, and a small disk for the ledger."""
    with (
        small_disk(work / "data" / "ledger", size=f"{DISK_MIB}m") as disk,
        host(work, engine.base_url, WORKERS) as its,
    ):
        yield its, disk


@pytest.fixture(scope="module")
def running(ground: tuple[Host, Disk]) -> Iterator[tuple[Host, Disk, Run]]:
    """The same with `up`, and with a job that is healthy all the while."""
    its, disk = ground
    with its.up() as run:
        healthy = its.submit(HEALTHY, HEALTHY_JOB, stall_timeout_s=HEALTHY_SILENCE_S)
        life = its.fleet.incarnation(HEALTHY)
        its.needs_nobody()
        yield its, disk, run
        job_state, accused = its.state(healthy), its.accused()
        assert (job_state, its.fleet.incarnation(HEALTHY)) == (State.RUNNING, life)
        assert HEALTHY not in accused
        assert run.stop() == 0


def test_a_stack_that_is_killed_at_any_moment_acts_once(tmp_path: Path, engine: Engine) -> None:
    worker = "gpuwarden-faults-mend"
    with host(tmp_path, engine.base_url, [worker]) as its:
        with its.starting() as run:
            eventually((run.data / "parts.json").exists, "it has begun to start", log=run.said)
        eventually(lambda: not its.processes(), "what it had started ends too")
        with its.up() as run:
            all_of_it_dies(its, run)  # idle
        job_id = its.submit(worker)
        with its.up() as run:
            eventually(lambda: "decided stop" in its.acts(worker), "a stop was begun", within_s=90, log=run.said)
            all_of_it_dies(its, run)
        assert "decided start" not in its.acts(worker)
        with its.up() as run:
            eventually(lambda: "did requeue" in its.acts(worker), "the job was requeued", within_s=90, log=run.said)
        with its.up() as run:
            its.is_mended(worker, job_id, run, stops_asked=2)  # the executor that was killed, and the next one
            its.needs_nobody()
            assert run.stop() == 0


def test_while_docker_is_stopped_nothing_is_done_and_a_wedge_of_that_time_is_mended_afterwards(tmp_path: Path) -> None:
    wedged, healthy = "gpuwarden-faults-docker", "gpuwarden-faults-docker-healthy"
    with (
        StoppableEngine(tmp_path / "engine") as engine,
        host(tmp_path, engine.url, [wedged, healthy]) as its,
        its.up() as run,
    ):
        going_on = its.submit(healthy, HEALTHY_JOB, stall_timeout_s=HEALTHY_SILENCE_S)
        its.needs_nobody()
        lives = {worker: its.fleet.incarnation(worker) for worker in (wedged, healthy)}

        engine.stop()
        job_id = its.submit(wedged)
        eventually(lambda: its.silent_s(wedged) > 2 * SILENCE_S, "it wedges", within_s=90)
        its.needs_a_person("source_docker", "check that Docker runs")
        assert its.state(job_id) is State.RUNNING
        assert not {"decided begin", "did fence"} & set(its.acts(wedged))

        engine.start()
        its.is_mended(wedged, job_id, run, known_starts=1)
        its.needs_nobody()
        assert its.fleet.incarnation(wedged) != lives[wedged]
        assert its.fleet.incarnation(healthy) == lives[healthy]
        assert its.state(going_on) is State.RUNNING
        assert its.accused() <= {wedged}
        assert run.stop() == 0


def test_while_ledger_and_queue_are_locked_it_says_so_and_afterwards_mends(running: tuple[Host, Disk, Run]) -> None:
    its, _, run = running
    with ExitStack() as locks:
        locks.enter_context(locked(its.database("ledger")))  # before it can be accused, however late the next comes
        job_id = its.submit(LEDGER)
        eventually(lambda: its.state(job_id) is State.RUNNING, "it is claimed")
        locks.enter_context(locked(its.database("queue")))
        began_s = time.monotonic()
        its.needs_a_person(
            "ledger: another process holds its write lock",
            f"find it (`fuser {its.data}/ledger/ledger.db`)",
            "queue: another process holds its write lock",
            f"find it (`fuser {its.data}/queue/queue.db`)",
        )
        eventually(lambda: not_accepted(run) > 0, "the webhook answers 503", within_s=90, log=run.said)
        eventually(lambda: time.monotonic() - began_s > LOCKED_S, "it was locked for long", within_s=2 * LOCKED_S)
        assert LEDGER not in its.accused()

    its.is_mended(LEDGER, job_id, run)
    its.needs_nobody()


def test_alerts_on_a_full_ledger_disk_are_sent_again_and_acted_on(running: tuple[Host, Disk, Run]) -> None:
    its, disk, run = running
    refused = not_accepted(run)
    disk.fill()
    job_id = its.submit(DISK)
    eventually(lambda: not_accepted(run) >= refused + 2, "the webhook answers 503, and is called again", within_s=90)
    its.needs_a_person("ledger: only 0 MiB free on the disk of", "make room")
    assert its.state(job_id) is State.RUNNING
    assert DISK not in its.accused()

    disk.free()
    its.is_mended(DISK, job_id, run)
    its.needs_nobody()


def test_a_hung_prometheus_or_alertmanager_is_named(running: tuple[Host, Disk, Run]) -> None:
    its, _, run = running
    before = run.pids()
    with hung(before["alertmanager"]):
        job_id = its.submit(FROZEN)
        eventually(lambda: FROZEN in run.get("prometheus", "/api/v1/alerts"), "Prometheus accuses it", within_s=90)
        with hung(before["prometheus"]):
            its.needs_a_person(
                "prometheus: Prometheus is unreachable at", "alertmanager: Alertmanager is unreachable at"
            )
            assert FROZEN not in its.accused()

    its.is_mended(FROZEN, job_id, run)
    its.needs_nobody()
    assert run.pids() == before


def test_a_wedge_while_prometheus_and_alertmanager_are_down_is_freed(running: tuple[Host, Disk, Run]) -> None:
    its, _, run = running
    gone = {part: run.pids()[part] for part in ("prometheus", "alertmanager")}
    job_id = its.submit(KILLED)
    with hung(run.process.pid):  # before it starts them again
        for pid in gone.values():
            os.kill(pid, signal.SIGKILL)
        needs = its.needs()

    for part in gone:
        assert any(need.startswith(f"{part}: ") and "start it" in need for need in needs), needs
        run.says(f"up: {part} restarted")
    its.is_mended(KILLED, job_id, run)
    its.needs_nobody()
    assert not set(gone.values()) & set(run.pids().values())


def test_with_everything_it_keeps_on_a_full_disk_it_lives_and_afterwards_goes_on(tmp_path: Path) -> None:
    data, ports = tmp_path / "data", free_ports()
    with (
        small_disk(data, size=f"{DISK_MIB}m") as disk,
        up(tmp_path, ports, "--host", HOST, data=data) as run,
    ):
        its = Site(folder=tmp_path, docker="none", ports=ports)
        run.ready()
        its.needs_nobody()
        assert run.accuse("w1")
        eventually(lambda: its.accused() == {"w1"}, "an alert is delivered", log=run.said)

        before = run.pids()
        disk.fill()
        its.needs_a_person(
            "ledger: only 0 MiB free on the disk of", "queue: only 0 MiB free on the disk of", "make room"
        )
        run.accuse("w2")
        eventually(lambda: not_accepted(run) >= 2, "the webhook answers 503, and is called again", within_s=90)
        assert its.accused() == {"w1"}

        disk.free()
        free_at = time.time()
        eventually(lambda: its.accused() == {"w1", "w2"}, "the alert is delivered", within_s=90, log=run.said)
        eventually(lambda: (run.sample(time.time()) or 0) > free_at, "Prometheus stores scrapes again", within_s=90)
        its.needs_nobody()
        assert run.pids() == before
        assert run.stop() == 0


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """A part that neither answers nor ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def all_of_it_dies(its: Host, run: Run) -> None:
    """As when the power goes: `up` and its parts end at once, without a last word."""
    for pid in (run.process.pid, *its.processes()):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    eventually(lambda: not its.processes(), "all of it is dead")


def not_accepted(run: Run) -> float:
    """How many calls of the webhook were answered with 503, for want of the ledger."""
    found = re.search(r'webhook_rejected_total\{reason="ledger"\} (\S+)', run.get("remediator", "/metrics"))
    return float(found[1]) if found else 0.0
