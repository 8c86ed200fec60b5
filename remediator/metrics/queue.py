"""The queue in numbers, for Prometheus: what waits and for how long, who works, what ended and how.

Absent while the queue cannot be read, for unknown is never zero; what was counted and is none is a 0. A scrape reads
small indexes and the events that are new since the last one, and so costs the same however many jobs are done. What
grows with the jobs that wait, and with the items of runs that are judged, the count of them, is made beside the
scrapes: each starts one and shows the newest, with its age.

Hosts may share a queue, and each then shows the whole of it: they are never summed.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTimeError
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import FRESH_S, State
from gpuwarden.queue import JobStore
from gpuwarden.queue.counts import FAILING_MAX, HOST_WORKERS_MAX, Failing, Look, Outcome, Retries, Waiting
from remediator.metrics.series import Catalogue, Series

log: Final = structlog.get_logger("remediator")

ANSWER_S: Final = 2.0
"""A queue that does not answer a scrape within this time cannot be read, seconds: the ledger is to be told of, too."""

COUNT_WAIT_S: Final = 0.02
"""How long a scrape waits for the count that it started, seconds; else it shows the one before.

It does not wait at all where the one before took longer."""

FIRST_COUNT_WAIT_S: Final = 1.0
"""The same where there is none before."""

COUNT_REST: Final = 10.0
"""A count is not begun again for so many times as long as the last one took, however often somebody scrapes."""

COUNT_AGE_MAX_S: Final = 300.0
"""An older count is not shown, seconds."""

LATE_S: Final = 120.0
"""For how long an event that others have overtaken is waited for, seconds: longer than a transaction may take."""

MISSED_MAX: Final = 1000
"""So many numbers of events are waited for, the newest."""

BUCKETS_S: Final = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
"""The upper bounds of the histograms, seconds."""

OPEN: Final = tuple(state for state in State if state not in (State.COMPLETED, State.FAILED, State.CANCELLED))
OUTCOMES: Final = ("completed", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Count:
    """What was counted beside the scrapes: the claimable jobs, by queue, and who fails items."""

    waiting: Mapping[str, Waiting]
    failing: Failing


_Counted: TypeAlias = tuple[float, float, Count]
"""When a count was begun and ended, by a monotonic clock, and what it found."""


_Seen: TypeAlias = tuple[Look, Sequence[tuple[str, str]]]
"""The queue at one moment, and the workers of this host that are there, as (queue, worker)."""


_UNREAD: Final = "the queue cannot be read"
_NONE_YET: Final = f"{_UNREAD}, or none ended since this process started"
_NO_COUNT: Final = "as `gpuwarden_queue_jobs` of state queued"

SERIES: Final = Catalogue(
    Series("gpuwarden_queue_up", "1 while the queue can be read."),
    Series(
        "gpuwarden_queue_jobs",
        "Jobs that are not over, by state; of state queued as counted `gpuwarden_queue_count_age_seconds` ago.",
        labels=("queue", "state"),
        absent=f"{_UNREAD}; of state queued also while there is no count of the last {COUNT_AGE_MAX_S:g} s",
    ),
    Series(
        "gpuwarden_queue_oldest_seconds",
        "For how long the oldest of the jobs that a worker may claim has been waiting for one.",
        labels=("queue",),
        absent="no job of the queue is claimable, or as `gpuwarden_queue_jobs` of state queued",
    ),
    Series(
        "gpuwarden_queue_count_age_seconds",
        "Age of the count of claimable jobs, and of items that failed, which is made beside the scrapes.",
        absent=_NO_COUNT,
    ),
    Series(
        "gpuwarden_queue_workers",
        "Workers, by what they do: busy, idle, draining, locked, gone; each in one, the last that holds.",
        labels=("queue", "state"),
        absent=f"{_UNREAD}, or no worker of the queue has ever registered",
    ),
    Series(
        "gpuwarden_queue_workers_busy",
        f"Workers that were seen within {FRESH_S:g} s and hold a model; falls at once when one is ended.",
        labels=("queue",),
        absent="as `gpuwarden_queue_workers`",
    ),
    Series(
        "gpuwarden_queue_host_worker_info",
        f"A worker of this remediator's own host that was seen within {FRESH_S:g} s and is not ended; always "
        f"1, of {HOST_WORKERS_MAX} at most.",
        labels=("queue", "worker"),
        absent="as `gpuwarden_queue_workers`, or the worker is of another host, gone or ended",
    ),
    Series(
        "gpuwarden_queue_retries_total",
        "How often jobs were queued again: cause trip after one, reclaim after a lease that was lost.",
        labels=("queue", "cause"),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_queue_outcomes_total",
        "Jobs and runs that ended since this process started, by kind of event; a run's by its last job.",
        labels=("queue", "job_class", "kind"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_queue_wait_seconds",
        "Of jobs that completed or failed: from when the last attempt could be claimed until it was.",
        labels=("queue",),
        is_histogram=True,
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_queue_run_seconds",
        "Of jobs that completed or failed: from the claim of the last attempt to the end.",
        labels=("queue", "job_class"),
        is_histogram=True,
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_queue_dead_workers",
        "Workers that were found dead with a job and have not come back.",
        labels=("queue",),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_queue_run_items_failed",
        "Items of a run that asked for wrangling and goes on which a worker has failed, each once and forgiven "
        f"ones left out; of workers that failed any, and of {FAILING_MAX} at most: those who finished none come first.",
        labels=("run", "worker_host", "worker"),
        absent=f"{_NO_COUNT}, or the worker failed none",
    ),
    Series(
        "gpuwarden_queue_run_items_done",
        "Items of the same run which the same worker has finished.",
        labels=("run", "worker_host", "worker"),
        absent="as `gpuwarden_queue_run_items_failed`",
    ),
    Series(
        "gpuwarden_queue_run_workers_left_out",
        f"Workers that failed items of runs and are not in those two series, being more than {FAILING_MAX}.",
        absent=_NO_COUNT,
    ),
    Series("gpuwarden_queue_gpus_quarantined", "GPUs out of use until a person releases them.", absent=_UNREAD),
    Series(
        "gpuwarden_queue_consumer_lag_events",
        "Events that a consumer has yet to acknowledge.",
        labels=("consumer",),
        absent=f"{_UNREAD}, or the consumer has never acknowledged any",
    ),
)


@dataclass
class Spread:
    """A histogram as it grows."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, value_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.total_s += value_s

    def buckets(self) -> Sequence[tuple[str, int]]:
        """As Prometheus wants them: each with all below it."""
        bounds, below, found = [*map(str, BUCKETS_S), "+Inf"], 0, []
        for bound, count in zip(bounds, self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class Tally:
    """What ended since it was made, counted from the events, each once."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str, str]] = Counter()
        self.waited: defaultdict[str, Spread] = defaultdict(Spread)
        self.ran: defaultdict[tuple[str, str], Spread] = defaultdict(Spread)
        self._newest: int | None = None
        self._missed: dict[int, float] = {}

    def take(self, store: JobStore, *, now_s: float) -> None:
        """Count what is new. The first time there is nothing to count from, and the place is noted.

        Args:
            store: the queue.
            now_s: a monotonic clock, seconds.
        """
        if self._newest is None:
            self._newest = store.counts.last_event()
            return
        for event in store.counts.outcomes_after(self._newest, and_of=self._missed):
            if event.event_id > self._newest:
                # Written by transactions that are not done, or that never will be.
                between = range(max(self._newest + 1, event.event_id - MISSED_MAX), event.event_id)
                self._missed |= dict.fromkeys(between, now_s)
                self._newest = event.event_id
            else:
                del self._missed[event.event_id]
            self._count(event)
        fresh = [(number, since_s) for number, since_s in self._missed.items() if now_s - since_s < LATE_S]
        self._missed = dict(fresh[-MISSED_MAX:])

    def _count(self, event: Outcome) -> None:
        queue, job_class = event.queue or "", event.job_class or ""
        self.ended[queue, job_class, event.kind] += 1
        if event.kind in ("completed", "failed"):
            if event.waited_s is not None:
                self.waited[queue].add(event.waited_s)
            if event.ran_s is not None:
                self.ran[queue, job_class].add(event.ran_s)


class QueueCollector(Collector):
    """The queue's families, and which workers `host` has in it. Safe to scrape from several threads."""

    def __init__(self, opened: Callable[[], JobStore], *, host: str) -> None:
        self._opened = opened
        self._host = host
        self._store: JobStore | None = None
        self._readable: bool | None = None
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="queue metrics")
        self._lock = threading.Lock()
        self._looking: Future[_Seen] | None = None
        self._counting: Future[_Counted] | None = None
        self._counted: _Counted | None = None
        self._tally = Tally()
        self._queues: set[str] = set()

    def describe(self) -> list[Metric]:
        """Nothing beforehand: asking would read the queue."""
        return []

    def close(self) -> None:
        """Let go of the queue."""
        self._pool.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()

    def collect(self) -> Iterator[Metric]:
        """Every family of this scrape."""
        with self._lock:
            up = SERIES.gauge("gpuwarden_queue_up")
            try:
                (look, here), counted = self._look(), self._count()
            except (GpuwardenError, NotInTimeError) as error:
                because = str(error) or f"no answer within {ANSWER_S:g} s"
                if self._readable is not False:  # at its first time alone: a scrape may come every second
                    log.warning("the queue cannot be read for /metrics", because=because)
                self._readable, self._counted = False, None
                up.add_metric((), 0.0)
                return iter([up])
            if self._readable is False:
                log.info("the queue can be read for /metrics again")
            self._readable = True
            up.add_metric((), 1.0)
            return iter([up, *self._families(look, here, counted)])

    def _look(self) -> _Seen:
        # One that has not come back is waited for once more, and no other is sent after it.
        if self._looking is None:
            self._looking = self._pool.submit(self._read)
        try:
            seen = self._looking.result(ANSWER_S)
        except GpuwardenError:
            self._looking = None
            raise
        self._looking = None
        return seen

    def _read(self) -> _Seen:
        if self._store is None:
            self._store = self._opened()
        store, now = self._store, self._store.now()
        self._tally.take(store, now_s=time.monotonic())
        return store.counts.look(now=now), store.counts.of_host(self._host, now=now)

    def _count(self) -> tuple[float, Count] | None:
        """The newest count and its age, seconds; each call begins one, unless one is under way."""
        begun_s, ended_s = (0.0, 0.0) if self._counted is None else self._counted[:2]
        rested = time.monotonic() - ended_s >= COUNT_REST * (ended_s - begun_s)
        if self._counting is None and self._store is not None and rested:
            self._counting = self._pool.submit(_counted, self._store)
        if self._counting is not None:
            try:
                newest = self._counting.result(_patience_s(self._counted))
            except NotInTimeError:
                pass
            except GpuwardenError:
                self._counting = None
                raise
            else:
                self._counted, self._counting = newest, None
        if self._counted is None:
            return None
        begun_s, _, found = self._counted
        age_s = time.monotonic() - begun_s
        return None if age_s > COUNT_AGE_MAX_S else (age_s, found)

    def _families(
        self, look: Look, here: Sequence[tuple[str, str]], counted: tuple[float, Count] | None
    ) -> Iterator[Metric]:
        self._queues |= {*(queue for queue, _ in look.at_work), *look.crews, *look.retries}
        if counted is not None:
            self._queues |= set(counted[1].waiting)
        queues = sorted(self._queues)
        yield from self._jobs(look, counted, queues)
        workers, busy = SERIES.gauge("gpuwarden_queue_workers"), SERIES.gauge("gpuwarden_queue_workers_busy")
        for queue, crew in sorted(look.crews.items()):
            busy.add_metric((queue,), crew.busy)
            for state, count in crew.by_state.items():
                workers.add_metric((queue, state), count)
        its = SERIES.gauge("gpuwarden_queue_host_worker_info")
        for names in here:
            its.add_metric(names, 1.0)
        yield from (workers, busy, its)
        retries = SERIES.counter("gpuwarden_queue_retries_total")
        dead = SERIES.gauge("gpuwarden_queue_dead_workers")
        for queue in queues:
            found = look.retries.get(queue, Retries(watchdog=0, reclaims=0))
            retries.add_metric((queue, "trip"), found.watchdog)
            retries.add_metric((queue, "reclaim"), found.reclaims)
            dead.add_metric((queue,), look.dead.get(queue, 0))
        yield from (retries, dead)
        if counted is not None:
            yield from _items(counted[1].failing)
        yield from self._ended()
        quarantined = SERIES.gauge("gpuwarden_queue_gpus_quarantined")
        quarantined.add_metric((), look.quarantined)
        lag = SERIES.gauge("gpuwarden_queue_consumer_lag_events")
        for consumer, count in sorted(look.lags.items()):
            lag.add_metric((consumer,), count)
        yield from (quarantined, lag)

    def _jobs(self, look: Look, counted: tuple[float, Count] | None, queues: Sequence[str]) -> Iterator[Metric]:
        jobs, oldest = SERIES.gauge("gpuwarden_queue_jobs"), SERIES.gauge("gpuwarden_queue_oldest_seconds")
        age = SERIES.gauge("gpuwarden_queue_count_age_seconds")
        for queue in queues:
            for state in OPEN:
                if state is not State.QUEUED:
                    jobs.add_metric((queue, state), look.at_work.get((queue, state), 0))
            if counted is None:
                continue
            waiting = counted[1].waiting.get(queue)
            jobs.add_metric((queue, State.QUEUED), 0 if waiting is None else waiting.jobs)
            if waiting is not None and waiting.oldest_at is not None:
                oldest.add_metric((queue,), max(0.0, look.now - waiting.oldest_at))
        if counted is not None:
            age.add_metric((), counted[0])
        yield from (jobs, oldest, age)

    def _ended(self) -> Iterator[Metric]:
        outcomes = SERIES.counter("gpuwarden_queue_outcomes_total")
        ended = dict(self._tally.ended)
        # The first failure of a queue is seen by a rate: its series was there at 0.
        for queue, job_class, _ in list(ended):
            for kind in OUTCOMES:
                ended.setdefault((queue, job_class, kind), 0)
        for key, count in sorted(ended.items()):
            outcomes.add_metric(key, count)
        yield outcomes
        wait, ran = SERIES.histogram("gpuwarden_queue_wait_seconds"), SERIES.histogram("gpuwarden_queue_run_seconds")
        for queue, spread in sorted(self._tally.waited.items()):
            wait.add_metric((queue,), spread.buckets(), spread.total_s)
        for its, spread in sorted(self._tally.ran.items()):
            ran.add_metric(its, spread.buckets(), spread.total_s)
        yield from (wait, ran)


def _patience_s(before: _Counted | None) -> float:
    """How long to wait for a count that was begun: not at all where the one before took too long for that."""
    if before is None:
        return FIRST_COUNT_WAIT_S
    begun_s, ended_s, _ = before
    return COUNT_WAIT_S if ended_s - begun_s < COUNT_WAIT_S else 0.0


def _counted(store: JobStore) -> _Counted:
    begun_s = time.monotonic()
    found = Count(waiting=store.counts.waiting(), failing=store.counts.failing())
    return begun_s, time.monotonic(), found


def _items(failing: Failing) -> Iterator[Metric]:
    failed, done = SERIES.gauge("gpuwarden_queue_run_items_failed"), SERIES.gauge("gpuwarden_queue_run_items_done")
    for each in failing.workers:
        failed.add_metric((each.run_id, each.host, each.worker), each.failed)
        done.add_metric((each.run_id, each.host, each.worker), each.done)
    left_out = SERIES.gauge("gpuwarden_queue_run_workers_left_out")
    left_out.add_metric((), failing.left_out)
    yield from (failed, done, left_out)
