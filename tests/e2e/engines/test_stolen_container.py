"""A stolen worker container attacks other slots, jobs, hosts and the machine, in real Docker and Podman.

The attacker is root in a container without network that has one folder of the host. It knows all that others know.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import docker
import httpx
import pytest
from sqlalchemy import Engine, inspect, text

from exporter.sources import workers
from gpuwarden import state_file
from gpuwarden.gateway.client import GatewayStore
from gpuwarden.gateway.operations import OPERATIONS, OnJob
from gpuwarden.gateway.wire import PREFIX, SOCKET_NAME
from gpuwarden.job import State
from gpuwarden.procfs import ProcessId
from gpuwarden.queue import Job, JobStore, Submission
from remediator.actuators import ActuatorError
from remediator.actuators.process import ProcessActuator
from remediator.ledger.ledger import Ledger
from testbed.docker_engine import NoEngine, docker_engine, podman_engine
from testbed.postgres import Postgres
from testbed.worker_image import worker_image
from tests.asking import PLAIN
from tests.e2e.running import free_ports
from tests.waiting import eventually

pytestmark = pytest.mark.slow

SCRIPT: Final = Path(__file__).parent / "stolen.py"
STOLEN: Final = "stolen"
OTHERS: Final = ("w2", "w3", "stolen-0")
"""The last has the name of a worker of a pool in the attacker's folder."""

FLOOD_S: Final = 6.0
MEMORY_MAX_KB: Final = 60_000
"""How much the gateway's memory may grow in a flood."""

FILES_MAX: Final = 1200
WORKER: Final = """
import sys, time
from pathlib import Path
from gpuwarden.reporter import Reporter
with Reporter(Path(sys.argv[1]), worker="w2", queue="gpu"):
    print("ready", flush=True)
    time.sleep(600)
"""


@dataclass(kw_only=True)
class Scene:
    """A host with four slots behind two gateways, and what only the test knows."""

    run: Path
    secret: Path
    databases: dict[str, Engine]
    store: JobStore
    token: str
    ports: dict[str, int]
    gateway: subprocess.Popen[bytes]
    attack: Callable[..., Any]
    jobs: dict[str, Job]

    def door(self, worker: str) -> GatewayStore:
        return GatewayStore(self.run / worker, worker=worker, queue="gpu")

    def facts(self, **more: Any) -> str:
        jobs = [
            {"job_id": each.job_id, "attempt": each.attempt, "incarnation": each.claimed_by or "i-ended"}
            for each in self.jobs.values()
        ]
        fields = {"lease_s": 9000, "within_s": 9000, "item": "a", "reason": "stolen", "gpus": []}
        its = {
            "names": [STOLEN, *OTHERS],
            "queues": ["gpu", "other"],
            "jobs": jobs,
            "fields": fields,
            "token": self.token,
        }
        return json.dumps({**its, "folder": str(self.run), "secret": str(self.secret), **more})

    def dump(self) -> dict[str, list[str]]:
        """All rows of queue and ledger, but the attacker's own worker, and when a token and its host were last seen."""
        found = {}
        for name, engine in self.databases.items():
            with engine.connect() as connection:
                for table in inspect(connection).get_table_names():
                    if table == "hosts":
                        continue  # a gateway notes that it heard its host
                    rows = connection.execute(text(f'SELECT * FROM "{table}"'))  # noqa: S608 - names of our tables
                    found[f"{name} {table}"] = sorted(
                        str({column: value for column, value in each.items() if column != "last_seen_at"})
                        for each in rows.mappings()
                        if each.get("worker") not in {STOLEN, *(f"{STOLEN}-{number}" for number in range(1, 64))}
                    )
        return found

    def secrets(self) -> list[str]:
        """What the attacker must not change outside of its folder."""
        paths = [self.secret, Path("/etc/shadow"), *sorted(self.run.glob("w*/*")), self.run / "host"]
        found = []
        for path in paths:
            its = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found.append(f"{path} {its.st_ino} {its.st_mode:o} {its.st_uid} {content}")
        return found

    def refusals(self) -> dict[str, float]:
        """Refusals by the attacker's slot, and by its host's gateway, per reason."""
        found: dict[str, float] = {}
        for port in self.ports.values():
            for line in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=PLAIN).text.splitlines():
                if line.startswith("gpuwarden_gateway_refused_requests_total"):
                    reason = line.partition('reason="')[2].partition('"')[0]
                    found[reason] = found.get(reason, 0) + float(line.rpartition(" ")[2])
        return found

    def memory_kb(self) -> int:
        lines = Path(f"/proc/{self.gateway.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (docker_engine, "postgresql"), id="docker", marks=[pytest.mark.needs_docker, pytest.mark.needs_postgres]
        ),
        pytest.param((podman_engine, "sqlite"), id="podman", marks=pytest.mark.needs_podman),
    ],
)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The gateways run, each other slot has a job, and the attacker's worker has registered."""
    folder = tmp_path_factory.mktemp("stolen")
    started, backend = request.param
    url = f"sqlite:///{folder / 'queue.db'}"
    if backend == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        postgres.create("stolen")
        url = postgres.url("stolen")
    with ExitStack() as stack:
        engine = stack.enter_context(started(folder / "engine"))
        if isinstance(engine, NoEngine):
            pytest.skip(engine.reason)
        client = docker.DockerClient(base_url=engine.base_url)
        stack.callback(client.close)
        yield _scene(folder, url, client, stack)


