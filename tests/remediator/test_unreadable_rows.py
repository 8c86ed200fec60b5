"""Rows with values that this version does not know: each costs itself only."""

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import MetaData

from gpuwarden.db.transactions import writing
from gpuwarden.queue import JobStore, QueueSettings, Submission
from gpuwarden.queue import schema as queue_schema
from gpuwarden.queue.open import existing
from remediator.ledger import schema as ledger_schema
from remediator.ledger.ledger import Ledger
from remediator.metrics.ledger import LedgerCollector
from remediator.metrics.queue import QueueCollector
from tests.remediator.builders import HOST, NOW, alert
from tests.remediator.ledger.test_ledger import accept, armed, opened

NAMES: Final = frozenset({"host", "worker", "queue", "incarnation", "run_id", "gpu", "episode_id", "fingerprint"})
"""Names may be any text."""


def run(part: JobStore | Ledger, statement: str) -> None:
    with writing(part._engine) as connection:
        connection.exec_driver_sql(statement)


def columns(tables: MetaData, table: str) -> list[str]:
    return [
        each.name
        for each in tables.tables[table].columns
        if not each.primary_key and each.name not in NAMES and not each.foreign_keys
    ]


def spoil(part: JobStore | Ledger, table: str, key: str, names: list[str]) -> int:
    """Spoil one column of each of the first rows. Returns the last one."""
    for number, name in enumerate(names, 1):
        run(part, f"UPDATE {table} SET {name} = 'weird' WHERE {key} = {number}")  # noqa: S608
    return len(names)


@pytest.fixture
def commands(
    store: JobStore, queue_url: str, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., int], tmp_path: Any
) -> Callable[..., int]:
    """Run a command on this queue and ledger."""
    assert store
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", queue_url)
    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", str(tmp_path))
    return cli


def page(*collectors: Any) -> str:
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    return generate_latest(registry).decode()


