"""Servers without jobs, through the whole pipeline: which ones are restarted, and what else may restart them.

A server answers over HTTP until a handler takes a lock for ever, like a server that waits for a hung GPU. The process
lives and accepts connections, but does not answer. The GPU is simulated, and the RAM is real.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, Literal

import docker
import pytest
from docker.errors import DockerException
from docker.models.containers import Container
from docker.types import Mount

from dashboards.queries import queries
from deploy.standalone.stack import CHECKOUT
from exporter.evidence.server_health import PROBE_LABEL, TIMEOUT_LABEL
from gpuwarden.evidence import ServerFacts
from remediator.actuators.docker import LABEL
from remediator.clients.exporter_access import ExporterError
from remediator.ledger.reports import EpisodeHistory
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import NO_ACTION, Stage, stage, with_action
from testbed.workers import STAGE_LABEL, DockerFleet
from tests.e2e.running import free_ports
from tests.e2e.stalled_workers import container_events
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S: Final = 10.0
PROBE_S: Final = 1.0
AUTOHEAL: Final = "autoheal"
PARTNER: Final = "gpuwarden-server-partner"
TIMEOUT_S: Final = 20.0

PROGRAM: Final = """
import os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
lock = threading.Lock()
class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/exit":
            os._exit(3)
        if self.path == "/move":
            threading.Thread(target=move, daemon=True).start()
        if self.path == "/read":
            threading.Thread(target=read, daemon=True).start()
        if self.path in ("/hang", "/move", "/read"):
            lock.acquire()
        else:
            with lock:
                pass
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
def move():
    while True:
        held = bytearray(b"x") * (96 << 20)
        time.sleep(1)
        del held
        time.sleep(1)
def read():
    room = bytearray(1 << 20)
    with open("/dev/zero", "rb", buffering=0) as zero:
        while True:
            for _ in range(5):
                zero.readinto(room)
            time.sleep(1)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""
"""Answers every path except four. `hang` keeps the lock. `move` also allocates and frees RAM. `read` also reads 5 MiB a
second. `exit` ends the server."""

SLEEPS: Final = "import time\nwhile True: time.sleep(1)"
LOADS: Final = """
import socket, sys, time
held = socket.socket()
held.bind(("127.0.0.1", int(sys.argv[1])))
while True:
    time.sleep(1)
"""
"""Refuses connections like a server that loads. Another program cannot take its port and answer for it."""
HEALTH_CHECK: Final = """
import _socket, sys
client = _socket.socket()
client.settimeout(1)
client.connect(("127.0.0.1", int(sys.argv[1])))
client.send(b"GET /health HTTP/1.0\\r\\n\\r\\n")
sys.exit(b" 200 " not in client.recv(64))
"""
"""A health check with little I/O. A check that imports an HTTP client every 2 s would read more than an idle server."""

SECOND_NS: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Case:
    """One server: its probe, the request that it gets, and the settings of its container."""

    does: str = "/hang"
    probe: str = "http"
    managed: bool = True
    retries: int = 3
    restart: Literal["always", "unless-stopped"] | None = None
    program: str = PROGRAM
    labels: Mapping[str, str] | None = None
    network: str = "host"
    mounted: bool = False


