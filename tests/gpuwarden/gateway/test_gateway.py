"""A gateway process in front of a queue, and what passes through its sockets."""

import http.client
import json
import os
import re
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.gateway.app import SLOT_BOUNDS
from gpuwarden.gateway.client import GatewayChanges, GatewayStore, _Requests
from gpuwarden.gateway.main import QUEUES_ENV, _limits, _parser
from gpuwarden.gateway.operations import OPERATIONS, OnJob
from gpuwarden.gateway.wire import BODY_MAX_BYTES, PREFIX, REQUEST_ID, SOCKET_NAME
from gpuwarden.job import ItemState, State
from gpuwarden.queue import Job, JobStore, ReplacedError, Submission
from gpuwarden.queue.models import Completion, Success
from gpuwarden.reporter import Reporter
from gpuwarden.tasks import Current
from tests.gpuwarden.gateway.builders import described, documented
from tests.gpuwarden.worker.builders import Spawn, gateway, run_worker
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases


@pytest.fixture
def rooms(host_dir: Path) -> Path:
    """The host's folder of state files, with those of two workers."""
    for name in ("w1", "w2"):
        (host_dir / name).mkdir()
    return host_dir


@pytest.fixture
def door(spawn: Spawn, rooms: Path, url: str) -> None:
    """The gateway runs, and both folders have a socket."""
    gateway(spawn, rooms, url)
    eventually(lambda: all((rooms / name / SOCKET_NAME).is_socket() for name in ("w1", "w2")), "the sockets are there")


