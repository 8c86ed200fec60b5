"""A central gateway with TLS, in front of which hosts have gateways."""

import json
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from gpuwarden.gateway.app import HOST_BOUNDS
from gpuwarden.gateway.client import GatewayChanges, GatewayStore
from gpuwarden.gateway.operations import OPERATIONS, OnJob
from gpuwarden.gateway.wire import HOST, PREFIX, SOCKET_NAME
from gpuwarden.job import EXIT_DISOWNED, Condition, State
from gpuwarden.queue import Job, JobStore, Submission
from gpuwarden.queue.hosts.tokens import Scope
from tests.certificates import Authority, authority
from tests.gpuwarden.gateway.builders import CentralDoor, Reply
from tests.gpuwarden.worker.builders import Spawn
from tests.waiting import LATE_S, eventually

pytestmark = pytest.mark.both_databases


def ask(central: CentralDoor, path: str, body: dict[str, Any], token: str | None, **headers: str) -> Reply:
    """A request as any program can make it."""
    return central.post(PREFIX + path, body, token, **headers)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("authorities") / "ours")


@pytest.fixture
def central(spawn: Spawn, tmp_path: Path, url: str, ours: Authority) -> CentralDoor:
    return CentralDoor(spawn, tmp_path, url, ours=ours)


@pytest.fixture
def join(
    spawn: Spawn, tmp_path: Path, central: CentralDoor, ours: Authority, store: JobStore
) -> Callable[[str, str], GatewayStore]:
    """Start a host's gateway, and return the queue of its worker."""

    def start(host: str, worker: str) -> GatewayStore:
        folder = tmp_path / host
        (folder / worker).mkdir(parents=True)
        (folder / "host").write_text(f"{host}\n")
        (folder / "token").write_text(store.host_tokens.enrol(host, now=store.now()) + "\n")
        its = ["--central", central.url, "--token-file", str(folder / "token"), "--port", "0"]
        its += ["--ca-file", str(ours.own.cert), "--runtime-dir", str(folder)]
        spawn("-m", "gpuwarden", "gateway", "host", *its, stderr=folder / "log")
        eventually((folder / worker / SOCKET_NAME).is_socket, "the socket is there", log=(folder / "log").read_text)
        return GatewayStore(folder / worker, worker=worker, queue="gpu")

    return start


def claim(through: GatewayStore, incarnation: str) -> Job | None:
    its: dict[str, Any] = {"host": "", "worker": "", "incarnation": incarnation, "now": 0.0}
    through.claims.register("gpu", **its)
    return through.claims.claim("gpu", **its, lease_s=600)


@pytest.mark.behaviour("D9")
def test_hosts_act_for_themselves_only(
    join: Callable[[str, str], GatewayStore], central: CentralDoor, store: JobStore
) -> None:
    """The host of a job is its token's, and another host's operations on the job change nothing."""
    store.runs.submit(Submission(queue="gpu"), now=store.now())
    here, there = join("box1", "w1"), join("box2", "w1")
    job = claim(here, "i1")
    assert job is not None
    assert (job.host, job.worker) == ("box1", "w1")
    assert claim(there, "i1") is None
    before = store.job(job.job_id)

    stolen: dict[str, Any] = {"attempt": job.attempt, "incarnation": "i1"}
    thief = store.host_tokens.enrol("box3", now=store.now())
    body = {"worker": "w1", "job_id": job.job_id, **stolen, "lease_s": 9, "reason": "r", "item": "a", "queue": "gpu"}

    assert not there.claims.complete(job.job_id, **stolen, now=0.0)
    answers = [ask(central, path, body, thief) for path, kind in OPERATIONS.items() if issubclass(kind, OnJob)]
    assert {status for status, _ in answers} == {200}
    assert not any(found["result"] for _, found in answers)
    of_claim = {"worker": "w1", "job_id": job.job_id, "attempt": 1, "incarnation": "i1"}
    sync = {
        "beats": [{"worker": "w1", "queue": "gpu", "incarnation": "i1"}],
        "renewals": [of_claim | {"lease_s": 9000}],
    }
    lost = [[job.job_id, 1]]
    rows = [row for row in store.admin.workers(now=store.now()) if row.host == "box1"]
    assert ask(central, "sync", sync, thief) == (200, {"result": {"over": [], "draining": [], "lost": lost}})
    assert ask(central, "watch", {"name": "one", "claims": [of_claim], "timeout_s": 20}, thief) == (
        200,
        {"result": lost},
    )
    assert [row for row in store.admin.workers(now=store.now()) if row.host == "box1"] == rows
    assert store.job(job.job_id) == before

    assert here.claims.complete(job.job_id, **stolen, now=0.0, result=[1])
    assert store.job(job.job_id).state is State.COMPLETED


