"""Metrics of the queue: counted and absent values, slow counts and unreachable queues."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, insert, text

from gpuwarden.db.engine import connect
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import writing
from gpuwarden.job import Condition, JobClass
from gpuwarden.queue import Job, JobStore, Slot, Submission
from gpuwarden.queue.counts import ClaimableJobs, Counts
from gpuwarden.queue.open import existing
from gpuwarden.queue.schema import OUTBOX_EVENTS
from remediator.metrics import queue as queue_metrics
from remediator.metrics.queue import SERIES, Histogram, QueueCollector
from tests.asking import PLAIN
from tests.remediator.builders import HOST
from tests.remediator.webhook.test_app import serving
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

Page = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def _counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape begins a count and waits for it."""
    monkeypatch.setattr(queue_metrics, "COUNT_REST", 0.0)
    monkeypatch.setattr(queue_metrics, "COUNT_WAIT_S", 30.0)
    monkeypatch.setattr(queue_metrics, "FIRST_COUNT_WAIT_S", 30.0)
    monkeypatch.setattr(queue_metrics, "ANSWER_S", 60.0)


@pytest.fixture
def collector(store: JobStore, queue_url: str) -> Iterator[QueueCollector]:
    """A collector of an existing queue, after its first count."""
    assert store
    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as found:
        page(found)
        yield found


def page(collector: QueueCollector) -> Page:
    registry = CollectorRegistry()
    registry.register(collector)
    return read(generate_latest(registry).decode())


def read(body: str) -> Page:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def of(found: Page, name: str, **labels: str) -> float | None:
    return found.get((f"gpuwarden_queue_{name}", tuple(sorted(labels.items()))))


def names(found: Page) -> set[str]:
    return {name for name, _ in found}


def submit(store: JobStore, queue: str = "gpu", *, ago_s: float = 0.0, **its: Any) -> int:
    return store.runs.submit(Submission(queue=queue, **its), now=store.now() - ago_s)


def claim(store: JobStore, queue: str = "gpu", worker: str = "w1") -> Job:
    found = store.claims.claim(queue, host=HOST, worker=worker, incarnation=f"i-{worker}", now=store.now())
    assert found is not None
    return found


def complete(store: JobStore, job: Job, *, after_s: float = 0.0) -> None:
    assert job.claimed_by is not None
    ended = store.now() + after_s
    assert store.claims.complete(job.job_id, attempt=job.attempt, incarnation=job.claimed_by, now=ended)


def test_jobs_are_counted_by_queue_and_state_with_zero_values(store: JobStore, collector: QueueCollector) -> None:
    submit(store, ago_s=100)
    submit(store)
    first = submit(store, "cpu", run_id="r1")
    submit(store, "cpu", run_id="r1", needs=(first,))
    store.admin.block(submit(store, "cpu"), reason="", now=store.now())
    claim(store, "cpu")

    found = page(collector)
    assert of(found, "up") == 1
    assert of(found, "jobs", queue="gpu", state="queued") == 2
    assert of(found, "oldest_job_age_seconds", queue="gpu") == pytest.approx(100, abs=30)
    states = {
        state: of(found, "jobs", queue="cpu", state=state) for state in ("waiting", "running", "blocked", "queued")
    }
    assert states == {"waiting": 1, "running": 1, "blocked": 1, "queued": 0}
    assert of(found, "oldest_job_age_seconds", queue="cpu") is None, "no job waits"
    for _ in range(2):
        complete(store, claim(store, worker="w2"))

    found = page(collector)
    assert of(found, "jobs", queue="gpu", state="queued") == 0
    assert of(found, "jobs", queue="gpu", state="completed") is None
    assert of(found, "oldest_job_age_seconds", queue="gpu") is None


@pytest.mark.behaviour("A12")
def test_busy_gauge_counts_recent_workers_with_a_model(store: JobStore, collector: QueueCollector) -> None:
    for worker in ("w1", "w2", "w3"):
        submit(store, model="sd-xl")
        claim(store, worker=worker)
    store.claims.register("gpu", host=HOST, worker="idle", incarnation="i", now=store.now())
    submit(store)
    store.claims.claim("gpu", host=HOST, worker="stale", incarnation="i-stale", now=store.now() - 31)
    assert of(page(collector), "workers_busy", queue="gpu") == 3

    assert store.fencing.fence(1, attempt=1, incarnation="i-w1", condition=Condition.STALL, now=store.now())
    assert of(page(collector), "workers_busy", queue="gpu") == 2
    assert store.fencing.retire_worker(host=HOST, worker="w2", incarnation="i-w2", now=store.now())
    found = page(collector)

    assert of(found, "workers_busy", queue="gpu") == 1
    states = {state: of(found, "workers", queue="gpu", state=state) for state in ("busy", "idle", "gone", "locked")}
    assert states == {"busy": 1, "idle": 1, "gone": 3, "locked": 0}
    store.claims.register("gpu", host=HOST, worker="w2", incarnation="i-w2b", now=store.now())
    store.claims.heartbeat(host=HOST, worker="w2", queue="gpu", incarnation="i-w2b", model="sd-xl", now=store.now())
    assert of(page(collector), "workers_busy", queue="gpu") == 2, "the next worker of the slot is busy"


