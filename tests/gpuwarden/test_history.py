"""The queue's tables go down to an older version and up again: what is kept, what is lost, and what is refused."""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, Float, Integer, MetaData, create_engine, insert, select, text

from deploy.postgres import Postgres
from gpuwarden import history, revisions
from gpuwarden.cli import main
from gpuwarden.database import DatabaseError, connect, refuse_other_revisions
from gpuwarden.history import InTheWayError, WouldLoseError
from gpuwarden.job import JobClass, JobId, State
from gpuwarden.queue import JobStore, QueueSettings, Submission
from gpuwarden.schema import QUEUE
from tests.waiting import eventually

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006")
NEWEST = REVISIONS[-1]
NOW = 1000.0

Rows = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.needs_postgres)])
def empty_url(request: pytest.FixtureRequest, database: Path) -> Iterator[str]:
    """A database in which nothing is."""
    if request.param == "sqlite":
        yield f"sqlite:///{database}"
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    postgres.create("history")
    yield postgres.url("history")
    postgres.drop("history")


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    opened = connect(empty_url)
    yield opened
    opened.dispose()


def go(url: str, to: str | None = None, *, losing: bool = True) -> str:
    return history.migrate(url, QUEUE, to=to, losing=losing)


def reflected(engine: Engine) -> MetaData:
    tables = MetaData()
    tables.reflect(engine, only=lambda name, _: not name.endswith("_version"))
    return tables


def fill(engine: Engine) -> None:
    """Two rows in every table there is, with something in every column."""
    with engine.begin() as connection:
        for table in reflected(engine).sorted_tables:
            for n in (1, 2):
                row: dict[str, Any] = {}
                for column in table.columns:
                    number = isinstance(column.type, Integer | Float)
                    row[column.name] = n + len(column.name) / 2 if isinstance(column.type, Float) else n
                    if not number:
                        row[column.name] = f"{column.name} {n}"
                row |= {name: value for name, value in KNOWN.items() if name in row and table.name == "jobs"}
                row |= {"wrangled": True} if "wrangled" in row else {}
                row |= {"state": "running"} if table.name == "runs" else {}
                row |= {"state": "done"} if table.name == "items" else {}
                row |= {"kind": "failed"} if table.name == "dispatch_events" else {}
                row |= {"run_id": f"run_id {n}"} if "run_id" in row else {}
                connection.execute(insert(table).values(**row))


KNOWN = {"state": "queued", "job_class": "gpu", "payload": {"a": 1}, "pending": 0, "gang": None, "recalled": False}


def rows(engine: Engine) -> Rows:
    with engine.connect() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in reflected(engine).sorted_tables
        }


def shared(some: Rows, others: Rows) -> tuple[Rows, Rows]:
    """What both know: the tables of both, and of these the columns of both."""
    columns = {
        name: set(some[name][0]) & set(others[name][0])
        for name in set(some) & set(others)
        if some[name] and others[name]
    }

    def cut(of: Rows) -> Rows:
        return {name: [{key: row[key] for key in row if key in columns[name]} for row in of[name]] for name in columns}

    return cut(some), cut(others)


def differences(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        options = {"version_table": QUEUE.version_table, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), QUEUE.tables))


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_an_older_version_wrote_is_there_again_after_the_way_up_and_down(
    empty_url: str, engine: Engine, revision: str
) -> None:
    go(empty_url, revision)
    fill(engine)
    before = rows(engine)

    go(empty_url)
    assert differences(engine) == []
    known, still = shared(before, rows(engine))
    assert known == still
    assert set(known) == set(before)
    go(empty_url, revision)

    assert rows(engine) == before


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_what_both_versions_know_outlives_the_way_down_and_up(empty_url: str, engine: Engine, revision: str) -> None:
    go(empty_url)
    fill(engine)
    before = rows(engine)

    go(empty_url, revision)
    known, still = shared(before, rows(engine))
    assert known == still
    assert {"jobs", "runs", "workers", "dispatch_events"} <= set(known)
    go(empty_url)

    known, still = shared(known, rows(engine))
    assert known == still
    assert differences(engine) == []


