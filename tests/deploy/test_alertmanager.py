"""Receivers and inhibited alerts of the Alertmanager configuration that ships."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.standalone import debian_packages, init
from deploy.standalone.config_files import IMPLIED, Intervals, alertmanager_config
from deploy.standalone.stack import Chain, Plan
from testbed.check_release import CHECKOUT, RULES_GLOB, run_part
from tests.remediator.alertmanager import send_alerts, silence
from tests.remediator.listening import listening
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

HERE = {"host": "a", "worker": "w", "container": "c"}
STALL = {"alertname": "GpuwardenJobStalled", "remedy": "restart_worker", "condition": "stall", **HERE}
HEALTH = {"alertname": "GpuwardenJobUnhealthy", "remedy": "restart_worker", "condition": "health", **HERE}
BUDGET = {"alertname": "GpuwardenJobOverBudget", "remedy": "restart_worker", "condition": "budget", **HERE}
DEAD = {"alertname": "GpuwardenWorkerDead", "remedy": "restart_worker", "condition": "dead_worker", **HERE}
LOST = {"alertname": "GpuwardenHostLost", "remedy": "hold_lost_host", "condition": "host_lost", "host": "a"}
DOWN = {"alertname": "GpuwardenExporterDown", "host": "a"}
BREAKER_OPEN = {"alertname": "GpuwardenCircuitBreakerOpen", "severity": "critical", "host": "a"}
SLOWED = {"alertname": "GpuwardenJobSlow", "severity": "warning", **HERE}
SHARED = {"alertname": "GpuwardenSharedJobStalled", "severity": "critical", **HERE}
OVERDUE = {"alertname": "GpuwardenRemediationOverdue", "severity": "critical", "alert": "GpuwardenJobStalled", **HERE}
LOW = {"alertname": "GpuwardenVramLow", "host": "a", "gpu": "GPU-1"}
VRAM = {
    "alertname": "GpuwardenVramRecycleDue",
    "remedy": "recycle_container",
    "condition": "vram",
    "host": "a",
    "gpu": "GPU-1",
}
BROKEN = {"alertname": "GpuwardenSomethingOfAGpu", "inhibits": "gpu", "host": "a", "gpu": "GPU-1"}
WATCHDOG = {"alertname": "GpuwardenWatchdog", "severity": "none"}


def program(name: str) -> Path:
    try:
        return debian_packages.find(name)
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))


def configured(
    folder: Path,
    *,
    webhook: str = "http://127.0.0.1:1/",
    outside: str | None = None,
    people: str | None = None,
    integrations: Mapping[str, list[dict[str, Any]]] | None = None,
) -> Path:
    """The configuration that ships; operators get alerts at once, by the webhook `people` or by `integrations`."""
    token, file = folder / "token", folder / "alertmanager.yml"
    token.write_text("0123456789abcdef")
    receiver = integrations if people is None else {"webhook_configs": [{"url": people}]}
    text = alertmanager_config(
        webhook=webhook, token_file=token, intervals=Intervals(), outside=outside, people=receiver
    )
    if receiver is not None:
        text = text.replace("group_wait: 30s", "group_wait: 0s")
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("labels", "outside", "receivers"),
    [
        pytest.param(STALL, False, "gpuwarden", id="stall: remediator"),
        pytest.param(LOST, True, "people,gpuwarden", id="lost host: people and remediator"),
        pytest.param(VRAM, False, "gpuwarden", id="VRAM: remediator"),
        pytest.param(DOWN, True, "people", id="exporter down: people"),
        pytest.param(BROKEN, False, "people", id="broken GPU: people"),
        pytest.param(BREAKER_OPEN, True, "people", id="open circuit breaker: people"),
        pytest.param(OVERDUE, False, "people", id="overdue remediation: people"),
        pytest.param({"alertname": "Theirs", "remedy": ""}, True, "people", id="no remedy: people"),
        pytest.param({**STALL, "remedy": "restart_wroker"}, True, "people,gpuwarden",
                     id="unknown remedy: people and remediator, which rejects it"),
        pytest.param({**STALL, "host": ""}, False, "people,gpuwarden",
                     id="no host: people and remediator, which rejects it"),
        pytest.param({**STALL, "host": "", "remedy": "x"}, False, "people,gpuwarden",
                     id="no host and unknown remedy: people once"),
        pytest.param(WATCHDOG, False, "gpuwarden", id="watchdog: remediator"),
        pytest.param(WATCHDOG, True, "outside,gpuwarden", id="watchdog: outside and remediator"),
    ],
)  # fmt: skip
def test_amtool_routes(labels: Mapping[str, str], outside: bool, receivers: str, tmp_path: Path) -> None:
    program("amtool")
    file = configured(tmp_path, outside="https://example.com/ping/1" if outside else None)
    asked = ("config", "routes", "test", f"--config.file={file}", f"--verify.receivers={receivers}")

    assert run_part("amtool", "check-config", str(file)) == []
    assert run_part("amtool", *asked, *(f"{name}={value}" for name, value in labels.items())) == []


@contextmanager
def alertmanager(folder: Path, **its: Any) -> Iterator[str]:
    """An Alertmanager with the configuration that ships; its address."""
    command = [
        *(str(program("alertmanager")), f"--config.file={configured(folder, **its)}"),
        *(f"--storage.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"),
        *("--cluster.listen-address=", "--log.format=json"),
    ]
    with listening(command, folder / "log") as url:
        yield url


def shipped_alerts() -> list[dict[str, Any]]:
    files = [yaml.safe_load(file.read_text()) for file in sorted(CHECKOUT.glob(RULES_GLOB))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if "alert" in rule]


def held_back(url: str) -> list[str]:
    """The inhibited alerts, once all posted alerts are known: name and host."""
    found = httpx.get(f"{url}/api/v2/alerts", trust_env=False).raise_for_status().json()
    if any(each["status"]["state"] == "unprocessed" for each in found):
        return ["not yet"]
    return sorted(
        f"{each['labels']['alertname']} of {each['labels']['host']}" for each in found if each["status"]["inhibitedBy"]
    )


@pytest.mark.parametrize(
    ("fire", "held"),
    [
        pytest.param([LOST, DOWN, LOW, {**DOWN, "host": "b"}],
                     ["GpuwardenExporterDown of a"],
                     id="lost host: exporter down, not its GPUs and no other host"),
        pytest.param([LOST, *({"alertname": each, "host": "a"} for each in (*IMPLIED, "GpuwardenCircuitBreakerOpen"))],
                     sorted(f"{each} of a" for each in IMPLIED), id="lost host: all implied alerts, not the breaker"),
        pytest.param([LOST, STALL, VRAM, {**DOWN, "alertname": "Theirs"}, DOWN], ["GpuwardenExporterDown of a"],
                     id="lost host: no alert with a remedy and no other alert"),
        pytest.param([DEAD, STALL, HEALTH, BUDGET, DOWN], [],
                     id="dead worker: no alert with a remedy"),
        pytest.param([DEAD, SLOWED, SHARED, {**SLOWED, "worker": "v"}, STALL, OVERDUE], ["GpuwardenJobSlow of a"],
                     id="dead worker: slow job of the same worker only"),
        pytest.param([{**OVERDUE, "alert": "GpuwardenWorkerGone"}, OVERDUE, {**OVERDUE, "worker": "v"}, STALL],
                     ["GpuwardenRemediationOverdue of a"], id="worker gone: its overdue remediations"),
        pytest.param([BROKEN, {**BROKEN, "alertname": "GpuwardenAnother"}, LOW, {**LOW, "gpu": "GPU-2"}, DOWN, VRAM],
                     ["GpuwardenVramLow of a"], id="broken GPU: alerts for people of the same GPU, no remedy"),
        pytest.param([{**BROKEN, "gpu": ""}, DOWN, LOW], [], id="no GPU label: nothing"),
        pytest.param([STALL, HEALTH, BUDGET, DOWN, LOW], [], id="other alerts: nothing"),
    ],
)  # fmt: skip
def test_alertmanager_inhibits(fire: list[Mapping[str, str]], held: list[str], tmp_path: Path) -> None:
    with alertmanager(tmp_path) as url:
        send_alerts(url, *fire)

        eventually(lambda: held_back(url) == held, f"it inhibits {held}", log=lambda: str(held_back(url)))


def grouped(url: str) -> set[tuple[str, tuple[str, ...], int]]:
    """The groups: receiver, common labels, and number of alerts."""
    found = httpx.get(f"{url}/api/v2/alerts/groups", trust_env=False).raise_for_status().json()
    return {
        (
            each["receiver"]["name"],
            tuple(f"{name}={value}" for name, value in sorted(each["labels"].items())),
            len(each["alerts"]),
        )
        for each in found
    }


def test_remedies_are_grouped_per_target_and_alerts_for_people_per_alert_and_host(tmp_path: Path) -> None:
    """A remedy must not wait for the group of another one. The breaker is one alert for all hosts."""
    on_b = {"host": "b"}
    wanted = {
        ("gpuwarden", ("alertname=GpuwardenJobStalled", "container=c", "host=a", "worker=w"), 1),
        ("gpuwarden", ("alertname=GpuwardenJobStalled", "container=d", "host=a", "worker=v"), 1),
        ("gpuwarden", ("alertname=GpuwardenJobUnhealthy", "container=c", "host=a", "worker=w"), 1),
        ("people", ("alertname=GpuwardenVramLow", "host=a"), 2),
        ("people", ("alertname=GpuwardenVramLow", "host=b"), 1),
        ("people", ("alertname=GpuwardenCircuitBreakerOpen",), 2),
    }
    with alertmanager(tmp_path) as url:
        send_alerts(url, STALL, {**STALL, "worker": "v", "container": "d"}, HEALTH)
        send_alerts(url, LOW, {**LOW, "gpu": "GPU-2"}, {**LOW, **on_b}, BREAKER_OPEN, {**BREAKER_OPEN, **on_b})

        eventually(lambda: grouped(url) == wanted, "the groups are complete", log=lambda: str(grouped(url)))


class Listener(ThreadingHTTPServer):
    """A webhook that records calls: the path, and the names of the alerts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Keep)
        self.calls: list[tuple[str, str]] = []
        self.resolved: list[str] = []


