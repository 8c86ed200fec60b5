"""kill -9 of a real executor at every commit and around every act: one stop, one start and one requeue each time.

Each mend is of a worker of its own, in a real container. One executor after another dies at its point, then a last one
is started and left alone. Many mends go on at once.
"""

import random
import subprocess
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Final

import pytest

from gpuwarden.job import State
from testbed.docker_engine import Engine
from tests.e2e import crashing
from tests.e2e.wedges import Ending, Room, Wedge, room, wedge

pytestmark = [pytest.mark.needs_docker, pytest.mark.slow]

AT_ONCE: Final = 6
PATIENCE_S: Final = 0.6
"""How long an executor works before it is killed at random, at most, seconds."""

KILLS_AT_RANDOM: Final = 12
"""After that many the next one is left alone: a start is believed only once it was seen to last."""

KILLS_WHILE_LOOKING: Final = 4
"""So many of them die before they can have kept what the worker was doing; the others die at what comes after it."""


@dataclass(frozen=True, kw_only=True)
class Mend:
    """The points at which executors die; without any they die at random moments, until it is done."""

    kills: tuple[str, ...]
    retries_max: int = 3

    def __str__(self) -> str:
        return ", ".join(self.kills) or "at random"

    @property
    def is_timed(self) -> bool:
        """Whether time decides what is told: the engine goes on with what it was asked, while nobody looks."""
        return not self.kills or any(kill.startswith("asked") for kill in self.kills)


def twice(*doings: str) -> tuple[str, ...]:
    """One executor dies before it has done this, and the next one right after it has."""
    return tuple(f"{when} {doing}" for doing in doings for when in ("before", "after"))


# The points are named by `tests.e2e.crashing`.
KILLS: Final = (
    twice("ledger: standing_orders", "ledger: saw alert: firing", "ledger: decided begin"),
    twice("ledger: saw capture", "queue: jobs fencing, workers"),
    twice("ledger: did fence", "ledger: decided stop"),
    twice("ledger: saw free: dead"),
    twice("queue: jobs queued, avoided", "ledger: saw settle: done"),
    twice("ledger: decided start", "ledger: saw free: done"),
    twice("docker stop", "docker start"),
    ("asked docker stop", "asked docker start"),
    # What comes after an act and is no part of it is not done again by the next one, which finds the act done.
    ("before queue: workers", "before ledger: did requeue", "before ledger: did start"),
    ("after queue: workers", "after ledger: did requeue", "after ledger: did start"),
    ("before ledger: did stop", "before ledger: decided close: mended"),
    ("after ledger: did stop", "after ledger: decided close: mended"),
)
KILLS_AT_THE_CAP: Final = (
    twice("queue: jobs failed, dispatch_events", "queue: runs failed, dispatch_events, jobs cancelled"),
    ("before ledger: did fail",),
    ("after ledger: did fail",),
)

UNDISTURBED: Final = Mend(kills=(crashing.NEVER,))
AT_RANDOM: Final = Mend(kills=())
REQUEUED: Final = (UNDISTURBED, *(Mend(kills=kills) for kills in KILLS), AT_RANDOM)
FAILED: Final = tuple(Mend(kills=kills, retries_max=0) for kills in KILLS_AT_THE_CAP)
WORKERS: Final = {mend: f"gpuwarden-killed-{number}" for number, mend in enumerate((*REQUEUED, *FAILED))}
DAILY: Final = {
    Mend(kills=twice("docker stop", "docker start")),
    Mend(kills=twice("queue: jobs queued, avoided", "ledger: saw settle: done")),
    *(Mend(kills=(f"{when} ledger: did fail",), retries_max=0) for when in ("before", "after")),
}
"""Ten points, around each act and each end of a job. All of them are for the night."""


@dataclass(frozen=True, kw_only=True)
class Mended:
    """How the executors ended that were killed, the points that each of them had reached, and what is found."""

    exits: Sequence[int]
    reached: Sequence[Sequence[str]]
    found: Ending


Endings = dict[Mend, Future[Mended]]


@pytest.fixture(scope="module")
def endings(request: pytest.FixtureRequest, work: Path, engine: Engine) -> Iterator[Endings]:
    """Every mend of this run, some of them at a time; all are over before the first is judged.

    Between two tests pytest changes the environment, which those that start programs read meanwhile.
    """
    nightly = any(each.get_closest_marker("nightly") for each in request.session.items if each.path == request.path)
    mends = [mend for mend in WORKERS if nightly or mend in DAILY]
    with room(work, engine, [WORKERS[mend] for mend in mends]) as shared, ThreadPoolExecutor(AT_ONCE) as pool:
        started = {mend: pool.submit(_play, shared, mend) for mend in mends}
        wait(started.values())
        yield started


def each_of(mends: Collection[Mend]) -> pytest.MarkDecorator:
    """One test for each mend, of the others at night."""
    marked = [mend if mend in DAILY else pytest.param(mend, marks=pytest.mark.nightly) for mend in mends]
    return pytest.mark.parametrize("mend", marked, ids=[str(mend) for mend in mends])


every_mend = each_of(WORKERS)


@every_mend
def test_the_container_is_stopped_once_and_started_once(endings: Endings, mend: Mend) -> None:
    found = endings[mend].result().found

    if mend.is_timed:  # two executors may ask for one stop, and each then sends its signals
        assert [event for event in found.history if event in ("start", "die", "restart")] == ["start", "die", "start"]
    else:
        assert found.history == ["create", "start", "kill 15", "kill 9", "die", "stop", "start"]
    first, last = (life.partition("@") for life in found.lives)
    assert first[0] == last[0]
    assert first[2] != last[2]
    assert found.restarts == 0


