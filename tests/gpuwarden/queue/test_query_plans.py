"""Plans of the statements of every job."""

from operator import attrgetter
from typing import Any

import psycopg
import pytest
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from gpuwarden.queue import JobStore, claims
from gpuwarden.queue.models import Completion, Success
from gpuwarden.queue.schema import JOBS
from tests.gpuwarden.queue.builders import NOW, claim, submit

pytestmark = pytest.mark.both_databases


def scans(plan: dict[str, Any]) -> set[tuple[str, str]]:
    """Each table of a plan with its index, if any."""
    is_look = "Relation Name" in plan and "Scan" in plan["Node Type"]
    found = {(plan["Relation Name"], plan.get("Index Name", "none"))} if is_look else set()
    return found.union(*(scans(each) for each in plan.get("Plans", [])))


@pytest.mark.needs_postgres
@pytest.mark.parametrize(
    "statement",
    ["_find_next", "_take", "_complete", "one_trip.claim", "one_trip.complete", "one_trip.complete_and_claim"],
)
def test_common_statements_use_an_index(shared_store: JobStore, postgres_url: str, statement: str) -> None:
    for _ in range(3):
        submit(shared_store)
    job = claim(shared_store)
    shared_store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW)
    # Refused, and so it takes the steps that one statement replaces.
    assert not shared_store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW)
    slot: dict[str, Any] = {"queue": "gpu", "host": "box1", "worker": "w1", "incarnation": "i1"}
    assert shared_store.claims.complete_and_claim(Success(job.job_id, 1), **slot, now=NOW) == Completion(done=False)
    shared_store.claims.release(claim(shared_store).job_id, attempt=1, incarnation="i1", now=NOW)
    text, parameters = for_postgresql(
        next(kept for names, kept in attrgetter(statement)(claims).statements.items() if "loaded" not in names),
        queue="gpu",
        host="box1",
        worker="w1",
        incarnation="i1",
        now=NOW,
        until=NOW + 600,
        fresh_since=NOW - 30,
        job_id=1,
        attempt=1,
        result=None,
    )
    columns = ", ".join(column.name for column in JOBS.columns if not column.primary_key)
    with psycopg.connect(
        postgres_url.replace("+psycopg", ""), autocommit=True, cursor_factory=psycopg.ClientCursor
    ) as connection:
        # The plan of a full queue without running jobs, which is cached.
        more = f"INSERT INTO jobs ({columns}) SELECT {columns} FROM jobs, generate_series(1, 5000)"  # noqa: S608 - our own
        connection.execute(more)
        connection.execute("UPDATE jobs SET state = 'queued', worker = NULL")
        connection.execute("VACUUM ANALYZE jobs")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        connection.execute(b"PREPARE it AS " + text.encode())
        places = ", ".join(["%s"] * len(parameters))
        (found,) = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE it ({places})", parameters).fetchone() or ([],)

    looks = {index for table, index in scans(found[0]["Plan"]) if table == "jobs"}
    assert looks
    assert "none" not in looks
    assert statement not in ("_complete", "one_trip.complete") or looks == {"jobs_pkey"}


def for_postgresql(statement: Any, **values: object) -> tuple[str, list[object]]:
    """A prepared statement with `$1` and so on, and its arguments."""
    compiled = statement.compile(dialect=PGDialect_psycopg(paramstyle="numeric_dollar"))  # type: ignore[no-untyped-call]
    found = compiled.construct_params({f"p_{name}": value for name, value in values.items()}, _check=False)
    return str(compiled), [found[name] for name in compiled.positiontup]
