"""Jobs: how far they are, when they last beat, and the limits that their owners set for them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import Row, gauge, or_nan
from exporter.evidence import activity
from exporter.model.container import ContainerEvidence
from exporter.model.snapshot import Snapshot
from exporter.model.timeouts import MIN_PHASE_VISITS, MIN_STEPS, Pauses, PhaseTimeouts, is_gang_rank
from exporter.model.worker import WorkerReading
from gpuwarden import conditions
from gpuwarden.state_file import JobFile

_SLOT = ("worker", "container")


_NO_JOB: Final = "the worker runs no job"
_UNKNOWN_AGE: Final = "it was stamped before the last reboot"
_DEAD: Final = "its worker is dead"
_NOT_SHARED: Final = "no other live worker is in its container"
_NO_RANK: Final = f"{_NO_JOB}, or no rank of a gang, is dead, or is older than the exporter"


@dataclass(frozen=True, kw_only=True)
class _Row:
    key: tuple[str, str]
    job: JobFile
    place: ContainerEvidence | None
    # Where each GPU is measured none is lost, and its idleness contradicts what was told of a lost one before.
    may_have_lost_gpu: bool
    # What its worker alone has done; `None` of one that has its container to itself.
    own: ContainerEvidence | None
    # A job whose worker is dead shows no life by any clock: what is wrong is that, and nothing else is accused of it.
    policed: bool
    elapsed_s: float | None
    step_beat_age_s: float | None
    # `None` of one that is not policed as well: no figure from before stands for a worker that has died since.
    inactive_s: float | None
    quiet_gpu_lost_s: float | None
    quiet_apart_s: float | None
    heartbeat_age_s: float | None
    dead_s: float | None

    @property
    def pauses(self) -> Pauses:
        return self.place.pauses if self.place else ()


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by worker slot and container, with which a worker's next job goes on.

    A job's id is a value: a label would make a series of each job, and who asks Prometheus for a name goes through all
    series of it that there have been for hours. Of attempts there are few, and the same ones come again.
    """
    if snapshot.workers is None:
        return
    rows: list[_Row] = []
    waiting: list[tuple[str, str]] = []
    for sighting in snapshot.workers.workers:
        job, place = sighting.job, snapshot.container_of(sighting)
        key = sighting.worker.worker, place.container.name if place else ""
        if job is None:
            waiting.append(key)
            continue
        rows.append(_row(key, sighting, job, place, snapshot))
    rows = _beside_others(rows)
    yield from _identity(rows, snapshot)
    yield from _progress(rows)
    yield from _silence(rows, waiting, snapshot)
    yield from _limits(rows, waiting, snapshot)
    # The file of a dead worker stays, and its rank may long be another's.
    yield from _ranks([row for row in rows if is_gang_rank(row.job) and row.policed], snapshot)


def _row(
    key: tuple[str, str], sighting: WorkerReading, job: JobFile, place: ContainerEvidence | None, snapshot: Snapshot
) -> _Row:
    now, policed = snapshot.taken, sighting.alive is not False
    own = snapshot.worker_evidence.get(sighting.worker.worker)
    may_have_lost_gpu = job.job_class.uses_gpu and (place is None or place.gpu_idle_s is None)
    lost = policed and may_have_lost_gpu
    return _Row(
        key=key,
        job=job,
        place=place,
        may_have_lost_gpu=may_have_lost_gpu,
        own=own,
        policed=policed,
        elapsed_s=job.started.age_s(now),
        step_beat_age_s=job.beat.age_s(now) if job.beat else None,
        inactive_s=activity.inactive_s(job, place, now=now) if policed else None,
        quiet_gpu_lost_s=activity.inactive_s(job, place, now=now, gpu_lost=True) if lost else None,
        quiet_apart_s=activity.inactive_s(job, own, now=now, shared_container=True) if policed and own else None,
        heartbeat_age_s=sighting.worker.heartbeat.age_s(now),
        dead_s=snapshot.dead_s.get(sighting.worker.worker),
    )


