"""Jobs: progress, step beats, and the limits that their owners set."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import Row, counter, gauge, or_nan
from exporter.evidence import activity
from exporter.model.container import ContainerEvidence
from exporter.model.snapshot import Snapshot
from exporter.model.timeouts import MIN_PHASE_VISITS, MIN_STEPS, Pauses, PhaseTimeouts, is_gang_rank
from exporter.model.worker import WorkerReading
from gpuwarden import conditions
from gpuwarden.state_file import JobFile

_SLOT = ("worker", "container")


_NO_JOB: Final = "the worker runs no job"
_UNKNOWN_AGE: Final = "its time is from before the last reboot"
_DEAD: Final = "its worker is dead"
_NOT_SHARED: Final = "no other live worker is in its container"
_NO_RANK: Final = f"{_NO_JOB} or no rank of a gang, is dead, or has an older version"


@dataclass(frozen=True, kw_only=True)
class _Row:
    key: tuple[str, str]
    job: JobFile
    place: ContainerEvidence | None
    # False if each GPU is measured: then none is lost.
    may_have_lost_gpu: bool
    # Activity of its worker alone; `None` if no other worker shares the container.
    own: ContainerEvidence | None
    # False if its worker is dead: then no other condition is reported.
    is_monitored: bool
    elapsed_s: float | None
    step_beat_age_s: float | None
    # `None` if not monitored: Prometheus must not repeat an old value.
    inactive_s: float | None
    quiet_gpu_lost_s: float | None
    inactive_alone_s: float | None
    heartbeat_age_s: float | None
    dead_s: float | None
    is_active_rank: bool

    @property
    def pauses(self) -> Pauses:
        return self.place.pauses if self.place else ()


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by worker slot and container; they continue with the worker's next job.

    A job's id is a value. As a label it would make new series for each job, which slow down every query. Attempt
    numbers are few and come again.
    """
    if snapshot.workers is None:
        return
    rows: list[_Row] = []
    waiting: list[tuple[str, str]] = []
    for reading in snapshot.workers.workers:
        job, place = reading.job, snapshot.evidence_of_job(reading)
        key = reading.worker.worker, place.container.name if place else ""
        if job is None:
            waiting.append(key)
            continue
        rows.append(_row(key, reading, job, place, snapshot))
    rows = _limit_by_neighbours(rows)
    yield from _identity(rows, snapshot)
    yield from _progress(rows)
    yield from _inactivity(rows, waiting, snapshot)
    yield from _limits(rows, waiting, snapshot)
    # A dead worker leaves its file, and another worker may have its rank.
    yield from _ranks([row for row in rows if is_gang_rank(row.job) and row.is_monitored], snapshot)


def _row(
    key: tuple[str, str], reading: WorkerReading, job: JobFile, place: ContainerEvidence | None, snapshot: Snapshot
) -> _Row:
    now, is_monitored = snapshot.taken, reading.alive is not False
    timeouts = snapshot.thresholds.timeouts
    own = snapshot.worker_evidence.get(reading.worker.worker)
    may_have_lost_gpu = job.job_class.uses_gpu and (place is None or place.gpu_idle_s is None)
    lost = is_monitored and may_have_lost_gpu
    return _Row(
        key=key,
        job=job,
        place=place,
        may_have_lost_gpu=may_have_lost_gpu,
        own=own,
        is_monitored=is_monitored,
        elapsed_s=job.started.age_s(now),
        step_beat_age_s=job.step_beat.age_s(now) if job.step_beat else None,
        inactive_s=activity.inactive_s(job, place, timeouts, now=now) if is_monitored else None,
        quiet_gpu_lost_s=activity.inactive_s(job, place, timeouts, now=now, gpu_lost=True) if lost else None,
        inactive_alone_s=activity.inactive_s(job, own, timeouts, now=now, shared_container=True)
        if is_monitored and own
        else None,
        heartbeat_age_s=reading.worker.heartbeat.age_s(now),
        dead_s=snapshot.dead_s.get(reading.worker.worker),
        is_active_rank=is_gang_rank(job) and activity.is_rank_active(job, own or place, timeouts, now=now),
    )


