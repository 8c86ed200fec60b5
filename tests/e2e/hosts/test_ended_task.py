"""A person ends a task of another runner on a host that is cut off: the order waits until the host is back (D7)."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from gpuwarden import procfs
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.tokens import Scope
from testbed.network_namespaces import Host, Network
from tests.certificates import authority
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_network, pytest.mark.slow, pytest.mark.behaviour("D7")]

HOST: Final = "left"
PORT: Final = 29838
GRACE_S: Final = 2.0
WITHIN_S: Final = 45.0
"""From the end of the cut until the task has ended: a request may wait 10 s, the next one comes 5 s later."""

EXECUTOR: Final = """
import sys
from gpuwarden.cli.main import main
from remediator.executor import task_orders
task_orders.ASK_S = 5.0
sys.exit(main())
"""
"""`gpuwarden` that asks for orders more often."""

RUNNER: Final = """
printf '{"running_log_id":%s,"remote_pid":"%s","remote_pgid":"%s","timestamp":"%s"}' \\
  "$2" "$$" "$$" "$(date +%s)" >"$1/$2.json"
trap '' TERM
sleep 600 & echo $! >"$1/$2.child"
wait
"""
"""Another runner's task, in a session of its own. It ignores SIGTERM."""


@dataclass(kw_only=True)
class Site:
    """A central gateway with TLS, and a host with an executor and a task. The executor has no other database."""

    folder: Path
    network: Network
    store: JobStore
    url: str
    stack: ExitStack
    host: Host = field(init=False)

    def __post_init__(self) -> None:
        ours = authority(self.folder / "authority", self.network.address)
        web = self.folder / "web.yml"
        web.write_text(f"tls_server_config: {{cert_file: {ours.server.cert}, key_file: {ours.server.key}}}\n")
        its = ["--queue-db", self.url, "--listen", self.network.address, "--port", str(PORT)]
        self._start("central", [*gpuwarden("gateway", "central"), *its, "--web-config-file", str(web)])
        self.host = self.network.host()
        own = self.folder / HOST
        self.tasks.mkdir(parents=True)
        (own / "host").write_text(f"{HOST}\n")
        token = self.store.host_tokens.enrol(HOST, scopes=[Scope.REPORTS], now=self.store.now())
        (own / "token").write_text(token)
        its = ["--ledger", f"sqlite:///{own}/ledger.db", "--queue-db", f"sqlite:///{own}/queue.db", "--docker", "none"]
        its += ["--runtime-dir", str(own), "--stop-grace-s", str(GRACE_S), "--task-dir", str(self.tasks)]
        its += ["--gateway", f"https://{self.network.address}:{PORT}", "--token-file", str(own / "token")]
        argv = [sys.executable, "-c", EXECUTOR, "remediator", "execute", *its, "--ca-file", str(ours.own.cert)]
        self._start("executor", self.host.command(argv))
        self.until(lambda: "executor ready" in self.log("executor"), "the executor is ready")

    @property
    def tasks(self) -> Path:
        """Where the host's runner writes its files."""
        return self.folder / HOST / "running_tasks"

    def run_task(self, task_id: int) -> list[int]:
        """Start a task on the host; returns the pids of its group."""
        argv = self.host.command(["sh", "-c", RUNNER, "sh", str(self.tasks), str(task_id)])
        shell = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        self.stack.callback(shell.wait)
        self.stack.callback(shell.kill)
        child = self.tasks / f"{task_id}.child"
        self.until(lambda: child.exists() and child.read_text().endswith("\n"), "the task runs")
        return [shell.pid, int(child.read_text())]

    def order(self, *said: str, code: int = 0) -> str:
        """Run the operator's command; returns what it prints."""
        ran = subprocess.run(
            gpuwarden("host", *said), env={**os.environ, "GPUWARDEN_QUEUE_DB": self.url}, capture_output=True,
            text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip
        assert ran.returncode == code, ran.stdout + ran.stderr + self.log("executor")
        return ran.stdout

    def until(self, holds: Callable[[], object], what: str) -> None:
        eventually(holds, what, within_s=WITHIN_S, log=lambda: self.log("executor") + self.log("central"))

    def log(self, program: str) -> str:
        return (self.folder / f"{program}.log").read_text()

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)


def gpuwarden(*words: str) -> list[str]:
    return [sys.executable, "-m", "gpuwarden", *words]


def living(pids: list[int]) -> list[int]:
    return [each for each in pids if Path("/proc", str(each)).exists() and not procfs.is_zombie(each)]


@pytest.fixture
def site(tmp_path: Path, network: Network) -> Iterator[Site]:
    url = f"sqlite:///{tmp_path}/queue.db"
    with closing(JobStore.open(url)) as store, ExitStack() as stack:
        yield Site(folder=tmp_path, network=network, store=store, url=url, stack=stack)


def test_order_waits_for_a_cut_host_and_ends_the_tasks_group(site: Site) -> None:
    ordered, other = site.run_task(123), site.run_task(124)
    site.until(lambda: site.store.host_tokens.rows(HOST)[0].last_seen_at, "the executor asks for orders")

    site.host.cut()
    said = site.order("end-task", HOST, "123", "--reason", "hung")
    assert re.match(r"task 123: the order waits for left, last heard 20.*: hung\)$", said)
    site.until(lambda: "orders to end tasks not read" in site.log("executor"), "the executor notices the cut")
    assert "the order waits for left" in site.order("show", HOST)
    assert living(ordered + other) == ordered + other

    site.host.heal()
    said = site.order("end-task", HOST, "123", "--wait")

    assert "task 123: ended by left at 20" in said
    assert f"group {ordered[0]}, processes: 2" in said
    assert living(ordered) == []
    assert living(other) == other
    assert f"group {ordered[0]}, processes: 2" in site.order("show", HOST)
    assert '"outcome": "ended"' in site.log("central")


def test_reused_pid_and_file_of_another_user_are_refused(site: Site) -> None:
    pids = site.run_task(123)
    file = site.tasks / "123.json"
    fields = json.loads(file.read_text())

    os.chown(file, 65534, 65534)
    said = site.order("end-task", HOST, "123", "--wait", code=1)
    assert "task 123: not ended, left refuses at 20" in said
    assert "is of user 0, and the task's file of user 65534" in said

    os.chown(file, 0, 0)
    file.write_text(json.dumps({**fields, "timestamp": str(int(time.time()) - 3600)}))
    said = site.order("end-task", HOST, "123", "--wait", code=1)
    assert f"process {pids[0]} started after the task: its pid was used again" in said

    assert living(pids) == pids
    file.write_text(json.dumps(fields))
    assert "ended by left" in site.order("end-task", HOST, "123", "--wait")
    assert living(pids) == []
