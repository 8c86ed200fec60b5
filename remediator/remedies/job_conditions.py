"""The conditions of jobs and their workers, and whether local evidence shows one: the table `CONDITIONS`. Pure.

Any unknown is a no: an absent figure never counts as idle. To add a condition: a function here, its line in the table,
its rows in the test.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from gpuwarden import conditions
from gpuwarden.conditions import Sign
from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import Condition, Phase
from remediator.reasons import Doubt, Finding


def confirm(evidence: WorkerFacts, condition: Condition) -> Finding:
    """Whether fresh local evidence shows the condition by itself."""
    check = CONDITIONS.get(condition)
    if check is None:
        return Finding(doubt=Doubt.NO_CONDITION, message=f"no local evidence is defined for trip {condition}")
    if evidence.alive is not True and not (evidence.alive is False and condition is Condition.DEAD_WORKER):
        return Finding(doubt=Doubt.NO_LOCK, message="the worker's process does not hold its lock")
    if evidence.job_id is None:
        return Finding(doubt=Doubt.NO_JOB, message="the worker runs no job")
    return check(evidence)


def _stalled(evidence: WorkerFacts) -> Finding:
    """Silent with its GPU idle (A2), or, far longer than its own step or phase, with one that proves nothing (A14b)."""
    silent = _silent(evidence)
    if silent.confirmed or not conditions.reached(evidence.step_beat_age_s, evidence.stuck_after_s):
        return silent
    stuck = _stuck(evidence)
    return stuck if stuck.confirmed else replace(stuck, message=f"{silent.message}; {stuck.message}")


def _gang_stuck(evidence: WorkerFacts) -> Finding:
    """Its own part in what its whole gang is accused of: that the other ranks spin too, no host knows alone (A14b).

    So it is asked for by the alert about the gang only: a rank that spins is as healthy as the one that it waits for.
    """
    after_s, step_beat_age_s = evidence.gang_stuck_after_s, evidence.step_beat_age_s
    if after_s is None:
        message = "the worker runs no rank of a gang, or after how long that is stuck is not said"
        return Finding(doubt=Doubt.NO_GANG, message=message)
    if step_beat_age_s is None:
        return Finding(doubt=Doubt.NOT_ARMED, message=f"the rank is not armed (phase {evidence.phase})")
    still_s = evidence.gang_stuck_still_s
    spinning_s = conditions.spinning_s(
        gpu_saturated_s=evidence.gpu_saturated_s,
        ram_idle_s=evidence.ram_idle_s,
        io_idle_s=evidence.io_idle_s,
        page_fault_idle_s=evidence.page_fault_idle_s,
    )
    if still_s is None or spinning_s is None:
        message = "whether its GPU is pegged, and RAM, I/O and page faults are still, is unknown"
        return Finding(doubt=Doubt.SIGNS_UNKNOWN, message=message)
    figures = (
        f"a rank that spins: no step for {step_beat_age_s:.1f} s of {after_s:.1f} s, GPU pegged and RAM, I/O, page "
        f"faults still {spinning_s:.1f} s of {still_s:.1f} s, {_where(evidence)}"
    )
    return Finding.of(conditions.is_stuck(step_beat_age_s, after_s, spinning_s, still_s), figures)


def _stuck(evidence: WorkerFacts) -> Finding:
    """Without a beat for long enough, and its container without any other sign of life that counts then.

    A GPU that is pegged without a pause is held by what waits for ever, and its process may spin beside it. Where the
    GPU is unknown the job may compute on it, so that its processes must use no CPU time either (A19).
    """
    still_s, saturated_s, not_busy_s = evidence.stuck_still_s, evidence.gpu_saturated_s, evidence.gpu_last_busy_age_s
    cpu_s = evidence.container_cpu_idle_s
    rest_s = conditions.least(evidence.ram_idle_s, evidence.io_idle_s, evidence.page_fault_idle_s)
    if still_s is None or rest_s is None:
        return Finding(doubt=Doubt.SIGNS_UNKNOWN, message="whether RAM, I/O and page faults are still is unknown")
    pegged = conditions.reached(saturated_s, still_s)
    gpu = (
        f"GPU pegged {saturated_s:.1f} s"
        if pegged
        else "GPU " + ("not told" if not_busy_s is None else f"not seen busy {not_busy_s:.1f} s")
    )
    cpu = "" if pegged or cpu_s is None else f", CPU still {cpu_s:.1f} s"
    where = "" if evidence.phase in (None, Phase.STEP) else f" in phase {evidence.phase}"
    figures = (
        f"stuck{where}: no step for {evidence.step_beat_age_s or 0:.1f} s of {evidence.stuck_after_s or 0:.1f} s, "
        f"{gpu}{cpu}, RAM, I/O, page faults still {rest_s:.1f} s of {still_s:.1f} s, {_where(evidence)}"
    )
    if not pegged and (not_busy_s is None or cpu_s is None):
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


def _silent(evidence: WorkerFacts) -> Finding:
    """No beat, every GPU idle and RAM still, each for the whole silence that the job's owner allows (A2)."""
    silence_s = evidence.stall_timeout_s
    if not silence_s:
        return Finding(doubt=Doubt.NOT_POLICED, message="the worker runs no job that the stall condition polices")
    if evidence.step_beat_age_s is None:
        return Finding(doubt=Doubt.NOT_ARMED, message=f"the job is not armed (phase {evidence.phase})")
    inactive_s, signs, unknown = _quiet(evidence)
    if inactive_s is None:
        return Finding(doubt=unknown, message=signs)
    figures = f"silent {evidence.step_beat_age_s:.1f} s, {signs} of {silence_s:.1f} s allowed, {_where(evidence)}"
    return Finding.of(conditions.is_stalled(evidence.step_beat_age_s, inactive_s, silence_s), figures)


