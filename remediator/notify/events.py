"""Collects the events that people are notified of, and writes their notices to the ledger.

Each event has a key, so that it becomes one notice per recipient, also with several processes.
"""

from collections.abc import Callable, Iterator
from typing import Final

from gpuwarden.format import format_duration, format_time
from gpuwarden.job import Kind
from gpuwarden.queue import Event, JobStore
from gpuwarden.queue.models import PersonsJob
from gpuwarden.queue.outbox import Outbox
from remediator.ledger.chain import DEAD_S
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import Notice
from remediator.notify.messages import describe
from remediator.settings.notify_file import NotifySettings

CONSUMER: Final = "notifications"
"""Consumer of the queue's events."""

BACK_S: Final = 3600.0
"""For how long it is news that alerts arrive again, seconds."""

KINDS: Final = frozenset({Kind.FAILED, Kind.BLOCKED})


class Events:
    """Events of the ledger and of the queue."""

    def __init__(self, ledger: Ledger, queue: Callable[[], JobStore] | None) -> None:
        self._ledger = ledger
        self._open = queue
        self._queue: JobStore | None = None
        self._stored = frozenset[str]()
        self._begun = False
        self._began_at: float | None = None

    def close(self) -> None:
        """Close the queue."""
        if self._queue is not None:
            self._queue.close()

    def collect(self, settings: NotifySettings, *, now: float) -> None:
        """Write notices of new events.

        Raises:
            GpuwardenError: a database cannot be read; its events wait.
        """
        found = self._store(self._of_ledger(now))  # also while the queue is unreachable
        if self._open is not None:
            self._queue = self._queue or self._open()
            found |= self._store(self._of_workers(self._queue, now))
        self._stored = found
        if self._queue is not None:
            self._collect_jobs(self._queue.outbox, settings, now)

    def _store(self, notices: Iterator[Notice]) -> frozenset[str]:
        """Store new notices; returns the keys of all."""
        found = list(notices)
        self._ledger.notices.add([each for each in found if each.key not in self._stored])
        return frozenset(each.key for each in found)

    def _collect_jobs(self, outbox: Outbox, settings: NotifySettings, now: float) -> None:
        """Store the notices of a batch before it is acknowledged: both may happen twice."""
        if not self._begun:
            outbox.begin(CONSUMER, now=now)  # events of the time before are not reported
            self._begun = True
        while events := outbox.events(CONSUMER):
            chosen = [event for event in events if event.kind in KINDS]
            jobs = outbox.jobs_of_people(chosen)
            its = [(event, jobs[event.job_id]) for event in chosen if event.job_id in jobs]
            self._ledger.notices.add([each for event, job in its for each in _notice(event, job, settings, now)])
            outbox.acknowledge(CONSUMER, events[-1], now=now)

    def _of_ledger(self, now: float) -> Iterator[Notice]:
        breaker = self._ledger.orders.current().breaker()
        if breaker is not None:
            title, text = describe("breaker", reason=breaker.reason)
            yield Notice(key=f"breaker {breaker.order_id}", kind="breaker", title=title, text=text, at=now)
        yield from self._of_chain(now)

    def _of_chain(self, now: float) -> Iterator[Notice]:
        """The watchdog alert stops or comes again. After a start of this process it has time to arrive."""
        began_at = self._began_at = now if self._began_at is None else min(self._began_at, now)
        arrival = self._ledger.chain.watchdog()
        last_at = None if arrival is None else arrival.at
        if now - max(last_at or 0.0, began_at) > DEAD_S:
            at, ago = ("", "") if last_at is None else (format_time(last_at), format_duration(now - last_at))
            title, text = describe("chain", at=at, ago=ago, drill=self._last_drill(now))
            yield Notice(key=f"chain {last_at or 'never'}", kind="chain", title=title, text=text, at=now)
        if arrival is None:
            return
        if arrival.gap_from is not None and arrival.gap_to is not None and now - arrival.gap_to < BACK_S:
            times = {"begin": format_time(arrival.gap_from), "end": format_time(arrival.gap_to)}
            title, text = describe("chain_back", **times)
            key = f"chain works {arrival.gap_from}"
            yield Notice(key=key, kind="chain_back", title=title, text=text, at=now)

    def _last_drill(self, now: float) -> str:
        """When the last drill began, and how it ended."""
        last = max(self._ledger.chain.last(), key=lambda each: each.started_at, default=None)
        if last is None:
            return "No drill has ended yet."
        ended = "passed" if last.broken is None else f"failed at the hop {last.broken}"
        began = f"{format_time(last.started_at)}, {format_duration(now - last.started_at)} ago"
        return f"The last drill, of {last.host}, began at {began}, and {ended}."

    def _of_workers(self, queue: JobStore, now: float) -> Iterator[Notice]:
        for each in queue.admin.locked_by_gpuwarden():
            title, text = describe("locked", worker=each.worker, host=each.host, reason=each.reason)
            key = f"locked {each.host}/{each.worker} {each.at}"
            yield Notice(key=key, kind="locked", title=title, text=text, at=now)
        oldest = {each.gpu: each for each in reversed(queue.gpu_quarantine.quarantined())}
        for gpu, its in oldest.items():
            title, text = describe("quarantined", gpu=gpu, host=its.host, reason=its.reason)
            yield Notice(key=f"quarantined {gpu} {its.since}", kind="quarantined", title=title, text=text, at=now)


def _notice(event: Event, job: PersonsJob, settings: NotifySettings, now: float) -> Iterator[Notice]:
    address = job.address or settings.of_submitter(job.submitted_by)
    if address is not None:
        about = {"job": job.job_id, "run": job.run_id or "", "queue": job.queue, "reason": job.reason}
        title, text = describe(event.kind, attempt=event.attempt, **about)
        key = f"{event.kind} job {job.job_id} {event.written_at}"
        yield Notice(key=key, kind=event.kind, title=title, text=text, at=now, address=address)
