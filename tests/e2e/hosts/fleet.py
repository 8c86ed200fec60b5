"""Hosts as network namespaces, each with an exporter, a gateway and workers, and what watches them.

PostgreSQL and the central gateway are in the namespace of the test. The programs of `monitor.py` have their own
namespace, and reach PostgreSQL through its Unix socket. So a cable is that of one host, or that of Prometheus.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from deploy.standalone import debian_packages
from gpuwarden.gateway.wire import SOCKET_NAME
from gpuwarden.job import HEARTBEAT_S, LEASE_S, JobClass, JobId, State
from gpuwarden.queue import JobStore, Submission
from gpuwarden.worker.commands import Command
from testbed.network_namespaces import Host, Network
from testbed.postgres import Postgres
from tests.certificates import Authority, authority
from tests.e2e.hosts.monitor import HOST as MONITOR
from tests.e2e.hosts.monitor import READY
from tests.e2e.running import run_gpuwarden
from tests.waiting import eventually

PORT: Final = 29838
EXPORTER_PORT: Final = 29835
CLOCK: Final = Path(__file__).with_name("clock.c")
TASK: Final = """
echo '{"running_log_id":123,"remote_pid":"'$$'","remote_pgid":"'$$'","timestamp":"'$(date +%s)'"}' >"$1/123.json"
echo start >>"$2"
until [ -e "$3" ]; do sleep 0.2; done
echo end >>"$2"
rm "$1/123.json"
"""
COMMAND: Final = 'echo start >>"$0"; until [ -e "$1" ]; do sleep 0.2; done; echo end >>"$0"; exit "$2"'


@dataclass(frozen=True, kw_only=True)
class Times:
    """Limits of the hosts, seconds."""

    lost_after_s: float = 180.0
    lease_s: float = LEASE_S
    heartbeat_s: float = HEARTBEAT_S
    scrape_s: int = 5

    @property
    def lost_within_s(self) -> float:
        """Longest time from a cut until the jobs are lost on a busy machine."""
        return 2 * self.lost_after_s + 120


class Door(Enum):
    """How Prometheus gets the metrics of a host: from its exporter, or from the central gateway."""

    SCRAPED = auto()
    REPORTED = auto()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Something that works until `release`, and writes its start and its end to a log."""

    log: Path
    until: Path

    def words(self) -> list[str]:
        """What it has written."""
        return self.log.read_text().split() if self.log.exists() else []

    def release(self) -> None:
        """Let it end."""
        self.until.touch()