def _over_budget(evidence: WorkerFacts) -> Finding:
    """The attempt has run for its budget or longer, busy or not (A1)."""
    if not evidence.budget_s:
        return Finding(doubt=Doubt.NO_BUDGET, message="the attempt has no budget")
    if evidence.elapsed_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="for how long the attempt has run is unknown")
    figures = f"has run for {evidence.elapsed_s:.1f} s of a budget of {evidence.budget_s:.1f} s, {_where(evidence)}"
    return Finding.of(conditions.reached(evidence.elapsed_s, evidence.budget_s), figures)


def _unhealthy(evidence: WorkerFacts) -> Finding:
    """A GPU job that has shown no sign of life for a whole window, after the grace for its load (A7).

    The window lies within one phase: what counted as life in the phase before is not told any more. A job that has
    never beaten, or did before a reboot, owes no beat.
    """
    if evidence.gpu_lost_s is not None and evidence.gpu_idle_s is None:
        return _on_a_lost_gpu(evidence)
    window_s, grace_s = evidence.health_window_s, evidence.health_grace_s
    if not window_s or grace_s is None:
        message = "GPU health does not watch it: its class uses no GPU, or it says that it is idle"
        return Finding(doubt=Doubt.NOT_POLICED, message=message)
    if evidence.elapsed_s is None or evidence.phase_age_s is None:
        message = "for how long the attempt has run, or been in its phase, is unknown"
        return Finding(doubt=Doubt.TIME_UNKNOWN, message=message)
    inactive_s, signs, unknown = _quiet(evidence)
    if inactive_s is None:
        return Finding(doubt=unknown, message=signs)
    step_beat_age_s = evidence.step_beat_age_s
    figures = (
        f"{'without a beat so far' if step_beat_age_s is None else f'silent {step_beat_age_s:.1f} s'}, "
        f"{signs} of {window_s:.1f} s allowed, {evidence.phase_age_s:.1f} s in its phase, "
        f"{evidence.elapsed_s:.1f} s after its start with a grace of {grace_s:.1f} s, {_where(evidence)}"
    )
    return Finding.of(conditions.is_unhealthy(inactive_s, window_s, evidence.elapsed_s, grace_s), figures)


def _on_a_lost_gpu(evidence: WorkerFacts) -> Finding:
    """A GPU job of which a GPU is lost, and that has shown no sign of life for a whole window, no beat either (A7).

    It has no grace: there is nothing to load any more. The window lies within one phase, as above.
    """
    window_s = evidence.health_window_s
    if not window_s:
        return Finding(doubt=Doubt.NOT_POLICED, message="the job's class uses no GPU")
    if evidence.phase_age_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="for how long the attempt has been in its phase is unknown")
    inactive_s, signs, unknown = _quiet(evidence, gpu=("lost", evidence.gpu_lost_s))
    if inactive_s is None:
        return Finding(doubt=unknown, message=signs)
    step_beat_age_s = evidence.step_beat_age_s
    figures = (
        f"{signs} of {window_s:.1f} s allowed, {evidence.phase_age_s:.1f} s in its phase, its last beat "
        f"{'never' if step_beat_age_s is None else f'{step_beat_age_s:.1f} s ago'}, {_where(evidence)}"
    )
    return Finding.of(conditions.reached(inactive_s, window_s), figures)