def _beside_others(rows: list[_Row]) -> list[_Row]:
    """Nobody is quiet while another worker of its container goes on, by all that one does itself: its steps, too.

    What acts on quiet frees the container, which would end the other's work. Where it is unknown whether one goes on,
    it is unknown who is quiet beside it.
    """
    going_on: dict[str, list[_Row]] = {}
    for row in rows:
        if row.own and row.policed:
            going_on.setdefault(row.key[1], []).append(row)

    def with_others(row: _Row) -> _Row:
        others = [each.quiet_apart_s for each in going_on.get(row.key[1], ()) if each is not row]
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
        "The id of the job that a worker runs, of which attempt and in which life of the worker.",
        (*_SLOT, "attempt", "incarnation"),
        (_named(row) for row in rows),
        source="job file",
        absent=_NO_JOB,
        values="an id",
    )
    yield gauge(
        "gpuwarden_job_overdue_id",
        "As `gpuwarden_job_id`, but only of a job that has run, or been silent or quiet, for as long as it may, or "
        "whose worker has: no rule that acts on jobs says anything of another.",
        (*_SLOT, "attempt", "incarnation"),
        (_named(row) for row in rows if _is_overdue(row, snapshot)),
        source="job file, and of what the rules compare each age with its limit",
        absent=f"{_NO_JOB}, or nothing of it has lasted as long as it may",
        values="an id",
    )
    yield gauge(
        "gpuwarden_job_info",
        "What kind of job a worker runs; always 1.",
        (*_SLOT, "job_class", "model"),
        (((*row.key, row.job.job_class, row.job.model or ""), 1.0) for row in rows),
        source="job file",
        absent=_NO_JOB,
    )
    yield gauge(
        "gpuwarden_job_elapsed_seconds",
        "Time since the attempt started; the load counts.",
        _SLOT,
        ((row.key, row.elapsed_s) for row in rows),
        source="job file, against CLOCK_BOOTTIME at the look",
        absent=f"{_NO_JOB}, or {_UNKNOWN_AGE}",
    )
    yield gauge(
        "gpuwarden_job_phase",
        "1 for the phase the attempt is in.",
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
        source="job file, against CLOCK_BOOTTIME at the look",
        absent=f"{_NO_JOB}, or {_UNKNOWN_AGE}",
    )