class _Raw(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def post(rooms: Path, folder: str, path: str, body: Any, request_id: str | None = None) -> tuple[int, Any]:
    """A request as any program can make it."""
    connection = _Raw(rooms / folder / SOCKET_NAME)
    try:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, text, {REQUEST_ID: request_id} if request_id else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def submit(store: JobStore, **more: Any) -> None:
    store.runs.submit(Submission(queue="gpu", **more), now=store.now())


def claim(through: GatewayStore, incarnation: str = "i2") -> Job:
    its: dict[str, Any] = {"host": "box1", "worker": "w2", "incarnation": incarnation, "now": 0.0}
    through.claims.register("gpu", **its)
    found = through.claims.claim("gpu", **its, lease_s=600)
    assert found is not None
    return found


@pytest.mark.usefixtures("door")
def test_job_goes_through_the_socket_as_through_a_database(rooms: Path, store: JobStore) -> None:
    submit(store, payload={"a": [1, None, "ü"]}, steps_total=7)
    with_socket = GatewayStore(rooms / "w2", worker="w2", queue="gpu")

    job = claim(with_socket)
    claim_of: dict[str, Any] = {"attempt": job.attempt, "incarnation": "i2"}
    assert job == store.job(job.job_id)
    assert with_socket.claims.owns(job.job_id, **claim_of)
    assert with_socket.claims.renew(job.job_id, **claim_of, now=0.0, lease_s=600)
    assert with_socket.claims.complete(job.job_id, **claim_of, now=0.0, result={"b": 2})

    ended = store.job(job.job_id)
    assert (ended.state, ended.result) == (State.COMPLETED, {"b": 2})
    eventually(lambda: not with_socket.claims.owns(job.job_id, **claim_of), "the gateway has read it")


@pytest.mark.usefixtures("door")
def test_slot_cannot_act_on_the_job_of_another(rooms: Path, store: JobStore) -> None:
    """It knows all that proves the claim, and takes the other's incarnation."""
    store.items.add("r1", ["a"], now=store.now())
    submit(store, run_id="r1")
    theirs = claim(GatewayStore(rooms / "w2", worker="w2", queue="gpu"))
    GatewayStore(rooms / "w1", worker="w1", queue="gpu").claims.register(
        "gpu", host="", worker="w1", incarnation="i2", now=0.0
    )
    body = {"job_id": theirs.job_id, "attempt": theirs.attempt, "incarnation": "i2", "lease_s": 9000,
            "reason": "stolen", "item": "a", "result": "stolen", "queue": "gpu",
            "timeout_s": 1, "within_s": 1}  # fmt: skip
    on_jobs = [path for path, kind in OPERATIONS.items() if issubclass(kind, OnJob)]

    answers = {path: post(rooms, "w1", PREFIX + path, {"worker": "w1", **body}) for path in on_jobs}
    under_their_name = {path: post(rooms, "w1", PREFIX + path, {"worker": "w2", **body})[0] for path in OPERATIONS}

    assert {path: status for path, (status, _) in answers.items()} == dict.fromkeys(on_jobs, 200)
    assert not any(found["result"] for _, found in answers.values())
    assert set(under_their_name.values()) == {403}
    assert store.job(theirs.job_id) == theirs
    assert [each.state for each in store.items.of_run("r1")] == [ItemState.PENDING]


def test_folder_uses_its_queues_only(spawn: Spawn, rooms: Path, url: str, store: JobStore) -> None:
    gateway(spawn, rooms, url, "--queue", "w1=gpu", "--queue", "w2=other", "--queue", "w*=all=of it")
    eventually((rooms / "w1" / SOCKET_NAME).is_socket, "the socket is there")
    job_id = store.runs.submit(Submission(queue="other", payload={"secret": 1}), now=store.now())
    before = store.job(job_id)
    its = {"worker": "w1", "job_id": 1, "attempt": 1, "incarnation": "i1", "lease_s": 9, "timeout_s": 0, "within_s": 1}

    def statuses(folder: str, queue: str, *paths: str) -> list[int]:
        return [post(rooms, folder, PREFIX + path, {**its, "worker": folder, "queue": queue})[0] for path in paths]

    naming = [path for path, kind in OPERATIONS.items() if "queue" in kind.model_fields]
    assert statuses("w1", "other", *naming) == [403] * 6
    assert store.job(job_id) == before
    assert store.counts.snapshot(now=store.now()).workers == {}
    for folder, queue in (("w1", "gpu"), ("w1", "all=of it"), ("w2", "other")):
        assert statuses(folder, queue, "register", "claim") == [200, 200]
    assert store.job(job_id).worker == "w2"


@pytest.mark.parametrize("text", ["gpu", "=gpu", "w1=", "w1=a\nb"])
def test_limit_without_folder_or_queue_is_refused(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit at all would allow every queue."""
    monkeypatch.setenv(QUEUES_ENV, f"w1=gpu,{text}")
    parser = _parser()
    for refuse in (lambda: parser.parse_args(["host", "--queue", text]), lambda: _limits(parser, None)):
        with pytest.raises(SystemExit):
            refuse()
        assert f"{text!a} is invalid: use FOLDER=QUEUE" in capsys.readouterr().err


@pytest.mark.usefixtures("door")
def test_repeated_request_gets_the_first_answer(rooms: Path, store: JobStore) -> None:
    submit(store)
    job = claim(GatewayStore(rooms / "w2", worker="w2", queue="gpu"))
    body = {"worker": "w2", "job_id": job.job_id, "attempt": job.attempt, "incarnation": "i2"}

    first = post(rooms, "w2", PREFIX + "complete", body, "one")
    again = post(rooms, "w2", PREFIX + "complete", body, "one")
    other = post(rooms, "w2", PREFIX + "complete", body, "two")

    assert [first, again] == [(200, {"result": True})] * 2
    assert other == (200, {"result": False, "refused": "job"})


@pytest.mark.usefixtures("door")
def test_gateway_keeps_no_next_job_for_a_repeated_completion(rooms: Path, store: JobStore) -> None:
    """A payload may have 1 MiB. The next claim returns the same job."""
    for _ in range(3):
        submit(store)
    job = claim(GatewayStore(rooms / "w2", worker="w2", queue="gpu"))
    slot = {"worker": "w2", "incarnation": "i2", "queue": "gpu", "lease_s": 600}
    body = {**slot, "attempt": 1, "job_id": job.job_id}

    first, again = (post(rooms, "w2", PREFIX + "complete-and-claim", body, "one") for _ in range(2))
    next_job = post(rooms, "w2", PREFIX + "claim", slot)[1]["result"]

    assert (first[1]["result"]["done"], first[1]["result"]["job"]["job_id"]) == (True, job.job_id + 1)
    assert again == (200, {"result": None, "refused": "job"})
    assert (next_job["job_id"], next_job["attempt"]) == (job.job_id + 1, 1)
    assert [each.state for each in store.jobs()].count(State.RUNNING) == 1


@pytest.mark.usefixtures("door")
def test_jobs_run_once_after_the_answer_with_the_next_job_is_lost(
    rooms: Path, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        submit(store)
    read, lost, ran = _Requests.read, list[Any](), list[int]()

    def read_or_lose(self: _Requests, connection: Any) -> Any:
        found = read(self, connection)
        if isinstance(found, dict) and "idle" in found and not lost:  # of a completion with a claim
            lost.append(found["job"]["job_id"])
            raise ConnectionResetError
        return found

    def body(job: Job, _report: Reporter) -> Callable[[], None]:
        return lambda: ran.append(job.job_id)

    monkeypatch.setattr(_Requests, "read", read_or_lose)
    through: Any = GatewayStore(rooms / "w1", worker="w1", queue="gpu")
    with Reporter(rooms, worker="w1", queue="gpu") as reporter:
        run_worker(through, reporter, body, jobs_max=3, heartbeat_s=60, lease_s=600)

    jobs = sorted(store.jobs(), key=lambda job: job.job_id)
    assert lost == [jobs[1].job_id]
    assert ran == [job.job_id for job in jobs]
    assert [(job.state, job.attempt) for job in jobs] == [(State.COMPLETED, 1)] * 3


@pytest.mark.usefixtures("door")
def test_next_job_comes_with_the_completion(rooms: Path, store: JobStore) -> None:
    submit(store)
    submit(store, model="m2", payload={"a": 1})
    with_socket = GatewayStore(rooms / "w2", worker="w2", queue="gpu")
    first = claim(with_socket)
    its: dict[str, Any] = {"queue": "gpu", "host": "", "worker": "", "incarnation": "i2", "now": 0.0}

    done, second, is_idle = with_socket.claims.complete_and_claim(Success(first.job_id, 1, {"b": 2}), **its)

    assert (done, second, is_idle) == (True, store.job(first.job_id + 1), False)
    assert (store.job(first.job_id).state, store.job(first.job_id).result) == (State.COMPLETED, {"b": 2})
    last = Success(first.job_id + 1, 1)
    assert with_socket.claims.complete_and_claim(last, **its) == Completion(done=True, idle=True)
    assert with_socket.claims.complete_and_claim(last, **its) == Completion(done=False)


@pytest.mark.usefixtures("door")
@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        pytest.param("claim", b"x" * (BODY_MAX_BYTES + 1), 413, "size", id="too large"),
        pytest.param("claim", b"[[[", 422, "invalid", id="no JSON"),
        pytest.param("claim", b"[" * 100_000, 422, "invalid", id="deep"),
        pytest.param("claim", {"worker": "w2", "queue": "gpu"}, 422, "invalid", id="a field is missing"),
        pytest.param(
            "claim",
            {"worker": "w2", "queue": "gpu", "incarnation": "i", "lease_s": 9e11},
            422,
            "invalid",
            id="a lease for ever",
        ),
        pytest.param("register", {"worker": "../w1", "queue": "g", "incarnation": "i"}, 422, "invalid", id="a path"),
        pytest.param("heartbeat", {"worker": "w1", "queue": "g", "incarnation": "i"}, 403, "name", id="another slot"),
        pytest.param(
            "heartbeat",
            {"worker": "w2", "queue": "g", "incarnation": "i", "model": "a\0"},
            422,
            "invalid",
            id="NUL, which would fail the heartbeats of all slots",
        ),
        pytest.param(
            "sync", {"beats": [{"worker": "w1", "queue": "g", "incarnation": "i"}]}, 404, "unknown", id="a host's"
        ),
        pytest.param("watch", {"claims": [], "timeout_s": 1}, 404, "unknown", id="a host's, too"),
        pytest.param("submit", {"worker": "w2"}, 404, "unknown", id="what a worker may not do"),
    ],
)
def test_bad_request_is_refused(rooms: Path, store: JobStore, path: str, body: Any, status: int, kind: str) -> None:
    got, says = post(rooms, "w2", PREFIX + path, body)

    assert (got, says["error"]["kind"]) == (status, kind)
    assert store.counts.snapshot(now=store.now()).workers == {}


@pytest.mark.usefixtures("door")
def test_half_a_request_is_refused_and_the_next_one_answered(rooms: Path) -> None:
    for _ in range(30):
        half = socket.socket(socket.AF_UNIX)
        half.connect(str(rooms / "w1" / SOCKET_NAME))
        half.sendall(b"POST /v1/claim HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        half.close()

    assert post(rooms, "w1", PREFIX + "quarantine", {"worker": "w1"}) == (200, {"result": None})


@pytest.mark.usefixtures("door")
def test_unfinished_bodies_of_a_slot_are_bounded_in_number_and_bytes(rooms: Path) -> None:
    """And so is what they take of the gateway's memory. Other slots are answered."""
    large, head = b" " * 100_000 + b"{", b"POST /v1/claim HTTP/1.1\r\nHost: x\r\nContent-Length: 110000\r\n\r\n"

    def status(folder: str) -> int:
        with suppress(BlockingIOError):  # the kernel's queue of connections is full
            return post(rooms, folder, PREFIX + "quarantine", large)[0]
        return 0

    for count, sent in (SLOT_BOUNDS.open, 1), (SLOT_BOUNDS.open_bytes // 100_000, 100_000):
        with ExitStack() as stack:
            for _ in range(count):
                half = stack.enter_context(socket.socket(socket.AF_UNIX))
                half.connect(str(rooms / "w1" / SOCKET_NAME))
                half.sendall(head + b" " * sent)
            eventually(lambda: status("w1") == 429, "the slot's share is taken", within_s=5)
            assert status("w2") == 422
        eventually(lambda: status("w1") == 422, "its share is free again")


@pytest.mark.usefixtures("door")
def test_replaced_socket_has_the_bounds_of_the_one_before(rooms: Path) -> None:
    """Otherwise a worker that removes its socket again and again had none."""
    path, body = rooms / "w1" / SOCKET_NAME, b'{"worker":"w1","queue":"q","timeout_s":30}'
    head = b"POST /v1/wait HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as stack:
        for _ in range(SLOT_BOUNDS.open):
            waits = stack.enter_context(socket.socket(socket.AF_UNIX))
            waits.connect(str(path))
            waits.sendall(head + body)

        def refused() -> bool:
            return post(rooms, "w1", PREFIX + "quarantine", {"worker": "w1"})[0] == 429

        eventually(refused, "all open requests are taken")
        path.unlink()
        eventually(path.is_socket, "the socket is back")
        assert refused()


@pytest.mark.usefixtures("door")
def test_caller_with_a_bound_socket_is_served_as_others(rooms: Path, tmp_path: Path) -> None:
    """Its address is a path, not the empty one of most callers."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.settimeout(20)
        bound.bind(str(tmp_path / "own"))
        bound.connect(str(rooms / "w1" / SOCKET_NAME))
        bound.sendall(b'POST /v1/quarantine HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"worker":"w1"}')
        assert bound.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("door")
def test_waiting_worker_that_is_gone_takes_no_wake(rooms: Path, store: JobStore) -> None:
    through = [GatewayStore(rooms / name, worker=name, queue="gpu") for name in ("w1", "w2")]
    gone, waits = (each.changes() for each in through)
    assert not gone.wait(0.01)
    gone.close()
    time.sleep(0.3)
    assert not waits.wait(0.01)

    submit(store)

    assert waits.wait(3)
    waits.close()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """The next files of this process have numbers that select(2) does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    with ExitStack() as stack:
        while stack.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("door", "many_open_files")
def test_one_job_wakes_at_most_two_of_many_waiting_workers(rooms: Path, store: JobStore) -> None:
    """Each of them has many open files."""
    through = [GatewayStore(rooms / f"w{1 + n % 2}", worker=f"w{1 + n % 2}", queue="gpu") for n in range(20)]
    waits: list[GatewayChanges] = []
    for each in through:
        waits.append(each.changes())
        assert not waits[-1].wait(0.01)

    submit(store)
    woken = eventually(lambda: [each for each in waits if each.wait(0)], "a worker is woken")
    more = [each for each in waits if each not in woken and each.wait(0.05)]

    assert 1 <= len(woken) + len(more) <= 2
    for wait in waits:
        wait.close()


@pytest.mark.usefixtures("door")
def test_metrics_are_as_documented(rooms: Path) -> None:
    port = re.search(r'"port": (\d+)', (rooms / "gateway.log").read_text())
    assert port is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=20) as answer:
        assert described(answer.read().decode()) == documented()


@pytest.mark.usefixtures("door")
def test_replaced_worker_ends(rooms: Path) -> None:
    old = GatewayStore(rooms / "w2", worker="w2", queue="gpu")
    its: dict[str, Any] = {"host": "box1", "worker": "w2", "now": 0.0}
    old.claims.register("gpu", incarnation="old", **its)
    old.claims.register("gpu", incarnation="new", **its)

    with pytest.raises(ReplacedError):
        old.claims.claim("gpu", incarnation="old", **its)
    assert not old.claims.heartbeat(queue="gpu", incarnation="old", model=None, **its)


def test_gateway_that_was_killed_is_followed_by_its_successor(
    spawn: Spawn, rooms: Path, store: JobStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for the successor; a claim before it stays the worker's."""
    first = gateway(spawn, rooms, url)
    eventually((rooms / "w2" / SOCKET_NAME).is_socket, "the socket is there")
    submit(store, ranks=2)
    through = GatewayStore(rooms / "w2", worker="w2", queue="gpu")
    job = eventually(lambda: _answered(lambda: claim(through)), "the first rank is claimed")

    first.kill()
    first.wait()
    threading.Timer(0.5, lambda: gateway(spawn, rooms, url)).start()

    with monkeypatch.context() as changed, Reporter(rooms, worker="w2", queue="gpu") as reporter:
        changed.setattr("gpuwarden.gateway.client.ANSWER_S", 0.0)
        changed.setattr("gpuwarden.tasks.RETRY_S", 0.1)
        found = Current(job=job, report=reporter, store=through).ranks()
    assert [each.rank for each in found] == [0, 1]

    done = eventually(
        lambda: _answered(
            lambda: through.claims.complete(job.job_id, attempt=job.attempt, incarnation="i2", now=0.0, result=1)
        ),
        "the result is written",
    )
    assert done
    assert store.job(job.job_id).state is State.FINISHED


@pytest.mark.usefixtures("door")
def test_gateway_of_another_version_is_named(rooms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.gateway.wire.PREFIX", "/v9/")

    with pytest.raises(DatabaseError, match="this gateway has version 1; use the same release"):
        GatewayStore(rooms / "w1", worker="w1", queue="gpu").gpu_quarantine.quarantine_of(host="box1", worker="w1")


def test_absent_gateway_is_no_answer(rooms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.gateway.client.ANSWER_S", 0.1)

    with pytest.raises(NoAnswerError, match=r"queue\.sock does not answer"):
        GatewayStore(rooms / "w1", worker="w1", queue="gpu").claims.owns(1, attempt=1, incarnation="i")


def _answered(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except NoAnswerError:
        return None
