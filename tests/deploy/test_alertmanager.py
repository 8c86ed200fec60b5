"""What becomes of alerts in the Alertmanager that is configured here: who is told, and what is held back by what."""

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
UNMENDED = {"alertname": "GpuwardenRemediationOverdue", "severity": "critical", "alert": "GpuwardenJobStalled", **HERE}
LOW = {"alertname": "GpuwardenVramLow", "host": "a", "gpu": "GPU-1"}
VICTIM = {
    "alertname": "GpuwardenVramRecycleDue",
    "remedy": "recycle_container",
    "condition": "vram",
    "host": "a",
    "gpu": "GPU-1",
}
BROKEN = {"alertname": "GpuwardenSomethingOfAGpu", "causes": "gpu", "host": "a", "gpu": "GPU-1"}
WATCHDOG = {"alertname": "GpuwardenWatchdog", "severity": "none"}


def program(name: str) -> Path:
    try:
        return debian_packages.find(name)
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))


def configured(
    folder: Path, *, webhook: str = "http://127.0.0.1:1/", outside: str | None = None, people: str | None = None
) -> Path:
    """The configuration that ships; with `people`, somebody is called there, at once."""
    token, file = folder / "token", folder / "alertmanager.yml"
    token.write_text("0123456789abcdef")
    text = alertmanager_config(webhook=webhook, token_file=token, intervals=Intervals(), outside=outside)
    if people is not None:
        text = text.replace("- name: people\n", f"- name: people\n  webhook_configs:\n  - url: {people}\n")
        text = text.replace("group_wait: 30s", "group_wait: 0s")
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("labels", "outside", "receivers"),
    [
        pytest.param(STALL, False, "gpuwarden", id="a wedge to the remediator"),
        pytest.param(LOST, True, "people,gpuwarden", id="a lost host to people and to the remediator"),
        pytest.param(VICTIM, False, "gpuwarden", id="who holds too much memory to the remediator"),
        pytest.param(DOWN, True, "people", id="an exporter that is down to people"),
        pytest.param(BROKEN, False, "people", id="a broken GPU to people"),
        pytest.param(BREAKER_OPEN, True, "people", id="a latched brake to people"),
        pytest.param(UNMENDED, False, "people", id="what is not mended to people"),
        pytest.param({"alertname": "Theirs", "remedy": ""}, True, "people", id="what names no remedy to people"),
        pytest.param({**STALL, "remedy": "restart_wroker"}, True, "people,gpuwarden",
                     id="what names a remedy that is none to people and to the remediator, which refuses it"),
        pytest.param({**STALL, "host": ""}, False, "people,gpuwarden",
                     id="a wedge of which the host is not told to people and to the remediator, which refuses it"),
        pytest.param({**STALL, "host": "", "remedy": "x"}, False, "people,gpuwarden", id="what is both to people once"),
        pytest.param(WATCHDOG, False, "gpuwarden", id="the watchdog to the remediator"),
        pytest.param(WATCHDOG, True, "outside,gpuwarden", id="the watchdog outside and to the remediator"),
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
    """One with the configuration that ships; its address."""
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
    """The alerts, once it knows of all that were posted, that another holds back: name and host."""
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
                     id="a lost host that its exporter is down, and nothing of its GPUs nor of another host"),
        pytest.param([LOST, *({"alertname": each, "host": "a"} for each in (*IMPLIED, "GpuwardenCircuitBreakerOpen"))],
                     sorted(f"{each} of a" for each in IMPLIED), id="a lost host: all implied alerts, not the breaker"),
        pytest.param([LOST, STALL, VICTIM, {**DOWN, "alertname": "Theirs"}, DOWN], ["GpuwardenExporterDown of a"],
                     id="a lost host nothing that is acted on, and nothing of others"),
        pytest.param([DEAD, STALL, HEALTH, BUDGET, DOWN], [],
                     id="a dead worker nothing that is acted on, its own stall and health among it"),
        pytest.param([DEAD, SLOWED, SHARED, {**SLOWED, "worker": "v"}, STALL, UNMENDED], ["GpuwardenJobSlow of a"],
                     id="a dead worker that its own job is slow, and neither a neighbour's nor what nobody mends"),
        pytest.param([{**UNMENDED, "alert": "GpuwardenWorkerGone"}, UNMENDED, {**UNMENDED, "worker": "v"}, STALL],
                     ["GpuwardenRemediationOverdue of a"], id="a worker that is gone what else of it is not mended"),
        pytest.param([BROKEN, {**BROKEN, "alertname": "GpuwardenAnother"}, LOW, {**LOW, "gpu": "GPU-2"}, DOWN, VICTIM],
                     ["GpuwardenVramLow of a"], id="a broken GPU what people would be told of that one, and no remedy"),
        pytest.param([{**BROKEN, "gpu": ""}, DOWN, LOW], [], id="a GPU that nobody names nothing"),
        pytest.param([STALL, HEALTH, BUDGET, DOWN, LOW], [], id="none of them another"),
    ],
)  # fmt: skip
def test_holds_back(fire: list[Mapping[str, str]], held: list[str], tmp_path: Path) -> None:
    with alertmanager(tmp_path) as url:
        send_alerts(url, *fire)

        eventually(lambda: held_back(url) == held, f"it holds back {held}", log=lambda: str(held_back(url)))


