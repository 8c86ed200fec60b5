"""Servers without jobs through the whole chain: which are freed, which are left alone, and who else may restart them.

A server here answers over HTTP until a handler of its takes a lock for ever, as one wedges that waits for its GPU: the
process lives, connections are taken, and nothing comes. What its GPU does is played; what its RAM does is not.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, Literal

import docker
import pytest
from docker.errors import DockerException
from docker.models.containers import Container

from dashboards.queries import queries
from deploy.standalone.stack import CHECKOUT
from exporter.evidence.server_health import PROBE_LABEL, TIMEOUT_LABEL
from gpuwarden.evidence import ServerFacts
from remediator.actuators.docker import LABEL
from remediator.clients.exporter import ExporterError
from remediator.ledger.reports import EpisodeHistory
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import NO_ACTION, Stage, stage, with_action
from testbed.workers import STAGE_LABEL, DockerFleet
from tests.e2e.running import free_ports
from tests.e2e.wedges import container_events
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S: Final = 10.0
PROBE_S: Final = 1.0
AUTOHEAL: Final = "autoheal"

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
        if self.path in ("/wedge", "/move", "/read"):
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
"""Answers every path but for four: `wedge` takes the lock and keeps it, `move` moves RAM besides, `read` reads 5 MiB a
second besides, `exit` ends it."""

SLEEPS: Final = "import time\nwhile True: time.sleep(1)"
ASKS: Final = """
import _socket, sys
asking = _socket.socket()
asking.settimeout(1)
asking.connect(("127.0.0.1", int(sys.argv[1])))
asking.send(b"GET /health HTTP/1.0\\r\\n\\r\\n")
sys.exit(b" 200 " not in asking.recv(64))
"""
"""A health check that reads little: one that imports an HTTP client every 2 s would read more than what is still."""

SECOND_NS: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Case:
    """One server: how it is asked, what is done to it, and how its container is made."""

    does: str = "/wedge"
    probe: str = "http"
    managed: bool = True
    retries: int = 3
    restart: Literal["always", "unless-stopped"] | None = None
    program: str = PROGRAM
    labels: Mapping[str, str] | None = None


CASES: Final[Mapping[str, Case]] = {
    "wedges": Case(),
    "unhealthy": Case(probe="docker"),
    "idle": Case(does="/"),
    "busy": Case(),
    "moving": Case(does="/move"),
    "reading": Case(does="/read"),
    "not-ours": Case(managed=False),
    "never": Case(program=SLEEPS),
    "elsewhere": Case(labels={PROBE_LABEL: "http://192.0.2.1/health"}),
    "exits": Case(does="/exit", restart="always"),
    "kept-up": Case(restart="unless-stopped"),
    "healed": Case(probe="docker", retries=1, labels={AUTOHEAL: "true"}),
    "stopped": Case(),
}
ANSWERING: Final = [name for name in CASES if name not in ("never", "elsewhere")]
LEFT_ALONE: Final = ["idle", "busy", "moving", "reading", "never", "elsewhere"]
FREED: Final = ["wedges", "unhealthy", "kept-up"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, and a server in each of its containers."""

    stage: Stage
    fleet: DockerFleet
    ports: Mapping[str, int]
    first: Mapping[str, str]
    client: docker.DockerClient
    events: list[dict[str, Any]]

    def facts(self, case: str) -> ServerFacts:
        return answered(lambda: self.stage.witness.container_evidence(named(case), host=self.stage.chain.plan.host))

    def stories(self, case: str) -> list[EpisodeHistory]:
        return [story for story in self.stage.ledger.reports.newest() if story.worker == named(case)]

    def freed(self, case: str) -> list[EpisodeHistory]:
        """The episodes of which something came, once they are closed."""
        return [story for story in with_action(self.stories(case)) if story.closed_at is not None]

    def told(self, case: str) -> str:
        return "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in self.stage.journal(named(case)))

    def fired(self, case: str) -> set[str]:
        found = self.stage.chain.query(f'max_over_time(ALERTS{{container="{named(case)}"}}[30m])')
        return {each["metric"]["alertname"] for each in found}

    def figures(self, case: str) -> dict[str, float]:
        found = self.stage.chain.query(f'{{__name__=~"gpuwarden_server_.*", container="{named(case)}"}}')
        return {each["metric"]["__name__"].removeprefix("gpuwarden_server_"): float(each["value"][1]) for each in found}

    def happened(self, case: str) -> list[str]:
        """The engine's newest events, and the older ones as they came: health checks have it forget those."""
        full_id = self.fleet.container(named(case)).id
        newest = self.client.events(since=0, until=int(time.time()) + 1, filters={"container": full_id}, decode=True)
        told = {each["timeNano"]: each["Action"] for each in [*self.events, *newest] if each["Actor"]["ID"] == full_id}
        return [told[at] for at in sorted(told) if told[at] in ("start", "stop", "die", "restart")]

    def answers(self, case: str) -> bool:
        return get(self.ports[case], "/health") == 200

    def until(self, holds: Callable[[], object], what: str, within_s: float = 90) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))