CASES: Final[Mapping[str, Case]] = {
    "hangs": Case(),
    "unhealthy": Case(probe="docker"),
    "idle": Case(does="/"),
    "busy": Case(),
    "moving": Case(does="/move"),
    "reading": Case(does="/read"),
    "not-ours": Case(managed=False),
    "never": Case(program=LOADS),
    "elsewhere": Case(labels={PROBE_LABEL: "http://192.0.2.1/health"}),
    "exits": Case(does="/exit", restart="always"),
    "policy": Case(restart="unless-stopped"),
    "healed": Case(probe="docker", retries=1, labels={AUTOHEAL: "true"}),
    "stopped": Case(),
    "without-partner": Case(probe="docker", network=f"container:{PARTNER}"),
    "without-mount": Case(mounted=True),
}
ANSWERING: Final = [name for name in CASES if name not in ("never", "elsewhere")]
NOT_RESTARTED: Final = ["idle", "busy", "moving", "reading", "never", "elsewhere"]
RESTARTED: Final = ["hangs", "unhealthy", "policy"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, with a server in each of its containers."""

    stage: Stage
    fleet: DockerFleet
    ports: Mapping[str, int]
    first: Mapping[str, str]
    client: docker.DockerClient
    events: list[dict[str, Any]]
    source: Path

    def facts(self, case: str) -> ServerFacts:
        return answered(
            lambda: self.stage.witness.container_evidence(container_name(case), host=self.stage.chain.plan.host)
        )

    def episodes(self, case: str) -> list[EpisodeHistory]:
        return [each for each in self.stage.ledger.reports.newest() if each.worker == container_name(case)]

    def closed_with_action(self, case: str) -> list[EpisodeHistory]:
        """The closed episodes in which something was done."""
        return [each for each in with_action(self.episodes(case)) if each.closed_at is not None]

    def journal_text(self, case: str) -> str:
        return "\n".join(
            f"{entry.act} {entry.what}: {entry.message}" for entry in self.stage.journal(container_name(case))
        )

    def fired_alerts(self, case: str) -> set[str]:
        firing = f'ALERTS{{container="{container_name(case)}", alertstate="firing"}}'
        found = self.stage.chain.query(f"max_over_time({firing}[30m])")
        return {each["metric"]["alertname"] for each in found}

    def server_metrics(self, case: str) -> dict[str, float]:
        found = self.stage.chain.query(f'{{__name__=~"gpuwarden_server_.*", container="{container_name(case)}"}}')
        return {each["metric"]["__name__"].removeprefix("gpuwarden_server_"): float(each["value"][1]) for each in found}

    def lifecycle(self, case: str) -> list[str]:
        """Starts, stops and ends of a container. Health checks push the older events out of the engine's memory."""
        full_id = self.fleet.container(container_name(case)).id
        newest = self.client.events(since=0, until=int(time.time()) + 1, filters={"container": full_id}, decode=True)
        actions = {
            each["timeNano"]: each["Action"] for each in [*self.events, *newest] if each["Actor"]["ID"] == full_id
        }
        return [actions[at] for at in sorted(actions) if actions[at] in ("start", "stop", "die", "restart")]

    def answers(self, case: str) -> bool:
        return get(self.ports[case], "/health") == 200

    def until(self, holds: Callable[[], object], what: str, within_s: float = 90) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))


def container_name(case: str) -> str:
    return f"gpuwarden-server-{case}"


def get(port: int, path: str) -> int | None:
    with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status
    return None


@pytest.fixture(scope="module")
def scene(work: Any, engine: Engine) -> Iterator[Scene]:
    """Every server that ever answers has answered, and has then received the request of its case."""
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setenv("GPUWARDEN_EXPORTER_PROBE_INTERVAL_S", str(PROBE_S))
        patched.setenv("GPUWARDEN_EXPORTER_PROBE_TIMEOUT_S", str(PROBE_S))
        slots = [Slot(worker=container_name(case), gpus=(f"GPU-sim-{case}",)) for case in CASES]
        set_up = stack.enter_context(
            stage(
                work,
                engine,
                slots,
                armed=True,
                stop_grace_s=1.0,
                settle_timeout_s=TIMEOUT_S,
                restart_timeout_s=TIMEOUT_S,
            )
        )
        fleet = set_up.fleet
        assert isinstance(fleet, DockerFleet)
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine.base_url)))
        events = stack.enter_context(container_events(engine))
        source = work / "mounted"
        source.mkdir()
        partner = run_partner(client, fleet)
        stack.callback(remove_partner, client)
        ports: dict[str, int] = {}
        for name, case in CASES.items():
            # Just before the start: the programs of another test may take a port that is free.
            ports |= free_ports([name])
            serve(client, fleet, name, case, ports[name], source)
        stack.enter_context(Autoheal(engine))
        first = {name: fleet.incarnation(container_name(name)) for name in CASES}
        scene = Scene(stage=set_up, fleet=fleet, ports=ports, first=first, client=client, events=events, source=source)
        scene.until(lambda: all(scene.facts(name).answered for name in ANSWERING), "every server has answered")
        partner.remove(force=True)
        run_partner(client, fleet)
        source.rmdir()
        set_up.gpus.busy = {"GPU-sim-busy": fleet.pid(container_name("busy"))}
        statuses = {name: get(ports[name], CASES[name].does) for name in ANSWERING}
        foreign = [name for name, status in statuses.items() if status not in (None, 200)]
        assert foreign == [], "another program answers on the ports of these servers"
        yield scene