def test_the_tables_can_be_removed_and_made_again(empty_url: str, engine: Engine) -> None:
    go(empty_url)
    fill(engine)

    with pytest.raises(WouldLoseError, match="all 2 jobs"):
        go(empty_url, "none", losing=False)
    assert go(empty_url, "none") == "the queue was of revision 0006 and is of none now"
    assert rows(engine) == {}
    assert go(empty_url, "none") == "the queue is of revision none: nothing to do"

    go(empty_url)
    assert differences(engine) == []


@pytest.fixture
def used(empty_url: str) -> Iterator[JobStore]:
    """A queue in which the newest version has done a little of everything."""
    store = JobStore.open(empty_url)
    store.set_queue(
        QueueSettings(
            queue="sweeps", job_class=JobClass.INGEST, budget_s=60.0, lost_hold_s=None, set_at=NOW, set_by="ann"
        )
    )
    first = store.submit(Submission(queue="gpu", run_id="r1"), now=NOW)
    store.submit(Submission(queue="gpu", run_id="r1", needs=(first,)), now=NOW)
    store.submit(Submission(queue="sweeps"), now=NOW)
    store.register("gpu", host="box1", worker="w1", incarnation="i1", now=NOW, gpus=("GPU-a",))
    store.lock(host="box1", worker="w2", who="ann", because="", now=NOW)
    yield store
    store.close()


def finish(store: JobStore, queue: str, **result: Any) -> int:
    job = store.claim(queue, host="box1", worker=queue, incarnation=queue, now=NOW)
    assert job is not None
    assert store.complete(job.job_id, attempt=1, incarnation=queue, now=NOW, result=result)
    return job.job_id


def test_going_down_names_what_would_be_lost_and_loses_nothing_until_it_is_agreed_to(
    used: JobStore, empty_url: str, engine: Engine
) -> None:
    for queue in ("gpu", "gpu", "sweeps"):
        finish(used, queue, frames=3)
    before = rows(engine)

    with pytest.raises(WouldLoseError) as refused:
        go(empty_url, "0004", losing=False)

    *lost, advice = str(refused.value).splitlines()
    assert lost == [
        "the queue going down to 0004 would lose:",
        "  the settings of 1 queues",
        "  the results of 3 jobs",
        "  which jobs 1 jobs needed",
        "  the class of 1 jobs: ingest becomes ingest_load",
        "  that 1 runs have completed: they are running",
        "  4 events of jobs that completed or were cancelled, and of runs that ended",
    ]
    assert advice.startswith("End the programs that use it, then say --yes; a program of this version that is started ")
    assert rows(engine) == before
    go(empty_url, "0004")
    after = rows(engine)
    assert [row["job_class"] for row in after["jobs"]] == ["gpu", "gpu", "ingest_load"]
    assert [row["state"] for row in after["runs"]] == ["running"]
    assert after["dispatch_events"] == [], "each would have failed its run"

    again = JobStore.open(empty_url)
    assert again.run_state("r1") == "completed"
    again.close()


def test_going_down_names_the_runs_that_nobody_judges_any_more_and_the_bars_that_fall(
    used: JobStore, empty_url: str, engine: Engine
) -> None:
    assert used.ask_wrangling("r1", wrangled=True)
    assert used.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is not None
    assert used.forgive_run("r1", who="ann", because="", now=NOW) == 0
    assert used.migrate_run("r1", host="box1", worker="w1", still=lambda _: True, who="ann", because="", now=NOW)
    before = rows(engine)

    with pytest.raises(WouldLoseError) as refused:
        go(empty_url, "0005", losing=False)

    assert str(refused.value).splitlines()[:-1] == [
        "the queue going down to 0005 would lose:",
        "  that 1 runs are wrangled: nobody judges them",
        "  who forgave 1 runs, and when",
        "  1 bars of workers from runs: they claim them again",
    ]
    assert rows(engine) == before
    go(empty_url, "0005")
    go(empty_url)
    assert used.wrangled_runs() == []


