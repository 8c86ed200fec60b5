"""Conditions of jobs and their workers: the table `CONDITIONS`. Pure. An unknown value never confirms."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from gpuwarden import conditions
from gpuwarden.conditions import Sign
from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import Condition, Phase
from remediator.reasons import Doubt, Finding


def confirm(evidence: WorkerFacts, condition: Condition) -> Finding:
    """Check whether local evidence alone shows the condition."""
    check = CONDITIONS.get(condition)
    if check is None:
        return Finding(doubt=Doubt.NO_CONDITION, message=f"no local evidence is defined for condition {condition}")
    if evidence.alive is not True and not (evidence.alive is False and condition is Condition.DEAD_WORKER):
        return Finding(doubt=Doubt.NO_LOCK, message="the worker's process does not hold its lock")
    if evidence.job_id is None:
        return Finding(doubt=Doubt.NO_JOB, message="the worker runs no job")
    return check(evidence)


def _check_stalled(evidence: WorkerFacts) -> Finding:
    """The job is inactive and its GPU idle (A2), or it is stuck and its GPU proves no work (A14b)."""
    silent = _check_inactive(evidence)
    if silent.confirmed or not conditions.reached(evidence.step_beat_age_s, evidence.stuck_after_s):
        return silent
    stuck = _check_stuck(evidence)
    return stuck if stuck.confirmed else replace(stuck, message=f"{silent.message}; {stuck.message}")


def _check_gang_stuck(evidence: WorkerFacts) -> Finding:
    """This rank's share of a stuck gang (A14b). Only the alert about the gang knows the other ranks."""
    after_s, step_beat_age_s = evidence.gang_stuck_after_s, evidence.step_beat_age_s
    if after_s is None:
        message = "the worker runs no rank of a gang, or its stuck limit is unknown"
        return Finding(doubt=Doubt.NO_GANG, message=message)
    if step_beat_age_s is None:
        return Finding(doubt=Doubt.NOT_ARMED, message=f"the rank is not armed (phase {evidence.phase})")
    still_s = evidence.gang_stuck_idle_s
    spinning_s = conditions.spinning_s(
        gpu_saturated_s=evidence.gpu_saturated_s,
        ram_idle_s=evidence.ram_idle_s,
        io_idle_s=evidence.io_idle_s,
        page_fault_idle_s=evidence.page_fault_idle_s,
    )
    if still_s is None or spinning_s is None:
        message = "GPU saturation, RAM, I/O or page faults unknown"
        return Finding(doubt=Doubt.SIGNS_UNKNOWN, message=message)
    figures = (
        f"a rank that spins: no step for {step_beat_age_s:.1f} s of {after_s:.1f} s, GPU saturated and RAM, I/O, "
        f"page faults inactive {spinning_s:.1f} s of {still_s:.1f} s, {_where(evidence)}"
    )
    return Finding.of(conditions.is_stuck(step_beat_age_s, after_s, spinning_s, still_s), figures)


def _check_stuck(evidence: WorkerFacts) -> Finding:
    """No step beat for too long, and no other activity that counts then.

    A permanently saturated GPU is held by a hung kernel or collective, and its process may spin. If the GPU is unknown
    the job may compute on it, so its processes must use no CPU time either (A19).
    """
    still_s, saturated_s, not_busy_s = evidence.stuck_idle_s, evidence.gpu_saturated_s, evidence.gpu_last_busy_age_s
    cpu_s = evidence.container_cpu_idle_s
    rest_s = conditions.least(evidence.ram_idle_s, evidence.io_idle_s, evidence.page_fault_idle_s)
    if still_s is None or rest_s is None:
        return Finding(doubt=Doubt.SIGNS_UNKNOWN, message="RAM, I/O or page faults unknown")
    is_saturated = conditions.reached(saturated_s, still_s)
    gpu = (
        f"GPU saturated {saturated_s:.1f} s"
        if is_saturated
        else "GPU " + ("unknown" if not_busy_s is None else f"not seen busy {not_busy_s:.1f} s")
    )
    cpu = "" if is_saturated or cpu_s is None else f", CPU inactive {cpu_s:.1f} s"
    where = "" if evidence.phase in (None, Phase.STEP) else f" in phase {evidence.phase}"
    figures = (
        f"stuck{where}: no step for {evidence.step_beat_age_s or 0:.1f} s of {evidence.stuck_after_s or 0:.1f} s, "
        f"{gpu}{cpu}, RAM, I/O, page faults inactive {rest_s:.1f} s of {still_s:.1f} s, {_where(evidence)}"
    )
    if not is_saturated and (not_busy_s is None or cpu_s is None):
        return Finding(doubt=Doubt.GPU_UNKNOWN, message=figures)
    no_progress_s = conditions.no_progress_s(
        gpu_saturated_s=saturated_s,
        gpu_last_busy_age_s=not_busy_s,
        cpu_idle_s=cpu_s,
        ram_idle_s=evidence.ram_idle_s,
        io_idle_s=evidence.io_idle_s,
        page_fault_idle_s=evidence.page_fault_idle_s,
    )
    return Finding.of(
        conditions.is_stuck(evidence.step_beat_age_s, evidence.stuck_after_s, no_progress_s, still_s), figures
    )


