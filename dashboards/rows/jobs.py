"""Jobs: phase, progress and inactivity."""

from collections.abc import Mapping
from typing import Final

from dashboards.expressions import SLOT, aggregate, phase_number, ratio, with_identity
from dashboards.panels import Panel, Query, ValueText
from gpuwarden.job import Phase

_BY_SLOT: Final = "{{host}}/{{worker}}"
_BEAT_AGE: Final = aggregate("min", SLOT, "gpuwarden_job_step_beat_age_seconds")
_STALL_TIMEOUT: Final = aggregate("max", SLOT, "gpuwarden_job_stall_timeout_seconds")
_ELAPSED: Final = aggregate("max", SLOT, "gpuwarden_job_elapsed_seconds")
_PHASE_COLORS: Final[Mapping[Phase, str]] = {
    Phase.LOAD: "blue",
    Phase.STEP: "green",
    Phase.EVAL: "purple",
    Phase.CHECKPOINT: "yellow",
    Phase.SAVE: "orange",
    Phase.IDLE: "gray",
}

PANELS: Final = (
    Panel(
        title="Jobs now",
        description="One line per running attempt: its worker, phase and run time, load included.",
        unit="s",
        queries=(Query(expr=with_identity(_ELAPSED), legend=_BY_SLOT),),
        kind="table",
        width=24,
    ),
    Panel(
        title="Step beat age / stall timeout",
        description="Time since the last step beat, as a share of the stall timeout. At 100 % the job is suspected. "
        "It is stalled if its GPUs were idle and its RAM unchanged for that time. Absent before the first "
        "step beat, and without a stall timeout.",
        unit="percentunit",
        queries=(Query(expr=ratio(_BEAT_AGE, _STALL_TIMEOUT), legend=_BY_SLOT),),
        levels={0.8: "orange", 1: "red"},
    ),
    Panel(
        title="Step beat age and stall timeout",
        description="Time since the last step beat of each job. Dashed: its stall timeout. A healthy job shows a low "
        "saw-tooth; a steady rise means no steps.",
        unit="s",
        queries=(
            Query(expr=_BEAT_AGE, legend=_BY_SLOT),
            Query(expr=_STALL_TIMEOUT, legend=f"{_BY_SLOT} timeout", limit=True),
        ),
    ),
    Panel(
        title="Inactivity and limits",
        description="Time for which a job has been inactive: no step beat, GPU idle, RAM unchanged, and in some "
        "phases no other work. `shared`: the same for one worker of a shared container. Dashed: the stall "
        "timeout and the health window. A gap is unknown.",
        unit="s",
        queries=(
            Query(expr=aggregate("min", SLOT, "gpuwarden_job_inactive_seconds"), legend=_BY_SLOT),
            Query(
                expr=aggregate("min", SLOT, "gpuwarden_job_inactive_in_shared_container_seconds"),
                legend=f"{_BY_SLOT} shared",
            ),
            Query(expr=_STALL_TIMEOUT, legend=f"{_BY_SLOT} timeout", limit=True),
            Query(
                expr=aggregate("max", SLOT, "gpuwarden_job_health_window_seconds"),
                legend=f"{_BY_SLOT} window",
                limit=True,
            ),
        ),
    ),
    Panel(
        title="Run time / time budget",
        description="Run time of the attempt, load included, as a share of its time budget. At 100 % the attempt is "
        "over budget.",
        unit="percentunit",
        queries=(Query(expr=ratio(_ELAPSED, aggregate("max", SLOT, "gpuwarden_job_budget_seconds")), legend=_BY_SLOT),),
        levels={0.9: "orange", 1: "red"},
    ),
    Panel(
        title="Phase",
        description="Phase of each worker's job. A gap is a worker without a job.",
        unit="short",
        queries=(Query(expr=phase_number(), legend=_BY_SLOT),),
        kind="states",
        meanings={
            str(number): ValueText(text=phase, color=_PHASE_COLORS[phase])
            for number, phase in enumerate(Phase, start=1)
        },
    ),
    Panel(
        title="Time in the phase",
        description="Time that each job has spent in its current phase. If a load takes far longer than usual, the "
        "job hangs before its first step beat, and the stall condition does not apply yet.",
        unit="s",
        queries=(Query(expr=aggregate("max", SLOT, "gpuwarden_job_phase_age_seconds"), legend=_BY_SLOT),),
    ),
    Panel(
        title="Steps",
        description="Steps of each attempt. A flat line is a job without progress; a drop to 0 is a new attempt.",
        unit="short",
        queries=(Query(expr=aggregate("max", SLOT, "gpuwarden_job_steps"), legend=_BY_SLOT),),
    ),
    Panel(
        title="Steps / planned steps",
        description="Progress of each attempt. Absent for a job that reports no planned steps.",
        unit="percentunit",
        queries=(
            Query(
                expr=ratio(
                    aggregate("max", SLOT, "gpuwarden_job_steps"), aggregate("max", SLOT, "gpuwarden_job_steps_planned")
                ),
                legend=_BY_SLOT,
            ),
        ),
        top=1,
    ),
    Panel(
        title="Time between steps",
        description="Mean and longest time between two steps of the attempt. If the longest is close to the stall "
        "timeout, the timeout is too short for this job.",
        unit="s",
        queries=(
            Query(expr=aggregate("max", SLOT, "gpuwarden_job_step_mean_seconds"), legend=f"{_BY_SLOT} mean"),
            Query(expr=aggregate("max", SLOT, "gpuwarden_job_step_max_seconds"), legend=f"{_BY_SLOT} longest"),
        ),
    ),
    Panel(
        title="Items of the running jobs",
        description="Items that running jobs have finished and failed. The items of a job leave the sum when it ends.",
        unit="short",
        queries=(
            Query(
                expr=f"sum by (outcome) ({aggregate('max', (*SLOT, 'outcome'), 'gpuwarden_job_items')})",
                legend="{{outcome}}",
            ),
        ),
    ),
    Panel(
        title="Worker heartbeat age",
        description="Time since each worker refreshed its file. A separate thread sends heartbeats, so a stalled job "
        "keeps it low. A rise is a frozen or dead process.",
        unit="s",
        queries=(Query(expr=aggregate("min", SLOT, "gpuwarden_worker_heartbeat_age_seconds"), legend=_BY_SLOT),),
    ),
    Panel(
        title="Worker loop age",
        description="Time since each worker's main loop last ran outside a job. The value rises while a job runs and "
        "stays low without one.",
        unit="s",
        queries=(Query(expr=aggregate("min", SLOT, "gpuwarden_worker_loop_age_seconds"), legend=_BY_SLOT),),
    ),
)
