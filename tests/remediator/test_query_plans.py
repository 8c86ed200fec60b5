"""Plans of the statements that run by themselves: none scans a table that grows with finished jobs or closed episodes.

Workers, executor and webhook run on databases with a history. Each of their statements is explained afterwards.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import Engine, MetaData, UniqueConstraint, event

from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import Condition, JobClass
from gpuwarden.queue import Job, JobStore, QueueSettings, Slot, Submission
from gpuwarden.queue import schema as queue_schema
from gpuwarden.queue.claims import Claims
from gpuwarden.queue.counts import Counts
from gpuwarden.queue.fencing import Fencing
from gpuwarden.queue.hosts.batches import Batches
from gpuwarden.queue.hosts.lost_hosts import LostHosts
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from gpuwarden.queue.hosts.tokens import HostTokens, Scope
from gpuwarden.queue.items.items import Items
from gpuwarden.queue.models import Beat, Renewal, SlotClaim, Success
from gpuwarden.queue.outbox import Outbox
from gpuwarden.queue.sweeps import Sweeps
from remediator.executor import housekeeping
from remediator.ledger import schema as ledger_schema
from remediator.ledger.inbox import Inbox
from remediator.ledger.intents import Intents
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import GATHER_S, Notices, Parcel
from remediator.metrics.ledger import LedgerCollector
from remediator.plan import Outcome, Scale, Taint
from remediator.reasons import Reason
from tests.remediator.builders import HOST, alert
from tests.remediator.executor.builders import executor, running, to_the_end, turn
from tests.remediator.executor.test_runs import accused_worker
from tests.remediator.ledger.test_ledger import BEGIN, BOUNDLESS, REFUSAL, opened
from tests.remediator.world import Box, World

GROWS: Final = frozenset(
    {
        *("jobs", "runs", "outbox_events", "dependencies", "items", "item_outcomes", "host_tokens", "task_orders"),
        *("episodes", "alerts", "journal", "intents", "run_decisions", "used_intent_keys", "notices"),
    }
)

SMALL: Final = frozenset(
    {
        *("jobs_claimable", "jobs_by_model", "jobs_by_lease", "jobs_by_worker", "jobs_at_work"),
        *(
            "outbox_events_unplaced",
            "outbox_events_unheeded",
            "runs_wrangled",
            "intents_owed",
            "task_orders_open",
            "notices_waiting",
        ),
        "alerts_by_state",  # in the order of ids, with a limit
        "jobs_tried_again",  # requeued jobs are few
        "one_open_episode_per_subject",
    }
)
"""Indexes of unfinished rows."""

COARSE: Final = ("(kind=?)", "(state=?)", "(stage=?)", "(host=?)", "(queue=?)", "(outcome=?)")
"""Conditions of a search that most rows of a table may meet."""

BY_OPERATORS: Final = {
    Fencing: {"dead_workers"},
    HostTokens: {"enrol", "rotate", "revoke", "rows"},
    Items: {"reset", "of_run", "counts"},
    Outbox: {"events_of", "consumers"},
    Counts: {"ended"},
    Inbox: {"refused", "last_alert_at"},
}
"""Methods that only commands call."""

OLD: Final = 1_000_000.0
DOUBLINGS: Final = 12

Statement = tuple[str, Any]


# --- what is recorded


@contextmanager
def recorded(*engines: Engine) -> Iterator[dict[str, tuple[Engine, Any]]]:
    """Each statement with its engine and the parameters of one call."""
    found: dict[str, tuple[Engine, Any]] = {}

    def note(connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", statement):
            found.setdefault(statement, (connection.engine, parameters[0] if many else parameters))

    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


@contextmanager
def called(*kinds: type) -> Iterator[set[str]]:
    """The public methods of these classes that are called."""
    found: set[str] = set()
    with pytest.MonkeyPatch.context() as patched:
        for kind in kinds:
            for name in public(kind):
                patched.setattr(kind, name, partial_of(found, f"{kind.__name__}.{name}", getattr(kind, name)))
        yield found


def partial_of(found: set[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*its: Any, **named: Any) -> Any:
        found.add(name)
        return method(*its, **named)

    return call


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")} - BY_OPERATORS.get(kind, set())


# --- plans


def scanned(engine: Engine, statement: str, parameters: Any) -> set[str]:
    """The growing tables that a statement scans."""
    if "WHERE" not in statement and "LIMIT" in statement:
        return set()  # it ends at its limit
    aliases = {alias: table for table, alias in re.findall(r"(\w+) AS (\w+)", statement)}
    with reading(engine) as connection:
        if engine.dialect.name == "postgresql":
            (plan,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
            return set(scans(plan["Plan"]))
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    found = set()
    for row in rows:
        match = re.match(r"(SCAN|SEARCH) (\w+)(?:.* INDEX (\w+))?(?: (\(\w+=\?\)))?", row.detail)
        if match is None or (match[1] == "SEARCH" and match[4] not in COARSE):
            continue
        table, index = aliases.get(match[2], match[2]), match[3]
        found |= {f"{table} by {index}"} if table in GROWS and index not in SMALL else set()
    return found


def scans(plan: Mapping[str, Any]) -> Iterator[str]:
    """The growing tables that a plan of PostgreSQL scans."""
    index, kind = plan.get("Index Name"), plan["Node Type"]
    table = plan.get("Relation Name")
    whole = kind == "Seq Scan" or (kind.startswith("Index") and "Index Cond" not in plan)
    if table in GROWS and whole and index not in SMALL:
        yield f"{table} by {index}"
    for each in plan.get("Plans", ()):
        yield from scans(each)


def assert_no_scans(found: Mapping[str, tuple[Engine, Any]], *, but: str = "") -> None:
    bad = {its: scanned(engine, its, parameters) - {but} for its, (engine, parameters) in found.items()}
    assert {statement: tables for statement, tables in bad.items() if tables} == {}


# --- a history


def fill(store: JobStore, ledger: Ledger) -> None:
    """Thousands of finished jobs, ended runs and closed episodes."""
    store.runs.submit(Submission(queue="gpu"), now=OLD)
    job = store.claims.claim("gpu", host="old", worker="old", incarnation="old", now=OLD)
    assert job is not None
    store.claims.complete(job.job_id, attempt=1, incarnation="old", now=OLD)
    ledger.inbox.accept([alert(worker="old", host="old")], [], now=OLD)
    ledger.inbox.take_new("old", now=OLD)
    jobs = columns(queue_schema.METADATA, "jobs", "job_id")
    episodes = columns(ledger_schema.METADATA, "episodes", "episode_id")
    run(
        store._engine,
        *[f"INSERT INTO jobs ({jobs}) SELECT {jobs} FROM jobs"] * DOUBLINGS,  # noqa: S608 - our own names
        "DELETE FROM outbox_events",
        "INSERT INTO outbox_events (kind, job_id, attempt, written_at, position)"
        " SELECT 'completed', job_id, 1, ended_at, job_id FROM jobs",
        "INSERT INTO runs (run_id, state, submitted_at, ended_at)"
        " SELECT 'run ' || job_id, 'completed', submitted_at, ended_at FROM jobs",
        "UPDATE jobs SET run_id = 'run ' || job_id, gang = job_id - job_id / 2 WHERE job_id > 2",
        "INSERT INTO dependencies (job_id, needs_job_id) SELECT job_id, job_id - 1 FROM jobs WHERE job_id > 1",
        "INSERT INTO items (run_id, item, position, state, job_id, attempt, changed_at)"
        " SELECT 'run ' || job_id, 'item', 1, 'done', job_id, 1, ended_at FROM jobs",
        "INSERT INTO item_outcomes (run_id, item, outcome, job_id, attempt, host, worker, at)"
        " SELECT 'run ' || job_id, 'item', 'done', job_id, 1, 'old', 'old', ended_at FROM jobs",
        "INSERT INTO host_tokens (token_id, token_hash, host, scopes, created_at)"
        " SELECT 'id ' || job_id, '', 'host ' || job_id, 'queue', ended_at FROM jobs",
        "INSERT INTO task_orders (host, task_id, ordered_at, ordered_by, reason, expires_at, outcome, message)"
        " SELECT 'host ' || job_id, job_id, ended_at, '', '', ended_at, 'ended', '' FROM jobs",
    )
    run(
        ledger._engine,
        f"UPDATE episodes SET closed_at = {OLD}, outcome = 'fixed'",  # noqa: S608 - our own number
        *[f"INSERT INTO episodes ({episodes}) SELECT {episodes} FROM episodes"] * DOUBLINGS,  # noqa: S608 - our own names
        "INSERT INTO notices (key, recipient, kind, at, title, text, state, ended_at)"
        " SELECT 'k' || episode_id, 'administrator 0', '', opened_at, '', '', 'sent', opened_at FROM episodes",
        "INSERT INTO alerts (received_at, host, fingerprint, firing, labels, annotations, starts_at, state, episode_id)"
        " SELECT received_at, alerts.host, fingerprint, firing, labels, annotations, starts_at, 'linked',"
        " episodes.episode_id FROM alerts, episodes",
        "INSERT INTO journal (at, episode_id, act, step, message, host)"
        " SELECT closed_at, episode_id, 'saw', 'alert', '', host FROM episodes",
        "INSERT INTO intents (episode_id, kind, key, host, stage, created_at, entered_at, data)"
        " SELECT episode_id, 'free', 'key ' || episode_id, host, 'done', closed_at, closed_at, '{}' FROM episodes",
        "INSERT INTO run_decisions (episode_id, kind, decided_at, done_at)"
        " SELECT episode_id, 'block', closed_at, closed_at FROM episodes",
        "INSERT INTO used_intent_keys (kind, key) SELECT kind, 'used ' || key FROM intents",
    )
    for engine in {store._engine, ledger._engine}:
        if engine.dialect.name == "postgresql":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM ANALYZE")
                # The planner expects a thousand times as many rows.
                connection.exec_driver_sql("UPDATE pg_class SET reltuples = reltuples * 1000 WHERE reltuples > 1000")


def columns(tables: MetaData, table: str, key: str) -> str:
    return ", ".join(column.name for column in tables.tables[table].columns if column.name != key)


def run(engine: Engine, *statements: str) -> None:
    with writing(engine) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


# --- the queue


def claimed(store: JobStore, worker: str = "w1", queue: str = "gpu") -> Job:
    found = store.claims.claim(
        queue, host=HOST, worker=worker, incarnation=f"i {worker}", now=store.now(), loaded=queue
    )
    assert found is not None
    return found


def work(store: JobStore) -> None:
    """What workers do."""
    now = store.now()
    one: dict[str, Any] = {"queue": "gpu", "model": "gpu"}
    store.runs.submit(Submission(queue="gpu"), now=now)
    store.runs.submit_run("r1", {"a": Submission(**one), "b": Submission(**one)}, needs={"b": ["a"]}, now=now)
    store.runs.submit(Submission(**one, run_id="r2", ranks=2), now=now)
    for _ in range(3):
        store.runs.submit(Submission(**one), now=now)
    store.items.add("r1", ["x", "y"], now=now)
    for worker in ("w1", "w2"):
        store.claims.register("gpu", host=HOST, worker=worker, incarnation=f"i {worker}", now=now, gpus=["GPU-1"])
        store.claims.claim("empty", host=HOST, worker="w3", incarnation="i w3", now=now)
    store.claims.others_completed("gpu", host=HOST, worker="w1", since=now)
    store.claims.retired_for(host=HOST, worker="w1", incarnation="i w1")
    store.gpu_quarantine.quarantine_of(host=HOST, worker="w1")
    while (job := store.claims.claim("gpu", host=HOST, worker="w1", incarnation="i w1", now=now)) is not None:
        mine: dict[str, Any] = {"attempt": job.attempt, "incarnation": "i w1"}
        slot: dict[str, Any] = {"host": HOST, "worker": "w1", "queue": "gpu", "incarnation": "i w1"}
        store.claims.heartbeat(**slot, model="gpu", now=now, completed_at=now)
        store.claims.renew(job.job_id, **mine, now=now)
        store.claims.owns(job.job_id, **mine)
        store.runs.inputs(job.job_id)
        store.queries.of_gang(job.gang or 0)
        if job.run_id == "r1" and not job.needs:
            taken = [store.items.take(job.job_id, **mine, now=now) for _ in range(1)]
            assert taken[0] is not None
            store.items.fail(job.job_id, **mine, item=taken[0].item, reason="", now=now)
            again = store.items.take(job.job_id, **mine, now=now)
            assert again is not None
            store.items.finish(job.job_id, **mine, item=again.item, now=now)
        if job.attempt == 1 and job.run_id is None and job.model is None:
            store.claims.give_back(job.job_id, **mine, slot=Slot(host=HOST, worker="w1"), reason="", now=now)
            store.admin.unlock(host=HOST, worker="w1", who="", now=now)
        elif job.attempt == 1 and job.run_id is None:
            store.claims.release(job.job_id, **mine, now=now)
        elif job.attempt == 2 and job.run_id is None:
            store.claims.retry(job.job_id, **mine, reason="", now=now)
            store.claims.fail_by_worker(job.job_id, **mine, reason="", now=now)
        else:
            store.claims.complete(job.job_id, **mine, now=now)

    slot = {"queue": "turns", "host": HOST, "worker": "w1", "incarnation": "i w1"}
    for loaded in (None, "gpu"):
        for _ in range(2):
            store.runs.submit(Submission(queue="turns", model="gpu"), now=now)
        for _ in range(2):
            job = store.claims.claim(**slot, now=now)
            assert job is not None
            assert store.claims.complete_and_claim(
                Success(job.job_id, job.attempt), **slot, now=now, loaded=loaded
            ).done


def tend(store: JobStore) -> None:
    """What the executor and consumers of events do."""
    now = store.now()
    named = QueueSettings(
        queue="short", job_class=JobClass.GPU, budget_s=None, lost_hold_s=None, retention_days=7, set_at=now, set_by=""
    )
    store.queue_settings.set_queue(named)
    for number, act in enumerate(("requeue", "fail", "lose", "sweep")):
        queue, worker = f"q{number}", f"x{number}"
        store.runs.submit(Submission(queue=queue), now=now)
        job = claimed(store, worker, queue)
        its: dict[str, Any] = {"attempt": job.attempt, "now": now}
        if act in ("requeue", "fail"):
            store.fencing.fence(job.job_id, **its, incarnation=f"i {worker}", condition=Condition.DEAD_WORKER)
            store.fencing.hold_fence(job.job_id, **its)
            store.fencing.retire_worker(host=HOST, worker=worker, incarnation=f"i {worker}", now=now)
        if act == "requeue":
            away = Slot(host=HOST, worker=worker, gpus=("GPU-1",))
            assert store.fencing.requeue(job.job_id, **its, condition=Condition.STALL, avoid=away, avoid_s=60)
        elif act == "fail":
            assert store.fencing.fail(job.job_id, **its, reason="")
        elif act == "lose":
            assert store.lost_hosts.jobs_on(HOST)
            assert store.lost_hosts.mark_lost(job.job_id, **its)
            assert store.lost_hosts.mark_returned(job.job_id, **its)
        else:
            assert (job.job_id, 1) in store.sweeps.expired(now=now + 1e4)
            assert job.job_id in store.sweeps.reclaim_expired(now=now + 1e4)
            assert store.sweeps.reclaim_expired(now=now + 1e4, among=[job.job_id]) == []
    store.sweeps.consume_events(now=now)
    assert store.sweeps.delete_old(now=now)
    events = store.outbox.events("me")
    store.outbox.acknowledge("me", events[-1], now=now)
    store.outbox.begin("notifications", now=now)
    assert store.outbox.jobs_of_people(events)
    store.outbox.address_of(1)


def scrape(store: JobStore, ledger: Ledger) -> None:
    """What `/metrics` of `serve` reads."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, HOST))
    generate_latest(registry)
    store.counts.waiting()
    store.counts.failing()
    store.counts.snapshot(now=store.now())
    store.counts.of_host(HOST, now=store.now())
    store.counts.outcomes_after(store.counts.last_event() - 3, and_of={1, 2})


