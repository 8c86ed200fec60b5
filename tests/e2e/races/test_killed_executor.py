"""kill -9 of a real executor at every commit and around every act: one stop, one start and one requeue each time.

Each case has a separate worker in a real container. One executor after another dies at its point. Then a last one runs
undisturbed. Many cases run at the same time.
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
from remediator.plan import Outcome
from testbed.docker_engine import Engine
from tests.e2e import crashing
from tests.e2e.stalled_workers import FinalState, SharedParts, StalledWorker, shared_parts, stalled_worker

pytestmark = [pytest.mark.needs_docker, pytest.mark.slow]

AT_ONCE: Final = 6
CLOSE: Final = f"ledger: decided close: {Outcome.FIXED}"
KILL_WITHIN_S: Final = 0.6
"""Longest time until an executor is killed at random, seconds."""

KILLS_AT_RANDOM: Final = 12
"""After this many the next executor is not killed: a start counts only once it has lasted."""

KILLS_BEFORE_CAPTURE: Final = 4
"""So many die before the capture can be saved; the others die after it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The points at which the executors die. Without points they die at random moments."""

    kills: tuple[str, ...]
    retries_max: int = 3

    def __str__(self) -> str:
        return self.kills[0] if self.kills else "at random"

    @property
    def is_timed(self) -> bool:
        """Whether timing changes the journal: the engine may finish a request while no executor runs."""
        return not self.kills or any(kill.startswith("asked") for kill in self.kills)


def twice(*points: str) -> tuple[str, ...]:
    """One executor dies before each of these, and the next one right after it."""
    return tuple(f"{when} {point}" for point in points for when in ("before", "after"))


# `tests.e2e.crashing` names the points.
KILLS: Final = (
    twice("ledger: standing_orders", "ledger: saw alert: firing", "ledger: decided begin"),
    twice("ledger: saw capture", "queue: jobs fencing, workers"),
    twice("ledger: did fence", "ledger: decided stop"),
    twice("ledger: saw free: dead"),
    twice("queue: jobs queued, job_gpu_avoidance", "ledger: saw settle: done"),
    twice("ledger: decided start", "ledger: saw free: done"),
    twice("docker stop", "docker start"),
    ("asked docker stop", "asked docker start"),
    # The next executor does not repeat the commit that follows an act: it finds the act done.
    ("before queue: workers", "before ledger: did requeue", "before ledger: did start"),
    ("after queue: workers", "after ledger: did requeue", "after ledger: did start"),
    ("before ledger: did stop", f"before {CLOSE}"),
    ("after ledger: did stop", f"after {CLOSE}"),
)
KILLS_AT_THE_CAP: Final = (
    twice("queue: jobs failed, outbox_events", "queue: runs failed, outbox_events, jobs cancelled"),
    ("before ledger: did fail",),
    ("after ledger: did fail",),
)

UNDISTURBED: Final = Case(kills=(crashing.NEVER,))
AT_RANDOM: Final = Case(kills=())
REQUEUED: Final = (UNDISTURBED, *(Case(kills=kills) for kills in KILLS), AT_RANDOM)
FAILED: Final = tuple(Case(kills=kills, retries_max=0) for kills in KILLS_AT_THE_CAP)
WORKERS: Final = {case: f"gpuwarden-killed-{number}" for number, case in enumerate((*REQUEUED, *FAILED))}
DAILY: Final = {
    Case(kills=twice("docker stop", "docker start")),
    Case(kills=twice("queue: jobs queued, job_gpu_avoidance", "ledger: saw settle: done")),
    *(Case(kills=(f"{when} ledger: did fail",), retries_max=0) for when in ("before", "after")),
}
"""Ten points, around each act and each end of a job. The nightly run has all points."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Exit codes of the killed executors, the points that each reached, and the final state."""

    exits: Sequence[int]
    reached: Sequence[Sequence[str]]
    found: FinalState


Results = dict[Case, Future[CaseResult]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, work: Path, engine: Engine) -> Iterator[Results]:
    """Run the cases in threads. All end before the first test.

    Between two tests pytest changes the environment, which a thread may read to start a program.
    """
    nightly = any(each.get_closest_marker("nightly") for each in request.session.items if each.path == request.path)
    cases = [case for case in WORKERS if nightly or case in DAILY]
    with shared_parts(work, engine, [WORKERS[case] for case in cases]) as shared, ThreadPoolExecutor(AT_ONCE) as pool:
        started = {case: pool.submit(_run_case, shared, case) for case in cases}
        wait(started.values())
        yield started


def parametrize_cases(cases: Collection[Case]) -> pytest.MarkDecorator:
    """Parametrize over cases; those that are not daily run at night."""
    marked = [case if case in DAILY else pytest.param(case, marks=pytest.mark.nightly) for case in cases]
    return pytest.mark.parametrize("case", marked, ids=[str(case) for case in cases])


every_case = parametrize_cases(WORKERS)


@every_case
def test_container_is_stopped_once_and_started_once(results: Results, case: Case) -> None:
    found = results[case].result().found

    if case.is_timed:  # two executors may each ask for the stop, which sends signals twice
        assert [event for event in found.history if event in ("start", "die", "restart")] == ["start", "die", "start"]
    else:
        assert found.history == ["create", "start", "kill 15", "kill 9", "die", "stop", "start"]
    first, last = (each.partition("@") for each in found.incarnations)
    assert first[0] == last[0]
    assert first[2] != last[2]
    assert found.restarts == 0