def test_running_workers_of_the_own_host_are_published_by_name(store: JobStore, collector: QueueCollector) -> None:
    for worker, host, ago_s in (("here", HOST, 0), ("ended", HOST, 0), ("gone", HOST, 31), ("theirs", "other", 0)):
        store.claims.register("gpu", host=host, worker=worker, incarnation="i", now=store.now() - ago_s)
        store.claims.heartbeat(
            host=host, worker=worker, queue="gpu", incarnation="i", model=None, now=store.now() - ago_s
        )
    assert store.fencing.retire_worker(host=HOST, worker="ended", incarnation="i", now=store.now())

    found_workers = [dict(labels) for name, labels in page(collector) if name == "gpuwarden_queue_host_worker_info"]

    assert found_workers == [{"queue": "gpu", "worker": "here"}]


def test_retries_dead_workers_quarantined_gpus_and_consumer_lag_are_counted(
    store: JobStore, collector: QueueCollector
) -> None:
    job_id = submit(store)
    claim(store)
    store.fencing.fence(job_id, attempt=1, incarnation="i-w1", condition=Condition.DEAD_WORKER, now=store.now())
    assert of(page(collector), "dead_workers", queue="gpu") == 1
    store.fencing.requeue(job_id, attempt=1, condition=Condition.DEAD_WORKER, now=store.now())
    claim(store, worker="w2")
    store.claims.register("gpu", host=HOST, worker="w2", incarnation="another", now=store.now())
    store.gpu_quarantine.quarantine(["GPU-a"], host=HOST, worker="w1", reason="", now=store.now())
    store.gpu_quarantine.quarantine(["GPU-a"], host=HOST, worker="w2", reason="", now=store.now())
    submit(store)
    submit(store)
    for _ in range(3):
        complete(store, claim(store, worker="w3"))
    store.outbox.acknowledge("mailer", store.outbox.events("mailer", limit=1)[0], now=store.now())
    submit(store)
    complete(store, claim(store, worker="w3"))

    found = page(collector)

    assert of(found, "retries_total", queue="gpu", cause="condition") == 1
    assert of(found, "retries_total", queue="gpu", cause="reclaim") == 1
    assert of(found, "gpus_quarantined") == 1
    assert of(found, "consumer_lag_events", consumer="mailer") == 3, "an event without a position counts too"


def items_of(found: Page) -> dict[tuple[str, str, str], tuple[float | None, float]]:
    """Finished and failed items by run, host and worker."""
    names = ("run", "worker_host", "worker")
    failed = [(dict(labels), value) for (name, labels), value in found.items() if name.endswith("_run_items_failed")]
    return {(its["run"], its["worker_host"], its["worker"]): (of(found, "run_items_done", **its), value)
            for its, value in failed if set(its) == set(names)}  # fmt: skip


def end_items(store: JobStore, job: Job, *ends: str) -> None:
    its: dict[str, Any] = {"attempt": job.attempt, "incarnation": job.claimed_by, "now": store.now()}
    for end in ends:
        item = store.items.take(job.job_id, **its)
        assert item is not None
        if end == "done":
            assert store.items.finish(job.job_id, **its, item=item.item)
        else:
            assert store.items.fail(job.job_id, **its, item=item.item, reason="boom", tries_max=99)


def render(store: JobStore, run_id: str, *, wrangled: bool = True, jobs: int = 1) -> None:
    store.runs.submit_run(
        run_id, {str(n): Submission(queue="gpu") for n in range(jobs)}, wrangled=wrangled, now=store.now()
    )
    store.items.add(run_id, ["a", "b", "c"], now=store.now())


