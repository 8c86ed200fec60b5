"""Ends tasks of other runners on orders of people (D7). It needs no arming: a person ordered each end."""

import random
import threading
import time
from contextlib import suppress
from typing import Final

import structlog

from gpuwarden.errors import GpuwardenError
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from remediator.actuators.task_group import TaskGroups
from remediator.clients.task_orders import OrderSource

ASK_S: Final = 30.0
"""Time between two questions for orders, seconds. 1,250 hosts ask 46 times a second."""

JITTER: Final = 0.2
"""Part of it that is random, so that hosts do not ask together."""

CLOSE_S: Final = 5.0
"""Longest wait for the end of a step, seconds. systemd allows the executor 60 s."""

LOG_S: Final = 60.0
"""Least time between log lines while orders cannot be read, seconds."""

log: Final = structlog.get_logger("executor")


class TaskOrdersLoop:
    """Asks for orders, carries them out and reports the results, from a thread."""

    def __init__(self, source: OrderSource, groups: TaskGroups) -> None:
        self._source, self._groups = source, groups
        self._results: list[TaskResult] = []
        self._log_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="task orders", daemon=True)

    def start(self) -> None:
        """Ask soon."""
        self._thread.start()

    def close(self) -> None:
        """Stop. The next executor carries out the other orders."""
        self._ending.set()
        self._thread.join(timeout=CLOSE_S)
        self._source.close()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._ending.wait(wait_s):
            try:
                wait_s = self.step()
            except GpuwardenError as error:
                wait_s = ASK_S
                if time.monotonic() >= self._log_s:
                    self._log_s = time.monotonic() + LOG_S
                    log.warning("orders to end tasks not read, asking again", reason=str(error))
            except Exception:  # the thread survives a defect
                wait_s = ASK_S
                log.exception("unexpected error")
            wait_s *= random.uniform(1 - JITTER, 1)  # noqa: S311
        if self._results:
            with suppress(GpuwardenError):
                self._source.exchange(self._results)

    def step(self) -> float:
        """Report results, take orders and carry them out. Returns the time until the next step, seconds.

        Raises:
            GpuwardenError: the source does not answer. The results are kept.
        """
        ordered = self._source.exchange(self._results)
        self._results = []
        for task_id in ordered:
            if self._ending.is_set():
                break
            result = self._groups.end(task_id)
            warns = result.outcome in (TaskOutcome.REFUSED, TaskOutcome.FAILED)
            (log.warning if warns else log.info)(
                "order to end a task", task=task_id, outcome=result.outcome.value, message=result.message
            )
            self._results.append(result)
        return 0.0 if self._results else ASK_S