@pytest.mark.behaviour("D9")
def test_host_of_some_queues_gets_no_other(central: CentralDoor, store: JobStore) -> None:
    """A worker that beats for another queue must not end the leases of the host's others."""
    job_id = store.runs.submit(Submission(queue="other", payload={"secret": 1}), now=store.now())
    before = store.job(job_id)
    store.runs.submit(Submission(queue="gpu"), now=store.now())
    token = store.host_tokens.enrol("box1", queues=["gpu"], now=store.now())
    its: dict[str, Any] = {"worker": "w1", "incarnation": "i1", "lease_s": 600.0, "within_s": 9, "timeout_s": 5}
    assert ask(central, "register", {**its, "queue": "gpu"}, token)[0] == 200
    job = ask(central, "claim", {**its, "queue": "gpu"}, token).content["result"]
    on_job = {**its, "job_id": job["job_id"], "attempt": job["attempt"]}

    naming = [path for path, kind in OPERATIONS.items() if "queue" in kind.model_fields]
    assert len(naming) == 6
    answers = [ask(central, path, {**on_job, "queue": "other"}, token) for path in naming]
    beats = [{**its, "queue": "other"}, {**its, "worker": "w2", "queue": "other"}]
    leased = store.job(job["job_id"]).lease_expires_at
    sync = ask(central, "sync", {"beats": beats, "renewals": [{**on_job, "lease_s": 9000}]}, token)

    assert {(status, found["error"]["kind"]) for status, found in answers} == {(403, "queue")}
    assert "'box1' may not use queue 'other': allow it by --queue of" in answers[0].content["error"]["reason"]
    assert sync == (200, {"result": {"over": [], "draining": [], "lost": []}})
    assert (store.job(job["job_id"]).lease_expires_at or 0) > (leased or 0) + 8000
    assert central.refusals() == {("box1", "queue"): len(naming) + len(beats)}
    assert [(row.worker, row.queue) for row in store.admin.workers(now=store.now())] == [("w1", "gpu")]
    assert store.job(job_id) == before
    assert ask(central, "complete", on_job, token) == (200, {"result": True})

    wider = store.host_tokens.rotate("box1", queues=["gpu", "other"], grace_s=60, now=store.now())
    statuses = [ask(central, "claim", {**its, "queue": "other"}, each)[0] for each in (token, wider)]
    assert (statuses, store.job(job_id).host) == ([403, 200], "box1")


@pytest.mark.behaviour("D9")
def test_wrong_revoked_and_other_tokens_are_refused_and_counted(central: CentralDoor, store: JobStore) -> None:
    now = store.now()
    valid = store.host_tokens.enrol("box1", now=now)
    gone = store.host_tokens.enrol("box2", now=now)
    store.host_tokens.revoke("box2", now=now)
    for_reports = store.host_tokens.enrol("box3", scopes=[Scope.REPORTS], now=now)
    body = {"worker": "w1", "queue": "gpu", "incarnation": "i1"}

    tried = [None, "", "wrong", valid[:-1] + ("0" if valid[-1] != "0" else "1"), gone, for_reports]
    assert [ask(central, "register", body, each)[0] for each in tried] == [401] * 6
    assert central.refusals()["unknown", "token"] == 6
    assert store.counts.snapshot(now=store.now()).workers == {}

    assert ask(central, "register", body, valid) == (200, {"result": []})
    assert ask(central, "register", body, valid, **{HOST: "box2"})[0] == 403
    store.host_tokens.revoke("box1", now=store.now())
    eventually(lambda: ask(central, "heartbeat", body, valid)[0] == 401, "the revoked token is refused")