def notify(ledger: Ledger) -> None:
    """What the notifier of `serve` does."""
    notices, now = ledger.notices, ledger.now()
    settles: list[Callable[[Parcel], object]] = [
        lambda parcel: notices.mark_sent(parcel, now=now + GATHER_S),
        lambda parcel: notices.mark_failed(parcel, "refused", now=now + GATHER_S),
        lambda parcel: notices.drop(parcel, now=now + GATHER_S),
    ]
    for number, settle in enumerate(settles):
        name = f"administrator {number}"
        notices.notify_administrators(key=f"k{number}", kind="chain", title="", text="", now=now)
        notices.expand(3, now=now)
        assert name in notices.due(3, now=now + GATHER_S)
        parcel = notices.claim(name, now=now + GATHER_S)
        assert parcel is not None
        settle(parcel)
    notices.deliveries("k0")
    notices.withdraw("k0", now=now)
    notices.unsent()
    notices.delete_old(now=now)


def act_on_node(ledger: Ledger) -> None:
    """Taint a node, and start a tenant on demand."""
    limits: dict[str, Any] = {"safety_limits": BOUNDLESS, "now": ledger.now()}
    faulty = opened(ledger, worker=None, remedy="taint_node", condition="gpu_faulty", gpu="GPU-0")
    assert ledger.intents.begin_taint(faulty, Taint(message=""), state=None, fleet=[HOST], **limits) is None
    assert [each.act for each in ledger.journal.taints()] == ["decided"]
    tenant = opened(ledger, worker=None, remedy="scale_tenant", condition="demand_up", tenant="c1")
    step = Scale(on=True, container_kind="docker", container_handle="c1", gpus=frozenset({"GPU-9"}), message="")
    assert ledger.intents.begin_scaling(tenant, step, **limits) is None
    assert ledger.intents.last_scaling(tenant.episode_id)


