"""The clock of a queue on PostgreSQL."""

import pytest
from sqlalchemy import func, select, text

from gpuwarden.db.clock import CLOCK_TRUSTED_S
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import HEARTBEAT_S
from gpuwarden.queue import JobStore, Submission
from remediator.clients.job_queue_sql import RENEWAL_S
from testbed.postgres import Postgres
from tests.gpuwarden.queue.builders import claim

pytestmark = pytest.mark.both_databases


@pytest.mark.needs_postgres
def test_time_is_the_servers(shared_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with reading(shared_store._engine) as connection:
        server = float(connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0)

    monkeypatch.setattr("time.time", lambda: 0.0)

    assert server <= shared_store.now() <= server + 30


@pytest.mark.needs_postgres
def test_server_clock_offset_is_reused(
    shared_store: JobStore, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shared_store.now()
    fresh = JobStore(shared_store._engine)
    monkeypatch.setattr("gpuwarden.db.clock.CLOCK_TRUSTED_S", 0.0)
    postgres.stop()

    assert before <= shared_store.now() <= before + 30
    with pytest.raises(DatabaseError):
        fresh.now()

    postgres.start()
    assert fresh.now() >= before


@pytest.mark.needs_postgres
def test_renewals_follow_a_clock_that_is_set_ahead(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore.open(f"{postgres_url}?options=-csearch_path%3Dpublic,pg_catalog")
    steady_s = 1000.0
    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: steady_s)
    job_id = store.runs.submit(Submission(queue="gpu"), now=store.now())
    claim(store, now=store.now())
    with writing(store._engine) as connection:  # found before the server's own, by the search path
        ahead = "SELECT pg_catalog.clock_timestamp() + interval '700 s'"
        returns = "RETURNS timestamptz LANGUAGE sql"
        connection.execute(text(f"CREATE FUNCTION public.clock_timestamp() {returns} AS $${ahead}$$"))
    stepped_s = steady_s
    others = JobStore(store._engine)

    steady_s += CLOCK_TRUSTED_S - 0.1  # the latest renewal by the old clock
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=store.now())
    assert others.sweeps.expired(now=others.now()) == {(job_id, 1)}
    steady_s += HEARTBEAT_S
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=store.now())

    assert steady_s - stepped_s < RENEWAL_S
    assert others.sweeps.expired(now=others.now()) == frozenset()
    store.close()