def named(case: str) -> str:
    return f"gpuwarden-server-{case}"


def get(port: int, path: str) -> int | None:
    with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status
    return None


@pytest.fixture(scope="module")
def scene(work: Any, engine: Engine) -> Iterator[Scene]:
    """Every server has answered, if it ever does, and then every one was done to what its case says."""
    ports = free_ports(CASES)
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setenv("GPUWARDEN_EXPORTER_PROBE_INTERVAL_S", str(PROBE_S))
        patched.setenv("GPUWARDEN_EXPORTER_PROBE_TIMEOUT_S", str(PROBE_S))
        slots = [Slot(worker=named(case), gpus=(f"GPU-sim-{case}",)) for case in CASES]
        set_up = stack.enter_context(stage(work, engine, slots, armed=True, stop_grace_s=1.0))
        fleet = set_up.fleet
        assert isinstance(fleet, DockerFleet)
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine.base_url)))
        told = stack.enter_context(container_events(engine))
        for name, case in CASES.items():
            serve(client, fleet, name, case, ports[name])
        stack.enter_context(autoheal(engine))
        first = {name: fleet.incarnation(named(name)) for name in CASES}
        scene = Scene(stage=set_up, fleet=fleet, ports=ports, first=first, client=client, events=told)
        scene.until(lambda: all(scene.facts(name).answered for name in ANSWERING), "every server has answered")
        set_up.gpus.busy = {"GPU-sim-busy": fleet.pid(named("busy"))}
        for name in ANSWERING:
            get(ports[name], CASES[name].does)
        yield scene


def serve(client: docker.DockerClient, fleet: DockerFleet, name: str, case: Case, port: int) -> None:
    """Put a server where the stage has made a worker's container, and start it."""
    before = fleet.container(named(name))
    image, environment = before.attrs["Config"]["Image"], before.attrs["Config"]["Env"]
    before.remove(force=True)
    labels = {STAGE_LABEL: "true", TIMEOUT_LABEL: f"{SILENCE_S:g}"} | ({LABEL: "true"} if case.managed else {})
    labels[PROBE_LABEL] = "docker" if case.probe == "docker" else f"http://localhost:{port}/health"
    policy: Any = case.restart and {"Name": case.restart}  # the types know two of Docker's four
    check = {
        "test": ["CMD", "/usr/bin/python3", "-I", "-S", "-c", ASKS, str(port)],
        "interval": 2 * SECOND_NS,
        "timeout": 3 * SECOND_NS,
        "retries": case.retries,
    }
    fleet._containers[named(name)] = client.containers.create(
        image,
        ["/usr/bin/python3", "-c", case.program, str(port)],
        name=named(name),
        labels=labels | dict(case.labels or {}),
        environment=environment,
        network_mode="host",
        healthcheck=check if case.probe == "docker" else None,
        restart_policy=policy,
    )
    fleet.start(named(name))


@pytest.fixture(scope="module")
def freed(scene: Scene) -> Scene:
    """Those that wedge have been freed, and everyone else has been silent for over twice the time allowed."""
    stop_like_a_person(scene.fleet.container(named("stopped")))
    scene.until(
        lambda: all(scene.freed(name) for name in [*FREED, "not-ours"]),
        "the wedged ones are freed",
    )
    scene.until(
        lambda: all(
            (scene.facts(name).unanswered_s or 0) > 2 * SILENCE_S for name in ("busy", "moving", "reading", "never")
        ),
        "the others were silent for over twice the time allowed",
    )
    return scene


def stop_like_a_person(container: Container) -> None:
    container.stop(timeout=1)


class autoheal:  # noqa: N801 - it reads as what it is
    """What restarts unhealthy containers that bear its label, as the programs of that name do."""

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


@pytest.mark.parametrize("name", FREED)
def test_a_server_that_does_not_answer_and_does_nothing_is_freed_and_answers_again(freed: Scene, name: str) -> None:
    (story,) = with_action(freed.stories(name))

    assert (story.remedy, story.condition, story.outcome) == ("restart_container", "server", "mended"), freed.told(name)
    assert (story.job_id, story.attempt) == (None, None)
    assert freed.happened(name) == ["start", "die", "stop", "start"]
    assert freed.fired(name) == {"GpuwardenServerHung"}
    assert freed.fleet.incarnation(named(name)) != freed.first[name]
    freed.until(lambda: freed.answers(name), "it answers again")
    freed.until(lambda: freed.facts(name).answered and freed.facts(name).unanswered_s == 0, "and is seen to")


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_server_is_left_alone_that_is(freed: Scene, name: str) -> None:
    assert freed.stories(name) == []
    assert freed.fired(name) == set()
    assert freed.happened(name) == ["start"]
    assert freed.fleet.incarnation(named(name)) == freed.first[name]