def grouped(url: str) -> set[tuple[str, tuple[str, ...], int]]:
    """Who is told of what in one call: the receiver, what its alerts have in common, and how many they are."""
    found = httpx.get(f"{url}/api/v2/alerts/groups", trust_env=False).raise_for_status().json()
    return {
        (
            each["receiver"]["name"],
            tuple(f"{name}={value}" for name, value in sorted(each["labels"].items())),
            len(each["alerts"]),
        )
        for each in found
    }


def test_each_wedge_is_a_call_of_its_own_and_people_are_called_once_for_a_kind_and_host(tmp_path: Path) -> None:
    """Whoever waits for another's call is mended later; and a brake is latched once for all who share it."""
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

        eventually(lambda: grouped(url) == wanted, "each is called of what it is for", log=lambda: str(grouped(url)))


class Listener(ThreadingHTTPServer):
    """A webhook that keeps what it is told: the path, and the names of the alerts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Keep)
        self.told: list[tuple[str, str]] = []
        self.resolved: list[str] = []


class _Keep(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        """Keep one."""
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told += [(self.path, each["labels"]["alertname"]) for each in payload["alerts"]]
        self.server.resolved += [
            each["labels"]["alertname"] for each in payload["alerts"] if each["status"] == "resolved"
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def heard() -> Iterator[Listener]:
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_what_a_lost_host_holds_back_are_alerts_for_people() -> None:
    assert set(IMPLIED) <= {rule["alert"] for rule in shipped_alerts() if "remedy" not in rule["labels"]}


def test_of_what_is_wrong_with_a_gpu_only_that_it_is_lost_holds_anything_back() -> None:
    assert [rule["alert"] for rule in shipped_alerts() if "causes" in rule["labels"]] == ["GpuwardenGpuLost"]


def test_what_is_held_back_reaches_nobody_and_the_watchdog_reaches_both(tmp_path: Path) -> None:
    with heard() as hook:
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
            eventually(lambda: first <= set(hook.told), "dead worker and lost host are told of, the host to people too")
            send_alerts(url, DOWN, WATCHDOG)
            send_alerts(url, STALL, LOW)

            wanted = {
                ("/warden", "GpuwardenWatchdog"),
                ("/outside", "GpuwardenWatchdog"),
                ("/warden", STALL["alertname"]),
                ("/people", LOW["alertname"]),
            }
            eventually(
                lambda: wanted <= set(hook.told), "the watchdog, the dead worker's stall and the GPU are told of"
            )

    assert set(hook.told) == {*wanted, *first}


def test_a_stall_is_acted_on_while_its_dead_workers_alert_is_silenced_and_its_end_is_told(tmp_path: Path) -> None:
    with heard() as hook, alertmanager(tmp_path, webhook=f"http://127.0.0.1:{hook.server_port}/warden") as url:
        silence(url, alertname=DEAD["alertname"])
        send_alerts(url, DEAD)
        send_alerts(url, STALL)
        eventually(lambda: ("/warden", STALL["alertname"]) in hook.told, "the stall is told of")
        send_alerts(url, STALL, firing=False)

        eventually(lambda: set(hook.resolved) == {STALL["alertname"]}, "and that it is over")

    assert ("/warden", DEAD["alertname"]) not in hook.told


def test_the_watchdogs_address_is_written_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