def run_partner(client: docker.DockerClient, fleet: DockerFleet) -> Container:
    """A container whose network a server shares."""
    image = fleet.container(container_name("hangs")).attrs["Config"]["Image"]
    sleeps = ["/usr/bin/python3", "-c", SLEEPS]
    return client.containers.run(image, sleeps, name=PARTNER, network_mode="host", detach=True)


def remove_partner(client: docker.DockerClient) -> None:
    client.containers.get(PARTNER).remove(force=True)


def serve(client: docker.DockerClient, fleet: DockerFleet, name: str, case: Case, port: int, source: Path) -> None:
    """Replace a worker's container by a server, and start it."""
    before = fleet.container(container_name(name))
    image, environment = before.attrs["Config"]["Image"], before.attrs["Config"]["Env"]
    before.remove(force=True)
    labels = {STAGE_LABEL: "true", TIMEOUT_LABEL: f"{SILENCE_S:g}"} | ({LABEL: "true"} if case.managed else {})
    labels[PROBE_LABEL] = "docker" if case.probe == "docker" else f"http://localhost:{port}/health"
    policy: Any = case.restart and {"Name": case.restart}  # the types know two of the four policies
    check = {
        "test": ["CMD", "/usr/bin/python3", "-I", "-S", "-c", HEALTH_CHECK, str(port)],
        "interval": 2 * SECOND_NS,
        "timeout": 3 * SECOND_NS,
        "retries": case.retries,
    }
    fleet._containers[container_name(name)] = client.containers.create(
        image,
        ["/usr/bin/python3", "-c", case.program, str(port)],
        name=container_name(name),
        labels=labels | dict(case.labels or {}),
        environment=environment,
        network_mode=case.network,
        mounts=[Mount("/mounted", str(source), type="bind")] if case.mounted else [],
        healthcheck=check if case.probe == "docker" else None,
        restart_policy=policy,
    )
    fleet.start(container_name(name))


@pytest.fixture(scope="module")
def restarted(scene: Scene) -> Scene:
    """The hung servers are restarted. The others have not answered for twice the time allowed."""
    stop_like_a_person(scene.fleet.container(container_name("stopped")))
    scene.until(
        lambda: all(scene.closed_with_action(name) for name in [*RESTARTED, "not-ours"]),
        "the hung servers are restarted",
    )
    others = ("busy", "moving", "reading", "never")
    eventually(
        lambda: all((scene.facts(name).probe_failing_s or 0) > 2 * SILENCE_S for name in others),
        "the others have not answered for twice the time allowed",
        within_s=90,
        log=lambda: "\n".join(f"{name} answers: {scene.answers(name)}; {scene.facts(name)}" for name in others),
    )
    return scene


def stop_like_a_person(container: Container) -> None:
    container.stop(timeout=1)