@each_of(REQUEUED)
def test_the_job_is_requeued_once_and_finished_by_its_second_attempt(endings: Endings, mend: Mend) -> None:
    found = endings[mend].result().found

    job = found.job
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 1, 0)
    assert found.events == ["completed"]
    assert (found.sibling.state, found.run_state) == (State.QUEUED, "running")


@each_of(FAILED)
def test_a_job_without_a_retry_left_fails_once_with_one_event_that_is_heeded(endings: Endings, mend: Mend) -> None:
    found = endings[mend].result().found

    job = found.job
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.FAILED, 1, 0, 0)
    assert found.events == ["failed", "run_failed"]
    assert (found.sibling.state, found.run_state) == (State.CANCELLED, "failed")


@every_mend
def test_both_intents_are_kept_and_the_one_episode_is_closed_as_mended(endings: Endings, mend: Mend) -> None:
    found = endings[mend].result().found

    assert found.intents == [("free", "done"), ("settle", "done")]
    assert [story.outcome for story in found.stories] == ["mended"]


@every_mend
def test_the_account_tells_each_step_once_but_for_what_the_deaths_explain(endings: Endings, mend: Mend) -> None:
    told = endings[mend].result().found.told

    expected = account(mend)
    if mend.is_timed:
        told, expected = _without_acts(told), _without_acts(expected)
    assert told == expected


@every_mend
def test_what_the_worker_was_doing_is_kept_once(endings: Endings, mend: Mend) -> None:
    found = endings[mend].result().found

    (capture,) = found.captures
    (process,) = capture.document["processes"]
    main = process["seen"][0]
    assert capture.document["armed"]
    assert main["python"]["owns_gil"]
    assert main["python"]["frames"][0]["function"] == "wedge"


@every_mend
def test_the_executors_did_die_where_they_were_to(endings: Endings, mend: Mend) -> None:
    mended = endings[mend].result()

    if mend is AT_RANDOM:
        assert len(mended.exits) >= 2
    elif mend is not UNDISTURBED:
        assert tuple(points[-1] for points in mended.reached) == mend.kills
    assert set(mended.exits) <= {-SIGKILL}


@pytest.mark.nightly
def test_executors_are_killed_at_every_point_that_any_of_them_reaches(endings: Endings) -> None:
    reached = {point for mend in WORKERS for points in endings[mend].result().reached for point in points}

    killed_at = {kill for mend in WORKERS for kill in mend.kills}
    assert reached == killed_at - {crashing.NEVER}


ACCOUNT: Final = (
    *("saw alert: firing", "decided begin", "saw capture", "did fence", "decided stop", "did stop", "saw free: dead"),
    *("did requeue", "decided start", "did start", "saw free: done", "decided close: mended"),
)
"""What the ledger tells of a mend, without what was waited for."""

AGAIN: Final = {
    "decided stop": {"after ledger: decided stop", "before docker stop"},
    "decided start": {"after ledger: decided start", "before docker start"},
}
"""Decided anew by the next executor, because it died between the decision and the act."""

UNTOLD: Final = {
    "did stop": {"after docker stop", *twice("queue: workers"), "before ledger: did stop"},
    "did start": {"after docker start", "before ledger: did start"},
}
"""Done and not told, because it died between the act and its record; the next executor sees that it is done."""

FOUND: Final = {
    *("after queue: jobs queued, avoided", "before ledger: did requeue"),
    *("after queue: jobs failed, dispatch_events", "before ledger: did fail"),
}
"""The job was settled and the ledger did not know: the next executor finds it settled."""


def account(mend: Mend) -> list[str]:
    """What the ledger has to tell of one mend."""
    lines: list[str] = []
    for line in ACCOUNT:
        if line == "did requeue":
            done = line if mend.retries_max else "did fail"
            lines.append("saw settle: done" if FOUND & set(mend.kills) else done)
        elif not UNTOLD.get(line, set()) & set(mend.kills):
            lines += [line] * (1 + len(AGAIN.get(line, set()) & set(mend.kills)))
    return lines


def _without_acts(told: Sequence[str]) -> list[str]:
    """What is told once whenever an executor dies; by whom the job was found settled is of no matter."""
    acts = {"decided stop", "did stop", "decided start", "did start"}
    return ["settled" if line in ("did requeue", "saw settle: done") else line for line in told if line not in acts]


def _play(shared: Room, mend: Mend) -> Mended:
    with wedge(shared, WORKERS[mend], retries_max=mend.retries_max) as patient:
        patient.accuse()
        first_life = patient.life()
        if mend.kills:
            exits, reached = _kill_at_points(patient, mend.kills)
        else:
            exits, reached = _kill_at_random(patient, random.Random(0)), []  # noqa: S311 - moments, no secret
        return Mended(exits=exits, reached=reached, found=patient.ending(first_life))


def _kill_at_points(patient: Wedge, points: Sequence[str]) -> tuple[list[int], list[list[str]]]:
    exits, reached = [], []
    for number, point in enumerate(points):
        with patient.doomed(point, number=number) as executor:
            if point == crashing.NEVER:
                patient.await_end()
            else:
                exits.append(patient.await_death(executor))
        reached.append(patient.reached(number))
    if exits:
        with patient.executor():
            patient.await_end()
    return exits, reached


def _kill_at_random(patient: Wedge, draw: random.Random) -> list[int]:
    exits: list[int] = []
    for _ in range(KILLS_AT_RANDOM):
        if patient.is_over():
            break
        with patient.executor() as executor:
            patient.await_ready(len(exits) + 1)
            if len(exits) >= KILLS_WHILE_LOOKING:
                patient.await_capture()
            with suppress(subprocess.TimeoutExpired):
                executor.wait(draw.uniform(0, PATIENCE_S))
            executor.kill()
            exits.append(executor.wait())
    with patient.executor():
        patient.await_end()
    return exits