def test_unreadable_jobs_are_listed_and_cost_only_themselves(
    store: JobStore, commands: Callable[..., int], queue_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = columns(queue_schema.METADATA, "jobs")
    now = store.now()
    for _ in range(len(names) + 1):
        store.runs.submit(Submission(queue="gpu"), now=now)
    last = spoil(store, "jobs", "job_id", names) + 1

    assert commands("job", "list", "--limit", "0") == 0
    listed = capsys.readouterr().out.splitlines()[1:]
    assert [int(line.split()[0]) for line in listed] == list(range(1, last + 1))
    assert "unreadable: 'weird' is not a valid JobClass" in listed[names.index("job_class")]
    assert "unreadable" not in listed[-1]
    assert commands("job", "list", "--limit", "0", "--json") == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == last
    state = names.index("state") + 1
    assert commands("job", "show", str(state)) == 1
    assert f"row {state} of table jobs is unreadable: 'weird' is not a valid State" in capsys.readouterr().err
    for command in (("queue", "list"), ("runs", "list"), ("worker", "list"), ("job", "show", str(last))):
        assert commands(*command) == 0, command
    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as collector:
        assert "gpuwarden_queue_up 1.0" in page(collector)


def test_worker_fails_an_unreadable_job_and_takes_the_next(store: JobStore) -> None:
    first, second = (store.runs.submit(Submission(queue="gpu"), now=NOW) for _ in range(2))
    run(store, f"UPDATE jobs SET job_class = CAST(x'ff' AS TEXT) WHERE job_id = {first}")  # noqa: S608 - our own number
    take = partial(store.claims.claim, "gpu", host=HOST, worker="w1", incarnation="i1", now=NOW)

    assert take() is None
    job = take()

    assert job is not None
    assert job.job_id == second
    run(store, f"UPDATE jobs SET job_class = 'gpu' WHERE job_id = {first}")  # noqa: S608 - our own number
    failed = store.job(first)
    assert (failed.state, "is not a valid JobClass" in str(failed.reason)) == ("failed", True)


def test_unreadable_events_are_named_and_the_next_ones_follow(
    store: JobStore, commands: Callable[..., int], queue_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in columns(queue_schema.METADATA, "outbox_events") if name not in ("position", "kind")]
    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as collector:
        page(collector)
        for _ in range(len(names) + 2):
            store.admin.cancel(store.runs.submit(Submission(queue="gpu"), now=NOW), reason="", now=NOW)
        store.outbox.place_events()
        for number, name in enumerate([*names, "kind"], 1):
            run(store, f"UPDATE outbox_events SET {name} = 'weird' WHERE event_id = {number}")  # noqa: S608

        assert "gpuwarden_queue_up 1.0" in page(collector)

    assert commands("events", "me") == 0
    said = capsys.readouterr()
    assert f"job {len(names) + 2}, queue gpu" in said.out.splitlines()[-1]
    assert "table outbox_events is unreadable: 'weird' is not a valid Kind" in said.err
    assert commands("events", "me") == 0
    assert capsys.readouterr().out == ""


def test_unreadable_workers_queues_and_gpus_cost_only_themselves(
    store: JobStore, commands: Callable[..., int], queue_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    now = store.now()
    names = columns(queue_schema.METADATA, "workers")
    for number in range(len(names) + 1):
        store.claims.register("gpu", host=HOST, worker=f"w{number}", incarnation="i", now=now)
    for number, name in enumerate(names):
        run(store, f"UPDATE workers SET {name} = 'weird' WHERE worker = 'w{number}'")  # noqa: S608
    for queue in ("a", "b"):
        its = QueueSettings(queue=queue, job_class=None, budget_s=7.0, lost_hold_s=None, set_at=now, set_by="ann")
        store.queue_settings.set_queue(its)
    run(store, "UPDATE queues SET job_class = 'weird', set_at = 'weird' WHERE queue = 'a'")
    for gpu in ("GPU-1", "GPU-2"):
        store.gpu_quarantine.quarantine([gpu], host=HOST, worker=None, reason="", now=now)
    run(store, "UPDATE quarantined_gpus SET since = 'weird' WHERE gpu = 'GPU-1'")

    for command, says in (
        (("worker", "list"), f"w{len(names)}"), (("queue", "list"), "budget 7 s"), (("gpu", "list"), "GPU-2"),
    ):  # fmt: skip
        assert commands(*command) == 0
        assert says in capsys.readouterr().out
    with closing(QueueCollector(partial(existing, queue_url), host=HOST)) as collector:
        assert "gpuwarden_queue_up 1.0" in page(collector)


def test_unreadable_episodes_cost_only_themselves(
    ledger: Ledger, commands: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    armed(ledger)
    names = [name for name in columns(ledger_schema.METADATA, "episodes") if name not in ("closed_at", "subject")]
    for number in range(len(names) + 1):
        accept(ledger, alert(f"f{number}", worker=f"w{number}"))
    last = spoil(ledger, "episodes", "episode_id", names) + 1

    assert ledger.episodes.list_open()[-1].episode_id == last
    assert commands("ledger", "list") == 0
    assert f"w{last - 1}" in capsys.readouterr().out
    for command in (("ledger", "summary"), ("ledger", "export"), ("ledger", "show", str(last)), ("ledger", "audit")):
        assert commands(*command) == 0, command
    assert "gpuwarden_remediator_ledger_up 1.0" in page(LedgerCollector(ledger, HOST))


def test_unreadable_alert_is_ignored_and_others_are_taken(ledger: Ledger) -> None:
    ledger.inbox.accept([alert(f"f{number}", worker=f"w{number}") for number in range(4)], [], now=NOW)
    run(ledger, "UPDATE alerts SET labels = 'weird' WHERE alert_id = 1")
    run(ledger, "UPDATE alerts SET labels = '{}' WHERE alert_id = 2")
    run(ledger, "UPDATE alerts SET annotations = '[]' WHERE alert_id = 3")

    assert ledger.inbox.take_new(HOST, now=NOW) == 1

    assert [each.worker for each in ledger.episodes.list_open()] == ["w3"]
    assert ledger.inbox.take_new(HOST, now=NOW) == 0


def test_unreadable_intent_leaves_out_its_episode(ledger: Ledger) -> None:
    broken, healthy = opened(ledger, worker="w1"), opened(ledger, worker="w2")
    run(
        ledger,
        "INSERT INTO intents (episode_id, kind, key, host, stage, created_at, entered_at, data)"  # noqa: S608
        f" VALUES ({broken.episode_id}, 'weird', 'k', 'box1', 'planned', 1, 1, '{{}}')",
    )

    assert [each.episode_id for each in ledger.episodes.list_open()] == [healthy.episode_id]


def test_unreadable_order_holds_all_actions_and_says_so(ledger: Ledger) -> None:
    armed(ledger)
    assert ledger.orders.current().pause(host=HOST, now=NOW) is None
    run(ledger, "UPDATE standing_orders SET act = 'weird'")

    orders = ledger.orders.current()

    pause = orders.pause(host=HOST, now=NOW)
    assert pause is not None
    assert "table standing_orders is unreadable: 'weird' is not a valid Act" in pause.reason
    assert not orders.armed(host=HOST, remedy="restart_worker")