def pass_on(store: JobStore) -> None:
    """What a gateway asks for its workers."""
    claim: dict[str, Any] = {"attempt": 1, "incarnation": "i"}
    store.claims.is_of(1, **claim, host=HOST, worker="w")
    store.claims.is_settled(1, attempt=1, reason=None, given_back=False, retried_after=None)
    store.counts.claimable("gpu", now=store.now(), at_most=10)
    its = SlotClaim(1, 1, "i", HOST, "w")
    store.batches.owned([its])
    store.batches.sync(HOST, [Beat("w", "gpu", "i", completed=True)], [Renewal(its, 600)], now=store.now())


# --- the tests


@pytest.mark.parametrize("tables", [queue_schema.METADATA, ledger_schema.METADATA], ids=["queue", "ledger"])
def test_each_reference_to_a_table_that_grows_has_an_index(tables: MetaData) -> None:
    """A deletion looks for rows that refer to the deleted one."""
    without = set()
    for table in tables.sorted_tables:
        unique = [each for each in table.constraints if isinstance(each, UniqueConstraint)]
        keyed = [
            *(each.columns for each in table.indexes),
            *(each.columns for each in unique),
            table.primary_key.columns,
        ]
        leading = {next(iter(columns)).name for columns in keyed}
        for key in table.foreign_keys:
            if key.column.table.name in GROWS and key.parent.name not in leading:
                without.add(f"{table.name}.{key.parent.name}")
    assert without == set()