def test_failing_workers_are_published_for_wrangled_runs(store: JobStore, collector: QueueCollector) -> None:
    render(store, "r1", jobs=3)
    end_items(store, claim(store, worker="bad"), "failed", "failed", "failed", "failed")
    end_items(store, claim(store, worker="mixed"), "failed", "done")
    end_items(store, claim(store, worker="good"), "done")
    render(store, "r2", wrangled=False)
    end_items(store, claim(store, worker="unasked"), "failed")

    found = page(collector)
    assert items_of(found) == {("r1", HOST, "bad"): (0, 3), ("r1", HOST, "mixed"): (1, 1)}, "each item once"
    assert of(found, "run_workers_truncated") == 0

    store.item_failures.forgive_run("r1", who="ann", reason="fixed", now=store.now())
    assert items_of(page(collector)) == {}, "forgiven failures do not count"
    store.item_failures.ask_wrangling("r2", wrangled=True)
    assert items_of(page(collector)) == {("r2", HOST, "unasked"): (0, 1)}
    store.admin.cancel_run("r2", reason="", now=store.now())
    assert items_of(page(collector)) == {}, "an ended run does not count"


def test_ended_runs_are_counted_by_outcome(store: JobStore, collector: QueueCollector) -> None:
    page(collector)
    render(store, "r1")
    complete(store, claim(store), after_s=1)
    render(store, "r2")
    store.admin.cancel_run("r2", reason="", now=store.now())

    found = page(collector)

    assert {name: of(found, "runs_ended_total", outcome=name) for name in ("completed", "failed", "cancelled")} == {
        "completed": 1,
        "failed": 0,
        "cancelled": 1,
    }
    assert of(found, "jobs_ended_total", queue="gpu", job_class="gpu", outcome="completed") == 1


def test_failed_jobs_of_a_known_queue_are_0_before_the_first(store: JobStore, collector: QueueCollector) -> None:
    store.claims.register("gpu", host=HOST, worker="w1", incarnation="i-w1", now=store.now())

    found = page(collector)

    assert {of(found, "jobs_ended_total", queue="gpu", job_class=each, outcome="failed") for each in JobClass} == {0}


def test_worker_that_fatal_errors_locked_is_published(store: JobStore, collector: QueueCollector) -> None:
    for worker in ("w1", "w2"):
        store.claims.register("gpu", host=HOST, worker=worker, incarnation=f"i-{worker}", now=store.now())
    store.admin.lock(host=HOST, worker="w2", who="ann", reason="fan", now=store.now())
    give_back_three(store)

    locked = {"queue": "gpu", "worker_host": HOST}
    found = page(collector)
    assert of(found, "worker_locked_info", **locked, worker="w1") == 1
    assert of(found, "worker_locked_info", **locked, worker="w2") is None, "an operator locked it"

    store.admin.unlock(host=HOST, worker="w1", who="ann", now=store.now())
    assert of(page(collector), "worker_locked_info", **locked, worker="w1") is None


def give_back_three(store: JobStore) -> None:
    for n in range(3):
        submit(store, priority=-n)
        job = claim(store)
        slot = Slot(host=HOST, worker="w1")
        its: dict[str, Any] = {"attempt": 1, "incarnation": "i-w1", "slot": slot, "now": store.now()}
        assert store.claims.give_back(job.job_id, **its, reason="CUDA error")


