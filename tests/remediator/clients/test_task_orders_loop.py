"""The loop that carries out orders to end tasks: results are kept until they are reported."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import CliApp

from gpuwarden.errors import GpuwardenError
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from remediator.actuators.task_group import TaskGroups
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor import main, task_orders
from remediator.executor.task_orders import ASK_S, TaskOrdersLoop
from remediator.settings.settings import ExecuteSettings
from tests.remediator.builders import HOST
from tests.waiting import eventually

pytestmark = pytest.mark.behaviour("D7")


class Source:
    """Orders these tasks until their results arrive."""

    def __init__(self, *task_ids: int) -> None:
        self.open, self.got = list(task_ids), list[TaskResult]()
        self.away: Exception | None = None
        self.asked = self.closed = 0

    def exchange(self, results: Sequence[TaskResult]) -> list[int]:
        self.asked += 1
        if self.away is not None:
            raise self.away
        self.got += results
        self.open = [each for each in self.open if each not in {result.task_id for result in self.got}]
        return list(self.open)

    def close(self) -> None:
        self.closed += 1


class Groups(TaskGroups):
    """Ends nothing, and notes what it should end."""

    def __init__(self) -> None:
        super().__init__([], grace_s=0.0)
        self.ended: list[int] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def end(self, task_id: int) -> TaskResult:
        self.begun.set()
        self.may_go_on.wait(10)
        self.ended.append(task_id)
        return TaskResult(task_id=task_id, outcome=TaskOutcome.ENDED, message="")


def test_result_is_reported_at_once_and_again_after_an_outage() -> None:
    source, groups = Source(123, 124), Groups()
    loop = TaskOrdersLoop(source, groups)

    assert loop.step() == 0.0
    source.away = GpuwardenError("no route")
    with pytest.raises(GpuwardenError):
        loop.step()
    source.away = None
    assert loop.step() == ASK_S

    assert [each.task_id for each in source.got] == [123, 124]
    assert groups.ended == [123, 124], "each once"


@pytest.mark.parametrize("away", [GpuwardenError("no route"), ValueError("a defect")])
def test_thread_survives_and_asks_again(away: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_orders, "ASK_S", 0.01)
    source, groups = Source(123), Groups()
    source.away = away
    loop = TaskOrdersLoop(source, groups)
    loop.start()

    eventually(lambda: source.asked > 3, "it asks again")
    source.away = None
    eventually(lambda: source.got, "it carries the order out")
    loop.close()

    assert (groups.ended, source.closed) == ([123], 1)


def test_result_of_the_last_step_is_reported_at_the_end() -> None:
    source, groups = Source(123, 124), Groups()
    groups.may_go_on.clear()
    loop = TaskOrdersLoop(source, groups)
    loop.start()
    assert groups.begun.wait(10)

    closing = threading.Thread(target=loop.close)
    closing.start()
    eventually(loop._ending.is_set, "it closes")
    groups.may_go_on.set()
    closing.join()

    assert groups.ended == [123], "no other begins"
    assert [each.task_id for each in source.got] == [123]


@pytest.mark.both_databases
def test_executor_without_a_gateway_ends_a_task_of_its_queue(store: JobStore, tmp_path: Path) -> None:
    """A real process, by the executor's settings."""
    task = subprocess.Popen(["sleep", "600"], start_new_session=True)
    fields = {"running_log_id": 7, "remote_pid": task.pid, "remote_pgid": task.pid, "timestamp": int(time.time())}
    (tmp_path / "7.json").write_text(json.dumps(fields))
    needed = ["--ledger", "sqlite:////l.db", "--queue-db", "sqlite:////q.db"]
    settings = CliApp.run(ExecuteSettings, cli_args=[*needed, "--task-dir", str(tmp_path)])
    order = store.task_orders.give(HOST, 7, who="ann", reason="", life_s=60.0, now=store.now())
    loop = main._task_orders(settings, BuiltinQueue(store), HOST)
    try:
        assert (loop.step(), loop.step()) == (0.0, ASK_S)
        assert task.wait(10) == -signal.SIGTERM
    finally:
        task.kill()
        task.wait()

    found = store.task_orders.order(order.order_id, now=store.now())
    assert found is not None
    assert (found.outcome, found.message) == (TaskOutcome.ENDED, f"group {task.pid}, processes: 1")


def test_loop_without_orders_does_nothing() -> None:
    groups, source = Groups(), Source()
    found: Any = TaskOrdersLoop(source, groups).step()

    assert (found, groups.ended, source.asked) == (ASK_S, [], 1)