@pytest.mark.both_databases
def test_no_statement_of_workers_or_sweeps_scans_what_grows(store: JobStore, ledger: Ledger) -> None:
    fill(store, ledger)
    token = store.host_tokens.enrol(HOST, now=OLD)
    store.task_orders.give(HOST, 1, who="ann", reason="", life_s=60.0, now=store.now())
    parts = (Batches, Claims, Fencing, HostTokens, Items, LostHosts, Sweeps, Outbox, Counts)
    with called(*parts) as names, recorded(store._engine, ledger._engine) as found:
        work(store)
        tend(store)
        scrape(store, ledger)
        pass_on(store)
        its = store.host_tokens.verify(token, Scope.QUEUE, store.now())
        assert its is not None
        store.host_tokens.see(store.host_tokens.valid([its.token_id], store.now()), store.now())
        result = TaskResult(task_id=1, outcome=TaskOutcome.ENDED, message="")
        assert store.task_orders.exchange(HOST, [], now=store.now()) == [1]
        assert store.task_orders.exchange(HOST, [result], now=store.now()) == []

    assert names == {f"{kind.__name__}.{name}" for kind in parts for name in public(kind)}
    assert_no_scans(found)


@pytest.mark.both_databases
def test_no_statement_of_executor_or_webhook_scans_what_grows(
    store: JobStore, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "CLOCK_BELIEVED_S", 0.0)
    fill(store, ledger)
    with called(Inbox, Intents, Notices) as names, recorded(store._engine, ledger._engine) as found:
        notify(ledger)
        job_id = running(store)
        world = World(Box(worker="w1", job_id=job_id))
        ledger.inbox.accept([alert(job_id=str(job_id))], [REFUSAL], now=ledger.now())
        ledger.inbox.accept_listed([], [], asked_after=ledger.inbox.newest_alert(), now=ledger.now())
        ledger.inbox.new_targets("box1")
        works = executor(ledger, store, world)
        works.housekeeping.beat()
        works.housekeeping.sweep()
        to_the_end(works, ledger)
        accused_worker(ledger, store)
        turn(works, ledger)
        planned = opened(ledger, worker="w5")
        assert ledger.intents.begin(planned, BEGIN, safety_limits=BOUNDLESS, now=ledger.now()) is None
        act_on_node(ledger)
        ledger.intents.withdraw(planned.episode_id, Reason.DONE, "", now=ledger.now())
        works.housekeeping._keep_s = 3600.0
        works.housekeeping.delete_old()
        ledger.health.check_usable()
        ledger.executors.last_beats()
        ledger.episodes.about_silent_hosts()
        ledger.orders.arm_by_default(host="box9", who="", now=ledger.now())

    assert names == {f"{kind.__name__}.{name}" for kind in (Inbox, Intents, Notices) for name in public(kind)}
    assert ledger.reports.get(1) is None, "old episodes are deleted"
    assert_no_scans(found)


@pytest.mark.both_databases
def test_no_report_of_a_period_or_a_queue_scans_what_grows(store: JobStore, ledger: Ledger) -> None:
    fill(store, ledger)
    now = ledger.now()
    with recorded(store._engine, ledger._engine) as found:
        ledger.reports.closed_since(now, outcomes=(Outcome.PARTLY, Outcome.REFUSED), host=HOST)
        ledger.reports.activity_since(now)
        ledger.reports.activity_since(now, host=HOST)
        assert list(ledger.reports.export(since=now)) == []
        assert list(store.queries.newest(limit=50, queue="rare")) == []
        assert list(store.queries.newest(queue="rare")) == []

    assert_no_scans(found, but="jobs by jobs_by_queue")  # the jobs of that queue, by id
