"""Check the outcome of all jobs by their log of side effects and by the tables, without the queue's code."""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from bench.chaos.log import Effect, effects_of
from bench.chaos.player import Played, Stop
from bench.chaos.processes import LEASE_S
from gpuwarden.db.engine import BUSY_TIMEOUT_S
from gpuwarden.worker.lease import OWNERSHIP_S

LATE_S: Final = OWNERSHIP_S + LEASE_S + BUSY_TIMEOUT_S
"""How long an attempt may write after the next one began: until its worker checks its claim, with a lease and a wait
for a locked database."""

_JOBS: Final = "SELECT job_id, run_id, state, attempt, payload, reason FROM jobs ORDER BY job_id"
_EVENTS: Final = "SELECT kind, job_id, attempt, run_id, position FROM outbox_events ORDER BY event_id"
_NEEDS: Final = "SELECT job_id, needs_job_id FROM dependencies"
_RUNS: Final = "SELECT run_id, state FROM runs"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of `jobs`."""

    job: int
    run: str | None
    state: str
    attempt: int
    payload: dict[str, Any]
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Faults, one sentence each, and counts of the checked things."""

    broken: list[str]
    counts: Counter[str]
    stranded_s: list[float]
    """Seconds from the last effect of an unfinished attempt to the first of the next."""


def judge(played: Played) -> Verdict:
    """Check everything."""
    effects = effects_of(played.log)
    jobs_found, events, needs, runs = _read_tables(played.url)
    jobs = {
        row[0]: Row(job=row[0], run=row[1], state=row[2], attempt=row[3], payload=_parsed(row[4]), reason=row[5])
        for row in jobs_found
    }
    by_attempt: dict[tuple[int, int], list[Effect]] = defaultdict(list)
    for effect in effects:
        by_attempt[effect.job, effect.attempt].append(effect)
    broken = [] if played.drained else ["jobs or events were left at the end"]
    broken += [f"job {each} was accepted and is not there" for each in played.submitted if each not in jobs]
    broken += _check_jobs(jobs, events, by_attempt)
    broken += _check_runs(jobs, events, dict(runs))
    broken += _check_fencing(by_attempt, played.stops)
    broken += _check_order(jobs, needs, by_attempt)
    broken += _check_consumer(played.seen, [row[4] for row in events])
    counts = Counter(row.state for row in jobs.values()) + Counter(played.counts)
    counts["jobs"] = len(jobs)
    counts["attempts"] = len(by_attempt)
    counts["runs"] = len(runs)
    counts["that needed others"] = len({job for job, _ in needs} & {job for job, _ in by_attempt})
    return Verdict(broken=broken, counts=counts, stranded_s=sorted(_stranded_times(by_attempt)))


