"""Jobs and beats: what runs, how silent it is, how far it is."""

from collections.abc import Mapping
from typing import Final

from dashboards.expressions import SLOT, each, phase_number, ratio, with_identity
from dashboards.panels import Meaning, Panel, Query
from gpuwarden.job import Phase

_BY_SLOT: Final = "{{host}}/{{worker}}"
_BEAT_AGE: Final = each("min", SLOT, "gpuwarden_job_beat_age_seconds")
_STALL_TIMEOUT: Final = each("max", SLOT, "gpuwarden_job_stall_timeout_seconds")
_ELAPSED: Final = each("max", SLOT, "gpuwarden_job_elapsed_seconds")
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
        reads="One line for each running attempt: who runs it, its phase, and how long it has run, the load included.",
        unit="s",
        queries=(Query(expr=with_identity(_ELAPSED), legend=_BY_SLOT),),
        kind="table",
        width=24,
    ),
    Panel(
        title="Silence against the timeout",
        reads="Time since the last beat as a share of the silence the job's owner allows. At 100 % the job is "
        "suspected, and wedged if its GPUs were idle and its RAM still all that time. Absent until the "
        "first beat, and for jobs that the stall condition does not police.",
        unit="percentunit",
        queries=(Query(expr=ratio(_BEAT_AGE, _STALL_TIMEOUT), legend=_BY_SLOT),),
        levels={0.8: "orange", 1: "red"},
    ),
    Panel(
        title="Beat age and timeout",
        reads="Time since each job's last beat, and dashed the silence it is allowed. A healthy job is a low "
        "saw-tooth; a straight climb is silence.",
        unit="s",
        queries=(
            Query(expr=_BEAT_AGE, legend=_BY_SLOT),
            Query(expr=_STALL_TIMEOUT, legend=f"{_BY_SLOT} timeout", limit=True),
        ),
    ),
    Panel(
        title="Quiet, and what is allowed",
        reads="For how long each job has shown no sign of life: no beat, its GPU idle, its RAM still, and in some "
        "phases its work too; `apart` by what its own worker does, of several in one container. Dashed the silence it "
        "is allowed once it beats, and the window of GPU health. A gap is a sign that is unknown.",
        unit="s",
        queries=(
            Query(expr=each("min", SLOT, "gpuwarden_job_quiet_seconds"), legend=_BY_SLOT),
            Query(expr=each("min", SLOT, "gpuwarden_job_quiet_apart_seconds"), legend=f"{_BY_SLOT} apart"),
            Query(expr=_STALL_TIMEOUT, legend=f"{_BY_SLOT} timeout", limit=True),
            Query(
                expr=each("max", SLOT, "gpuwarden_job_health_window_seconds"), legend=f"{_BY_SLOT} window", limit=True
            ),
        ),
    ),
    Panel(
        title="Elapsed against the budget",
        reads="Wall-clock time of the attempt as a share of its budget, the load included. At 100 % it is out "
        "of budget.",
        unit="percentunit",
        queries=(Query(expr=ratio(_ELAPSED, each("max", SLOT, "gpuwarden_job_budget_seconds")), legend=_BY_SLOT),),
        levels={0.9: "orange", 1: "red"},
    ),
    Panel(
        title="Phase",
        reads="What each worker's job is doing. A gap is a worker without a job.",
        unit="short",
        queries=(Query(expr=phase_number(), legend=_BY_SLOT),),
        kind="states",
        meanings={
            str(number): Meaning(text=phase, color=_PHASE_COLORS[phase]) for number, phase in enumerate(Phase, start=1)
        },
    ),
    Panel(
        title="Time in the phase",
        reads="How long each job has been in its present phase. A load that climbs far past its usual length is "
        "stuck before its first beat, where the stall condition does not look.",
        unit="s",
        queries=(Query(expr=each("max", SLOT, "gpuwarden_job_phase_age_seconds"), legend=_BY_SLOT),),
    ),
    Panel(
        title="Steps",
        reads="Steps that each attempt has done. A flat line is a job that does not advance; a fall to 0 is a "
        "new attempt.",
        unit="short",
        queries=(Query(expr=each("max", SLOT, "gpuwarden_job_steps"), legend=_BY_SLOT),),
    ),
    Panel(
        title="Steps done of those planned",
        reads="How far each attempt is. Absent for a job that does not say how many steps it plans.",
        unit="percentunit",
        queries=(
            Query(
                expr=ratio(each("max", SLOT, "gpuwarden_job_steps"), each("max", SLOT, "gpuwarden_job_steps_planned")),
                legend=_BY_SLOT,
            ),
        ),
        top=1,
    ),
    Panel(
        title="Time between steps",
        reads="Mean and longest time between two steps of the attempt so far. A longest close to the stall "
        "timeout means that the timeout is too short for this job.",
        unit="s",
        queries=(
            Query(expr=each("max", SLOT, "gpuwarden_job_step_mean_seconds"), legend=f"{_BY_SLOT} mean"),
            Query(expr=each("max", SLOT, "gpuwarden_job_step_max_seconds"), legend=f"{_BY_SLOT} longest"),
        ),
    ),
    Panel(
        title="Items of the running jobs",
        reads="Items that the running jobs have finished and failed so far; those of a job that ends leave the sum.",
        unit="short",
        queries=(
            Query(
                expr=f"sum by (outcome) ({each('max', (*SLOT, 'outcome'), 'gpuwarden_job_items')})",
                legend="{{outcome}}",
            ),
        ),
    ),
    Panel(
        title="Worker heartbeat age",
        reads="Time since each worker's process refreshed its file. It beats from a thread of its own, so a "
        "wedged job keeps it low: a climb is a frozen or dead process.",
        unit="s",
        queries=(Query(expr=each("min", SLOT, "gpuwarden_worker_heartbeat_age_seconds"), legend=_BY_SLOT),),
    ),
    Panel(
        title="Worker loop age",
        reads="Time since each worker's main loop was last seen outside a job body. It climbs while a job runs; "
        "without one it stays low.",
        unit="s",
        queries=(Query(expr=each("min", SLOT, "gpuwarden_worker_loop_age_seconds"), legend=_BY_SLOT),),
    ),
)