def _check_inactive(evidence: WorkerFacts) -> Finding:
    """No step beat, every GPU idle and RAM inactive, each for the stall timeout (A2)."""
    silence_s = evidence.stall_timeout_s
    if not silence_s:
        return Finding(doubt=Doubt.NOT_POLICED, message="the stall condition does not apply to the worker's job")
    if evidence.step_beat_age_s is None:
        return Finding(doubt=Doubt.NOT_ARMED, message=f"the job is not armed (phase {evidence.phase})")
    inactive_s, signs, unknown = _inactivity(evidence)
    if inactive_s is None:
        return Finding(doubt=unknown, message=signs)
    figures = f"silent {evidence.step_beat_age_s:.1f} s, {signs} of {silence_s:.1f} s allowed, {_where(evidence)}"
    return Finding.of(conditions.is_stalled(evidence.step_beat_age_s, inactive_s, silence_s), figures)


def _check_budget(evidence: WorkerFacts) -> Finding:
    """The attempt has used its time budget, active or not (A1)."""
    if not evidence.budget_s:
        return Finding(doubt=Doubt.NO_BUDGET, message="the attempt has no budget")
    if evidence.elapsed_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="run time of the attempt unknown")
    figures = f"has run for {evidence.elapsed_s:.1f} s of a budget of {evidence.budget_s:.1f} s, {_where(evidence)}"
    return Finding.of(conditions.reached(evidence.elapsed_s, evidence.budget_s), figures)


def _check_health(evidence: WorkerFacts) -> Finding:
    """A GPU job without activity for a whole window in one phase, after the grace period (A7).

    A job without a step beat since the last boot owes none.
    """
    if evidence.health_acts is False:
        message = "an alert only: the command was started without --health-window-s"
        return Finding(doubt=Doubt.ALERT_ONLY, message=message)
    if evidence.gpu_lost_s is not None and evidence.gpu_idle_s is None:
        return _check_lost_gpu(evidence)
    window_s, grace_s = evidence.health_window_s, evidence.health_grace_s
    if not window_s or grace_s is None:
        message = "GPU health does not apply: its class uses no GPU, or its phase is idle"
        return Finding(doubt=Doubt.NOT_POLICED, message=message)
    if evidence.elapsed_s is None or evidence.phase_age_s is None:
        message = "run time or phase age of the attempt unknown"
        return Finding(doubt=Doubt.TIME_UNKNOWN, message=message)
    inactive_s, signs, unknown = _inactivity(evidence)
    if inactive_s is None:
        return Finding(doubt=unknown, message=signs)
    step_beat_age_s = evidence.step_beat_age_s
    figures = (
        f"{'no step beat so far' if step_beat_age_s is None else f'silent {step_beat_age_s:.1f} s'}, "
        f"{signs} of {window_s:.1f} s allowed, {evidence.phase_age_s:.1f} s in its phase, "
        f"{evidence.elapsed_s:.1f} s after its start with a grace of {grace_s:.1f} s, {_where(evidence)}"
    )
    return Finding.of(conditions.is_unhealthy(inactive_s, window_s, evidence.elapsed_s, grace_s), figures)


def _check_lost_gpu(evidence: WorkerFacts) -> Finding:
    """A job with a lost GPU and without activity or a step beat for a whole window (A7)."""
    window_s = evidence.health_window_s
    if not window_s:
        return Finding(doubt=Doubt.NOT_POLICED, message="the job's class uses no GPU")
    if evidence.phase_age_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="phase age of the attempt unknown")
    inactive_s, signs, unknown = _inactivity(evidence, gpu=("lost", evidence.gpu_lost_s))
    if inactive_s is None:
        return Finding(doubt=unknown, message=signs)
    step_beat_age_s = evidence.step_beat_age_s
    figures = (
        f"{signs} of {window_s:.1f} s allowed, {evidence.phase_age_s:.1f} s in its phase, last step beat "
        f"{'never' if step_beat_age_s is None else f'{step_beat_age_s:.1f} s ago'}, {_where(evidence)}"
    )
    return Finding.of(conditions.reached(inactive_s, window_s), figures)


