"""`gpuwarden host end-task` and what `gpuwarden host show` says about orders."""

import json
import re
import threading

import pytest

from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import Kind
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from tests.conftest import Cli
from tests.waiting import eventually

pytestmark = [pytest.mark.both_databases, pytest.mark.behaviour("D7")]


def answer(store: JobStore, outcome: TaskOutcome, message: str) -> None:
    assert store.task_orders.exchange("box1", [], now=store.now()) == [123]
    store.task_orders.exchange("box1", [TaskResult(task_id=123, outcome=outcome, message=message)], now=store.now())


def test_order_waits_for_the_host_and_then_says_what_it_did(store: JobStore, cli: Cli) -> None:
    code, out, _ = cli("host", "end-task", "box1", "123", "--reason", "hung\x1b[31m")
    assert code == 0
    assert out.startswith("task 123: the order waits for box1, which was never heard; it ends ")
    assert "\x1b" not in out

    store.host_reports.save("box1", Kind.TASKS, b"", now=store.now() - 75)
    _, out, _ = cli("host", "show", "box1")
    assert re.search(r"^order    task 123: the order waits for box1, last heard 20.*; it ends 20", out, re.MULTILINE)
    assert re.search(r"\(ordered 20.* by .*@.*: hung", out)

    store.task_orders.exchange("box1", [], now=store.now())
    assert "and has not answered yet" in cli("host", "show", "box1")[1]
    answer(store, TaskOutcome.REFUSED, "pid 7 is of another user")
    assert "task 123: not ended, box1 refuses at 20" in cli("host", "show", "box1")[1]
    (found,) = json.loads(cli("host", "show", "box1", "--json")[1])["task_orders"]
    assert (found["outcome"], found["message"], found["task_id"]) == ("refused", "pid 7 is of another user", 123)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(TaskOutcome.ENDED, 0), (TaskOutcome.GONE, 0), (TaskOutcome.REFUSED, 1), (TaskOutcome.FAILED, 1)],
)
def test_command_waits_for_the_hosts_answer(store: JobStore, cli: Cli, outcome: TaskOutcome, code: int) -> None:
    def serve() -> None:
        eventually(lambda: store.task_orders.of_host("box1", now=store.now()), "the order is given")
        answer(store, outcome, "2 processes")

    host = threading.Thread(target=serve)
    host.start()
    found, out, err = cli("host", "end-task", "box1", "123", "--wait", "--json")
    host.join()

    assert (found, err) == (code, "")
    assert json.loads(out)["outcome"] == outcome


def test_command_that_waits_ends_with_the_life_of_its_order(store: JobStore, cli: Cli) -> None:
    assert store
    code, out, err = cli("host", "end-task", "box1", "123", "--wait", "--for", "1s")

    assert code == 1
    assert err.startswith("task 123: the order waits for box1")
    assert re.match(r"task 123: the order expired 20.*, box1 did not take it", out)


def test_order_is_withdrawn(store: JobStore, cli: Cli) -> None:
    cli("host", "end-task", "box1", "123")
    code, out, _ = cli("host", "end-task", "box1", "123", "--withdraw")
    assert (code, out.startswith("task 123: the order is withdrawn at 20")) == (0, True)
    assert cli("host", "end-task", "box1", "123", "--withdraw") == (
        1, "", "gpuwarden host: no open order to end task 123 on box1\n"
    )  # fmt: skip

    cli("host", "end-task", "box1", "123")
    store.task_orders.exchange("box1", [], now=store.now())
    _, out, _ = cli("host", "end-task", "box1", "123", "--withdraw")
    assert "box1 took it before and may still end the task" in out


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (["box1"], "missing ID"),
        (["box1", "-1"], "'-1' is not a task id"),
        (["box1", "1.5"], "'1.5' is not a task id"),
        (["box1", str(2**63)], "is not a task id"),
        (["box1", "1", "--for", "8d"], "'8d' is invalid: use at most 7 d"),
        (["box1", "1", "--wait", "--withdraw"], "--withdraw"),
        (["box 1", "1"], "host name 'box 1' is invalid"),
    ],
)
def test_wrong_usage_is_named_and_orders_nothing(store: JobStore, cli: Cli, said: list[str], says: str) -> None:
    code, out, err = cli("host", "end-task", *said)

    assert (code, out) == (2, "")
    assert says in err
    assert store.task_orders.of_host("box1", now=store.now()) == []