def test_worst_workers_are_published(
    store: JobStore, collector: QueueCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    render(store, "r1", jobs=3)
    end_items(store, claim(store, worker="much"), "failed", "failed", "done")
    end_items(store, claim(store, worker="little"), "failed")
    end_items(store, claim(store, worker="none"), "failed", "failed")
    monkeypatch.setattr("gpuwarden.queue.counts.FAILING_MAX", 2)

    found = page(collector)

    assert [worker for _, _, worker in items_of(found)] == ["none", "little"], (
        "a worker that finished an item comes last"
    )
    assert of(found, "run_workers_truncated") == 1


def test_quarantined_gpus_of_the_own_host_are_published_once(store: JobStore, collector: QueueCollector) -> None:
    for host, gpu, worker in ((HOST, "GPU-0", "w1"), (HOST, "GPU-0", "w2"), ("other", "GPU-1", "w1")):
        store.gpu_quarantine.quarantine([gpu], host=host, worker=worker, reason="lost", now=store.now())

    found = page(collector)

    assert of(found, "host_gpu_quarantined_info", gpu="GPU-0") == 1
    assert of(found, "host_gpu_quarantined_info", gpu="GPU-1") is None


def test_outcomes_are_counted_once_per_job(store: JobStore, queue_url: str, collector: QueueCollector) -> None:
    submit(store, ago_s=40)
    complete(store, claim(store), after_s=100)
    submit(store, "load")
    job = claim(store, "load", "w2")
    store.claims.fail_by_worker(job.job_id, attempt=1, incarnation="i-w2", reason="it broke", now=store.now())
    store.admin.cancel(submit(store), reason="", now=store.now())

    for _ in range(2):
        found = page(collector)
    assert of(found, "jobs_ended_total", queue="gpu", job_class="gpu", outcome="completed") == 1
    assert of(found, "jobs_ended_total", queue="gpu", job_class="gpu", outcome="cancelled") == 1
    assert of(found, "jobs_ended_total", queue="gpu", job_class="gpu", outcome="failed") == 0
    assert of(found, "jobs_ended_total", queue="load", job_class="ingest_load", outcome="failed") == 1
    assert of(found, "wait_seconds_count", queue="gpu") == 1, "a cancelled job has no wait"
    assert of(found, "wait_seconds_sum", queue="gpu") == pytest.approx(40, abs=20)
    assert of(found, "wait_seconds_bucket", queue="gpu", le="30") == 0
    assert of(found, "wait_seconds_bucket", queue="gpu", le="120") == 1
    assert of(found, "job_duration_seconds_bucket", queue="gpu", job_class="gpu", le="60") == 0
    assert of(found, "job_duration_seconds_bucket", queue="gpu", job_class="gpu", le="+Inf") == 1

    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as later:
        assert of(page(later), "jobs_ended_total", queue="gpu", job_class="gpu", outcome="completed") == 0


@pytest.mark.needs_postgres
@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_event_committed_late_is_counted_once(store: JobStore, collector: QueueCollector) -> None:
    submit(store)
    submit(store)
    row = {"kind": "completed", "attempt": 1, "queue": "gpu", "job_class": "gpu", "written_at": 0.0}

    def completed() -> float | None:
        return of(page(collector), "jobs_ended_total", queue="gpu", job_class="gpu", outcome="completed")

    with writing(store._engine) as late:
        late.execute(insert(OUTBOX_EVENTS).values(job_id=1, **row))
        with writing(store._engine) as early:
            early.execute(insert(OUTBOX_EVENTS).values(job_id=2, **row))
        assert completed() == 1
        assert completed() == 1

    assert completed() == 2
    assert completed() == 2


def test_unreadable_queue_publishes_only_up_0(store: JobStore, collector: QueueCollector) -> None:
    submit(store)
    assert of(page(collector), "jobs", queue="gpu", state="queued") == 1
    rename_jobs(store, "jobs", "elsewhere")

    assert page(collector) == {("gpuwarden_queue_up", ()): 0}

    rename_jobs(store, "elsewhere", "jobs")
    assert of(page(collector), "jobs", queue="gpu", state="queued") == 1


def rename_jobs(store: JobStore, name: str, new_name: str) -> None:
    with writing(store._engine) as connection:
        connection.exec_driver_sql(f"ALTER TABLE {name} RENAME TO {new_name}")


def test_missing_queue_is_found_once_it_exists(backend: str, tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/later.db"
    with closing(QueueCollector(partial(existing, url), host=HOST)) as found:
        assert page(found) == {("gpuwarden_queue_up", ()): 0}
        assert list(tmp_path.iterdir()) == [], backend
        JobStore.open(url).close()

        assert of(page(found), "up") == 1


class SlowCounts(Counts):
    """Waits before it counts."""

    def __init__(self, engine: Engine, slow: "Slow") -> None:
        super().__init__(engine)
        self._slow = slow

    def waiting(self) -> dict[str, ClaimableJobs]:
        assert self._slow.go.wait(30)
        return super().waiting()


class Slow(JobStore):
    """A queue whose count, or whose every answer, waits for the test."""

    go: threading.Event
    all_of_it = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.counts = SlowCounts(engine, self)

    def now(self) -> float:
        if self.all_of_it:
            assert self.go.wait(30)
        return super().now()


def test_slow_count_does_not_delay_a_scrape(store: JobStore, queue_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(connect(queue_url))
    slow.go = threading.Event()
    monkeypatch.setattr(queue_metrics, "FIRST_COUNT_WAIT_S", 0.01)
    monkeypatch.setattr(queue_metrics, "COUNT_WAIT_S", 0.01)
    submit(store)
    claim(store)
    submit(store)
    with closing(QueueCollector(lambda: slow, host=HOST)) as found:
        first = page(found)
        assert of(first, "jobs", queue="gpu", state="running") == 1
        assert of(first, "jobs", queue="gpu", state="queued") is None, "unknown is not zero"
        assert of(first, "count_age_seconds") is None

        slow.go.set()
        eventually(lambda: of(page(found), "jobs", queue="gpu", state="queued") == 1, "it is counted")
        slow.go.clear()
        submit(store)
        page(found)
        later = page(found)
        assert of(later, "jobs", queue="gpu", state="queued") == 1
        assert (of(later, "count_age_seconds") or 0) > 0

        monkeypatch.setattr(queue_metrics, "COUNT_AGE_MAX_S", 0.0)
        assert of(page(found), "jobs", queue="gpu", state="queued") is None
        slow.go.set()


def test_count_pauses_in_proportion_to_its_duration(
    store: JobStore, queue_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_metrics, "COUNT_REST", 1e9)
    submit(store)
    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as found:
        assert of(page(found), "jobs", queue="gpu", state="queued") == 1
        submit(store)
        assert of(page(found), "jobs", queue="gpu", state="queued") == 1
        monkeypatch.setattr(queue_metrics, "COUNT_REST", 0.0)

        assert of(page(found), "jobs", queue="gpu", state="queued") == 2


def test_slow_queue_is_unreadable(store: JobStore, queue_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store
    monkeypatch.setattr(queue_metrics, "ANSWER_S", 0.05)
    slow = Slow(connect(queue_url))
    slow.go, slow.all_of_it = threading.Event(), True
    with closing(QueueCollector(lambda: slow, host=HOST)) as found:
        for _ in range(3):
            assert page(found) == {("gpuwarden_queue_up", ()): 0}
        slow.go.set()

        eventually(lambda: of(page(found), "up") == 1, "it answers")


def test_failed_count_publishes_only_up_0(store: JobStore, queue_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(store)
    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as found:
        with monkeypatch.context() as patch:
            patch.setattr(Counts, "waiting", broken)
            assert page(found) == {("gpuwarden_queue_up", ()): 0}

        assert of(page(found), "jobs", queue="gpu", state="queued") == 1


def broken(_counts: Counts) -> None:
    raise DatabaseError("the server has gone")


def test_published_series_are_the_documented_ones(store: JobStore, collector: QueueCollector) -> None:
    submit(store)
    complete(store, claim(store))
    submit(store)
    store.outbox.acknowledge("mailer", store.outbox.events("mailer")[-1], now=store.now())
    render(store, "r0")
    store.admin.cancel_run("r0", reason="", now=store.now())
    render(store, "r1")
    claim(store)
    end_items(store, claim(store, worker="w2"), "failed")
    submit(store)
    give_back_three(store)
    store.gpu_quarantine.quarantine(["GPU-0"], host=HOST, worker=None, reason="lost", now=store.now())

    found = names(page(collector))

    parts = ("_bucket", "_count", "_sum")
    whole = {
        next((name.removesuffix(part) for part in parts if name.removesuffix(part) in SERIES), name) for name in found
    }
    assert whole == set(SERIES)
    for name, series in SERIES.items():
        assert series.meaning.endswith("."), name


def test_value_on_a_bucket_bound_is_within_the_bucket() -> None:
    spread = Histogram()
    for value_s in (0.1, 0.2, 1e9):
        spread.add(value_s)

    buckets = dict(spread.buckets())
    assert (buckets["0.1"], buckets["0.5"], buckets["43200"], buckets["+Inf"]) == (1, 2, 2, 3)


def test_serve_publishes_the_metrics_of_its_queue(store: JobStore, queue_url: str, tmp_path: Any) -> None:
    submit(store)
    with serving(tmp_path / "serve", "--queue-db", queue_url) as (served, _):
        found = read(httpx.get(f"{served.url}/metrics", trust_env=False, verify=PLAIN).text)
    with serving(tmp_path / "without") as (served, _):
        without = read(httpx.get(f"{served.url}/metrics", trust_env=False, verify=PLAIN).text)

    assert of(found, "jobs", queue="gpu", state="queued") == 1
    assert of(without, "up") is None
    assert "gpuwarden_remediator_ledger_up" in names(without)


def test_scrape_writes_nothing_to_the_queue(store: JobStore, collector: QueueCollector) -> None:
    submit(store)
    complete(store, claim(store))
    with closing(store.changes()) as changes:
        changes.any()
        page(collector)

        assert not changes.any()
    with writing(store._engine) as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox_events WHERE position IS NULL")) == 1