class _Keep(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        """Record one call."""
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls += [(self.path, each["labels"]["alertname"]) for each in payload["alerts"]]
        self.server.resolved += [
            each["labels"]["alertname"] for each in payload["alerts"] if each["status"] == "resolved"
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def webhook() -> Iterator[Listener]:
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_alerts_implied_by_a_lost_host_have_no_remedy() -> None:
    assert set(IMPLIED) <= {rule["alert"] for rule in shipped_alerts() if "remedy" not in rule["labels"]}


def test_only_a_lost_gpu_inhibits_other_gpu_alerts() -> None:
    assert [rule["alert"] for rule in shipped_alerts() if "inhibits" in rule["labels"]] == ["GpuwardenGpuLost"]


def test_inhibited_alerts_reach_no_receiver_and_the_watchdog_reaches_both(tmp_path: Path) -> None:
    with webhook() as hook:
        address = f"http://127.0.0.1:{hook.server_port}"
        addresses = {
            name: f"{address}/{path}"
            for name, path in (("webhook", "warden"), ("outside", "outside"), ("people", "people"))
        }
        with alertmanager(tmp_path, **addresses) as url:
            send_alerts(url, DEAD, LOST)
            first = {
                ("/warden", DEAD["alertname"]),
                ("/warden", LOST["alertname"]),
                ("/people", LOST["alertname"]),
            }
            eventually(lambda: first <= set(hook.calls), "dead worker and lost host arrive, the host for people too")
            send_alerts(url, DOWN, WATCHDOG)
            send_alerts(url, STALL, LOW)

            wanted = {
                ("/warden", "GpuwardenWatchdog"),
                ("/outside", "GpuwardenWatchdog"),
                ("/warden", STALL["alertname"]),
                ("/people", LOW["alertname"]),
            }
            eventually(lambda: wanted <= set(hook.calls), "watchdog, stall and GPU arrive")

    assert set(hook.calls) == {*wanted, *first}


def test_stall_arrives_while_the_alert_of_its_dead_worker_is_silenced(tmp_path: Path) -> None:
    with webhook() as hook, alertmanager(tmp_path, webhook=f"http://127.0.0.1:{hook.server_port}/warden") as url:
        silence(url, alertname=DEAD["alertname"])
        send_alerts(url, DEAD)
        send_alerts(url, STALL)
        eventually(lambda: ("/warden", STALL["alertname"]) in hook.calls, "the stall arrives")
        send_alerts(url, STALL, firing=False)

        eventually(lambda: set(hook.resolved) == {STALL["alertname"]}, "its end arrives")

    assert ("/warden", DEAD["alertname"]) not in hook.calls


def test_watchdog_url_is_written_or_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = "https://example.com/ping/1"
    assert init.command([str(tmp_path / "init"), "--command", "/bin/true", "--watchdog-url", there]) == 0
    chain = Chain(Plan(work=tmp_path / "up", host="a", docker=None, simulate_gpu=None, watchdog_url=there))
    with chain.http, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "_start", lambda *_: None)
        chain._start_alertmanager()

    for file in (tmp_path / "init" / "alertmanager.yml", tmp_path / "up" / "alertmanager.yml"):
        assert f"url: {there}" in file.read_text()
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), "--watchdog-url", "example.com"])
    assert "invalid URL" in capsys.readouterr().err
