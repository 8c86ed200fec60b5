"""Runs `gpuwarden up` as a user does: its output, its addresses and its processes."""

import json
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.standalone import ports
from deploy.standalone.stack import CHECKOUT, PARTS, PORTS
from tests.asking import PLAIN
from tests.waiting import eventually

READY = "ready; Ctrl-C"
ALERT_LABELS = {
    "alertname": "GpuwardenJobStalled", "host": "box1", "worker": "w1", "container": "c1", "job_id": "7",
    "attempt": "1", "incarnation": "i1", "severity": "critical", "remedy": "restart_worker", "condition": "stall",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of `up`."""

    process: subprocess.Popen[bytes]
    log: Path
    data: Path
    ports: dict[str, int]

    def output(self) -> str:
        return self.log.read_text()

    def await_output(self, text: str) -> None:
        eventually(lambda: text in self.output(), f"up prints {text!r}", within_s=40, log=self.output)

    def ready(self) -> "Run":
        eventually(lambda: READY in self.output() or self._fail_if_ended(), "up is ready", within_s=90, log=self.output)
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=90)

    def url(self, part: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[part]}{path}"

    def get(self, part: str, path: str) -> str:
        return httpx.get(self.url(part, path), trust_env=False, verify=PLAIN).text

    def answers(self, part: str) -> bool:
        try:
            return httpx.get(self.url(part, "/-/ready"), trust_env=False, verify=PLAIN, timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def post_alert(self, worker: str = "w1") -> bool:
        """Send Alertmanager the alert of a stalled job, as Prometheus would."""
        texts = {"summary": "stalled", "description": "d", "runbook": "r"}
        alerts = [{"labels": ALERT_LABELS | {"worker": worker}, "annotations": texts}]
        return (
            httpx.post(
                self.url("alertmanager", "/api/v2/alerts"), json=alerts, trust_env=False, verify=PLAIN
            ).status_code
            == 200
        )

    def sample(self, at_s: float) -> float | None:
        """Unix seconds of the newest exporter scrape that Prometheus has at that time; `None` if it has none."""
        parameters = {"query": 'timestamp(up{job="gpuwarden-exporter"})', "time": str(at_s)}
        answer = httpx.get(
            self.url("prometheus", "/api/v1/query"), params=parameters, trust_env=False, verify=PLAIN
        ).json()
        found = answer["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def pids(self) -> dict[str, int]:
        record = json.loads((self.data / "parts.json").read_text())
        return {part: int(record[part].split()[0]) for part in PARTS if part in record}

    def _fail_if_ended(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"up ended with {self.process.returncode}:\n{self.output()}")
        return False


def run_gpuwarden(*arguments: str) -> str:
    done = command_of(*arguments)
    done.check_returncode()
    return done.stdout


def command_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def free_ports(names: Collection[str] = PORTS) -> dict[str, int]:
    return dict(zip(names, ports.free_ports(len(names)), strict=True))


@contextmanager
def up(
    folder: Path,
    ports: dict[str, int],
    *options: str,
    data: Path | None = None,
    docker: str = "none",
    command: Sequence[str] = ("-m", "deploy.standalone.up"),
    cwd: Path = CHECKOUT,
    env: dict[str, str] | None = None,
) -> Iterator[Run]:
    """Start `up`, and kill it at the end of the block. Its parts end with it."""
    log, data = folder / "up.log", data or folder / "data"
    listening = [word for part, port in ports.items() for word in (f"--{part}-port", str(port))]
    argv = [sys.executable, *command, "--data-dir", str(data), "--docker", docker]
    with log.open("wb") as file:
        process = subprocess.Popen([*argv, *listening, *options], cwd=cwd, env=env, stdout=file, stderr=file)
    try:
        yield Run(process=process, log=log, data=data, ports=ports)
    finally:
        process.kill()
        process.wait()


def find_broken_runbooks(groups: list[dict[str, Any]]) -> list[str]:
    """Return the alerts whose runbook URL does not open the page of that alert."""
    alerts = [rule for group in groups for rule in group["rules"] if rule["type"] == "alerting"]
    assert len(alerts) > 30, "Prometheus has the rules"
    with httpx.Client(trust_env=False, verify=PLAIN, timeout=10) as http:
        pages = {each["name"]: http.get(each["annotations"]["runbook_url"]) for each in alerts}
    return [name for name, page in pages.items() if page.status_code != 200 or f">{name}</h1>" not in page.text]