def _inactivity(
    evidence: WorkerFacts, gpu: tuple[str, float | None] | None = None
) -> tuple[float | None, str, Doubt | None]:
    """Return how long a job has been inactive, seconds, and the figures as text.

    `gpu` is the state of its GPUs and its duration in seconds, by default idle. If a sign is unknown, the result is
    `None`, which one, and the doubt.
    """
    state, gpu_s = gpu or ("idle", evidence.gpu_idle_s)
    work_s = conditions.least(evidence.io_idle_s, evidence.page_fault_idle_s, evidence.container_cpu_idle_s)
    signs = conditions.activity(
        evidence.phase,
        has_beaten=evidence.step_beat_age_s is not None,
        step_beat_age_s=evidence.step_beat_age_s,
        phase_age_s=evidence.phase_age_s,
        gpu_s=gpu_s,
        ram_idle_s=evidence.ram_idle_s,
        work_idle_s=work_s,
        heavy_work_idle_s=evidence.heavy_work_idle_s,
        busy_timeout_s=evidence.busy_timeout_s,
    )
    unknown = next((sign for sign, for_s in signs.items() if for_s is None), None)
    if unknown is not None:
        doubt, what, cause_of = _UNKNOWN[unknown]
        return None, f"{what} unknown: {cause_of(evidence) or 'not measured'}", doubt
    figures = f"GPU {state} {gpu_s:.1f} s, RAM inactive {evidence.ram_idle_s:.1f} s"
    if Sign.HEAVY_WORK in signs:
        figures += f", no heavy I/O or computing {evidence.heavy_work_idle_s:.1f} s"
    elif evidence.phase == Phase.STEP:
        figures += f", its busy timeout of {evidence.busy_timeout_s:.0f} s over"
    if Sign.WORK in signs:
        figures += f", I/O, page faults and CPU inactive {work_s:.1f} s"
    return conditions.least(*signs.values()), figures, None


_UNKNOWN: Final[Mapping[Sign, tuple[Doubt, str, Callable[[WorkerFacts], str | None]]]] = {
    Sign.PHASE: (Doubt.TIME_UNKNOWN, "time in its phase", lambda _: "its start is from before the last reboot"),
    Sign.GPU: (Doubt.GPU_UNKNOWN, "GPU", lambda seen: seen.gpu_unknown),
    Sign.RAM: (Doubt.RAM_UNKNOWN, "RAM", lambda seen: seen.ram_unknown),
    Sign.WORK: (Doubt.WORK_UNKNOWN, "work of its processes", lambda seen: seen.work_unknown),
    Sign.HEAVY_WORK: (Doubt.WORK_UNKNOWN, "work of its processes", lambda seen: seen.work_unknown),
}


def _where(evidence: WorkerFacts) -> str:
    rank = "" if evidence.local_rank is None else f", rank {evidence.local_rank}"
    return f"phase {evidence.phase}, step {evidence.step}{rank}" + (", simulated GPU" if evidence.gpu_simulated else "")


def _check_worker_dead(evidence: WorkerFacts) -> Finding:
    """No heartbeat and no CPU time, or no process for longer than a restart by others takes (A14).

    A long call that holds the interpreter stops only the heartbeat. A free lock alone proves nothing: a worker can lose
    its lock and live. A heartbeat from before a reboot has no age: then the time without a process counts.
    """
    bound_s = evidence.dead_after_s
    if bound_s <= 0:
        return Finding(doubt=Doubt.NO_BOUND, message="the exporter sets no time after which a worker is dead")
    if not evidence.alive:
        if evidence.dead_s is None:
            message = "time since the worker's process ended unknown"
            return Finding(doubt=Doubt.TIME_UNKNOWN, message=message)
        age_s = evidence.heartbeat_age_s
        heartbeat = "before the last reboot" if age_s is None else f"{age_s:.1f} s ago"
        figures = (
            f"its process has been gone for {evidence.dead_s:.1f} s of {bound_s:.1f} s allowed, "
            f"its last heartbeat {heartbeat}, phase {evidence.phase}, step {evidence.step}"
        )
        gone_s = evidence.dead_s if age_s is None else conditions.least(evidence.dead_s, age_s)
        return Finding.of(conditions.reached(gone_s, bound_s), figures)
    if evidence.heartbeat_age_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="the worker's heartbeat age is unknown")
    if evidence.cpu_idle_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="the CPU time of the worker's process is unknown")
    figures = (
        f"no heartbeat for {evidence.heartbeat_age_s:.1f} s and no CPU time used for {evidence.cpu_idle_s:.1f} s "
        f"of {bound_s:.1f} s allowed, phase {evidence.phase}, step {evidence.step}"
    )
    silent_s = conditions.least(evidence.heartbeat_age_s, evidence.cpu_idle_s)
    return Finding.of(conditions.reached(silent_s, bound_s), figures)


CONDITIONS: Final[Mapping[Condition, Callable[[WorkerFacts], Finding]]] = {
    Condition.STALL: _check_stalled,
    Condition.GANG: _check_gang_stuck,
    Condition.BUDGET: _check_budget,
    Condition.HEALTH: _check_health,
    Condition.DEAD_WORKER: _check_worker_dead,
}