def test_why_each_of_them_is_left_alone(freed: Scene) -> None:
    idle, busy, moving, reading, never = (freed.facts(name) for name in ("idle", "busy", "moving", "reading", "never"))

    assert (idle.answered, idle.unanswered_s) == (True, 0.0)
    assert min(idle.gpu_idle_s or 0, idle.ram_idle_s or 0) > 2 * SILENCE_S
    assert (busy.answered, busy.gpu_idle_s) == (True, 0.0)
    assert min(busy.unanswered_s or 0, busy.ram_idle_s or 0) > 2 * SILENCE_S
    assert moving.ram_idle_s is not None
    assert moving.ram_idle_s < SILENCE_S
    assert min(moving.unanswered_s or 0, moving.gpu_idle_s or 0) > 2 * SILENCE_S
    assert reading.io_idle_s is not None
    assert reading.io_idle_s < SILENCE_S
    assert min(reading.unanswered_s or 0, reading.gpu_idle_s or 0, reading.ram_idle_s or 0) > 2 * SILENCE_S
    assert never.answered is False
    assert min(never.unanswered_s or 0, never.gpu_idle_s or 0, never.ram_idle_s or 0) > 2 * SILENCE_S


def test_a_label_that_names_another_place_is_told_and_not_followed(freed: Scene) -> None:
    freed.until(lambda: freed.figures("elsewhere") == {"invalid": 1.0}, "it is told")
    assert "its host must be localhost" in freed.stage.chain.log("exporter")
    assert freed.facts("elsewhere").probe is None


def test_a_server_that_did_not_opt_in_is_refused(freed: Scene) -> None:
    (story,) = with_action(freed.stories("not-ours"))

    assert story.outcome == "refused"
    assert freed.happened("not-ours") == ["start"]


def test_what_docker_restarts_by_itself_is_not_restarted_again(freed: Scene) -> None:
    assert freed.happened("exits") == ["start", "die", "start"]
    assert freed.stories("exits") == []
    freed.until(lambda: freed.answers("exits"), "it answers")
    assert freed.facts("exits").answered


def test_what_is_restarted_for_its_health_check_first_is_not_restarted_again(freed: Scene) -> None:
    freed.until(lambda: freed.answers("healed"), "it answers")
    happened = freed.happened("healed")
    healed = happened.count("restart")  # a slow machine may look unhealthy once more
    assert healed >= 1
    assert happened == ["start", *["die", "stop", "start", "restart"] * healed], "each stop and start is a restart's"
    assert {story.outcome for story in freed.stories("healed")} <= NO_ACTION


def test_what_a_person_stopped_stays_down(freed: Scene) -> None:
    assert freed.happened("stopped") == ["start", "die", "stop"]
    assert {story.outcome for story in freed.stories("stopped")} <= NO_ACTION


def test_the_dashboards_panel_of_servers_answers_with_data(freed: Scene) -> None:
    dashboard = json.loads((CHECKOUT / "dashboards" / "overview.json").read_text(encoding="utf-8"))
    asked = queries(dashboard, host=freed.stage.chain.plan.host, rate_interval="30s")

    its = [query.expr for query in asked if "Server probe" in query.panel_title]

    assert len(its) == len(set(its)) == 2
    all_but_one = len(ANSWERING) - 1  # that was stopped
    freed.until(lambda: all(len(freed.stage.chain.query(each)) >= all_but_one for each in its), "each has its row")


def test_once_its_gpu_is_idle_the_busy_one_is_freed_too(freed: Scene) -> None:
    """The control of the one that was busy: the same server in the same container, and only its GPU changed."""
    idle_from = time.time()
    freed.stage.gpus.busy = {}

    freed.until(lambda: freed.freed("busy"), "it is freed")

    (story,) = with_action(freed.stories("busy"))
    assert (story.outcome, story.opened_at > idle_from) == ("mended", True)
    freed.until(lambda: freed.answers("busy"), "it answers again")


def test_a_server_that_wedges_while_its_exporter_is_away_is_freed_once_that_is_back(freed: Scene) -> None:
    """Who has answered outlives the exporter; who never has is no more armed by its next one than by this."""
    wedged = freed.facts("idle").container_incarnation
    assert freed.facts("idle").answered

    freed.stage.chain.kill("exporter")
    get(freed.ports["idle"], "/wedge")
    freed.stage.chain.start_exporter()

    freed.until(lambda: freed.freed("idle"), "it is freed")
    (story,) = with_action(freed.stories("idle"))
    assert (story.remedy, story.outcome) == ("restart_container", "mended"), freed.told("idle")
    assert freed.fleet.incarnation(named("idle")) != wedged
    freed.until(lambda: freed.answers("idle"), "it answers again")

    def silent(case: str) -> bool:
        with suppress(ExporterError):
            return (freed.facts(case).unanswered_s or 0) > 2 * SILENCE_S
        return False

    freed.until(lambda: silent("never"), "the one that never answered is silent for over twice the time allowed")
    assert freed.facts("never").answered is False
    assert freed.stories("never") == []
    assert freed.fleet.incarnation(named("never")) == freed.first["never"]
