"""What came of the jobs: by the log of their side effects, and a look at the tables that is no code of the queue's."""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from bench.chaos.log import Effect, effects_of
from bench.chaos.player import LEASE_S, Played, Stop
from gpuwarden.db.engine import BUSY_TIMEOUT_S
from gpuwarden.worker.lease import OWNERSHIP_S

LATE_S: Final = OWNERSHIP_S + LEASE_S + BUSY_TIMEOUT_S
"""For how long an attempt may leave anything after the next one began: its worker's look at its claim, a lease, and the
wait for a database that others write to."""

_JOBS: Final = "SELECT job_id, run_id, state, attempt, payload, because FROM jobs ORDER BY job_id"
_EVENTS: Final = "SELECT kind, job_id, attempt, run_id, position FROM dispatch_events ORDER BY event_id"
_NEEDS: Final = "SELECT job_id, needs_job_id FROM dependencies"
_RUNS: Final = "SELECT run_id, state FROM runs"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job in the tables."""

    job: int
    run: str | None
    state: str
    attempt: int
    payload: dict[str, Any]
    because: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong, in sentences; nothing where all is well. And what there was to be judged."""

    broken: list[str]
    counts: Counter[str]
    stranded_s: list[float]
    """From the last sign of each attempt that came to nothing to the beginning of the next, seconds."""


def judge(played: Played) -> Verdict:
    """Look at everything."""
    effects = effects_of(played.log)
    jobs_found, events, needs, runs = _look(played.url)
    jobs = {
        row[0]: Row(job=row[0], run=row[1], state=row[2], attempt=row[3], payload=_parsed(row[4]), because=row[5])
        for row in jobs_found
    }
    by_attempt: dict[tuple[int, int], list[Effect]] = defaultdict(list)
    for effect in effects:
        by_attempt[effect.job, effect.attempt].append(effect)
    broken = [] if played.drained else ["not everything was over and told in time"]
    broken += [f"job {each} was accepted and is not there" for each in played.submitted if each not in jobs]
    broken += _ends(jobs, events, by_attempt)
    broken += _runs(jobs, events, dict(runs))
    broken += _late(by_attempt, played.stops)
    broken += _order(jobs, needs, by_attempt)
    broken += _told(played.seen, [row[4] for row in events])
    counts = Counter(row.state for row in jobs.values()) + Counter(played.counts)
    counts["jobs"] = len(jobs)
    counts["attempts"] = len(by_attempt)
    counts["runs"] = len(runs)
    counts["that needed others"] = len({job for job, _ in needs} & {job for job, _ in by_attempt})
    return Verdict(broken=broken, counts=counts, stranded_s=sorted(_stranded(by_attempt)))