def _scene(folder: Path, url: str, client: docker.DockerClient, stack: ExitStack) -> Scene:
    run = folder / "run"
    for name in (STOLEN, *OTHERS):
        (run / name).mkdir(parents=True)
    (run / "host").write_text("box1\n")
    secret = folder / "secret"
    secret.write_text("kept")
    secret.chmod(0o600)
    store, ledger = JobStore.open(url), Ledger.open(f"sqlite:///{folder / 'ledger.db'}")
    stack.callback(store.close)
    stack.callback(ledger.close)
    (folder / "token").write_text(store.host_tokens.enrol("box1", now=store.now()))
    token = store.host_tokens.enrol("box2", now=store.now())
    ports = free_ports(("central", "host"))

    def started(name: str, *its: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            argv = [sys.executable, "-m", "gpuwarden", "gateway", name, "--port", str(ports[name]), *its]
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    started("central", "--queue-db", url)
    central = f"http://127.0.0.1:{ports['central']}"
    its = ["--central", central, "--token-file", str(folder / "token"), "--runtime-dir", str(run)]
    limits = ["*=gpu", "w*=other", *(f"{STOLEN}=q{number}" for number in range(20))]
    gateway = started("host", *its, *(f"--queue={each}" for each in limits))
    for name in (STOLEN, *OTHERS):
        eventually((run / name / SOCKET_NAME).is_socket, "the sockets are there")
    image = worker_image(client, extra={"/app/stolen.py": SCRIPT})

    def attack(phase: str, facts: str, *, detach: bool = False) -> Any:
        container = client.containers.run(
            image,
            ["python3", "/app/stolen.py", phase, facts],
            network_mode="none",
            user="0:0",
            detach=True,
            volumes={
                str(run / STOLEN): {"bind": f"/run/gpuwarden/{STOLEN}", "mode": "rw"},
                str(run / "host"): {"bind": "/run/gpuwarden/host", "mode": "ro"},
            },
        )
        stack.callback(container.remove, force=True)
        if detach:
            eventually(lambda: b"held" in container.logs(), "the attacker is ready", log=lambda: str(container.logs()))
            return container
        ended = container.wait(timeout=240)
        said = container.logs(stderr=False)
        assert ended["StatusCode"] == 0, container.logs()
        return json.loads(said)

    scene = Scene(
        run=run, secret=secret, databases={"queue": store._engine, "ledger": ledger._engine}, store=store,
        token=token, ports=ports, gateway=gateway, attack=attack, jobs={},
    )  # fmt: skip
    ended = _claimed(scene, "w3", "i-ended")
    claim: dict[str, Any] = {"attempt": ended.attempt, "incarnation": "i-ended", "now": 0.0}
    assert scene.door("w3").claims.fail_by_worker(ended.job_id, **claim, reason="the reason of w3")
    scene.jobs["ended"] = store.job(ended.job_id)
    for name in OTHERS:
        scene.jobs[name] = _claimed(scene, name)
    job_id = store.runs.submit(Submission(queue="other", payload={"secret": 1}), now=store.now())
    scene.jobs["queued"] = store.job(job_id)
    return scene


def _claimed(scene: Scene, name: str, incarnation: str | None = None) -> Job:
    store, door = scene.store, scene.door(name)
    run_id = f"run {name} {incarnation}"
    store.items.add(run_id, ["a", "b"], now=store.now())
    store.runs.submit(Submission(queue="gpu", run_id=run_id), now=store.now())
    its: dict[str, Any] = {"host": "", "worker": name, "incarnation": incarnation or f"i-{name}", "now": 0.0}
    door.claims.register("gpu", **its)
    job = door.claims.claim("gpu", **its, lease_s=80_000)
    assert job is not None
    return job


def test_no_operation_reaches_another_slot_job_queue_or_host(scene: Scene) -> None:
    before, secrets, refused = scene.dump(), scene.secrets(), scene.refusals()

    found = scene.attack("operations", scene.facts())

    tried = [each for each in found if each["path"].removeprefix(PREFIX) in OPERATIONS and each["worker"]]
    assert {each["path"].removeprefix(PREFIX) for each in tried} == set(OPERATIONS)
    assert {each["status"] for each in tried if each["worker"] in OTHERS} == {403}
    own = [each for each in tried if each["worker"] == STOLEN and each["queue"] != "other"]
    elsewhere = [each for each in tried if each["worker"] == STOLEN and each["queue"] == "other"]
    assert {each["path"] for each in elsewhere} == {each["path"] for each in own if each["queue"] == "gpu"}
    assert {(each["status"], each["answer"]["error"]["kind"]) for each in elsewhere} == {(403, "queue")}
    on_jobs = [each for each in own if issubclass(OPERATIONS[each["path"].removeprefix(PREFIX)], OnJob)]
    assert {(each["status"], bool(each["answer"]["result"])) for each in on_jobs} == {(200, False)}
    assert {each["status"] for each in found if each not in tried} <= {404, 405}
    assert scene.dump() == before
    assert scene.secrets() == secrets
    more = {reason: count - refused.get(reason, 0) for reason, count in scene.refusals().items()}
    assert more["name"] == len([each for each in tried if each["worker"] in OTHERS])
    assert more["job"] >= len(on_jobs)
    assert more["queue"] == len(elsewhere)
    assert more["unknown"]


def test_replaced_socket_changes_nothing_else_and_comes_back(scene: Scene) -> None:
    before, secrets = scene.dump(), scene.secrets()

    found = scene.attack("sockets", scene.facts())

    assert set(found.values()) == {True}, found
    assert (scene.run.parent / "host.log").read_text().count("socket") < 20, "an attacker must not fill the log"
    assert len(found) >= 8
    assert scene.dump() == before
    assert scene.secrets() == secrets


def test_flood_is_bounded_and_others_are_answered(scene: Scene) -> None:
    before, memory_kb, refused = scene.dump(), scene.memory_kb(), scene.refusals()
    job, answered, most_files = scene.jobs["w2"], [], 0
    with ThreadPoolExecutor(1) as pool:
        flood = pool.submit(scene.attack, "flood", scene.facts(seconds=FLOOD_S))
        while not flood.done():
            its: dict[str, Any] = {"attempt": job.attempt, "incarnation": job.claimed_by}
            answered.append(scene.door("w2").claims.owns(job.job_id, **its))
            most_files = max(most_files, len(os.listdir(f"/proc/{scene.gateway.pid}/fd")))  # noqa: PTH208
        statuses = flood.result()

    assert answered
    assert all(answered)
    assert most_files < FILES_MAX
    assert scene.memory_kb() - memory_kb < MEMORY_MAX_KB
    assert scene.dump() == before
    more = {reason: count - refused.get(reason, 0) for reason, count in scene.refusals().items()}
    assert all(more.get(reason, 0) > 0 for reason in ("rate", "size", "cut", "invalid")), f"{more} {statuses}"


def test_state_files_of_others_mislead_neither_exporter_nor_executor(scene: Scene) -> None:
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(scene.run)], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        theirs = (scene.run / "w2" / f"w2{state_file.WORKER_SUFFIX}").read_text()
        claim = {"process": _id(foreign.pid), "supervisor": _id(os.getpid()), "restarts": True}
        forged = json.dumps({**json.loads(theirs), "worker": STOLEN, "pid": foreign.pid})
        files = {
            f"w2{state_file.WORKER_SUFFIX}": theirs,
            f"{STOLEN}{state_file.WORKER_SUFFIX}": forged,
            **{f"{name}.{kind}.json": json.dumps(claim) for name in ("w2", STOLEN) for kind in ("process", "command")},
        }
        locks = [f"{name}{suffix}" for name in ("w2", STOLEN) for suffix in (state_file.LOCK_SUFFIX, ".command.lock")]
        attacker = scene.attack("files", scene.facts(files=files, locks=locks), detach=True)
        attacker.reload()
        inside = int(attacker.attrs["State"]["Pid"])

        found = {each.worker.worker: each for each in workers.read(scene.run).workers}
        for name in (STOLEN, "w2"):
            try:
                ProcessActuator(scene.run).stop(name, grace_s=0.1)
            except ActuatorError:
                continue

        assert (found["w2"].folder, found["w2"].pid) == ("w2", worker.pid)
        assert found[STOLEN].pid in (None, inside)
        assert found[STOLEN].process is None
        assert foreign.poll() is None
        assert worker.poll() is None
    finally:
        for each in (foreign, worker):
            each.kill()
            each.communicate()


def test_jobs_of_the_others_complete_after_all(scene: Scene) -> None:
    for name in OTHERS:
        job = scene.jobs[name]
        its: dict[str, Any] = {"attempt": job.attempt, "incarnation": job.claimed_by, "now": 0.0}
        assert scene.door(name).claims.complete(job.job_id, **its, result=name)
        assert scene.store.job(job.job_id).state is State.COMPLETED
    its = {"host": "", "worker": "w2", "incarnation": "i-w2", "now": 0.0}
    found = scene.door("w2").claims.claim("other", **its, lease_s=600)
    assert found is not None
    assert found.job_id == scene.jobs["queued"].job_id


def _id(pid: int) -> list[int]:
    its = ProcessId.of(pid)
    return [its.pid, its.start_ticks]
