"""Collects the events that people are notified of, and writes their notices to the ledger.

Each event has a key, so that it becomes one notice per recipient, also with several processes.
"""

from collections.abc import Callable, Iterator

from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import Notice
from remediator.notify.messages import describe


class Events:
    """Events of the ledger and of the queue."""

    def __init__(self, ledger: Ledger, queue: Callable[[], JobStore] | None) -> None:
        self._ledger = ledger
        self._open = queue
        self._queue: JobStore | None = None
        self._stored = frozenset[str]()

    def close(self) -> None:
        """Close the queue."""
        if self._queue is not None:
            self._queue.close()

    def collect(self, *, now: float) -> None:
        """Write notices of new events.

        Raises:
            GpuwardenError: a database cannot be read; its events wait.
        """
        found = {each.key: each for each in self._of_ledger(now)}
        if self._open is not None:
            self._queue = self._queue or self._open()
            found |= {each.key: each for each in self._of_workers(self._queue, now)}
        self._ledger.notices.add([each for key, each in found.items() if key not in self._stored])
        self._stored = frozenset(found)

    def _of_ledger(self, now: float) -> Iterator[Notice]:
        breaker = self._ledger.orders.current().breaker()
        if breaker is not None:
            title, text = describe("breaker", reason=breaker.reason)
            yield Notice(key=f"breaker {breaker.order_id}", kind="breaker", title=title, text=text, at=now)

    def _of_workers(self, queue: JobStore, now: float) -> Iterator[Notice]:
        for each in queue.admin.locked_by_gpuwarden():
            title, text = describe("locked", worker=each.worker, host=each.host, reason=each.reason)
            key = f"locked {each.host}/{each.worker} {each.at}"
            yield Notice(key=key, kind="locked", title=title, text=text, at=now)
        oldest = {each.gpu: each for each in reversed(queue.gpu_quarantine.quarantined())}
        for gpu, its in oldest.items():
            title, text = describe("quarantined", gpu=gpu, host=its.host, reason=its.reason)
            yield Notice(key=f"quarantined {gpu} {its.since}", kind="quarantined", title=title, text=text, at=now)
