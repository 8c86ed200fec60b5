"""What the executor takes from a gateway: ids of tasks, whatever the gateway sends."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from gpuwarden.errors import GpuwardenError
from gpuwarden.http.web_config import WebConfig
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.task_orders import TAKEN_MAX, TaskOutcome, TaskResult
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.clients.task_orders import (
    ANSWER_MAX_BYTES,
    PATH,
    GatewayOrders,
    QueueOrders,
    TaskOrdersError,
)
from tests.remediator.builders import HOST
from tests.served import served_app

pytestmark = pytest.mark.behaviour("D7")

RESULT = TaskResult(task_id=7, outcome=TaskOutcome.REFUSED, message="not ours")

Ask = Callable[..., GatewayOrders]


@pytest.fixture
def requests() -> list[tuple[str, str, Any]]:
    """Path, authorization and body of what the gateway got."""
    return []


@pytest.fixture
def gateway(requests: list[tuple[str, str, Any]], tmp_path: Path) -> Iterator[Ask]:
    """A gateway with this answer; the token is `secret`."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    with ExitStack() as stack:

        def answering(content: Any, status: int = 200, **headers: str) -> GatewayOrders:
            async def app(scope: Any, receive: Any, send: Any) -> None:
                request = Request(scope, receive)
                body = json.loads(await request.body())
                requests.append((request.url.path, request.headers["authorization"], body))
                text = content if isinstance(content, bytes) else json.dumps(content)
                await Response(text, status, headers)(scope, receive, send)

            port = stack.enter_context(served_app(app, WebConfig(None)))
            return stack.enter_context(closing(GatewayOrders(f"http://127.0.0.1:{port}", token, ca_file=None)))

        yield answering


def test_results_are_sent_with_the_token_and_ids_come_back(
    gateway: Ask, requests: list[tuple[str, str, Any]], tmp_path: Path
) -> None:
    orders = gateway({"result": True, "end_tasks": [123, 124, 123]})

    assert orders.exchange([RESULT]) == [123, 124]
    (tmp_path / "new").write_text("newer\n")
    (tmp_path / "new").rename(tmp_path / "token")
    orders.exchange([])

    sent = {"ended": [{"running_log_id": 7, "outcome": "refused", "message": "not ours"}]}
    assert requests == [(PATH, "Bearer secret", sent), (PATH, "Bearer newer", {"ended": []})]
    assert orders.ignored == 0


@pytest.mark.parametrize(
    ("content", "taken", "ignored"),
    [
        ({"end_tasks": [123], "run": "rm -rf /", "pid": 1}, [123], 2),
        ({"end_tasks": ["124", 1.5, True, None, -1, 2**63, {"running_log_id": 1}, 123]}, [123], 7),
        ({"end_tasks": "123"}, [], 1),
        ({"end_tasks": {"123": "SIGKILL"}}, [], 1),
        ({"end_tasks": list(range(TAKEN_MAX + 3))}, list(range(TAKEN_MAX)), 3),
        ({"result": True}, [], 0),
    ],
)
def test_all_but_ids_is_ignored_and_counted(gateway: Ask, content: Any, taken: list[int], ignored: int) -> None:
    orders = gateway(content)

    assert orders.exchange([]) == taken
    assert orders.ignored == ignored


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        ([123], 200, "returned no JSON object"),
        (b"<html>", 200, "Expecting value"),
        (b'{"end_tasks": [' + b"1, " * ANSWER_MAX_BYTES + b"1]}", 200, "is larger than 65536 bytes"),
        ({"error": {"reason": "the token is wrong"}, "end_tasks": [1]}, 401, "returned 401: .*the token is wrong"),
        ({"end_tasks": [1]}, 307, "returned 307"),
    ],
)
def test_other_answer_is_an_error(gateway: Ask, content: Any, status: int, says: str) -> None:
    """A redirect would take the token to another address."""
    with pytest.raises(TaskOrdersError, match=says):
        gateway(content, status, Location="http://127.0.0.1:1/").exchange([])


def test_address_without_encryption_and_missing_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GpuwardenError, match="would show the token: use https"):
        GatewayOrders("http://gateway.example:29838", tmp_path / "token", ca_file=None)
    with pytest.raises(GpuwardenError, match="cannot read the token of --gateway"):
        GatewayOrders("http://127.0.0.1:1", tmp_path / "token", ca_file=None)


def test_gateway_that_is_away_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with (
        closing(GatewayOrders("http://127.0.0.1:1", tmp_path / "token", ca_file=None)) as orders,
        pytest.raises(TaskOrdersError, match=f"^{re.escape(f'http://127.0.0.1:1{PATH}: ')}"),
    ):
        orders.exchange([])


@pytest.mark.both_databases
def test_executor_with_a_database_reads_its_own_hosts_orders_there(store: JobStore) -> None:
    orders = QueueOrders(queue=BuiltinQueue(store), host=HOST)
    for host in (HOST, "another"):
        store.task_orders.give(host, 7, who="ann", reason="", life_s=60.0, now=store.now())

    assert orders.exchange([]) == [7]
    assert orders.exchange([RESULT]) == []

    (found,) = store.task_orders.of_host(HOST, now=store.now())
    assert (found.outcome, found.message) == (TaskOutcome.REFUSED, "not ours")
    assert store.task_orders.of_host("another", now=store.now())[0].taken_at is None