def test_what_an_older_version_could_not_live_with_keeps_the_tables_up(
    used: JobStore, empty_url: str, engine: Engine
) -> None:
    assert used.block(2, because="")
    used.submit(Submission(queue="gpu", run_id="r1", needs=(JobId(1),)), now=NOW)

    with pytest.raises(InTheWayError) as refused:
        go(empty_url, "0001")

    assert str(refused.value).splitlines() == [
        "the queue cannot go down to 0001:",
        "  1 jobs wait for others (`gpuwarden job list --state waiting`): let what they need complete, or cancel them",
        "  1 blocked jobs need others that are not done (`gpuwarden job list --state blocked`): cancel them",
        "  1 jobs of class ingest are not over: let them end, or cancel them",
    ]
    assert differences(engine) == []
    used.cancel_run("r1", because="", now=NOW)
    used.cancel(3, because="", now=NOW)
    go(empty_url, "0001")


def test_a_job_whose_host_seems_lost_runs_in_the_older_version_and_has_a_lease(
    used: JobStore, empty_url: str, engine: Engine
) -> None:
    used.cancel(2, because="", now=NOW)
    used.cancel(3, because="", now=NOW)
    used.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW)
    used.lose(1, attempt=1, now=NOW)
    assert used.job(1).lease_expires_at is None

    go(empty_url, "0004")

    (job, *_) = rows(engine)["jobs"]
    assert job["state"] == "running"
    assert job["lease_expires_at"] > NOW + 600