class Autoheal:
    """Restarts unhealthy containers with its label, as the program `autoheal` does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=10)

    def _go_on(self) -> None:
        with closing(docker.DockerClient(base_url=self._engine.base_url)) as client:
            while not self._closing.wait(0.5):
                with suppress(DockerException):
                    for each in client.containers.list(filters={"health": "unhealthy", "label": AUTOHEAL}):
                        each.restart(timeout=1)


@pytest.mark.parametrize("name", RESTARTED)
def test_hung_idle_server_is_restarted_and_answers_again(restarted: Scene, name: str) -> None:
    (episode,) = with_action(restarted.episodes(name))

    assert (episode.remedy, episode.condition, episode.outcome) == ("restart_container", "server", "fixed"), (
        restarted.journal_text(name)
    )
    assert (episode.job_id, episode.attempt) == (None, None)
    assert restarted.lifecycle(name) == ["start", "die", "stop", "start"]
    assert restarted.fired_alerts(name) == {"GpuwardenServerHung"}
    assert restarted.fleet.incarnation(container_name(name)) != restarted.first[name]
    restarted.until(lambda: restarted.answers(name), "the server answers again")
    restarted.until(
        lambda: restarted.facts(name).answered and restarted.facts(name).probe_failing_s == 0,
        "the exporter sees the answer",
    )


@pytest.mark.parametrize("name", NOT_RESTARTED)
def test_server_is_not_restarted(restarted: Scene, name: str) -> None:
    assert restarted.episodes(name) == []
    assert restarted.fired_alerts(name) == set()
    assert restarted.lifecycle(name) == ["start"]
    assert restarted.fleet.incarnation(container_name(name)) == restarted.first[name]


def test_evidence_of_servers_that_are_not_restarted(restarted: Scene) -> None:
    idle, busy, moving, reading, never = (
        restarted.facts(name) for name in ("idle", "busy", "moving", "reading", "never")
    )

    assert (idle.answered, idle.probe_failing_s) == (True, 0.0)
    assert min(idle.gpu_idle_s or 0, idle.ram_idle_s or 0) > 2 * SILENCE_S
    assert (busy.answered, busy.gpu_idle_s) == (True, 0.0)
    assert min(busy.probe_failing_s or 0, busy.ram_idle_s or 0) > 2 * SILENCE_S
    assert moving.ram_idle_s is not None
    assert moving.ram_idle_s < SILENCE_S
    assert min(moving.probe_failing_s or 0, moving.gpu_idle_s or 0) > 2 * SILENCE_S
    assert reading.io_idle_s is not None
    assert reading.io_idle_s < SILENCE_S
    assert min(reading.probe_failing_s or 0, reading.gpu_idle_s or 0, reading.ram_idle_s or 0) > 2 * SILENCE_S
    assert never.answered is False
    assert min(never.probe_failing_s or 0, never.gpu_idle_s or 0, never.ram_idle_s or 0) > 2 * SILENCE_S


def test_probe_label_of_another_host_is_reported_and_ignored(restarted: Scene) -> None:
    restarted.until(lambda: restarted.server_metrics("elsewhere") == {"invalid": 1.0}, "the invalid label is published")
    assert "its host must be localhost" in restarted.stage.chain.log("exporter")
    assert restarted.facts("elsewhere").probe is None


def test_restart_of_an_unmanaged_server_is_refused(restarted: Scene) -> None:
    (episode,) = with_action(restarted.episodes("not-ours"))

    assert episode.outcome == "refused"
    assert restarted.lifecycle("not-ours") == ["start"]


def test_server_restarted_by_docker_is_not_restarted_again(restarted: Scene) -> None:
    assert restarted.lifecycle("exits") == ["start", "die", "start"]
    assert restarted.episodes("exits") == []
    restarted.until(lambda: restarted.answers("exits"), "the server answers")
    assert restarted.facts("exits").answered


def test_server_restarted_by_autoheal_is_not_restarted_again(restarted: Scene) -> None:
    restarted.until(lambda: restarted.answers("healed"), "the server answers")
    lifecycle = restarted.lifecycle("healed")
    healed = lifecycle.count("restart")  # on a slow machine the server may become unhealthy again
    assert healed >= 1
    assert lifecycle == ["start", *["die", "stop", "start", "restart"] * healed], (
        "each stop and start belongs to a restart"
    )
    assert {episode.outcome for episode in restarted.episodes("healed")} <= NO_ACTION


def test_server_stopped_by_an_operator_stays_down(restarted: Scene) -> None:
    assert restarted.lifecycle("stopped") == ["start", "die", "stop"]
    assert {episode.outcome for episode in restarted.episodes("stopped")} <= NO_ACTION


def test_server_whose_network_partner_was_recreated_is_not_stopped(restarted: Scene) -> None:
    (held,) = (each for each in restarted.stage.ledger.reports.list_held() if each.worker.endswith("without-partner"))

    assert held.reason == "unstartable"
    assert ", whose network it shares, is gone" in held.message
    assert restarted.lifecycle("without-partner") == ["start"]
    assert restarted.fired_alerts("without-partner") == {"GpuwardenServerHung"}
    status = run_gpuwarden_status(restarted)
    assert f"episode {held.episode_id} of {held.worker}" in status


def test_server_that_does_not_start_again_raises_an_alert_until_it_runs(restarted: Scene) -> None:
    name = "without-mount"
    given_up = f'gpuwarden_remediator_given_up_seconds{{container="{container_name(name)}"}}'

    restarted.until(lambda: "GpuwardenRestartGivenUp" in restarted.fired_alerts(name), "the alert fires")

    (episode,) = with_action(restarted.episodes(name))
    (tells,) = (each for each in restarted.stage.ledger.reports.list_held() if each.episode_id == episode.episode_id)
    assert (episode.outcome, tells.reason) == (None, "given_up"), restarted.journal_text(name)
    assert "bind source path does not exist" in restarted.journal_text(name)
    assert restarted.lifecycle(name) == ["start", "die", "stop"]

    restarted.source.mkdir()
    restarted.fleet.start(container_name(name))

    restarted.until(lambda: restarted.closed_with_action(name), "the episode ends once it runs")
    restarted.until(lambda: not restarted.stage.chain.query(given_up), "its series ends")
    (episode,) = restarted.closed_with_action(name)
    assert (episode.outcome, episode.reason) == ("partly_fixed", "started_elsewhere")


def run_gpuwarden_status(scene: Scene) -> str:
    """What `gpuwarden status` prints about the ledger. It exits with 1, since something needs an operator."""
    skipped = [f"--{part}=none" for part in ("remediator", "exporter", "alertmanager", "prometheus", "queue-db")]
    argv = [sys.executable, "-m", "gpuwarden", "status", "--ledger", scene.stage.chain.ledger_url, *skipped]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_server_panel_of_the_dashboard_has_data(restarted: Scene) -> None:
    dashboard = json.loads((CHECKOUT / "dashboards" / "overview.json").read_text(encoding="utf-8"))
    found = queries(dashboard, host=restarted.stage.chain.plan.host, rate_interval="30s")

    expressions = [query.expr for query in found if "Server probe" in query.panel_title]

    assert len(expressions) == len(set(expressions)) == 2
    all_but_one = len(ANSWERING) - 1  # one was stopped
    restarted.until(
        lambda: all(len(restarted.stage.chain.query(each)) >= all_but_one for each in expressions),
        "each server has its row",
    )


def test_busy_server_is_restarted_once_its_gpu_is_idle(restarted: Scene) -> None:
    """Control of the busy server: only its GPU changes."""
    idle_from = time.time()
    restarted.stage.gpus.busy = {}

    restarted.until(lambda: restarted.closed_with_action("busy"), "the server is restarted")

    (episode,) = with_action(restarted.episodes("busy"))
    assert (episode.outcome, episode.opened_at > idle_from) == ("fixed", True)
    restarted.until(lambda: restarted.answers("busy"), "the server answers again")


def test_server_that_hangs_while_the_exporter_is_down_is_restarted_later(restarted: Scene) -> None:
    """After its restart the exporter knows which servers have answered. One that never answered is not monitored."""
    first = restarted.facts("idle").container_incarnation
    assert restarted.facts("idle").answered

    restarted.stage.chain.kill("exporter")
    get(restarted.ports["idle"], "/hang")
    restarted.stage.chain.start_exporter()

    restarted.until(lambda: restarted.closed_with_action("idle"), "the server is restarted")
    (episode,) = with_action(restarted.episodes("idle"))
    assert (episode.remedy, episode.outcome) == ("restart_container", "fixed"), restarted.journal_text("idle")
    assert restarted.fleet.incarnation(container_name("idle")) != first
    restarted.until(lambda: restarted.answers("idle"), "the server answers again")

    def silent(case: str) -> bool:
        with suppress(ExporterError):
            return (restarted.facts(case).probe_failing_s or 0) > 2 * SILENCE_S
        return False

    restarted.until(lambda: silent("never"), "the server that never answered is silent for twice the time allowed")
    assert restarted.facts("never").answered is False
    assert restarted.episodes("never") == []
    assert restarted.fleet.incarnation(container_name("never")) == restarted.first["never"]