def _read_tables(url: str) -> list[list[Any]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            return [file.execute(each).fetchall() for each in (_JOBS, _EVENTS, _NEEDS, _RUNS)]
    with closing(psycopg.connect(url.replace("postgresql+psycopg:", "postgresql:"))) as server:
        return [server.execute(each).fetchall() for each in (_JOBS, _EVENTS, _NEEDS, _RUNS)]


def _parsed(payload: Any) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(payload) if isinstance(payload, str) else payload
    return parsed


def _check_jobs(
    jobs: dict[int, Row], events: Sequence[Any], by_attempt: dict[tuple[int, int], list[Effect]]
) -> Iterator[str]:
    """Every job ended once, by its last attempt, with one event."""
    published: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for kind, job, attempt, *_ in events:
        if not kind.startswith("run_"):
            published[job].append((kind, attempt))
    last = dict(sorted(by_attempt))
    for job, row in jobs.items():
        if published[job] != [(row.state, row.attempt)]:
            yield f"job {job} is {row.state} of attempt {row.attempt}, and its events say {published[job]}"
        if last.get(job, 0) > row.attempt:
            yield f"job {job} ended as attempt {row.attempt}, and attempt {last[job]} worked on it"
        yield from _check_end(row, [effect.step for effect in by_attempt.get((job, row.attempt), [])])
    for (job, attempt), effects in by_attempt.items():
        if len({each.pid for each in effects}) > 1:
            yield f"attempt {attempt} of job {job} had several processes: {effects}"
        if job not in jobs:
            yield f"job {job} left effects, and is not there"


def _check_end(row: Row, steps: list[int]) -> Iterator[str]:
    """The result is that of the last attempt, complete, and as in the payload."""
    reason = row.reason or ""
    by_itself = row.state == "completed" or "RuntimeError" in reason
    if by_itself and steps != list(range(row.payload["steps"] + 1)):
        yield f"job {row.job} is {row.state} by attempt {row.attempt}, which left steps {steps} of {row.payload}"
    if by_itself and row.payload["fails"] is (row.state == "completed"):
        yield f"job {row.job} is {row.state}, and its payload says {row.payload}"
    if row.state == "failed" and not by_itself and "are used" not in reason:
        yield f"job {row.job} failed because {reason}"
    if row.state == "cancelled" and row.run is None:
        yield f"job {row.job} was cancelled because {reason}"


def _check_runs(jobs: dict[int, Row], events: Sequence[Any], runs: dict[str, str]) -> Iterator[str]:
    published: dict[str, list[str]] = defaultdict(list)
    for kind, _, _, run, _ in events:
        if kind.startswith("run_"):
            published[run].append(kind)
    for run, state in runs.items():
        states = {row.state for row in jobs.values() if row.run == run}
        if state != ("failed" if "failed" in states else "completed"):
            yield f"{run} is {state}, and its jobs are {states}"
        if published[run] != [f"run_{state}"]:
            yield f"{run} is {state}, and its events say {published[run]}"


def _check_fencing(by_attempt: dict[tuple[int, int], list[Effect]], stops: Sequence[Stop]) -> Iterator[str]:
    """An attempt writes nothing `LATE_S` after the next one began, or after a stopped process continued."""
    begun = {key: min(effect.at_s for effect in effects) for key, effects in by_attempt.items()}
    for (job, attempt), effects in by_attempt.items():
        later = [at_s for (other, number), at_s in begun.items() if other == job and number > attempt]
        for effect in effects if later else []:
            stopped = any(stop.pid == effect.pid and stop.from_s <= effect.at_s <= stop.to_s + LATE_S for stop in stops)
            if effect.at_s > min(later) + LATE_S and not stopped:
                late_s = effect.at_s - min(later)
                yield f"attempt {attempt} of job {job} left step {effect.step} {late_s:.1f} s after the next began"


def _check_order(
    jobs: dict[int, Row], needs: Sequence[Any], by_attempt: dict[tuple[int, int], list[Effect]]
) -> Iterator[str]:
    """No job began before its dependencies completed."""
    for job, needed in needs:
        if needed not in jobs:
            continue  # reported above
        begun = [min(each.at_s for each in effects) for (other, _), effects in by_attempt.items() if other == job]
        done = [each.at_s for each in by_attempt.get((needed, jobs[needed].attempt), [])]
        if begun and (jobs[needed].state != "completed" or min(begun) < max(done)):
            yield f"job {job} began, and job {needed}, which it needs, was not done"


def _check_consumer(seen: Sequence[int], positions: Sequence[int | None]) -> Iterator[str]:
    """A consumer saw every event in order."""
    if sorted(set(seen)) != sorted(position or 0 for position in positions):
        yield f"a consumer saw {sorted(set(seen))}, and there are {positions}"
    if list(dict.fromkeys(seen)) != sorted(set(seen)):
        yield f"a consumer saw events in this order: {seen}"


def _stranded_times(by_attempt: dict[tuple[int, int], list[Effect]]) -> Iterator[float]:
    for (job, attempt), effects in by_attempt.items():
        after = [key for key in by_attempt if key[0] == job and key[1] > attempt]
        if after:
            begun_s = min(each.at_s for each in by_attempt[min(after)])
            yield begun_s - max((each.at_s for each in effects if each.at_s <= begun_s), default=begun_s)
