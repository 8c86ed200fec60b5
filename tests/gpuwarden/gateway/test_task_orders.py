"""Orders to end a task, in the answers to a host's reports."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from gpuwarden.queue.hosts.tokens import Scope
from remediator.clients.task_orders import GatewayOrders
from tests.gpuwarden.gateway.builders import CentralDoor
from tests.gpuwarden.worker.builders import Spawn

pytestmark = pytest.mark.behaviour("D7")

ENDED = "/api/v1/report_ended_tasks/"
TASKS = "/api/v1/report_tasks/"


@pytest.fixture
def central(spawn: Spawn, tmp_path: Path, url: str) -> CentralDoor:
    return CentralDoor(spawn, tmp_path, url)


@pytest.fixture
def token(store: JobStore) -> str:
    return store.host_tokens.enrol("box1", scopes=[Scope.REPORTS], now=store.now())


def order(store: JobStore, task_id: int, host: str = "box1") -> int:
    its = {"who": "ann", "reason": "", "life_s": 600.0}
    return store.task_orders.give(host, task_id, **its, now=store.now()).order_id  # type: ignore[arg-type]


def test_order_is_in_the_answer_to_a_report_of_tasks_and_its_result_is_kept(
    central: CentralDoor, store: JobStore, token: str
) -> None:
    """As an agent in any language does it."""
    order_id = order(store, 123)
    order(store, 124, "box2")
    report = {"token": token, "tasks": [{"running_log_id": 123}], "timestamp": 1}

    assert central.post(TASKS, report).content == {"result": True, "end_tasks": [123]}
    said = {"running_log_id": "123", "outcome": "ended", "message": "2 processes"}
    answer = central.post(ENDED, {"ended": [said]}, token)
    assert (answer.status, answer.content) == (200, {"result": True, "end_tasks": []})

    found = store.task_orders.order(order_id, now=store.now())
    assert found is not None
    assert (found.outcome, found.message) == (TaskOutcome.ENDED, "2 processes")
    assert central.post(TASKS, report).content["end_tasks"] == []
    assert 'gpuwarden_gateway_answered_orders_total{outcome="ended"} 1.0' in central.get("/metrics")


def test_question_for_orders_is_no_report(central: CentralDoor, store: JobStore, token: str) -> None:
    """A host whose exporter hangs must not seem to be up."""
    order(store, 123)

    assert central.post(ENDED, {}, token).content["end_tasks"] == [123]
    assert central.post("/api/v1/report_gpu/", {"gpus": []}, token).content == {"result": True}

    assert store.host_reports.ages("box1", now=store.now())[0].kind == "gpu"
    assert len(store.host_reports.ages("box1", now=store.now())) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"ended": [{"running_log_id": 123, "outcome": "run rm"}]}, 422),
        ({"ended": [{"running_log_id": -1, "outcome": "ended"}]}, 422),
        ({"ended": [{"running_log_id": 123, "outcome": "ended"}], "host": "box2"}, 403),
        ({"ended": [{"running_log_id": 123, "outcome": "ended"}] * 257}, 422),
    ],
)
def test_invalid_result_is_refused_and_settles_nothing(
    central: CentralDoor, store: JobStore, token: str, body: dict[str, object], status: int
) -> None:
    order_id = order(store, 123)
    store.task_orders.exchange("box1", [], now=store.now())

    assert central.post(ENDED, body, token).status == status

    found = store.task_orders.order(order_id, now=store.now())
    assert found is not None
    assert found.outcome is None


def test_result_with_a_refused_message_does_not_block_the_others(
    central: CentralDoor, store: JobStore, token: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    for task_id in (123, 124):
        order(store, task_id)
    results = [
        TaskResult(task_id=123, outcome=TaskOutcome.REFUSED, message="x" * 1001),
        TaskResult(task_id=124, outcome=TaskOutcome.ENDED, message="2 processes"),
    ]
    with closing(GatewayOrders(central.url, file, ca_file=None)) as orders:
        assert orders.exchange([]) == [123, 124]
        order(store, 125)

        assert orders.exchange(results) == [125]

    settled = {each.task_id: each.outcome for each in store.task_orders.of_host("box1", now=store.now())}
    assert settled == {123: TaskOutcome.REFUSED, 124: TaskOutcome.ENDED, 125: None}


def test_token_without_the_scope_gets_no_orders(central: CentralDoor, store: JobStore) -> None:
    order(store, 123)
    token = store.host_tokens.enrol("box1", scopes=[Scope.QUEUE], now=store.now())

    for path in (TASKS, ENDED):
        reply = central.post(path, json.dumps({"token": token}))
        assert (reply.status, reply.kind) == (401, "token")
    assert store.task_orders.of_host("box1", now=store.now())[0].taken_at is None