@parametrize_cases(REQUEUED)
def test_job_is_requeued_once_and_finished(results: Results, case: Case) -> None:
    found = results[case].result().found

    job = found.job
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 1, 0)
    assert found.events == ["completed"]
    assert (found.sibling.state, found.run_state) == (State.QUEUED, "running")


@parametrize_cases(FAILED)
def test_job_without_retries_fails_once_with_one_event(results: Results, case: Case) -> None:
    found = results[case].result().found

    job = found.job
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.FAILED, 1, 0, 0)
    assert found.events == ["failed", "run_failed"]
    assert (found.sibling.state, found.run_state) == (State.CANCELLED, "failed")


@every_case
def test_intents_are_done_and_episode_fixed(results: Results, case: Case) -> None:
    found = results[case].result().found

    assert found.intents == [("free", "done"), ("settle", "done")]
    assert [episode.outcome for episode in found.episodes] == ["fixed"]


@every_case
def test_journal_matches_the_deaths(results: Results, case: Case) -> None:
    journal = results[case].result().found.journal

    expected = expected_journal(case)
    if case.is_timed:
        journal, expected = _without_acts(journal), _without_acts(expected)
    assert journal == expected


@every_case
def test_capture_is_saved_once(results: Results, case: Case) -> None:
    found = results[case].result().found

    (capture,) = found.captures
    (process,) = capture.document["processes"]
    main = process["seen"][0]
    assert capture.document["armed"]
    assert main["python"]["owns_gil"]
    assert main["python"]["frames"][0]["function"] == "wedge"


@every_case
def test_executors_die_at_their_points(results: Results, case: Case) -> None:
    result = results[case].result()

    if case is AT_RANDOM:
        assert len(result.exits) >= 2
    elif case is not UNDISTURBED:
        assert tuple(points[-1] for points in result.reached) == case.kills
    assert set(result.exits) <= {-SIGKILL}


@pytest.mark.nightly
def test_every_point_that_an_executor_reaches_has_a_case(results: Results) -> None:
    reached = {point for case in WORKERS for points in results[case].result().reached for point in points}

    killed_at = {kill for case in WORKERS for kill in case.kills}
    assert reached == killed_at - {crashing.NEVER}


JOURNAL: Final = (
    *("saw alert: firing", "decided begin", "saw capture", "did fence", "decided stop", "did stop", "saw free: dead"),
    *("did requeue", "decided start", "did start", "saw free: done", "decided close: fixed"),
)
"""The journal of a restart, without waits."""

REPEATED: Final = {
    "decided stop": {"after ledger: decided stop", "before docker stop"},
    "decided start": {"after ledger: decided start", "before docker start"},
}
"""Decided again by the next executor, because the first died between the decision and the act."""

UNRECORDED: Final = {
    "did stop": {"after docker stop", *twice("queue: workers"), "before ledger: did stop"},
    "did start": {"after docker start", "before ledger: did start"},
}
"""Done but not recorded, because the executor died after the act. The next one sees that it is done."""

ALREADY_SETTLED: Final = {
    *("after queue: jobs queued, job_gpu_avoidance", "before ledger: did requeue"),
    *("after queue: jobs failed, outbox_events", "before ledger: did fail"),
}
"""The job was settled, but the ledger has no record: the next executor finds it settled."""


def expected_journal(case: Case) -> list[str]:
    """The expected journal of a case."""
    lines: list[str] = []
    for line in JOURNAL:
        if line == "did requeue":
            done = line if case.retries_max else "did fail"
            lines.append("saw settle: done" if ALREADY_SETTLED & set(case.kills) else done)
        elif not UNRECORDED.get(line, set()) & set(case.kills):
            lines += [line] * (1 + len(REPEATED.get(line, set()) & set(case.kills)))
    return lines


def _without_acts(lines: Sequence[str]) -> list[str]:
    """Drop the entries that depend on timing. Which executor settled the job does not matter."""
    acts = {"decided stop", "did stop", "decided start", "did start"}
    return ["settled" if line in ("did requeue", "saw settle: done") else line for line in lines if line not in acts]


def _run_case(shared: SharedParts, case: Case) -> CaseResult:
    with stalled_worker(shared, WORKERS[case], retries_max=case.retries_max) as worker:
        worker.post_alert()
        first_incarnation = worker.incarnation()
        if case.kills:
            exits, reached = _kill_at_points(worker, case.kills)
        else:
            exits, reached = _kill_at_random(worker, random.Random(0)), []  # noqa: S311 - moments, no secret
        return CaseResult(exits=exits, reached=reached, found=worker.read_final_state(first_incarnation))


def _kill_at_points(worker: StalledWorker, points: Sequence[str]) -> tuple[list[int], list[list[str]]]:
    exits, reached = [], []
    for number, point in enumerate(points):
        with worker.crashing_executor(point, number=number) as executor:
            if point == crashing.NEVER:
                worker.await_fixed()
            else:
                exits.append(worker.await_death(executor))
        reached.append(worker.reached(number))
    if exits:
        with worker.executor():
            worker.await_fixed()
    return exits, reached


def _kill_at_random(worker: StalledWorker, draw: random.Random) -> list[int]:
    exits: list[int] = []
    for _ in range(KILLS_AT_RANDOM):
        if worker.is_over():
            break
        with worker.executor() as executor:
            worker.await_ready(len(exits) + 1)
            if len(exits) >= KILLS_BEFORE_CAPTURE:
                worker.await_capture()
            with suppress(subprocess.TimeoutExpired):
                executor.wait(draw.uniform(0, KILL_WITHIN_S))
            executor.kill()
            exits.append(executor.wait())
    with worker.executor():
        worker.await_fixed()
    return exits
