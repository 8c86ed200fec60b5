"""Workers, a sweeper, connections and a server that die, stop and come back: what the queue accepted is right.

It is judged by a log that the jobs' bodies write and a look at the tables, and by nothing of the queue's own. The seed
is printed; `CHAOS_SEED` sets it, and the processes' timing stays their own.
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
"""Later than anything that was stopped went on."""


def seed() -> int:
    return int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))  # noqa: S311 - it keeps no secret


def told(played: Played, verdict: Verdict) -> str:
    return f"CHAOS_SEED={played.seed}: {dict(verdict.counts)}, workers ended {dict(played.ends)}"


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("chaos")
    return play(f"sqlite:///{folder}/queue.db", folder, seconds=ON_SQLITE_S, seed=seed())


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
@pytest.mark.needs_postgres
def test_on_postgresql_every_job_ends_once_by_its_last_attempt_whatever_dies(tmp_path: Path) -> None:
    with postgres(tmp_path / "server", durable=False) as server:
        if isinstance(server, NoPostgres):
            pytest.skip(server.because)
        server.create("chaos")
        played = play(server.url("chaos"), tmp_path, seconds=ON_POSTGRESQL_S, seed=seed(), server=server)
        verdict = judge(played)

    print(told(played, verdict))
    assert verdict.broken == []
    wanted = ("worker killed", "sweeper killed", "stopped for a while", "stopped longer than a lease", "server killed",
              "server stopped", "connection dropped", "completed", "failed", "that needed others", AT_WORK)  # fmt: skip
    assert [what for what in wanted if not verdict.counts[what]] == []
    assert verdict.stranded_s, "none was tried again"


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
def test_on_sqlite_every_job_ends_once_by_its_last_attempt_whatever_dies(on_sqlite: Played) -> None:
    verdict = judge(on_sqlite)

    print(told(on_sqlite, verdict))
    assert verdict.broken == []
    assert [
        what for what in ("worker killed", "completed", "stopped for a while", AT_WORK) if not verdict.counts[what]
    ] == []


def test_a_play_that_is_over_before_anybody_works_has_one_killed_at_work_all_the_same(tmp_path: Path) -> None:
    """As on a machine so slow that every kill hits a worker that still starts, and no attempt comes to nothing."""
    played = play(f"sqlite:///{tmp_path}/queue.db", tmp_path, seconds=0.0, seed=seed())
    verdict = judge(played)

    print(told(played, verdict))
    assert verdict.broken == []
    # The plan's own kill goes on until one counts: its victim may leave its last step between the look and the kill.
    assert verdict.counts[AT_WORK] == 1 <= verdict.counts["worker killed"]
    assert verdict.stranded_s, "it was not tried again"


# --- the judge has eyes: where the same play is doctored, it says so


@dataclass(frozen=True, kw_only=True)
class Doctored:
    """A copy of what a play left, to be changed."""

    played: Played
    file: Path

    def sql(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as connection:
            connection.execute(statement, values)

    def a_completed_job(self) -> int:
        with closing(sqlite3.connect(self.file)) as connection:
            found = connection.execute("SELECT min(job_id) FROM jobs WHERE state = 'completed'").fetchone()
        return int(found[0])

    def effects(self, job: int) -> list[Effect]:
        return [each for each in effects_of(self.played.log) if each.job == job]

    def leave(self, effect: Effect, **changed: Any) -> None:
        with self.played.log.open("a", encoding="ascii") as log:
            log.write(json.dumps(vars(replace(effect, **changed))) + "\n")


@pytest.fixture
def doctored(on_sqlite: Played, tmp_path: Path) -> Doctored:
    file = Path(on_sqlite.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copy, log = Path(shutil.copy(file, tmp_path)), Path(shutil.copy(on_sqlite.log, tmp_path))
    return Doctored(played=replace(on_sqlite, url=f"sqlite:///{copy}", log=log), file=copy)


def a_job_is_gone(doctored: Doctored) -> None:
    doctored.sql("DELETE FROM jobs WHERE job_id = ?", doctored.played.submitted[0])


def an_event_is_gone(doctored: Doctored) -> None:
    doctored.sql("DELETE FROM dispatch_events WHERE job_id = ? AND kind = 'completed'", doctored.a_completed_job())


def an_event_of_another_end(doctored: Doctored) -> None:
    job = doctored.a_completed_job()
    doctored.sql("UPDATE dispatch_events SET kind = 'failed' WHERE job_id = ? AND kind = 'completed'", job)


def a_job_is_not_over(doctored: Doctored) -> None:
    doctored.sql("UPDATE jobs SET state = 'running' WHERE job_id = ?", doctored.a_completed_job())


def a_later_attempt_worked_on(doctored: Doctored) -> None:
    last = doctored.effects(doctored.a_completed_job())[-1]
    doctored.leave(last, attempt=last.attempt + 1, step=0, pid=1, at_s=last.at_s + 1)


def two_processes_had_one_attempt(doctored: Doctored) -> None:
    last = doctored.effects(doctored.a_completed_job())[-1]
    doctored.leave(last, pid=1)


def a_step_is_missing(doctored: Doctored) -> None:
    job = doctored.a_completed_job()
    lines = doctored.played.log.read_text(encoding="ascii").splitlines(keepends=True)
    lines.remove(next(line for line in reversed(lines) if json.loads(line)["job"] == job))
    doctored.played.log.write_text("".join(lines), encoding="ascii")


def an_old_attempt_went_on(doctored: Doctored) -> None:
    last = doctored.effects(doctored.a_completed_job())[-1]
    doctored.sql("UPDATE jobs SET attempt = attempt + 1 WHERE job_id = ?", last.job)
    doctored.leave(last, attempt=last.attempt + 1, step=0, pid=1, at_s=last.at_s + 1)
    doctored.leave(last, at_s=last.at_s + AGES_S)


def a_consumer_missed_one(doctored: Doctored) -> None:
    doctored.played.seen[:] = [each for each in doctored.played.seen if each != 1]


@pytest.mark.parametrize(
    ("doctor", "says"),
    [
        (a_job_is_gone, "was accepted and is not there"),
        (an_event_is_gone, "and its events say"),
        (an_event_of_another_end, "and its events say"),
        (a_job_is_not_over, "is running"),
        (a_later_attempt_worked_on, "worked on it"),
        (two_processes_had_one_attempt, "several processes"),
        (a_step_is_missing, "which left steps"),
        (an_old_attempt_went_on, "after the next began"),
        (a_consumer_missed_one, "a consumer saw"),
    ],
)
def test_the_judge_sees_that(doctor: Callable[[Doctored], None], says: str, doctored: Doctored) -> None:
    doctored = replace(doctored, played=replace(doctored.played, seen=[*doctored.played.seen]))
    assert judge(doctored.played).broken == []

    doctor(doctored)

    assert [each for each in judge(doctored.played).broken if says in each]


def test_the_judge_excuses_what_was_stopped_at_the_time(doctored: Doctored) -> None:
    an_old_attempt_went_on(doctored)
    late = doctored.effects(doctored.a_completed_job())[-1]
    stop = Stop(pid=late.pid, from_s=late.at_s - 1, to_s=late.at_s)

    found = judge(replace(doctored.played, stops=[*doctored.played.stops, stop])).broken

    assert [each for each in found if "after the next began" in each] == []