def _quiet(
    evidence: WorkerFacts, gpu: tuple[str, float | None] | None = None
) -> tuple[float | None, str, Doubt | None]:
    """For how long a job has shown none of the signs of life that count in its phase, with the figures for people.

    `gpu` is what its GPUs are, and for how long: idle, where nothing is said. `None` where any of them is unknown, and
    then which.
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
    )
    unknown = next((sign for sign, for_s in signs.items() if for_s is None), None)
    if unknown is not None:
        doubt, what, because = _UNKNOWN[unknown]
        return None, f"{what} unknown: {because(evidence) or 'not measured'}", doubt
    figures = f"GPU {state} {gpu_s:.1f} s, RAM still {evidence.ram_idle_s:.1f} s"
    if Sign.WORK in signs:
        figures += f", I/O, page faults and CPU still {work_s:.1f} s"
    return conditions.least(*signs.values()), figures, None


_UNKNOWN: Final[Mapping[Sign, tuple[Doubt, str, Callable[[WorkerFacts], str | None]]]] = {
    Sign.PHASE: (Doubt.TIME_UNKNOWN, "time in its phase", lambda _: "it is from before the last reboot"),
    Sign.GPU: (Doubt.GPU_UNKNOWN, "GPU", lambda seen: seen.gpu_unknown),
    Sign.RAM: (Doubt.RAM_UNKNOWN, "RAM", lambda seen: seen.ram_unknown),
    Sign.WORK: (Doubt.WORK_UNKNOWN, "work of its processes", lambda seen: seen.work_unknown),
}


def _where(evidence: WorkerFacts) -> str:
    return f"phase {evidence.phase}, step {evidence.step}" + (", simulated GPU" if evidence.gpu_simulated else "")


def _worker_dead(evidence: WorkerFacts) -> Finding:
    """No heartbeat, and no CPU time used meanwhile: a long call that holds the interpreter starves one only (A14).

    Or no process at all, for as long as one that comes back by itself may take. A free lock alone does not tell that: a
    worker can lose its lock and live. A heartbeat of another boot has no age; then what was seen on this one counts,
    its lock free and its heartbeat unmoved.
    """
    bound_s = evidence.dead_after_s
    if bound_s <= 0:
        return Finding(doubt=Doubt.NO_BOUND, message="the exporter sets no time after which a worker is dead")
    if not evidence.alive:
        if evidence.dead_s is None:
            message = "for how long the worker's process has been gone is unknown"
            return Finding(doubt=Doubt.TIME_UNKNOWN, message=message)
        age_s = evidence.heartbeat_age_s
        heartbeat = "before the last reboot" if age_s is None else f"{age_s:.1f} s ago"
        figures = (
            f"its process is gone and its files are left, for {evidence.dead_s:.1f} s of {bound_s:.1f} s allowed, "
            f"its last heartbeat {heartbeat}, phase {evidence.phase}, step {evidence.step}"
        )
        gone_s = evidence.dead_s if age_s is None else conditions.least(evidence.dead_s, age_s)
        return Finding.of(conditions.reached(gone_s, bound_s), figures)
    if evidence.heartbeat_age_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="the worker's heartbeat is unknown")
    if evidence.cpu_idle_s is None:
        return Finding(doubt=Doubt.TIME_UNKNOWN, message="the CPU time of the worker's process is unknown")
    figures = (
        f"no heartbeat for {evidence.heartbeat_age_s:.1f} s and no CPU time used for {evidence.cpu_idle_s:.1f} s "
        f"of {bound_s:.1f} s allowed, phase {evidence.phase}, step {evidence.step}"
    )
    silent_s = conditions.least(evidence.heartbeat_age_s, evidence.cpu_idle_s)
    return Finding.of(conditions.reached(silent_s, bound_s), figures)


CONDITIONS: Final[Mapping[Condition, Callable[[WorkerFacts], Finding]]] = {
    Condition.STALL: _stalled,
    Condition.GANG: _gang_stuck,
    Condition.BUDGET: _over_budget,
    Condition.HEALTH: _unhealthy,
    Condition.DEAD_WORKER: _worker_dead,
}
"""Each trip of an alert about a worker, and what its local evidence must show."""
