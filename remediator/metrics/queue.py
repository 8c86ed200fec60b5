"""Metrics of the job queue.

Series are absent while the queue cannot be read; a count of none is 0. A scrape reads small indexes and new events, so
its cost does not grow with finished jobs. Claimable jobs and failed items are counted in the background: each scrape
starts a count and shows the newest with its age.

Hosts that share a queue each publish all of it: do not sum them.
"""

import itertools
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
from gpuwarden.job import FRESH_S, JobClass, Kind, State
from gpuwarden.queue import JobStore
from gpuwarden.queue.claims import FATAL_JOBS_MAX
from gpuwarden.queue.counts import (
    FAILING_MAX,
    HOST_WORKERS_MAX,
    LOCKED_MAX,
    ClaimableJobs,
    Failing,
    Outcome,
    QueueSnapshot,
    Retries,
)
from remediator.metrics.series import Catalogue, Series

log: Final = structlog.get_logger("remediator")

ANSWER_S: Final = 2.0
"""Timeout of a queue read, seconds. The scrape must also read the ledger."""

COUNT_WAIT_S: Final = 0.02
"""Time that a scrape waits for its own count before it shows the last one, seconds; none if the last took longer."""

FIRST_COUNT_WAIT_S: Final = 1.0
"""The same for the first count, seconds."""

COUNT_REST: Final = 10.0
"""Minimum pause between counts, as a multiple of the last count's duration."""

COUNT_AGE_MAX_S: Final = 300.0
"""Maximum age of a published count, seconds."""

LATE_S: Final = 120.0
"""Time to wait for an event id of a running transaction, seconds; longer than any transaction."""

MISSED_MAX: Final = 1000
"""Maximum event ids waited for."""

BUCKETS_S: Final = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
"""Upper bounds of the histograms, seconds."""