def test_central_gateway_that_restarts_costs_nothing(
    join: Callable[[str, str], GatewayStore], central: CentralDoor, store: JobStore
) -> None:
    store.runs.submit(Submission(queue="gpu"), now=store.now())
    worker = join("box1", "w1")
    job = claim(worker, "i1")
    assert job is not None

    central.process.kill()
    central.process.wait()
    central.start()

    its: dict[str, Any] = {"attempt": job.attempt, "incarnation": "i1", "now": 0.0}
    assert worker.claims.renew(job.job_id, **its, lease_s=600)
    assert worker.claims.complete(job.job_id, **its)
    assert store.job(job.job_id).state is State.COMPLETED


def test_jobs_wake_as_many_idle_workers_of_one_host(join: Callable[[str, str], GatewayStore], store: JobStore) -> None:
    """The host has one request open for all of them. A later count would take 5 s for each."""
    folder = join("box1", "w1")._requests._folder
    waits: list[GatewayChanges] = []
    for _ in range(8):
        each = GatewayStore(folder, worker="w1", queue="gpu")
        waits.append(each.changes())
        assert not waits[-1].wait(0.01)

    began_s = time.monotonic()
    for _ in range(8):
        store.runs.submit(Submission(queue="gpu"), now=store.now())
    for wait in waits:
        assert wait.wait(LATE_S)

    assert time.monotonic() - began_s < 15


BAD: Final[list[tuple[str, dict[str, Any]]]] = [
    ("sync", {"beats": [{"worker": "w1", "queue": "gpu", "incarnation": "i\0"}]}),
    ("sync", {"beats": [{"worker": "w1", "queue": "gpu", "incarnation": "i"}] * 513}),
    ("sync", {"renewals": [{"worker": "../w1", "job_id": 1, "attempt": 1, "incarnation": "i", "lease_s": 9}]}),
    ("sync", {"renewals": [{"worker": "w1", "job_id": 1, "attempt": 1, "incarnation": "i", "lease_s": 1e9}]}),
    ("watch", {"claims": [{"worker": "w1", "job_id": -1, "attempt": 1, "incarnation": "i"}], "timeout_s": 1}),
    ("watch", {"claims": [], "timeout_s": 1e9}),
    ("watch", {"claims": "all", "timeout_s": 1}),
]


def test_bad_messages_of_a_host_are_refused(central: CentralDoor, store: JobStore) -> None:
    token = store.host_tokens.enrol("box1", now=store.now())

    assert [ask(central, path, body, token)[0] for path, body in BAD] == [422] * len(BAD)
    assert [ask(central, path, body, "wrong")[0] for path, body in BAD] == [401] * len(BAD)
    assert store.counts.snapshot(now=store.now()).workers == {}


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_flood_of_a_host_and_of_wrong_tokens_is_refused_and_others_are_served(
    spawn: Spawn, tmp_path: Path, url: str, store: JobStore
) -> None:
    """The flood is 1000 open requests of a host, and 400 requests at once with wrong tokens."""
    central = CentralDoor(spawn, tmp_path, url)
    box1, box2, box3 = (store.host_tokens.enrol(host, now=store.now()) for host in ("box1", "box2", "box3"))
    body = {"worker": "w1", "queue": "gpu", "incarnation": "i1", "lease_s": 600, "timeout_s": 30}
    worker = {"worker": "w1"}

    def held(token: str) -> socket.socket:
        sent = json.dumps(body)
        lines = ("POST /v1/wait HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", f"Content-Length: {len(sent)}")
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", central.port), 30))
        connection.sendall("\r\n".join((*lines, "", sent)).encode())
        return connection

    # Known tokens: of a new host's first requests, those over 256 at once get 503.
    assert [ask(central, "register", body, token)[0] for token in (box1, box2)] == [200] * 2
    with ExitStack() as stack:
        for _ in range(HOST_BOUNDS.open):
            held(box1)
        eventually(lambda: ask(central, "quarantine", worker, box1)[0] == 429, "the host has too many open requests")
        wrong = [held(f"{box2[:-5]}{number:05x}") for number in range(400)]
        store.runs.submit(Submission(queue="other"), now=store.now())
        assert ask(central, "claim", body | {"queue": "other"}, box2).content["result"]["host"] == "box2"
        eventually(lambda: ask(central, "quarantine", worker, box3)[0] == 200, "a host that is new to it is served")
        assert {each.recv(12)[9:] for each in wrong} <= {b"401", b"503"}

    assert ask(central, "quarantine", worker, box2)[0] == 200
    refused = central.refusals()
    assert refused["unknown", "token"] + refused.get(("unknown", "busy"), 0) >= len(wrong)
    assert refused["box1", "rate"] > 0
    assert ("box2", "rate") not in refused
    eventually(lambda: ask(central, "quarantine", worker, box1)[0] == 200, "the host is served after its flood")