def test_a_way_down_that_breaks_off_leaves_the_tables_as_they_were(
    empty_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(empty_url)
    fill(engine)
    before = rows(engine)
    with monkeypatch.context() as patch:
        patch.setattr("alembic.op.create_index", broken)
        with pytest.raises(RuntimeError, match="power cut"):
            go(empty_url, "0001")

    assert rows(engine) == before
    assert differences(engine) == []


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("power cut")


def test_a_database_of_the_first_version_without_a_history_is_brought_to_any(database: Path) -> None:
    url = f"sqlite:///{database}"
    go(url, "0001")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {QUEUE.version_table}"))

    assert go(url, "0003") == "the queue was of revision 0001 and is of 0003 now"
    engine.dispose()


# --- programs that are open


def test_a_program_that_is_open_is_refused_by_the_older_tables_and_goes_on_once_they_are_up_again(
    empty_url: str,
) -> None:
    store = JobStore.open(empty_url)
    store.submit(Submission(queue="gpu"), now=NOW)
    go(empty_url, "0004")

    for ask in (lambda: store.job(1), lambda: store.submit(Submission(queue="gpu"), now=NOW)):
        with pytest.raises(DatabaseError, match=r"no such (column|table)|no column named|does not exist"):
            ask()
    with pytest.raises(DatabaseError, match=r"tables of another version \(revision 0004; this one knows 0006\)"):
        JobStore.open(empty_url, migrate=False)

    go(empty_url)
    assert store.job(1).state is State.QUEUED
    store.close()


def test_an_idle_worker_outlives_tables_that_went_down_and_up(
    empty_url: str, host_dir: Path, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "bodies.py").write_text("def load(job, report):\n    return lambda: None\n")
    log = tmp_path / "worker.log"
    go(empty_url)
    worker = spawn(
        "-m", "gpuwarden", "worker", "--name", "w1", "--body", "bodies:load", "--store", empty_url, "--dir",
        str(host_dir), stderr=log, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    eventually(lambda: log.exists() and "ready" in log.read_text(), "the worker is ready", log=log.read_text)

    go(empty_url, "0004")
    eventually(
        lambda: "no such" in log.read_text() or "does not exist" in log.read_text() or worker.poll() is not None,
        "the worker meets the older tables", log=log.read_text, within_s=30,
    )  # fmt: skip
    go(empty_url)
    store = JobStore.open(empty_url)
    job_id = store.submit(Submission(queue="gpu"), now=store.now())

    eventually(lambda: store.job(job_id).state is State.COMPLETED, "the job is done", log=log.read_text, within_s=30)
    assert worker.poll() is None
    store.close()


@pytest.mark.parametrize("empty_url", [pytest.param("postgresql", marks=pytest.mark.needs_postgres)], indirect=True)
@pytest.mark.parametrize(("before", "after"), [("0006", "0004"), ("0004", "0006")])
def test_a_transaction_that_goes_on_to_another_table_while_they_move_is_let_through_and_then_they_move(
    empty_url: str, before: str, after: str
) -> None:
    go(empty_url, before)
    plain = empty_url.replace("+psycopg", "")
    with ExitStack() as stack:
        other, asking = (stack.enter_context(closing(psycopg.connect(plain))) for _ in range(2))
        beside = stack.enter_context(ThreadPoolExecutor())
        asking.autocommit = True
        other.execute("UPDATE workers SET last_seen_at = 0")
        moving = beside.submit(go, empty_url, after)
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'workers'::regclass"
        eventually(lambda: asking.execute(waits).fetchall(), "they wait for the transaction")

        other.execute("SELECT 1 FROM jobs")
        other.execute("SELECT 1 FROM runs")
        other.commit()

        assert moving.result(timeout=30) == f"the queue was of revision {before} and is of {after} now"


@pytest.mark.parametrize("empty_url", [pytest.param("postgresql", marks=pytest.mark.needs_postgres)], indirect=True)
def test_what_has_read_of_which_revision_the_tables_are_may_go_on_before_they_are_of_another(
    empty_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revisions, "IN_USE_S", 0.6)
    go(empty_url)
    with engine.connect() as other:
        refuse_other_revisions(other, QUEUE)

        with pytest.raises(DatabaseError, match="in use for 0"):
            go(empty_url, "0004")
        other.execute(text("UPDATE workers SET last_seen_at = 0"))


@pytest.mark.parametrize("empty_url", [pytest.param("postgresql", marks=pytest.mark.needs_postgres)], indirect=True)
def test_tables_that_a_program_never_lets_go_of_stay_as_they_are_and_it_is_said(
    empty_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revisions, "IN_USE_S", 0.6)
    go(empty_url)
    with engine.connect() as other:
        other.execute(text("UPDATE workers SET last_seen_at = 0"))

        with pytest.raises(DatabaseError, match=r"in use for 0\.6 s: end the programs that use them"):
            go(empty_url, "0004")

    assert differences(engine) == []


# --- the command


def test_the_command_goes_up_and_down_and_says_what_it_did(empty_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["queue", "migrate", "--store", empty_url, *argv])
        said = capsys.readouterr()
        return code, said.out, said.err

    assert run("--to", "0002") == (0, "the queue was of revision none and is of 0002 now\n", "")
    assert run() == (0, "the queue was of revision 0002 and is of 0006 now\n", "")
    assert run() == (0, "the queue is of revision 0006: nothing to do\n", "")
    code, out, err = run("--to", "0004")
    assert (code, out) == (1, "")
    assert err.startswith("gpuwarden queue: the queue going down to 0004 would lose:\n  nothing that is there\n")
    assert run("--to", "0004", "--yes") == (0, "the queue was of revision 0006 and is of 0004 now\n", "")
    assert run("--to", "7")[2] == (
        "gpuwarden queue: the queue has no revision '7': there are none, 0001, 0002, 0003, 0004, 0005, 0006\n"
    )