def _limit_by_neighbours(rows: list[_Row]) -> list[_Row]:
    """Limit each job's inactivity to that of the other workers of its container.

    The remedy restarts the container, which would end their work too. Unknown if theirs is unknown.
    """
    monitored: dict[str, list[_Row]] = {}
    for row in rows:
        if row.own and row.is_monitored:
            monitored.setdefault(row.key[1], []).append(row)

    def with_others(row: _Row) -> _Row:
        others = [each.inactive_alone_s for each in monitored.get(row.key[1], ()) if each is not row]
        if not row.own or not others:
            return row
        return replace(
            row,
            inactive_s=conditions.least(row.inactive_s, *others),
            quiet_gpu_lost_s=conditions.least(row.quiet_gpu_lost_s, *others),
        )

    return [with_others(row) for row in rows]


def _identity(rows: list[_Row], snapshot: Snapshot) -> Iterable[Metric]:
    yield gauge(
        "gpuwarden_job_id",
        "Id of the job that a worker runs, by attempt and incarnation of the worker.",
        (*_SLOT, "attempt", "incarnation"),
        (_id_row(row) for row in rows),
        source="job file",
        absent=_NO_JOB,
        values="an id",
    )
    yield gauge(
        "gpuwarden_job_overdue_id",
        "As `gpuwarden_job_id`, only for a job past its budget, stall timeout, health window or worker timeout. Rules "
        "with a remedy read only these.",
        (*_SLOT, "attempt", "incarnation"),
        (_id_row(row) for row in rows if _is_overdue(row, snapshot)),
        source="job file, and each age that rules compare with a limit",
        absent=f"{_NO_JOB}, or it has reached no limit",
        values="an id",
    )
    yield gauge(
        "gpuwarden_job_info",
        "Class and model of the job that a worker runs; always 1.",
        (*_SLOT, "job_class", "model"),
        (((*row.key, row.job.job_class, row.job.model or ""), 1.0) for row in rows),
        source="job file",
        absent=_NO_JOB,
    )
    yield gauge(
        "gpuwarden_job_elapsed_seconds",
        "Time since the attempt started, load included.",
        _SLOT,
        ((row.key, row.elapsed_s) for row in rows),
        source="job file, against CLOCK_BOOTTIME at the sample",
        absent=f"{_NO_JOB}, or {_UNKNOWN_AGE}",
    )
    yield gauge(
        "gpuwarden_job_phase",
        "1 for the current phase of the attempt.",
        (*_SLOT, "phase"),
        (((*row.key, row.job.phase), 1.0) for row in rows),
        source="job file",
        absent=_NO_JOB,
    )
    yield gauge(
        "gpuwarden_job_phase_age_seconds",
        "Time since the attempt entered its phase.",
        _SLOT,
        ((row.key, row.job.phase_started.age_s(snapshot.taken)) for row in rows),
        source="job file, against CLOCK_BOOTTIME at the sample",
        absent=f"{_NO_JOB}, or {_UNKNOWN_AGE}",
    )


def _id_row(row: _Row) -> Row:
    return (*row.key, str(row.job.attempt), row.job.incarnation), float(row.job.job_id)


def _is_overdue(row: _Row, snapshot: Snapshot) -> bool:
    """Whether any age of the job has reached its limit, so that a rule may name it."""
    job, thresholds = row.job, snapshot.thresholds
    return conditions.is_overdue(
        elapsed_s=row.elapsed_s,
        budget_s=job.budget_s,
        step_beat_age_s=row.step_beat_age_s,
        silence_s=thresholds.timeouts.stall_after_s(job),
        inactive_s=row.inactive_s,
        quiet_gpu_lost_s=row.quiet_gpu_lost_s,
        window_s=thresholds.timeouts.health_window_s(job, thresholds.health_window_s),
        heartbeat_age_s=row.heartbeat_age_s,
        dead_s=row.dead_s,
        dead_after_s=thresholds.dead_after_s,
    )


