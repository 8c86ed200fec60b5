"""An executor is killed after any call: the next one finishes, and no action runs twice."""

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.job import JobClass, State
from gpuwarden.queue import JobStore
from gpuwarden.queue.schema import QUEUE
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import LEDGER
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import (
    Crash,
    Crashing,
    assert_fixed_once,
    executor,
    journal,
    sql,
    stalled_job,
    to_the_end,
    turn,
)
from tests.remediator.world import World

Scenes = Callable[..., AbstractContextManager[tuple[Ledger, JobStore, World]]]


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Makes a stalled job in a new ledger and a new queue, both SQLite files."""
    empty = tmp_path_factory.mktemp("empty")
    Ledger.open(f"sqlite:///{empty}/ledger.db").close()
    JobStore.open(f"sqlite:///{empty}/queue.db").close()

    @contextmanager
    def make(**submission: Any) -> Iterator[tuple[Ledger, JobStore, World]]:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(empty, folder, dirs_exist_ok=True)
            ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", host=HOST)
            store = JobStore.open(f"sqlite:///{folder}/queue.db")
            try:
                yield ledger, store, stalled_job(ledger, store, **submission)
            finally:
                ledger.close()
                store.close()

    return make


@pytest.fixture
def scenes(backend: str, request: pytest.FixtureRequest, scene: Scenes) -> Scenes:
    """Makes a stalled job in an empty ledger and an empty queue."""
    if backend == "sqlite":
        return scene
    ledger, store = request.getfixturevalue("ledger"), request.getfixturevalue("store")
    tables = ", ".join([*LEDGER.tables.tables, *QUEUE.tables.tables])

    @contextmanager
    def emptied(**submission: Any) -> Iterator[tuple[Ledger, JobStore, World]]:
        sql(ledger, f"TRUNCATE {tables} RESTART IDENTITY")
        yield ledger, store, stalled_job(ledger, store, **submission)

    return emptied


def crashing(ledger: Ledger, store: JobStore, world: World, after: int) -> bool:
    """Work until the process ends after that many calls. False if the episode ended first."""
    calls = itertools.count(1)
    works = executor(
        Crashing(ledger, after=after, calls=calls),
        Crashing(BuiltinQueue(store), after=after, calls=calls),
        Crashing(world, after=after, calls=calls),
    )
    try:
        to_the_end(works, ledger)
    except Crash:
        return True
    return False


@pytest.mark.parametrize(
    ("backend", "job_class", "ends_cleanly"),
    [
        pytest.param("sqlite", JobClass.GPU, False, id="requeued job, killed worker"),
        pytest.param(
            "postgresql",
            JobClass.INGEST_LOAD,
            True,
            id="failed job, worker exits on SIGTERM",
            marks=pytest.mark.needs_postgres,
        ),
    ],
    indirect=["backend"],
)
def test_next_executor_finishes_after_a_kill(scenes: Scenes, job_class: JobClass, *, ends_cleanly: bool) -> None:
    for after in itertools.count(1):
        with scenes(job_class=job_class) as (ledger, store, world):
            world.boxes["w1"].ends_cleanly = ends_cleanly
            crashed = crashing(ledger, store, world, after)
            to_the_end(executor(ledger, store, world), ledger)

            assert_fixed_once(ledger, store, world, failed=job_class is JobClass.INGEST_LOAD)
        if not crashed:
            assert after > 40, "the calls were counted"
            return


@settings(max_examples=15, deadline=None)
@given(crashes=st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_repeated_kills_still_fix_it_once(scene: Scenes, crashes: list[int]) -> None:
    with scene() as (ledger, store, world):
        for after in crashes:
            crashing(ledger, store, world, after)
        to_the_end(executor(ledger, store, world), ledger)

        assert_fixed_once(ledger, store, world)


def test_worker_that_recovers_while_no_executor_runs_is_not_fenced(ledger: Ledger, store: JobStore) -> None:
    """The executor ended after it wrote the intent, and then the worker continued."""
    world = stalled_job(ledger, store)
    with pytest.raises(Crash):
        turn(executor(Crashing(ledger, after=1), store, world), ledger)
    assert journal(ledger)[-1] == "decided begin"
    world.boxes["w1"].hung = False

    turn(executor(ledger, store, world), ledger)

    assert journal(ledger)[-1] == "decided wait: unconfirmed"
    assert store.job(1).state is State.RUNNING
    assert world.boxes["w1"].calls == []