def _look(url: str) -> list[list[Any]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            return [file.execute(each).fetchall() for each in (_JOBS, _EVENTS, _NEEDS, _RUNS)]
    with closing(psycopg.connect(url.replace("postgresql+psycopg:", "postgresql:"))) as server:
        return [server.execute(each).fetchall() for each in (_JOBS, _EVENTS, _NEEDS, _RUNS)]


def _parsed(payload: Any) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(payload) if isinstance(payload, str) else payload
    return parsed


def _ends(
    jobs: dict[int, Row], events: Sequence[Any], by_attempt: dict[tuple[int, int], list[Effect]]
) -> Iterator[str]:
    """Every job ended once, was told of once, and by the last attempt that there was."""
    told: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for kind, job, attempt, *_ in events:
        if not kind.startswith("run_"):
            told[job].append((kind, attempt))
    last = dict(sorted(by_attempt))
    for job, row in jobs.items():
        if told[job] != [(row.state, row.attempt)]:
            yield f"job {job} is {row.state} of attempt {row.attempt}, and its events say {told[job]}"
        if last.get(job, 0) > row.attempt:
            yield f"job {job} ended as attempt {row.attempt}, and attempt {last[job]} worked on it"
        yield from _end(row, [effect.step for effect in by_attempt.get((job, row.attempt), [])])
    for (job, attempt), effects in by_attempt.items():
        if len({each.pid for each in effects}) > 1:
            yield f"attempt {attempt} of job {job} had several processes: {effects}"
        if job not in jobs:
            yield f"job {job} left effects, and is not there"


def _end(row: Row, steps: list[int]) -> Iterator[str]:
    """What was accepted of a job is what its last attempt did, all of it, and what its payload says."""
    because = row.because or ""
    by_itself = row.state == "completed" or "RuntimeError" in because
    if by_itself and steps != list(range(row.payload["steps"] + 1)):
        yield f"job {row.job} is {row.state} by attempt {row.attempt}, which left steps {steps} of {row.payload}"
    if by_itself and row.payload["fails"] is (row.state == "completed"):
        yield f"job {row.job} is {row.state}, and its payload says {row.payload}"
    if row.state == "failed" and not by_itself and "are used" not in because:
        yield f"job {row.job} failed because {because}"
    if row.state == "cancelled" and row.run is None:
        yield f"job {row.job} was cancelled because {because}"


def _runs(jobs: dict[int, Row], events: Sequence[Any], runs: dict[str, str]) -> Iterator[str]:
    told: dict[str, list[str]] = defaultdict(list)
    for kind, _, _, run, _ in events:
        if kind.startswith("run_"):
            told[run].append(kind)
    for run, state in runs.items():
        states = {row.state for row in jobs.values() if row.run == run}
        if state != ("failed" if "failed" in states else "completed"):
            yield f"{run} is {state}, and its jobs are {states}"
        if told[run] != [f"run_{state}"]:
            yield f"{run} is {state}, and its events say {told[run]}"


def _late(by_attempt: dict[tuple[int, int], list[Effect]], stops: Sequence[Stop]) -> Iterator[str]:
    """An attempt leaves nothing any more once the next works, but for a while; what was stopped, once it goes on."""
    begun = {key: min(effect.at_s for effect in effects) for key, effects in by_attempt.items()}
    for (job, attempt), effects in by_attempt.items():
        later = [at_s for (other, number), at_s in begun.items() if other == job and number > attempt]
        for effect in effects if later else []:
            stopped = any(stop.pid == effect.pid and stop.from_s <= effect.at_s <= stop.to_s + LATE_S for stop in stops)
            if effect.at_s > min(later) + LATE_S and not stopped:
                late_s = effect.at_s - min(later)
                yield f"attempt {attempt} of job {job} left step {effect.step} {late_s:.1f} s after the next began"


def _order(
    jobs: dict[int, Row], needs: Sequence[Any], by_attempt: dict[tuple[int, int], list[Effect]]
) -> Iterator[str]:
    """Nothing began before what it needs had completed."""
    for job, needed in needs:
        if needed not in jobs:
            continue  # told of above
        begun = [min(each.at_s for each in effects) for (other, _), effects in by_attempt.items() if other == job]
        done = [each.at_s for each in by_attempt.get((needed, jobs[needed].attempt), [])]
        if begun and (jobs[needed].state != "completed" or min(begun) < max(done)):
            yield f"job {job} began, and job {needed}, which it needs, was not done"


def _told(seen: Sequence[int], positions: Sequence[int | None]) -> Iterator[str]:
    """A consumer saw every event, each after those before it."""
    if sorted(set(seen)) != sorted(position or 0 for position in positions):
        yield f"a consumer saw {sorted(set(seen))}, and there are {positions}"
    if list(dict.fromkeys(seen)) != sorted(set(seen)):
        yield f"a consumer saw events in this order: {seen}"


def _stranded(by_attempt: dict[tuple[int, int], list[Effect]]) -> Iterator[float]:
    for (job, attempt), effects in by_attempt.items():
        after = [key for key in by_attempt if key[0] == job and key[1] > attempt]
        if after:
            begun_s = min(each.at_s for each in by_attempt[min(after)])
            yield begun_s - max((each.at_s for each in effects if each.at_s <= begun_s), default=begun_s)