@dataclass(kw_only=True)
class Fleet:
    """The central gateway with TLS, and hosts with a gateway each."""

    folder: Path
    network: Network
    postgres: Postgres
    database: str
    store: JobStore
    stack: ExitStack
    times: Times = field(default_factory=Times)
    environment: Mapping[str, str] = field(default_factory=dict)
    ours: Authority = field(init=False)
    hosts: dict[str, Host] = field(default_factory=dict)
    scraped: list[str] = field(default_factory=list)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ahead: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        yesterday = self.clock(-86400)  # a new certificate would not be valid yet on a host whose clock is behind
        self.ours = authority(self.folder / "authority", self.network.address, environment=yesterday)
        web = self.folder / "web.yml"
        web.write_text(f"tls_server_config: {{cert_file: {self.ours.server.cert}, key_file: {self.ours.server.key}}}\n")
        self.start_central()

    # --- programs

    def start_central(self) -> None:
        its = ["--queue-db", self.postgres.url(self.database), "--listen", self.network.address, "--port", str(PORT)]
        its += ["--host-lost-after-s", str(self.times.lost_after_s)]
        self.start("central", [*gpuwarden("gateway", "central"), *its, "--web-config-file", f"{self.folder}/web.yml"])

    def start_monitor(self) -> None:
        """Start what watches the hosts, and wait for it."""
        if MONITOR not in self.hosts:
            self.hosts[MONITOR] = self.network.host()
        work = self.folder / MONITOR
        work.mkdir(exist_ok=True)
        hosts = {name: f"{self.hosts[name].address}:{EXPORTER_PORT}" for name in self.scraped}
        asked = {
            "work": str(work),
            "hosts": hosts,
            "central": f"{self.network.address}:{PORT}",
            "ca_file": str(self.ours.own.cert),
            "database": self.postgres.url(self.database, sockets=str(self.postgres.sockets)),
            "lost_after_s": self.times.lost_after_s,
            "scrape_s": self.times.scrape_s,
        }
        log = self.folder / f"{MONITOR}.log"
        log.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "tests.e2e.hosts.monitor", json.dumps(asked)]
        self.start(MONITOR, self.hosts[MONITOR].command(argv))
        eventually(lambda: READY in log.read_text(), "the monitor is ready", within_s=90, log=self.log)

    def add(self, name: str, *workers: str, door: Door | None = None, ahead_s: int = 0) -> None:
        """A host with its gateway, a folder for each worker, and with a `door` also an exporter."""
        folder, host = self.folder / name, self.network.host()
        for each in (*workers, "tasks"):
            (folder / each).mkdir(parents=True)
        (folder / "host").write_text(f"{name}\n")
        (folder / "token").write_text(self.store.host_tokens.enrol(name, now=self.store.now()))
        self.hosts[name] = host
        if ahead_s:
            self._ahead[name] = self.clock(ahead_s)
        central = f"https://{self.network.address}:{PORT}"
        its = [
            "--runtime-dir",
            str(folder),
            "--token-file",
            str(folder / "token"),
            "--ca-file",
            str(self.ours.own.cert),
        ]
        self.start(f"gateway of {name}", gpuwarden("gateway", "host", *its, "--central", central), host=name)
        if door is not None:
            own = ["--docker", "none", "--task-dir", str(folder / "tasks")]
            if door is Door.REPORTED:
                own += [*its, "--push", central, "--push-interval-s", str(2 * self.times.scrape_s)]
            else:
                own += ["--runtime-dir", str(folder), "--listen", host.address]
                self.scraped.append(name)
            self.start(f"exporter of {name}", gpuwarden("exporter", *own), host=name)
        for each in workers:
            eventually((folder / each / SOCKET_NAME).is_socket, "the socket is there", log=self.log)

    def clock(self, ahead_s: int) -> Mapping[str, str]:
        """The environment of a program whose wall clock is ahead. The library is compiled once."""
        library = self.folder / "clock.so"
        if not library.exists():
            compiler = debian_packages.find("cc")
            subprocess.run([compiler, "-shared", "-fPIC", "-o", library, CLOCK], check=True, capture_output=True)
        return {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s)}

    def work(self, name: str, worker: str, *options: str, queue_db: str = "gateway") -> subprocess.Popen[bytes]:
        """Start a worker of a host. The options name its queue and what it runs."""
        its = ["--name", worker, "--queue-db", queue_db, "--runtime-dir", str(self.folder / name), "--logs", "none"]
        its += ["--lease-s", str(self.times.lease_s), "--heartbeat-s", str(self.times.heartbeat_s)]
        return self.start(f"{worker} of {name}", gpuwarden("worker", "run", *its, *options), host=name)

    def start(self, what: str, argv: list[str], *, host: str | None = None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.environment}
        if host is not None:
            argv, environment = self.hosts[host].command(argv), {**environment, **self._ahead.get(host, {})}
        with (self.folder / f"{what}.log").open("ab") as log:
            process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.running[what] = process
        self.stack.callback(ended if what == MONITOR else killed, process)
        return process

    # --- what they do

    def held(self, name: str) -> Held:
        return Held(log=self.folder / f"{name}.held", until=self.folder / f"{name}.until")

    def submit(self, held: Held, *, queue: str, **options: Any) -> JobId:
        """Submit a job that runs `held_body`."""
        payload = {"log": str(held.log), "until": str(held.until)}
        return self._submit(Submission(queue=queue, job_class=JobClass.GPU, payload=payload, **options))

    def submit_command(self, held: Held, *, exit_code: int, queue: str, **options: Any) -> JobId:
        """Submit a command, as `gpuwarden job submit -- CMD`."""
        argv = ("sh", "-c", COMMAND, str(held.log), str(held.until), str(exit_code))
        payload = Command(argv=argv, cwd=str(self.folder)).payload
        return self._submit(Submission(queue=queue, job_class=JobClass.GPU, payload=payload, **options))

    def _submit(self, submission: Submission) -> JobId:
        return self.store.runs.submit(submission, now=self.store.now())

    def start_task(self, name: str, held: Held) -> subprocess.Popen[bytes]:
        """Start a task of another runner on a host, with its metadata file."""
        argv = ["setsid", "sh", "-c", TASK, "sh", str(self.folder / name / "tasks"), str(held.log), str(held.until)]
        return self.start(f"task of {name}", argv, host=name)

    # --- what is seen

    def until(self, holds: Callable[[], object], what: str, *, within_s: float = 90) -> None:
        eventually(holds, what, within_s=within_s, log=self.log)

    def is_in(self, job_id: JobId, state: State) -> bool:
        return self.store.job(job_id).state is state

    def reaches(self, job_id: JobId, state: State) -> None:
        self.until(lambda: self.is_in(job_id, state), f"the job is {state}")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask Prometheus, in its namespace."""
        (ready,) = (each for each in (self.folder / f"{MONITOR}.log").read_text().splitlines() if READY in each)
        url = f"{ready.partition(READY)[2]}/api/v1/query"
        argv = ["curl", "-sf", "--max-time", "10", "--data-urlencode", f"query={expression}", url]
        done = subprocess.run(self.hosts[MONITOR].command(argv), capture_output=True, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)["data"]["result"]
        return found

    def alerts(self, matchers: str, *, ago: str = "1h") -> set[str]:
        """Names and hosts of the alerts that fired."""
        found = self.query(f'max_over_time(ALERTS{{alertstate="firing", {matchers}}}[{ago}])')
        return {f"{each['metric']['alertname']} of {each['metric'].get('host')}" for each in found}

    def arm(self, remedy: str) -> None:
        """Arm a remedy on all hosts."""
        run_gpuwarden("arm", "--yes", "--remedy", remedy, "--ledger", self.postgres.url(self.database))

    def log(self) -> str:
        logs = [*self.folder.glob("*.log"), *(self.folder / MONITOR / "log").glob("*.log")]
        return "\n".join(f"--- {each.name}\n{each.read_text()[-3000:]}" for each in logs)


@contextmanager
def fleet(
    folder: Path,
    network: Network,
    postgres: Postgres,
    name: str,
    *,
    times: Times | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """A fleet without hosts, on a new database."""
    postgres.create(name)
    try:
        with closing(JobStore.open(postgres.url(name))) as store, ExitStack() as stack:
            yield Fleet(
                folder=folder,
                network=network,
                postgres=postgres,
                database=name,
                store=store,
                stack=stack,
                times=times or Times(),
                environment=environment or {},
            )
    finally:
        postgres.drop(name)


def gpuwarden(*words: str) -> list[str]:
    return [sys.executable, "-m", "gpuwarden", *words]


def killed(process: subprocess.Popen[bytes]) -> None:
    """End a program at once."""
    process.kill()
    process.wait()


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a program that ends others first."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        killed(process)