def _progress(rows: list[_Row]) -> Iterable[Metric]:
    yield gauge(
        "gpuwarden_job_steps",
        "Steps the attempt has done.",
        _SLOT,
        ((row.key, float(row.job.step)) for row in rows),
        source="job file",
        absent=_NO_JOB,
    )
    yield gauge(
        "gpuwarden_job_steps_planned",
        "Steps that the job plans, if known.",
        _SLOT,
        ((row.key, None if row.job.steps_total is None else float(row.job.steps_total)) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or the job does not report them",
    )
    yield gauge(
        "gpuwarden_job_step_mean_seconds",
        "Mean time between the attempt's steps, without other phases, and without the first 20 steps after 40.",
        _SLOT,
        ((row.key, row.job.step_mean_s) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or it has done fewer than two steps",
    )
    yield gauge(
        "gpuwarden_job_step_max_seconds",
        "Longest time between two of the attempt's steps, counted as in the mean.",
        _SLOT,
        ((row.key, row.job.step_max_s) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or it has done fewer than two steps",
    )
    yield counter(
        "gpuwarden_job_paused_seconds",
        "Time for which the container of a worker with a job was paused.",
        _SLOT,
        ((row.key, row.place.paused_s) for row in rows if row.place),
        source="the container's freezer, at each sample",
        absent=f"{_NO_JOB}, or its container is unknown",
    )
    yield gauge(
        "gpuwarden_job_items",
        "Items of the job so far, by outcome.",
        (*_SLOT, "outcome"),
        (
            ((*row.key, outcome), float(count))
            for row in rows
            for outcome, count in (("done", row.job.items_done), ("failed", row.job.items_failed))
        ),
        source="job file",
        absent=_NO_JOB,
    )


def _inactivity(rows: list[_Row], waiting: list[tuple[str, str]], snapshot: Snapshot) -> Iterable[Metric]:
    """Time since the step beat, and without any activity."""
    timeouts = snapshot.thresholds.timeouts
    yield gauge(
        "gpuwarden_job_step_beat_age_seconds",
        "Time since the attempt's last step beat, by CLOCK_BOOTTIME; NaN before the first.",
        _SLOT,
        ((row.key, or_nan(row.step_beat_age_s)) for row in rows),
        source="job file, against CLOCK_BOOTTIME at the sample",
        absent=f"{_NO_JOB}; NaN before the first step beat, or {_UNKNOWN_AGE}",
    )
    yield gauge(
        "gpuwarden_job_step_beat_timestamp_seconds",
        "Last step beat of the attempt, Unix time; absent before the first.",
        _SLOT,
        ((row.key, row.job.step_beat.unix_s if row.job.step_beat else None) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or it has no step beat yet",
    )
    yield gauge(
        "gpuwarden_job_stall_suspected",
        "1 while a job has no step beat within its stall timeout but shows, or may show, other activity.",
        _SLOT,
        (
            (
                row.key,
                float(activity.not_stalled_reason(row.job, row.place, timeouts, now=snapshot.taken) is not None),
            )
            for row in rows
            if timeouts.stall_after_s(row.job) and row.is_monitored
        ),
        source="computed at each sample from the job file and its container's GPU, RAM and work",
        absent=f"{_NO_JOB}, the stall condition does not apply, or {_DEAD}",
    )
    yield gauge(
        "gpuwarden_job_inactive_seconds",
        "Time without activity of the attempt: no step beat, GPUs idle, RAM unchanged; in load, eval, save and "
        "checkpoint also no work of processes.",
        _SLOT,
        (*((row.key, or_nan(row.inactive_s)) for row in rows), *((key, math.nan) for key in waiting)),
        source="the least of `gpuwarden_job_step_beat_age_seconds`, `gpuwarden_job_phase_age_seconds` and the idle "
        "times of the container's GPU, RAM and, if it counts, work. Other workers of the container limit it",
        absent=(
            f"as `gpuwarden_worker_info`; NaN without a job, while one of these that counts is unknown, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_inactive_gpu_lost_seconds",
        "As `gpuwarden_job_inactive_seconds` for a GPU job with a lost GPU in its container, the others lost or idle.",
        _SLOT,
        ((row.key, or_nan(row.quiet_gpu_lost_s)) for row in rows if row.may_have_lost_gpu),
        source="as `gpuwarden_job_inactive_seconds`, with `gpuwarden_container_gpu_lost_seconds` for the GPU",
        absent=(
            f"{_NO_JOB}, its class uses no GPU, or each GPU of its container is "
            f"measured; NaN while none is lost, an input is unknown, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_inactive_in_shared_container_seconds",
        "As `gpuwarden_job_inactive_seconds`, for the activity of one worker in a shared container; its I/O counts in "
        "each phase.",
        _SLOT,
        (
            *((row.key, or_nan(row.inactive_alone_s)) for row in rows if row.own),
            *((key, math.nan) for key in waiting if key[0] in snapshot.worker_evidence),
        ),
        source="the least of `gpuwarden_job_step_beat_age_seconds`, `gpuwarden_job_phase_age_seconds`, "
        "`gpuwarden_worker_gpu_idle_seconds`, `gpuwarden_worker_ram_idle_seconds`, "
        "`gpuwarden_worker_io_idle_seconds` and, if it counts, `gpuwarden_worker_work_idle_seconds`",
        absent=f"{_NOT_SHARED}; NaN as `gpuwarden_job_inactive_seconds`",
    )


def _limits(rows: list[_Row], waiting: list[tuple[str, str]], snapshot: Snapshot) -> Iterable[Metric]:
    """Limits of each job; NaN if a limit does not apply, or the worker is dead or waits for a job.

    Without a sample Prometheus would repeat the limit of the last job.
    """

    def limits(limit_s: Callable[[JobFile, Pauses], float | None]) -> Iterator[Row]:
        for row in rows:
            yield row.key, or_nan(limit_s(row.job, row.pauses) or None if row.is_monitored else None)
        yield from ((key, math.nan) for key in waiting)

    timeouts = snapshot.thresholds.timeouts
    on_gpu = [row for row in rows if row.is_monitored and row.job.job_class.uses_gpu]
    yield gauge(
        "gpuwarden_job_budget_seconds",
        "Time budget of one attempt, wall clock; NaN without one.",
        _SLOT,
        limits(lambda job, _: job.budget_s),
        source="job file",
        absent=(f"as `gpuwarden_worker_info`; NaN without a job or a budget, or {_DEAD}"),
    )
    yield gauge(
        "gpuwarden_job_stall_timeout_seconds",
        "Stall timeout of the job in its phase; NaN while the stall condition does not apply.",
        _SLOT,
        limits(lambda job, _: timeouts.stall_after_s(job)),
        source="job file; `--load-timeout-s` and the options of other phases",
        absent=(f"as `gpuwarden_worker_info`; NaN without a job, while the stall condition does not apply, or {_DEAD}"),
    )
    yield gauge(
        "gpuwarden_job_busy_timeout_seconds",
        "Time without a step beat for which heavy I/O or computing counts as activity in the phase step.",
        _SLOT,
        ((row.key, timeouts.busy_timeout_s(row.job)) for row in rows if row.is_monitored),
        source="job file; `--busy-timeout-s`",
        absent=f"{_NO_JOB}, or {_DEAD}",
    )
    yield gauge(
        "gpuwarden_job_stuck_after_seconds",
        "Time without a step beat until a job is stuck, even with an unknown or busy GPU: a multiple of its longest "
        "step or phase.",
        _SLOT,
        limits(timeouts.stuck_after_s),
        source="job file, less the time its container was paused; `--stuck-min-s`, `--stuck-factor`",
        absent=(
            "as `gpuwarden_worker_info`; NaN while `gpuwarden_job_stall_timeout_seconds` is, for ranks of a gang, "
            f"with `--stuck-factor 0`, or before {MIN_STEPS} steps. Also NaN in another phase than `step` before "
            f"{MIN_PHASE_VISITS} visits, unless the job set a timeout"
        ),
    )
    yield gauge(
        "gpuwarden_job_stuck_idle_seconds",
        "Time without other activity of its container that a stuck job needs, at least its stall timeout. Slightly "
        "less than `gpuwarden_job_stuck_after_seconds`.",
        _SLOT,
        limits(timeouts.stuck_inactive_s),
        source="20 s less than `gpuwarden_job_stuck_after_seconds`; the job's stall timeout",
        absent="absent, or NaN, as `gpuwarden_job_stuck_after_seconds`",
    )
    yield gauge(
        "gpuwarden_job_health_window_seconds",
        "Time for which a GPU job and its container may be inactive: at least the stall timeout, or the window of "
        "`gpuwarden run`.",
        _SLOT,
        limits(lambda job, _: timeouts.health_window_s(job, snapshot.thresholds.health_window_s)),
        source="`--health-window-s`, or the job's timeout if that is longer",
        absent=(
            "as `gpuwarden_worker_info`; NaN without a job, "
            f"while its class uses no GPU or its phase is `idle`, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_health_grace_seconds",
        "Earliest start of the health window after the attempt's start: the grace period for load and first step, "
        "less the window after that step.",
        _SLOT,
        ((row.key, snapshot.health_grace_s(row.job)) for row in on_gpu),
        source="`--health-grace-s`, by the job's phase and its first step",
        absent=f"{_NO_JOB}, its class uses no GPU, or {_DEAD}",
    )


def _ranks(ranks: list[_Row], snapshot: Snapshot) -> Iterable[Metric]:
    """Series of gangs only, so that a fleet without gangs has none.

    The label `gang` has a new value for each gang, so only series of ranks and overdue ranks have it.
    """
    timeouts = snapshot.thresholds.timeouts
    candidates = [
        (row, _spinning_s(row, timeouts), timeouts.gang_stuck_after_s(row.job, row.pauses), row.job.gang or "")
        for row in ranks
    ]
    overdue = [(row, gang) for row, spinning_s, limit_s, gang in candidates if conditions.reached(spinning_s, limit_s)]
    yield gauge(
        "gpuwarden_gang_rank_attempt",
        "Attempt of the rank that a worker runs; of duplicate ranks in a gang the highest counts.",
        (*_SLOT, "gang", "rank"),
        (((*row.key, gang, str(row.job.rank)), float(row.job.attempt)) for row, _, _, gang in candidates),
        source="job file",
        absent=_NO_RANK,
    )
    yield gauge(
        "gpuwarden_gang_rank_active_attempt",
        "As `gpuwarden_gang_rank_attempt`, but only for a rank that was active in the last minute. A new phase or a "
        "saturated GPU does not count.",
        (*_SLOT, "gang"),
        (((*row.key, row.job.gang or ""), float(row.job.attempt)) for row in ranks if row.is_active_rank),
        source="job file, and its container's GPU, RAM and work",
        absent=f"{_NO_RANK}, or it has no such activity",
    )
    yield gauge(
        "gpuwarden_gang_rank_overdue_attempt",
        "As `gpuwarden_gang_rank_attempt`, with its job, but only for a rank that has been spinning up to its limit. "
        "The rule needs this for every rank.",
        (*_SLOT, "gang", "rank", "job_id", "attempt", "incarnation"),
        (
            (
                (
                    *row.key,
                    gang,
                    str(row.job.rank),
                    str(row.job.job_id),
                    str(row.job.attempt),
                    row.job.incarnation,
                ),
                float(row.job.attempt),
            )
            for row, gang in overdue
        ),
        source="job file, and the spinning time that the rule compares with its limit",
        absent=f"{_NO_RANK}, or it has not reached its limit",
    )
    yield gauge(
        "gpuwarden_gang_overdue_ranks",
        "Number of ranks in the gang of an overdue rank.",
        (*_SLOT, "gang"),
        (((*row.key, gang), float(row.job.ranks)) for row, gang in overdue),
        source="job file",
        absent="as `gpuwarden_gang_rank_overdue_attempt`",
    )
    yield gauge(
        "gpuwarden_gang_rank_spinning_seconds",
        "Time without a step beat of a rank, with its GPU saturated and no other activity. Starts up to 20 s before "
        "such a sample.",
        _SLOT,
        ((row.key, or_nan(spinning_s)) for row, spinning_s, _, _ in candidates),
        source="job file, and its container's GPU, RAM, I/O and page faults",
        absent=f"{_NO_RANK}; NaN before the first step beat, or while an input is unknown",
    )
    yield gauge(
        "gpuwarden_gang_rank_stuck_after_seconds",
        "Spinning time after which a rank is stuck, if every other rank of its gang is too; computed as "
        "`gpuwarden_job_stuck_after_seconds`.",
        _SLOT,
        ((row.key, or_nan(limit_s)) for row, _, limit_s, _ in candidates),
        source="job file; `--stuck-min-s`, `--stuck-factor`",
        absent=f"{_NO_RANK}; NaN as `gpuwarden_job_stuck_after_seconds`",
    )


def _spinning_s(row: _Row, timeouts: PhaseTimeouts) -> float | None:
    spinning_s = row.place.spinning_s if row.place else None
    late_s = timeouts.gang_activity_lag_s(row.job, row.pauses)
    return conditions.rank_spinning_s(row.step_beat_age_s, spinning_s, late_s)