def _named(row: _Row) -> Row:
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
        "Steps the job plans, where it says.",
        _SLOT,
        ((row.key, None if row.job.steps_total is None else float(row.job.steps_total)) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or the job does not say",
    )
    yield gauge(
        "gpuwarden_job_step_mean_seconds",
        "Mean time between the attempt's steps so far, less that in other phases, and without the first 20 once 20 "
        "more are known.",
        _SLOT,
        ((row.key, row.job.step_mean_s) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or it has done fewer than two steps",
    )
    yield gauge(
        "gpuwarden_job_step_max_seconds",
        "Longest time between two of the attempt's steps so far; what counts as in the mean.",
        _SLOT,
        ((row.key, row.job.step_max_s) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or it has done fewer than two steps",
    )
    yield gauge(
        "gpuwarden_job_items",
        "The job's items so far, by what became of them.",
        (*_SLOT, "outcome"),
        (
            ((*row.key, outcome), float(count))
            for row in rows
            for outcome, count in (("done", row.job.items_done), ("failed", row.job.items_failed))
        ),
        source="job file",
        absent=_NO_JOB,
    )


def _silence(rows: list[_Row], waiting: list[tuple[str, str]], snapshot: Snapshot) -> Iterable[Metric]:
    """For how long each attempt was silent, and showed no other sign of life either."""
    timeouts = snapshot.thresholds.timeouts
    yield gauge(
        "gpuwarden_job_step_beat_age_seconds",
        "Time since the attempt's last beat, by CLOCK_BOOTTIME; NaN until it is armed.",
        _SLOT,
        ((row.key, or_nan(row.step_beat_age_s)) for row in rows),
        source="job file, against CLOCK_BOOTTIME at the look",
        absent=f"{_NO_JOB}; NaN while it is not armed yet, or {_UNKNOWN_AGE}",
    )
    yield gauge(
        "gpuwarden_job_step_beat_timestamp_seconds",
        "When the attempt last beat, Unix time; absent until it is armed.",
        _SLOT,
        ((row.key, row.job.beat.unix_s if row.job.beat else None) for row in rows),
        source="job file",
        absent=f"{_NO_JOB}, or it is not armed yet",
    )
    yield gauge(
        "gpuwarden_job_stall_suspected",
        "1 while a policed job is silent past its timeout yet shows, or may show, another sign of life.",
        _SLOT,
        (
            (
                row.key,
                float(activity.not_stalled_reason(row.job, row.place, timeouts, now=snapshot.taken) is not None),
            )
            for row in rows
            if timeouts.stall_after_s(row.job) and row.policed
        ),
        source="computed at each look from the job file and its container's GPU, RAM and work",
        absent=f"{_NO_JOB}, the stall condition does not police it, or {_DEAD}",
    )
    yield gauge(
        "gpuwarden_job_inactive_seconds",
        "For how long the attempt has shown no sign of life in its phase: no beat once it has beaten, every GPU of its "
        "container idle, its RAM still, and in a load, an evaluation, a save or a checkpoint its work too; nor has any "
        "other worker with a job there, by `gpuwarden_job_inactive_in_shared_container_seconds`.",
        _SLOT,
        (*((row.key, or_nan(row.inactive_s)) for row in rows), *((key, math.nan) for key in waiting)),
        source="the least of `gpuwarden_job_step_beat_age_seconds`, `gpuwarden_job_phase_age_seconds` and of its "
        "container the times for its GPU, its RAM and, where it counts, its work",
        absent=(
            "as `gpuwarden_worker_info`; NaN where the worker runs no job, while any of these "
            f"is unknown that counts, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_inactive_gpu_lost_seconds",
        "For how long the attempt of a GPU job has been as quiet in its phase, a GPU of its container lost and each "
        "other one lost or idle.",
        _SLOT,
        ((row.key, or_nan(row.quiet_gpu_lost_s)) for row in rows if row.may_have_lost_gpu),
        source="as `gpuwarden_job_inactive_seconds`, with `gpuwarden_container_gpu_lost_seconds` for its GPU",
        absent=(
            f"{_NO_JOB}, its class uses no GPU, or every GPU of its container is "
            f"measured; NaN while none of them is lost, any of these is unknown that counts, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_inactive_in_shared_container_seconds",
        "For how long the attempt of a worker that shares its container has itself shown no sign of life in its phase: "
        "as `gpuwarden_job_inactive_seconds`, but by what its worker does, and its I/O still in each phase.",
        _SLOT,
        (
            *((row.key, or_nan(row.quiet_apart_s)) for row in rows if row.own),
            *((key, math.nan) for key in waiting if key[0] in snapshot.worker_evidence),
        ),
        source="the least of `gpuwarden_job_step_beat_age_seconds`, `gpuwarden_job_phase_age_seconds`, "
        "`gpuwarden_worker_gpu_idle_seconds`, `gpuwarden_worker_ram_idle_seconds`, "
        "`gpuwarden_worker_io_idle_seconds` and, where it counts, `gpuwarden_worker_work_idle_seconds`",
        absent=f"{_NOT_SHARED}; NaN as `gpuwarden_job_inactive_seconds`",
    )


def _limits(rows: list[_Row], waiting: list[tuple[str, str]], snapshot: Snapshot) -> Iterable[Metric]:
    """What a job is not judged by is NaN, as all is once its worker is dead: no limit from before stands for it.

    So it is of a worker that waits for a job, or its last one would be accused whose figures Prometheus repeats.
    """

    def limits(limit_s: Callable[[JobFile, Pauses], float | None]) -> Iterator[Row]:
        for row in rows:
            yield row.key, or_nan(limit_s(row.job, row.pauses) or None if row.policed else None)
        yield from ((key, math.nan) for key in waiting)

    timeouts = snapshot.thresholds.timeouts
    on_gpu = [row for row in rows if row.policed and row.job.job_class.uses_gpu]
    yield gauge(
        "gpuwarden_job_budget_seconds",
        "Wall-clock budget of one attempt; NaN where it has none.",
        _SLOT,
        limits(lambda job, _: job.budget_s),
        source="job file",
        absent=(f"as `gpuwarden_worker_info`; NaN where the worker runs no job, or one without a budget, or {_DEAD}"),
    )
    yield gauge(
        "gpuwarden_job_stall_timeout_seconds",
        "Silence the job is allowed in its phase once armed; NaN while the stall condition does not police the job.",
        _SLOT,
        limits(lambda job, _: timeouts.stall_after_s(job)),
        source="job file, and for its phase `--load-timeout-s` and its like",
        absent=(
            f"as `gpuwarden_worker_info`; NaN where the worker runs no job, while the "
            f"stall condition does not police it, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_stuck_after_seconds",
        "Time without a beat after which the job is stuck though its GPU is unknown or reads busy: far longer than any "
        "step it has taken, or in a phase that owes no steps than any earlier stay there.",
        _SLOT,
        limits(timeouts.stuck_after_s),
        source="job file, less the time its container was seen paused; `--stuck-min-s`, `--stuck-factor`",
        absent=(
            "as `gpuwarden_worker_info`; NaN while "
            "`gpuwarden_job_stall_timeout_seconds` is, it is one rank of a gang, `--stuck-factor` is 0, it has done "
            f"fewer than {MIN_STEPS} steps, or, in another phase than `step` for which it asked no patience, has been "
            f"there fewer than {MIN_PHASE_VISITS} times before, however many steps it has done"
        ),
    )
    yield gauge(
        "gpuwarden_job_stuck_idle_seconds",
        "How long the container of a stuck job must have shown no other sign of life: a little less than without a "
        "beat, for rates of work show late, and never less than the silence the job is allowed.",
        _SLOT,
        limits(timeouts.stuck_inactive_s),
        source="20 s less than `gpuwarden_job_stuck_after_seconds`; the job's own silence",
        absent="absent, or NaN, as `gpuwarden_job_stuck_after_seconds`",
    )
    yield gauge(
        "gpuwarden_job_health_window_seconds",
        "How long a GPU job and its container may stay without a sign of life, never less than the silence the job is "
        "allowed; NaN for jobs of other classes, and while the job says that it is idle.",
        _SLOT,
        limits(lambda job, _: timeouts.health_window_s(job, snapshot.thresholds.health_window_s)),
        source="`--health-window-s`, and the job's patience where that is longer",
        absent=(
            "as `gpuwarden_worker_info`; NaN where the worker runs no job, "
            f"while its class uses no GPU or it says that it is idle, or {_DEAD}"
        ),
    )
    yield gauge(
        "gpuwarden_job_health_grace_seconds",
        "How long after the start of a GPU job's attempt the window without a sign of life begins at the soonest: what "
        "is left to its load and its first step; after that step less the window, which then ends no sooner.",
        _SLOT,
        ((row.key, snapshot.health_grace_s(row.job)) for row in on_gpu),
        source="`--health-grace-s`, by the job's phase and whether it has stepped",
        absent=f"{_NO_JOB}, its class uses no GPU, or {_DEAD}",
    )


def _ranks(ranks: list[_Row], snapshot: Snapshot) -> Iterable[Metric]:
    """Series of their own for what is judged of a whole gang: a fleet without any pays nothing for it.

    A gang is a label only of what each rank needs to be known by, and of those that are overdue, of which a fleet in
    health has none: its name is another for each of its jobs.
    """
    timeouts = snapshot.thresholds.timeouts
    told = [
        (row, _spinning_s(row, timeouts), timeouts.gang_stuck_after_s(row.job, row.pauses), row.job.gang or "")
        for row in ranks
    ]
    overdue = [(row, gang) for row, spinning_s, limit_s, gang in told if conditions.reached(spinning_s, limit_s)]
    yield gauge(
        "gpuwarden_gang_rank_attempt",
        "The attempt at its rank that a worker runs; where several run one rank of a gang, it is of the highest.",
        (*_SLOT, "gang", "rank"),
        (((*row.key, gang, str(row.job.rank)), float(row.job.attempt)) for row, _, _, gang in told),
        source="job file",
        absent=_NO_RANK,
    )
    yield gauge(
        "gpuwarden_gang_rank_overdue_attempt",
        "As `gpuwarden_gang_rank_attempt`, with its job, but only of a rank that has been spinning for as long as it "
        "may: the rule says nothing of a gang with any other.",
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
        source="job file, and of what the rule compares each rank's spinning with its limit",
        absent=f"{_NO_RANK}, or it has not been spinning for so long",
    )
    yield gauge(
        "gpuwarden_gang_overdue_ranks",
        "How many ranks the gang has of which the worker runs one that is overdue.",
        (*_SLOT, "gang"),
        (((*row.key, gang), float(row.job.ranks)) for row, gang in overdue),
        source="job file",
        absent="as `gpuwarden_gang_rank_overdue_attempt`",
    )
    yield gauge(
        "gpuwarden_gang_rank_spinning_seconds",
        "How long a rank has been without a beat, its GPU pegged and nothing else of it moving, 20 s of which, or half "
        "its limit where that is less, may be from before that was seen, for rates of work show late.",
        _SLOT,
        ((row.key, or_nan(spinning_s)) for row, spinning_s, _, _ in told),
        source="job file, and its container's GPU, RAM, I/O and page faults",
        absent=(f"{_NO_RANK}; NaN while it is not armed yet, or its GPU, RAM, I/O or faults are unknown"),
    )
    yield gauge(
        "gpuwarden_gang_rank_stuck_after_seconds",
        "How long a rank must have been spinning to be stuck, if every other rank of its gang is too: as "
        "`gpuwarden_job_stuck_after_seconds` of a job that is alone.",
        _SLOT,
        ((row.key, or_nan(limit_s)) for row, _, limit_s, _ in told),
        source="job file; `--stuck-min-s`, `--stuck-factor`",
        absent=f"{_NO_RANK}; NaN as `gpuwarden_job_stuck_after_seconds`",
    )


def _spinning_s(row: _Row, timeouts: PhaseTimeouts) -> float | None:
    spinning_s = row.place.spinning_s if row.place else None
    late_s = timeouts.gang_activity_lag_s(row.job, row.pauses)
    return conditions.rank_spinning_s(row.step_beat_age_s, spinning_s, late_s)