BODY = """
import time
from pathlib import Path

def load(job, report):
    def work():
        while not Path(job.payload["out"]).exists():
            report.step()
            time.sleep(0.01)
    return work
"""


@pytest.fixture
def runs(
    join: Callable[[str, str], GatewayStore], spawn: Spawn, tmp_path: Path, store: JobStore
) -> Callable[..., tuple[subprocess.Popen[str], Job]]:
    """Start a worker process on a host with a gateway, with a job that ends once the file `out` is there."""

    def start(*more: str) -> tuple[subprocess.Popen[str], Job]:
        (tmp_path / "bodies.py").write_text(BODY)
        join("box1", "w1")
        job_id = store.runs.submit(Submission(queue="gpu", payload={"out": str(tmp_path / "out")}), now=store.now())
        its = ["--name", "w1", "--handler", "bodies:load", "--queue-db", "gateway", "--jobs-max", "1"]
        arguments = ["-m", "gpuwarden", "worker", "run", *its, "--runtime-dir", str(tmp_path / "box1"), *more]
        worker, log = (
            spawn(*arguments, stderr=tmp_path / "worker.log", PYTHONPATH=str(tmp_path)),
            tmp_path / "worker.log",
        )
        eventually(lambda: "job ready" in log.read_text(), "the job runs", log=log.read_text)
        return worker, store.job(job_id)

    return start


@pytest.mark.slow
def test_worker_ends_soon_after_its_job_is_lost(
    runs: Callable[..., tuple[subprocess.Popen[str], Job]], store: JobStore
) -> None:
    """The next message of its host comes 10 s after its first renewal."""
    worker, job = runs()
    its: dict[str, Any] = {"attempt": 1, "incarnation": job.claimed_by, "condition": Condition.STALL}

    assert store.fencing.fence(job.job_id, **its, now=store.now())
    lost_s = time.monotonic()

    assert worker.wait(LATE_S) == Condition.STALL.exit_code
    assert time.monotonic() - lost_s < 6  # 2 s on an idle machine


@pytest.mark.slow
def test_central_gateway_away_for_less_than_a_lease_costs_nothing(
    runs: Callable[..., tuple[subprocess.Popen[str], Job]], central: CentralDoor, store: JobStore, tmp_path: Path
) -> None:
    worker, job = runs("--lease-s", "60", "--heartbeat-s", "0.5")

    central.process.kill()
    central.process.wait()
    (tmp_path / "out").write_text("")
    eventually(lambda: "queue does not answer" in (tmp_path / "worker.log").read_text(), "the worker notices")
    central.start()

    assert worker.wait(LATE_S) == 0
    ended = store.job(job.job_id)
    assert (ended.state, ended.attempt) == (State.COMPLETED, 1)


@pytest.mark.slow
def test_cut_off_worker_stops_before_its_lease_ends_in_the_queue(
    runs: Callable[..., tuple[subprocess.Popen[str], Job]], central: CentralDoor, store: JobStore, tmp_path: Path
) -> None:
    worker, job = runs("--lease-s", "9", "--heartbeat-s", "1")
    eventually(lambda: (store.job(job.job_id).lease_expires_at or 0) > (job.lease_expires_at or 0), "it is renewed")

    central.process.kill()
    central.process.wait()
    code = worker.wait(LATE_S)
    stopped_at = store.now()

    assert (code, "the lease could not be renewed" in (tmp_path / "worker.log").read_text()) == (EXIT_DISOWNED, True)
    assert stopped_at < (store.job(job.job_id).lease_expires_at or 0)


def test_address_without_encryption_is_refused(spawn: Spawn, host_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    its = ["--central", "http://queue.example:29838", "--token-file", str(tmp_path / "token"), "--port", "0"]
    process = spawn("-m", "gpuwarden", "gateway", "host", *its, "--runtime-dir", str(host_dir), stderr=tmp_path / "log")

    assert process.wait(60) == 1
    assert "is not encrypted, and would show the token: use https" in (tmp_path / "log").read_text()