OPEN: Final = tuple(state for state in State if state not in (State.COMPLETED, State.FAILED, State.CANCELLED))
OUTCOMES: Final = ("completed", "failed", "cancelled")
RUN_EVENT: Final = "run_"
"""Prefix of an outcome in the event of a run."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """A background count: claimable jobs by queue, and workers with failed items."""

    waiting: Mapping[str, ClaimableJobs]
    failing: Failing


_Counted: TypeAlias = tuple[float, float, Count]
"""Start and end of a count, monotonic clock seconds, and its result."""


@dataclass(frozen=True)
class Here:
    """What the queue has of this host: workers as (queue, worker), and GPUs in quarantine."""

    workers: Sequence[tuple[str, str]]
    gpus: Sequence[str] = ()


_Seen: TypeAlias = tuple[QueueSnapshot, Here]


_UNREAD: Final = "the queue cannot be read"
_NONE_YET: Final = f"{_UNREAD}, or no job ended since this process started"
_NO_COUNT: Final = "as `gpuwarden_queue_jobs` of state queued"

SERIES: Final = Catalogue(
    Series("gpuwarden_queue_up", "1 while the queue can be read."),
    Series(
        "gpuwarden_queue_jobs",
        "Open jobs by state. State queued is as old as `gpuwarden_queue_count_age_seconds`.",
        labels=("queue", "state"),
        absent=f"{_UNREAD}; state queued also without a count from the last {COUNT_AGE_MAX_S:g} s",
    ),
    Series(
        "gpuwarden_queue_oldest_job_age_seconds",
        "Age of the oldest claimable job.",
        labels=("queue",),
        absent="the queue has no claimable job, or as `gpuwarden_queue_jobs` of state queued",
    ),
    Series(
        "gpuwarden_queue_count_age_seconds",
        "Age of the background count of claimable jobs and failed items.",
        absent=_NO_COUNT,
    ),
    Series(
        "gpuwarden_queue_workers",
        "Workers by state: busy, idle, draining, locked, gone. The last that applies counts.",
        labels=("queue", "state"),
        absent=f"{_UNREAD}, or the queue never had a worker",
    ),
    Series(
        "gpuwarden_queue_workers_busy",
        f"Workers with a heartbeat within {FRESH_S:g} s and a model. A retired worker leaves at once.",
        labels=("queue",),
        absent="as `gpuwarden_queue_workers`",
    ),
    Series(
        "gpuwarden_queue_host_worker_info",
        f"A live worker of this host, with a heartbeat within {FRESH_S:g} s; at most {HOST_WORKERS_MAX}.",
        labels=("queue", "worker"),
        absent="as `gpuwarden_queue_workers`, or the worker is on another host or gone",
    ),
    Series(
        "gpuwarden_queue_retries_total",
        "Requeued jobs by cause: condition (found by gpuwarden) or reclaim (lost lease).",
        labels=("queue", "cause"),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_queue_jobs_ended_total",
        "Jobs that ended since this process started, by outcome.",
        labels=("queue", "job_class", "outcome"),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_queue_runs_ended_total",
        "Runs that ended since this process started, by outcome.",
        labels=("outcome",),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_queue_wait_seconds",
        "Time from claimable to claimed of the last attempt of completed and failed jobs.",
        labels=("queue",),
        is_histogram=True,
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_queue_job_duration_seconds",
        "Time from the claim of the last attempt to the end of completed and failed jobs.",
        labels=("queue", "job_class"),
        is_histogram=True,
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_queue_dead_workers",
        "Workers that died with a job and did not restart.",
        labels=("queue",),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_queue_worker_locked_info",
        f"A worker that {FATAL_JOBS_MAX} jobs with a fatal error in an hour have locked; at most {LOCKED_MAX}.",
        labels=("queue", "worker_host", "worker"),
        absent=f"{_UNREAD}, or the worker is not locked, or an operator or wrangling locked it",
    ),
    Series(
        "gpuwarden_queue_run_items_failed",
        f"Items of a wrangled, open run that a worker failed, without cleared ones. At most {FAILING_MAX} workers, "
        "those without a finished item first.",
        labels=("run", "worker_host", "worker"),
        absent=f"{_NO_COUNT}, or the worker failed none",
    ),
    Series(
        "gpuwarden_queue_run_items_done",
        "Items of the same run that the same worker finished.",
        labels=("run", "worker_host", "worker"),
        absent="as `gpuwarden_queue_run_items_failed`",
    ),
    Series(
        "gpuwarden_queue_run_workers_truncated",
        f"Workers with failed items that those series leave out: more than {FAILING_MAX}.",
        absent=_NO_COUNT,
    ),
    Series("gpuwarden_queue_gpus_quarantined", "Quarantined GPUs.", absent=_UNREAD),
    Series(
        "gpuwarden_queue_host_gpu_quarantined_info",
        "A quarantined GPU of this host.",
        labels=("gpu",),
        absent=f"{_UNREAD}, or the GPU is not in quarantine",
    ),
    Series(
        "gpuwarden_queue_consumer_lag_events",
        "Events that a consumer has not acknowledged.",
        labels=("consumer",),
        absent=f"{_UNREAD}, or the consumer never acknowledged an event",
    ),
)


@dataclass
class Histogram:
    """A histogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, value_s: float) -> None:
        """Count a value."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.total_s += value_s

    def buckets(self) -> Sequence[tuple[str, int]]:
        """Cumulative buckets."""
        bounds, below, found = [*map(str, BUCKETS_S), "+Inf"], 0, []
        for bound, count in zip(bounds, self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class OutcomeCounters:
    """Outcomes since the start, each event counted once."""

    def __init__(self) -> None:
        self.jobs: Counter[tuple[str, str, str]] = Counter()
        self.runs: Counter[str] = Counter()
        self.waited: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.ran: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self._newest: int | None = None
        self._missed: dict[int, float] = {}

    def take(self, store: JobStore, *, now_s: float) -> None:
        """Count new events. The first call only notes where to start. `now_s` is the monotonic clock."""
        if self._newest is None:
            self._newest = store.counts.last_event()
            return
        for event in store.counts.outcomes_after(self._newest, and_of=self._missed):
            if event.event_id > self._newest:
                # Missing ids belong to transactions that are running or rolled back.
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
        if event.kind == Kind.BLOCKED:
            return
        if event.kind.startswith(RUN_EVENT):
            self.runs[event.kind.removeprefix(RUN_EVENT)] += 1
            return
        self.jobs[queue, job_class, event.kind] += 1
        if event.kind in ("completed", "failed"):
            if event.waited_s is not None:
                self.waited[queue].add(event.waited_s)
            if event.ran_s is not None:
                self.ran[queue, job_class].add(event.ran_s)


class QueueCollector(Collector):
    """The queue's metrics, and the workers of `host`. Safe to scrape from several threads."""

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
        self._outcomes = OutcomeCounters()
        self._queues: set[str] = set()

    def describe(self) -> list[Metric]:
        """Nothing: it would read the queue."""
        return []

    def close(self) -> None:
        """Close the queue."""
        self._pool.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()

    def collect(self) -> Iterator[Metric]:
        """Collect every family."""
        with self._lock:
            up = SERIES.gauge("gpuwarden_queue_up")
            try:
                (snapshot, here), counted = self._look(), self._count()
            except (GpuwardenError, NotInTimeError) as error:
                reason = str(error) or f"no answer within {ANSWER_S:g} s"
                if self._readable is not False:  # once, not at every scrape
                    log.warning("queue unreachable for /metrics", reason=reason)
                self._readable, self._counted = False, None
                up.add_metric((), 0.0)
                return iter([up])
            if self._readable is False:
                log.info("queue reachable for /metrics again")
            self._readable = True
            up.add_metric((), 1.0)
            return iter([up, *self._families(snapshot, here, counted)])

    def _look(self) -> _Seen:
        # Wait for a read that is still running instead of starting another.
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
        self._outcomes.take(store, now_s=time.monotonic())
        gpus = {each.gpu for each in store.gpu_quarantine.quarantined() if each.host == self._host}
        here = Here(store.counts.of_host(self._host, now=now), sorted(gpus))
        return store.counts.snapshot(now=now), here

    def _count(self) -> tuple[float, Count] | None:
        """The newest count and its age, seconds. Starts another, unless one is running."""
        begun_s, ended_s = (0.0, 0.0) if self._counted is None else self._counted[:2]
        rested = time.monotonic() - ended_s >= COUNT_REST * (ended_s - begun_s)
        if self._counting is None and self._store is not None and rested:
            self._counting = self._pool.submit(_counted, self._store)
        if self._counting is not None:
            try:
                newest = self._counting.result(_count_wait_s(self._counted))
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

    def _families(self, snapshot: QueueSnapshot, here: Here, counted: tuple[float, Count] | None) -> Iterator[Metric]:
        self._queues |= {*(queue for queue, _ in snapshot.at_work), *snapshot.workers, *snapshot.retries}
        if counted is not None:
            self._queues |= set(counted[1].waiting)
        queues = sorted(self._queues)
        yield from self._jobs(snapshot, counted, queues)
        workers, busy = SERIES.gauge("gpuwarden_queue_workers"), SERIES.gauge("gpuwarden_queue_workers_busy")
        for queue, counts in sorted(snapshot.workers.items()):
            busy.add_metric((queue,), counts.busy)
            for state, count in counts.by_state.items():
                workers.add_metric((queue, state), count)
        its = SERIES.gauge("gpuwarden_queue_host_worker_info")
        for names in here.workers:
            its.add_metric(names, 1.0)
        yield from (workers, busy, its)
        retries = SERIES.counter("gpuwarden_queue_retries_total")
        dead = SERIES.gauge("gpuwarden_queue_dead_workers")
        for queue in queues:
            found = snapshot.retries.get(queue, Retries(watchdog=0, reclaims=0))
            retries.add_metric((queue, "condition"), found.watchdog)
            retries.add_metric((queue, "reclaim"), found.reclaims)
            dead.add_metric((queue,), snapshot.dead.get(queue, 0))
        locked = SERIES.gauge("gpuwarden_queue_worker_locked_info")
        for labels in snapshot.locked:
            locked.add_metric(labels, 1.0)
        yield from (retries, dead, locked)
        if counted is not None:
            yield from _items(counted[1].failing)
        yield from self._ended()
        quarantined = SERIES.gauge("gpuwarden_queue_gpus_quarantined")
        quarantined.add_metric((), snapshot.quarantined)
        its_gpus = SERIES.gauge("gpuwarden_queue_host_gpu_quarantined_info")
        for gpu in here.gpus:
            its_gpus.add_metric((gpu,), 1.0)
        yield its_gpus
        lag = SERIES.gauge("gpuwarden_queue_consumer_lag_events")
        for consumer, count in sorted(snapshot.lags.items()):
            lag.add_metric((consumer,), count)
        yield from (quarantined, lag)

    def _jobs(
        self, snapshot: QueueSnapshot, counted: tuple[float, Count] | None, queues: Sequence[str]
    ) -> Iterator[Metric]:
        jobs, oldest = SERIES.gauge("gpuwarden_queue_jobs"), SERIES.gauge("gpuwarden_queue_oldest_job_age_seconds")
        age = SERIES.gauge("gpuwarden_queue_count_age_seconds")
        for queue in queues:
            for state in OPEN:
                if state is not State.QUEUED:
                    jobs.add_metric((queue, state), snapshot.at_work.get((queue, state), 0))
            if counted is None:
                continue
            waiting = counted[1].waiting.get(queue)
            jobs.add_metric((queue, State.QUEUED), 0 if waiting is None else waiting.jobs)
            if waiting is not None and waiting.oldest_at is not None:
                oldest.add_metric((queue,), max(0.0, snapshot.now - waiting.oldest_at))
        if counted is not None:
            age.add_metric((), counted[0])
        yield from (jobs, oldest, age)

    def _ended(self) -> Iterator[Metric]:
        jobs, runs = (
            SERIES.counter("gpuwarden_queue_jobs_ended_total"),
            SERIES.counter("gpuwarden_queue_runs_ended_total"),
        )
        # Publish 0 first, so that rate() sees the first failure.
        classes = {*itertools.product(self._queues, JobClass), *(key[:2] for key in self._outcomes.jobs)}
        for queue, job_class in sorted(classes):
            for outcome in OUTCOMES:
                jobs.add_metric((queue, job_class, outcome), self._outcomes.jobs[queue, job_class, outcome])
        if self._outcomes.runs:
            for outcome in OUTCOMES:
                runs.add_metric((outcome,), self._outcomes.runs[outcome])
        yield from (jobs, runs)
        wait, ran = (
            SERIES.histogram("gpuwarden_queue_wait_seconds"),
            SERIES.histogram("gpuwarden_queue_job_duration_seconds"),
        )
        for queue, spread in sorted(self._outcomes.waited.items()):
            wait.add_metric((queue,), spread.buckets(), spread.total_s)
        for its, spread in sorted(self._outcomes.ran.items()):
            ran.add_metric(its, spread.buckets(), spread.total_s)
        yield from (wait, ran)


def _count_wait_s(before: _Counted | None) -> float:
    """Seconds to wait for a new count; 0 if the last one took too long."""
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
    left_out = SERIES.gauge("gpuwarden_queue_run_workers_truncated")
    left_out.add_metric((), failing.left_out)
    yield from (failed, done, left_out)
