"""Workers, a sweeper, connections and a server die, stop and return, and every accepted job ends correctly.

The judge reads a log that the jobs write and the tables, and uses no code of the queue. The test prints the seed, and
`CHAOS_SEED` sets it. The timing of the processes still varies.
"""

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from bench.chaos.judge import Verdict, judge
from bench.chaos.log import Effect, effects_of
from bench.chaos.player import AT_WORK, Played, Stop, play
from testbed.postgres import NoPostgres, postgres

pytestmark = pytest.mark.nightly

ON_POSTGRESQL_S: Final = 45.0
ON_SQLITE_S: Final = 15.0
AGES_S: Final = 1000.0
"""Later than any stopped process was resumed."""


def seed() -> int:
    return int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))  # noqa: S311 - not a secret


def summarize(played: Played, verdict: Verdict) -> str:
    return f"CHAOS_SEED={played.seed}: {dict(verdict.counts)}, workers ended {dict(played.ends)}"


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("chaos")
    return play(f"sqlite:///{folder}/queue.db", folder, seconds=ON_SQLITE_S, seed=seed())


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
@pytest.mark.needs_postgres
def test_every_job_ends_once_in_its_last_attempt_on_postgresql(tmp_path: Path) -> None:
    with postgres(tmp_path / "server", durable=False) as server:
        if isinstance(server, NoPostgres):
            pytest.skip(server.reason)
        server.create("chaos")
        played = play(server.url("chaos"), tmp_path, seconds=ON_POSTGRESQL_S, seed=seed(), server=server)
        verdict = judge(played)

    print(summarize(played, verdict))
    assert verdict.broken == []
    expected = (
        "worker killed", "sweeper killed", "stopped for a while", "stopped longer than a lease", "server killed",
        "server stopped", "connection dropped", "completed", "failed", "that needed others", AT_WORK,
    )  # fmt: skip
    assert [what for what in expected if not verdict.counts[what]] == []
    assert verdict.stranded_s, "no job was retried"


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
def test_every_job_ends_once_in_its_last_attempt_on_sqlite(on_sqlite: Played) -> None:
    verdict = judge(on_sqlite)

    print(summarize(on_sqlite, verdict))
    assert verdict.broken == []
    assert [
        what for what in ("worker killed", "completed", "stopped for a while", AT_WORK) if not verdict.counts[what]
    ] == []


def test_shortest_play_still_kills_one_worker_at_work(tmp_path: Path) -> None:
    """As on a slow machine, where every other kill hits a worker that still starts."""
    played = play(f"sqlite:///{tmp_path}/queue.db", tmp_path, seconds=0.0, seed=seed())
    verdict = judge(played)

    print(summarize(played, verdict))
    assert verdict.broken == []
    # The planned kill repeats until it hits a worker at work: a worker may finish between the check and the kill.
    assert verdict.counts[AT_WORK] == 1 <= verdict.counts["worker killed"]
    assert verdict.stranded_s, "the job was not retried"


# --- the judge finds faults in a manipulated record


@dataclass(frozen=True, kw_only=True)
class Manipulated:
    """A copy of the record of a play, for manipulation."""

    played: Played
    file: Path

    def sql(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as connection:
            connection.execute(statement, values)

    def completed_job(self) -> int:
        with closing(sqlite3.connect(self.file)) as connection:
            found = connection.execute("SELECT min(job_id) FROM jobs WHERE state = 'completed'").fetchone()
        return int(found[0])

    def effects(self, job: int) -> list[Effect]:
        return [each for each in effects_of(self.played.log) if each.job == job]

    def append(self, effect: Effect, **changed: Any) -> None:
        with self.played.log.open("a", encoding="ascii") as log:
            log.write(json.dumps(vars(replace(effect, **changed))) + "\n")


@pytest.fixture
def manipulated(on_sqlite: Played, tmp_path: Path) -> Manipulated:
    file = Path(on_sqlite.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copy, log = Path(shutil.copy(file, tmp_path)), Path(shutil.copy(on_sqlite.log, tmp_path))
    return Manipulated(played=replace(on_sqlite, url=f"sqlite:///{copy}", log=log), file=copy)


def remove_job(manipulated: Manipulated) -> None:
    manipulated.sql("DELETE FROM jobs WHERE job_id = ?", manipulated.played.submitted[0])


def remove_event(manipulated: Manipulated) -> None:
    manipulated.sql("DELETE FROM outbox_events WHERE job_id = ? AND kind = 'completed'", manipulated.completed_job())


def change_event(manipulated: Manipulated) -> None:
    job = manipulated.completed_job()
    manipulated.sql("UPDATE outbox_events SET kind = 'failed' WHERE job_id = ? AND kind = 'completed'", job)


def set_job_running(manipulated: Manipulated) -> None:
    manipulated.sql("UPDATE jobs SET state = 'running' WHERE job_id = ?", manipulated.completed_job())


def add_later_attempt(manipulated: Manipulated) -> None:
    last = manipulated.effects(manipulated.completed_job())[-1]
    manipulated.append(last, attempt=last.attempt + 1, step=0, pid=1, at_s=last.at_s + 1)


def add_second_process(manipulated: Manipulated) -> None:
    last = manipulated.effects(manipulated.completed_job())[-1]
    manipulated.append(last, pid=1)


def remove_step(manipulated: Manipulated) -> None:
    job = manipulated.completed_job()
    lines = manipulated.played.log.read_text(encoding="ascii").splitlines(keepends=True)
    lines.remove(next(line for line in reversed(lines) if json.loads(line)["job"] == job))
    manipulated.played.log.write_text("".join(lines), encoding="ascii")


def continue_old_attempt(manipulated: Manipulated) -> None:
    last = manipulated.effects(manipulated.completed_job())[-1]
    manipulated.sql("UPDATE jobs SET attempt = attempt + 1 WHERE job_id = ?", last.job)
    manipulated.append(last, attempt=last.attempt + 1, step=0, pid=1, at_s=last.at_s + 1)
    manipulated.append(last, at_s=last.at_s + AGES_S)


def hide_event_from_consumer(manipulated: Manipulated) -> None:
    manipulated.played.seen[:] = [each for each in manipulated.played.seen if each != 1]


@pytest.mark.parametrize(
    ("manipulate", "text"),
    [
        (remove_job, "was accepted and is not there"),
        (remove_event, "and its events say"),
        (change_event, "and its events say"),
        (set_job_running, "is running"),
        (add_later_attempt, "worked on it"),
        (add_second_process, "several processes"),
        (remove_step, "which left steps"),
        (continue_old_attempt, "after the next began"),
        (hide_event_from_consumer, "a consumer saw"),
    ],
)
def test_judge_finds(manipulate: Callable[[Manipulated], None], text: str, manipulated: Manipulated) -> None:
    manipulated = replace(manipulated, played=replace(manipulated.played, seen=[*manipulated.played.seen]))
    assert judge(manipulated.played).broken == []

    manipulate(manipulated)

    assert [each for each in judge(manipulated.played).broken if text in each]


def test_judge_excuses_a_process_that_was_stopped(manipulated: Manipulated) -> None:
    continue_old_attempt(manipulated)
    late = manipulated.effects(manipulated.completed_job())[-1]
    stop = Stop(pid=late.pid, from_s=late.at_s - 1, to_s=late.at_s)

    found = judge(replace(manipulated.played, stops=[*manipulated.played.stops, stop])).broken

    assert [each for each in found if "after the next began" in each] == []
