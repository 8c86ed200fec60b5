"""The thread that keeps seats, against an API that fails in every way: it says so, retries, and loses nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from gpuwarden.kube import api as kube_api
from gpuwarden.queue import JobStore
from remediator.clients import nodes
from remediator.clients.exporter import ExporterClient
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.clients.nodes import Nodes
from remediator.executor import seats
from remediator.executor.executor import Clients, Executor
from remediator.executor.seats import SeatKeeper
from remediator.ledger.ledger import Ledger
from remediator.seats import RESOURCE, Rules
from tests.exporter import builders as host
from tests.exporter.http.test_server import live, served
from tests.remediator.executor.builders import PACE
from tests.remediator.kubernetes_api import Api, Failure, kubernetes_api, pod
from tests.waiting import eventually

pytestmark = pytest.mark.behaviour("C1")

REQUEST_S = 0.5
MIB = 2**20


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with kubernetes_api(tmp_path / "kubeconfig") as api:
        yield api


@pytest.fixture
def exporter() -> Iterator[ExporterClient]:
    card = host.gpu(0, memory_size_bytes=15360 * MIB)
    with (
        served(live(gpus=host.gpus(card))) as port,
        closing(ExporterClient(f"http://127.0.0.1:{port}")) as exporter,
    ):
        yield exporter


@pytest.fixture
def logged() -> Iterator[LogCapture]:
    capture = LogCapture()
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[capture])
    yield capture
    structlog.configure(processors=before)


@pytest.fixture
def keep(
    api: Api, exporter: ExporterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SeatKeeper]]:
    """Start a keeper."""
    monkeypatch.setattr(seats, "RETRY_S", 0.02)
    monkeypatch.setattr(seats, "CHECK_S", 1.0)
    monkeypatch.setattr(nodes, "ANSWER_S", 0.5)
    started = []

    def start(*, acts: bool = True, **rules: Any) -> SeatKeeper:
        api = Nodes(kube_api.connect(tmp_path / "kubeconfig", timeout_s=REQUEST_S), RESOURCE)
        keeper = SeatKeeper("node-1", nodes=api, exporter=exporter, rules=Rules(**rules), may_act=lambda: acts)
        keeper.start()
        started.append(keeper)
        return keeper

    yield start
    api.ends.set()
    for keeper in started:
        keeper.close()


def events(logged: LogCapture) -> list[str]:
    return [f"{each['event']}: {each.get('reason', '')}" for each in logged.entries]


def advertised(api: Api, mib: str) -> Callable[[], bool]:
    return lambda: api.capacity.get(RESOURCE) == mib


def test_seats_are_advertised_and_asserted_again_when_they_change(
    api: Api, keep: Callable[..., SeatKeeper], logged: LogCapture
) -> None:
    keep()
    eventually(advertised(api, "14000"))

    for changed in ("0", "5k"):
        api.capacity[RESOURCE] = changed
        api.version += 1
        eventually(advertised(api, "14000"), f"{changed} is replaced")
    del api.capacity[RESOURCE]
    eventually(advertised(api, "14000"), "the removed key is back")

    assert api.capacity["cpu"] == "2"
    assert [each["before_mib"] for each in logged.entries if each["event"] == "seats patched"] == [
        None, 0, 5000, None,
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["read", "list", "patch", "watch"])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (Failure(status=401), "HTTP 401: as the test says; the token or certificate is not valid or has expired"),
        (Failure(status=403), "HTTP 403: as the test says; grant the account this verb"),
        (Failure(status=409), "HTTP 409"),
        (Failure(status=410), "HTTP 410"),
        (Failure(status=429, headers={"Retry-After": "1"}), "HTTP 429"),
        (Failure(status=500), "HTTP 500"),
        (Failure(status=503, body="<html>"), "HTTP 503"),
        (Failure(hangs=True), "no answer from the Kubernetes API"),
    ],
    ids=["401", "403", "409", "410", "429", "500", "503", "hangs"],
)
def test_failing_request_is_logged_and_repeated(
    api: Api, keep: Callable[..., SeatKeeper], logged: LogCapture, verb: str, failure: Failure, reason: str
) -> None:
    api.failures[verb] = [failure]

    keep()

    eventually(lambda: any(reason in each for each in events(logged)), "it is logged", log=lambda: str(events(logged)))
    eventually(advertised(api, "14000"))
    api.capacity[RESOURCE] = "0"
    eventually(advertised(api, "14000"), "the keeper goes on")
    assert not [each for each in logged.entries if each["event"] == "unexpected error"]


@pytest.mark.parametrize("verb", ["read", "list", "patch"])
def test_half_an_answer_is_logged_and_asked_again(
    api: Api, keep: Callable[..., SeatKeeper], logged: LogCapture, verb: str
) -> None:
    api.failures[verb] = [Failure(status=200, body='{"kind": "No')]

    keep()

    eventually(advertised(api, "14000"))
    assert any("invalid answer of the Kubernetes API" in each for each in events(logged))


def test_api_that_asks_to_wait_is_given_the_time(api: Api, keep: Callable[..., SeatKeeper]) -> None:
    api.failures["read"] = [Failure(status=429, headers={"Retry-After": "1"})]

    began_s = time.monotonic()
    keep()
    eventually(advertised(api, "14000"))

    assert time.monotonic() - began_s >= 1


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ('{"type": "MODIFIED", "object": {"metadata": {"na\n', "half an event"),
        ('{"type": "MODIFIED"}\n', "invalid answer"),
        ('{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}\n', "HTTP 410"),
    ],
    ids=["half", "without-object", "too-old"],
)
def test_broken_watch_is_logged_and_begun_again(
    api: Api, keep: Callable[..., SeatKeeper], logged: LogCapture, event: str, reason: str
) -> None:
    api.events = [event]

    keep()

    eventually(lambda: any(reason in each for each in events(logged)), "it is logged", log=lambda: str(events(logged)))
    eventually(advertised(api, "14000"))
    assert not [each for each in logged.entries if each["event"] == "unexpected error"]


def test_same_failure_is_logged_once(api: Api, keep: Callable[..., SeatKeeper], logged: LogCapture) -> None:
    api.failures["patch"] = [Failure(status=403) for _ in range(5)]

    keeper = keep()
    eventually(advertised(api, "14000"))

    assert len([each for each in events(logged) if "HTTP 403" in each]) == 1
    assert keeper.failures == 5


def test_node_that_does_not_exist_is_awaited(api: Api, keep: Callable[..., SeatKeeper], logged: LogCapture) -> None:
    missing = '{"kind": "Status", "message": "nodes \\"node-1\\" not found"}'
    api.failures["read"] = [Failure(status=404, body=missing), Failure(status=404, body=missing)]

    keep()

    eventually(advertised(api, "14000"))
    assert any("seats not set: cannot read node node-1: HTTP 404" in each for each in events(logged))


def test_pods_that_only_etcd_knows_keep_their_seats(api: Api, keep: Callable[..., SeatKeeper]) -> None:
    api.capacity[RESOURCE] = "14000"
    api.pods = [pod(13300)]
    api.cached_pods = []

    keep(reserve_mib=8360)

    eventually(advertised(api, "13300"))


def test_pod_that_does_not_run_raises_no_seats(api: Api, keep: Callable[..., SeatKeeper]) -> None:
    api.pods = [pod(13300), pod(8000, phase="Pending"), pod("1e12")]

    keep()

    eventually(lambda: RESOURCE in api.capacity)
    assert api.capacity[RESOURCE] == "14000"


@pytest.mark.parametrize("changes", [{"acts": False}, {"node_labels": ("gpu=yes",)}])
def test_keeper_that_may_not_act_or_has_no_gpu_node_patches_nothing(
    api: Api, keep: Callable[..., SeatKeeper], changes: dict[str, Any]
) -> None:
    keep(**changes)

    eventually(lambda: api.requests.count("watch") > 1)
    assert "patch" not in api.requests


def test_keeper_ends_while_the_api_hangs(api: Api, keep: Callable[..., SeatKeeper]) -> None:
    api.failures["watch"] = [Failure(hangs=True)]
    keeper = keep()
    eventually(lambda: "watch" in api.requests)

    began_s = time.monotonic()
    keeper.close()

    assert time.monotonic() - began_s < seats.CLOSE_S + 1
    assert api.capacity[RESOURCE] == "14000"


def test_exporter_without_an_answer_leaves_the_node_as_it_is(
    api: Api, tmp_path: Path, logged: LogCapture, ledger: Ledger, store: JobStore
) -> None:
    client = Nodes(kube_api.connect(tmp_path / "kubeconfig"), RESOURCE)
    api.capacity[RESOURCE] = "9000"

    with closing(ExporterClient("http://127.0.0.1:1")) as silent:
        keeper = SeatKeeper("node-1", nodes=client, exporter=silent, rules=Rules(), may_act=lambda: True)
        keeper.check_and_watch()
        clients = Clients(exporter=silent, queue=BuiltinQueue(store), actuators={}, seats=keeper)
        Executor(ledger, host="node-1", clients=clients, settings=PACE).housekeeping.beat()

    assert api.capacity[RESOURCE] == "9000"
    assert ledger.executors.list_all()[0].seats_failures == 1
    assert "seats not set: the exporter at http://127.0.0.1:1 is unreachable" in events(logged)[0]
