"""Two hosts in network namespaces, and a central gateway. The cable of one is cut under a running job."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bench.chaos.body import LOG_VARIABLE
from bench.chaos.log import Effect, effects_of
from bench.chaos.processes import RENEWAL_S
from gpuwarden.job import EXIT_DISOWNED, JobId, State
from gpuwarden.queue import Submission
from testbed.network_namespaces import Network
from testbed.postgres import Postgres
from tests.e2e.hosts.fleet import Fleet, Times, fleet

pytestmark = [pytest.mark.needs_network, pytest.mark.needs_postgres, pytest.mark.slow]

LEASE_S: Final = 6.0
SHORT_S: Final = LEASE_S / 2
STEPS, STEP_S = 60, 0.2


@pytest.fixture
def hosts(tmp_path: Path, network: Network, postgres: Postgres) -> Iterator[Fleet]:
    """The left host works already."""
    times, environment = Times(lease_s=LEASE_S, heartbeat_s=1), {LOG_VARIABLE: str(tmp_path / "effects")}
    with fleet(tmp_path, network, postgres, "cut", times=times, environment=environment) as found:
        found.start("sweeper", [sys.executable, "-m", "bench.chaos.sweeper", postgres.url("cut"), str(RENEWAL_S)])
        for name in ("left", "right"):
            found.add(name, "w1")
        work(found, "left")
        yield found


def work(hosts: Fleet, name: str) -> None:
    """Start the worker of a host."""
    hosts.work(name, "w1", "--queue", "cut", "--handler", "bench.chaos.body:load")


def submit(hosts: Fleet, steps: int = STEPS) -> JobId:
    payload = {"steps": steps, "step_s": STEP_S, "fails": False}
    return hosts.store.runs.submit(Submission(queue="cut", payload=payload), now=hosts.store.now())


def effects(hosts: Fleet, job_id: JobId, attempt: int) -> list[Effect]:
    """What an attempt has left outside of the queue: a line for each step."""
    return [each for each in effects_of(hosts.folder / "effects") if (each.job, each.attempt) == (job_id, attempt)]


def steps(hosts: Fleet, job_id: JobId, attempt: int) -> list[int]:
    return [each.step for each in effects(hosts, job_id, attempt)]


def test_job_outlives_a_cut_that_is_shorter_than_its_lease(hosts: Fleet) -> None:
    job_id = submit(hosts)
    hosts.until(lambda: len(steps(hosts, job_id, 1)) > 5, "the job is at work")
    work(hosts, "right")

    hosts.hosts["left"].cut()
    time.sleep(SHORT_S)
    hosts.hosts["left"].heal()

    hosts.reaches(job_id, State.COMPLETED)
    job = hosts.store.job(job_id)
    assert (job.attempt, job.reclaims) == (1, 0)
    assert steps(hosts, job_id, 1) == list(range(STEPS + 1))
    assert hosts.running["w1 of left"].poll() is None


def test_job_of_a_host_that_is_cut_off_ends_on_the_other_host(hosts: Fleet) -> None:
    job_id = submit(hosts)
    hosts.until(lambda: len(steps(hosts, job_id, 1)) > 5, "the job is at work")
    work(hosts, "right")

    hosts.hosts["left"].cut()
    assert hosts.running["w1 of left"].wait(30) == EXIT_DISOWNED
    hosts.reaches(job_id, State.COMPLETED)
    hosts.hosts["left"].heal()
    work(hosts, "left")

    job = hosts.store.job(job_id)
    assert (job.attempt, job.reclaims) == (2, 1)
    assert len(steps(hosts, job_id, 1)) < STEPS
    assert steps(hosts, job_id, 2) == list(range(STEPS + 1))
    assert effects(hosts, job_id, 1)[-1].at_s < effects(hosts, job_id, 2)[0].at_s, "never two at once"
    hosts.running["w1 of right"].kill()
    after = submit(hosts, steps=1)
    hosts.reaches(after, State.COMPLETED)
