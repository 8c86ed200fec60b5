"""Two hosts in network namespaces, and a central gateway. The cable of one is cut under a running job."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from bench.chaos.body import LOG_VARIABLE
from bench.chaos.log import Effect, effects_of
from bench.chaos.processes import RENEWAL_S
from gpuwarden.gateway.wire import SOCKET_NAME
from gpuwarden.job import EXIT_DISOWNED, JobId, State
from gpuwarden.queue import JobStore, Submission
from testbed.network_namespaces import Host, Network
from testbed.postgres import Postgres
from tests.certificates import Authority, authority
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_network, pytest.mark.needs_postgres, pytest.mark.slow]

PORT: Final = 29838
LEASE_S: Final = 6.0
SHORT_S: Final = LEASE_S / 2
STEPS, STEP_S = 60, 0.2


@dataclass(kw_only=True)
class Fleet:
    """The central gateway with TLS, and two hosts with a gateway and a worker each."""

    folder: Path
    network: Network
    store: JobStore
    url: str
    stack: ExitStack
    ours: Authority = field(init=False)
    hosts: dict[str, Host] = field(default_factory=dict)
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ours = authority(self.folder / "authority", self.network.address)
        web = self.folder / "web.yml"
        web.write_text(f"tls_server_config: {{cert_file: {self.ours.server.cert}, key_file: {self.ours.server.key}}}\n")
        its = ["--queue-db", self.url, "--listen", self.network.address, "--port", str(PORT)]
        self.start("central", [*gpuwarden("gateway", "central"), *its, "--web-config-file", str(web)])
        self.start("sweeper", [sys.executable, "-m", "bench.chaos.sweeper", self.url, str(RENEWAL_S)])

    def add(self, name: str) -> None:
        """A host with its gateway; its worker starts later."""
        folder, host = self.folder / name, self.network.host()
        (folder / "w1").mkdir(parents=True)
        (folder / "host").write_text(f"{name}\n")
        (folder / "token").write_text(self.store.host_tokens.enrol(name, now=self.store.now()))
        its = ["--central", f"https://{self.network.address}:{PORT}", "--token-file", str(folder / "token")]
        its += ["--ca-file", str(self.ours.own.cert), "--runtime-dir", str(folder), "--port", "0"]
        self.start(f"gateway of {name}", host.command([*gpuwarden("gateway", "host"), *its]))
        eventually((folder / "w1" / SOCKET_NAME).is_socket, "the socket is there", log=self.log)
        self.hosts[name] = host

    def work(self, name: str) -> None:
        """Start the host's worker."""
        its = ["--name", "w1", "--queue", "cut", "--handler", "bench.chaos.body:load", "--queue-db", "gateway"]
        its += ["--runtime-dir", str(self.folder / name), "--lease-s", str(LEASE_S), "--heartbeat-s", "1"]
        argv = self.hosts[name].command([*gpuwarden("worker", "run"), *its])
        self.workers[name] = self.start(f"worker of {name}", argv)

    def start(self, what: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{what}.log").open("ab") as log:
            environment = {**os.environ, LOG_VARIABLE: str(self.folder / "effects")}
            process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def submit(self, steps: int = STEPS) -> JobId:
        payload = {"steps": steps, "step_s": STEP_S, "fails": False}
        return self.store.runs.submit(Submission(queue="cut", payload=payload), now=self.store.now())

    def until(self, holds: Callable[[], object], what: str) -> None:
        eventually(holds, what, within_s=90, log=self.log)

    def ends_as(self, job_id: JobId, state: State) -> None:
        self.until(lambda: self.store.job(job_id).state is state, f"the job is {state}")

    def log(self) -> str:
        return "\n".join(f"--- {each.name}\n{each.read_text()[-3000:]}" for each in self.folder.glob("*.log"))

    def effects(self, job_id: JobId, attempt: int) -> list[Effect]:
        """What an attempt has left outside of the queue: a line for each step."""
        return [each for each in effects_of(self.folder / "effects") if (each.job, each.attempt) == (job_id, attempt)]

    def steps(self, job_id: JobId, attempt: int) -> list[int]:
        return [each.step for each in self.effects(job_id, attempt)]


def gpuwarden(*words: str) -> list[str]:
    return [sys.executable, "-m", "gpuwarden", *words]


@pytest.fixture
def fleet(tmp_path: Path, network: Network, postgres: Postgres) -> Iterator[Fleet]:
    """The left host works already."""
    postgres.create("cut")
    url = postgres.url("cut")
    try:
        with closing(JobStore.open(url)) as store, ExitStack() as stack:
            found = Fleet(folder=tmp_path, network=network, store=store, url=url, stack=stack)
            for name in ("left", "right"):
                found.add(name)
            found.work("left")
            yield found
    finally:
        postgres.drop("cut")


def test_job_outlives_a_cut_that_is_shorter_than_its_lease(fleet: Fleet) -> None:
    job_id = fleet.submit()
    fleet.until(lambda: len(fleet.steps(job_id, 1)) > 5, "the job is at work")
    fleet.work("right")

    fleet.hosts["left"].cut()
    time.sleep(SHORT_S)
    fleet.hosts["left"].heal()

    fleet.ends_as(job_id, State.COMPLETED)
    job = fleet.store.job(job_id)
    assert (job.attempt, job.reclaims) == (1, 0)
    assert fleet.steps(job_id, 1) == list(range(STEPS + 1))
    assert fleet.workers["left"].poll() is None


def test_job_of_a_host_that_is_cut_off_ends_on_the_other_host(fleet: Fleet) -> None:
    job_id = fleet.submit()
    fleet.until(lambda: len(fleet.steps(job_id, 1)) > 5, "the job is at work")
    fleet.work("right")

    fleet.hosts["left"].cut()
    assert fleet.workers["left"].wait(30) == EXIT_DISOWNED
    fleet.ends_as(job_id, State.COMPLETED)
    fleet.hosts["left"].heal()
    fleet.work("left")

    job = fleet.store.job(job_id)
    assert (job.attempt, job.reclaims) == (2, 1)
    assert len(fleet.steps(job_id, 1)) < STEPS
    assert fleet.steps(job_id, 2) == list(range(STEPS + 1))
    assert fleet.effects(job_id, 1)[-1].at_s < fleet.effects(job_id, 2)[0].at_s, "never two at once"
    fleet.workers["right"].kill()
    after = fleet.submit(steps=1)
    fleet.ends_as(after, State.COMPLETED)
