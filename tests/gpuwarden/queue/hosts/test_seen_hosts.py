"""When hosts were last heard, on both databases."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from gpuwarden.db.transactions import reading
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import Kind
from gpuwarden.queue.hosts.silence import KNOWN_S, QUIET_S, Verdict
from gpuwarden.queue.models import Beat
from tests.gpuwarden.queue.builders import NOW, put_to_work, register

pytestmark = pytest.mark.both_databases


def decided(store: JobStore, now: float = NOW) -> list[str]:
    """Hosts that are marked as lost. A gateway has listened for long."""
    return [each.host for each in store.seen_hosts.decide(now=now, since=0.0, after_s=180.0).lost]


def heard(store: JobStore) -> dict[str, float]:
    return {each.host: each.heard_at for each in store.seen_hosts.rows()}


def lost(store: JobStore) -> list[str]:
    return [each.host for each in store.seen_hosts.rows() if each.lost_at is not None]


@pytest.mark.behaviour("D3")
def test_messages_reports_and_workers_are_signs_of_life(store: JobStore) -> None:
    store.batches.sync("idle", [], [], now=NOW)
    store.host_reports.save("reports", Kind.GPU, b"", now=NOW + 1)
    register(store, "i1", now=NOW + 2)

    decided(store, NOW + 3)

    assert heard(store) == {"idle": NOW, "reports": NOW + 1, "box1": NOW + 2}


def test_older_contact_of_a_worker_changes_nothing(store: JobStore) -> None:
    register(store, "i1", now=NOW)
    store.host_reports.save("box1", Kind.GPU, b"", now=NOW + 5)

    decided(store, NOW + 6)

    assert heard(store) == {"box1": NOW + 5}


@pytest.mark.needs_postgres
def test_look_locks_no_host_that_is_not_newer(shared_store: JobStore) -> None:
    """PostgreSQL notes the last lock of a row in `xmax`."""
    register(shared_store, "i1", now=NOW)
    decided(shared_store, NOW + 1)

    decided(shared_store, NOW + 2)

    with reading(shared_store._engine) as connection:
        assert connection.scalar(text("SELECT xmax FROM hosts")) == "0"


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
@pytest.mark.parametrize("by", ["message", "report", "worker"])
def test_lost_host_is_back_once_it_is_heard(store: JobStore, by: str) -> None:
    put_to_work(store, "box1")
    store.batches.sync("box1", [], [], now=NOW - 180)
    store.batches.sync("box2", [], [], now=NOW)
    assert decided(store, NOW - 1) == []
    assert (decided(store), decided(store)) == (["box1"], [])
    assert lost(store) == ["box1"]

    if by == "message":
        store.batches.sync("box1", [Beat(worker="w1", queue="gpu", incarnation="i1")], [], now=NOW + 1)
    elif by == "report":
        store.host_reports.save("box1", Kind.PAGE, b"", now=NOW + 1)
    else:
        register(store, "i1", now=NOW + 1)

    assert decided(store, NOW + 2) == []
    assert lost(store) == []
    assert heard(store)["box1"] == NOW + 1


def test_one_of_several_gateways_marks_a_host(store: JobStore) -> None:
    put_to_work(store, "box1")
    store.batches.sync("box1", [], [], now=NOW - 180)
    store.batches.sync("box2", [], [], now=NOW)

    with ThreadPoolExecutor(4) as threads:
        found = [each.result() for each in [threads.submit(decided, store) for _ in range(4)]]

    assert sorted(found) == [[], [], [], ["box1"]]


def test_silent_majority_is_spared_and_forgotten_after_an_hour(store: JobStore) -> None:
    put_to_work(store, "box1", "box2")
    for host in ("box1", "box2"):
        store.batches.sync(host, [], [], now=NOW)
    end = NOW + KNOWN_S
    for at in (NOW + 180, end):
        store.batches.sync("box3", [], [], now=at)
        found = store.seen_hosts.decide(now=at, since=0.0, after_s=180.0)
        assert [each.host for each in found.spared] == ["box1", "box2"]
    store.batches.sync("box3", [], [], now=end + 1)

    assert store.seen_hosts.decide(now=end + 1, since=0.0, after_s=180.0) == Verdict()
    assert list(heard(store)) == ["box3"]


def test_lost_host_stays_lost(store: JobStore) -> None:
    put_to_work(store, "box1")
    store.batches.sync("box1", [], [], now=NOW - 180)
    store.batches.sync("box2", [], [], now=NOW)
    decided(store)
    store.batches.sync("box2", [], [], now=NOW + 90 * 86400)

    decided(store, NOW + 90 * 86400)

    assert lost(store) == ["box1"]


def test_lost_host_without_jobs_is_forgotten_after_an_hour(store: JobStore) -> None:
    put_to_work(store, "box1")
    store.batches.sync("box1", [], [], now=NOW - 180)
    store.batches.sync("box2", [], [], now=NOW)
    decided(store)
    (job,) = store.jobs()
    store.claims.complete(job.job_id, attempt=1, incarnation="box1-i1", now=NOW)

    decided(store, NOW - 180 + KNOWN_S)
    assert lost(store) == ["box1"]
    decided(store, NOW - 180 + KNOWN_S + 1)
    assert lost(store) == []


@pytest.mark.behaviour("D4")
def test_hosts_that_were_switched_off_without_jobs_are_not_lost(store: JobStore) -> None:
    """They do not protect a host whose job may still run."""
    put_to_work(store, "box1")
    for host in ("box1", "off1", "off2", "off3"):
        store.batches.sync(host, [], [], now=NOW - 180)
    store.batches.sync("box2", [], [], now=NOW)

    assert decided(store) == ["box1"]
    assert lost(store) == ["box1"]


def test_revoked_host_is_never_lost(store: JobStore) -> None:
    put_to_work(store, "box1", "box2")
    for host in ("box1", "box2"):
        store.host_tokens.enrol(host, now=NOW - 180)
        store.batches.sync(host, [], [], now=NOW - 180)
    store.host_tokens.rotate("box2", now=NOW - 170)
    store.host_tokens.revoke("box1", now=NOW - 170)
    for host in ("box3", "box4"):
        store.batches.sync(host, [], [], now=NOW)

    assert decided(store) == ["box2"]
    assert list(heard(store)) == ["box2", "box3", "box4"]


def test_forgotten_host_comes_back_only_when_it_is_heard(store: JobStore) -> None:
    register(store, "i1", now=NOW)
    decided(store, NOW)
    assert not store.seen_hosts.forget("box1", now=NOW + QUIET_S)
    assert store.seen_hosts.forget("box1", now=NOW + QUIET_S + 1)
    assert not store.seen_hosts.forget("box1", now=NOW + QUIET_S + 1)

    decided(store, NOW + QUIET_S + 1)
    assert heard(store) == {}
    register(store, "i1", now=NOW + 200)
    decided(store, NOW + 201)
    assert heard(store) == {"box1": NOW + 200}


def test_host_that_no_gateway_decides_about_is_unknown(store: JobStore) -> None:
    store.batches.sync("box1", [], [], now=NOW)
    seen = store.seen_hosts

    found = seen.get("box1", now=NOW + KNOWN_S)
    assert found is not None
    assert found.heard_at == NOW
    assert seen.get("box1", now=NOW + KNOWN_S + 1) is None
    assert seen.get("box2", now=NOW) is None
