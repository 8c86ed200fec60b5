"""Stops a container, waits until it has stopped, and starts it. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from remediator.plan import (
    Advance,
    Close,
    ContainerState,
    Facts,
    Fence,
    Intent,
    Kind,
    Outcome,
    Quarantine,
    Stage,
    Start,
    Step,
    Stop,
    Wait,
    Warn,
)
from remediator.reasons import Doubt, Finding, Reason
from remediator.remedies.guards import is_untouched

TRIES_MAX: Final = 5
"""Tries at the executor's interval; later ones follow at `RETRY_S`."""

RETRY_S: Final = 10.0
"""Interval of later tries, seconds: a restarting engine refuses everything."""

PAUSE_S: Final = 300.0
"""Interval of stops after that, seconds."""

WARNINGS_MAX: Final = 2
"""Warning signals per worker; the second only if the first may not have been sent."""

_LEFT_RUNNING: Final = frozenset({Reason.UNCONFIRMED, Reason.ATTEMPT_OVER})
"""Reasons to abandon a restart whose target works again."""

SEEN_DEAD: Final = frozenset({Stage.DEAD, Stage.STARTING, Stage.DONE})
"""Stages after the container has stopped."""


def next_step(
    facts: Facts,
    free: Intent,
    *,
    stop: Callable[[], Step],
    doubted: Callable[[], Step | None],
    ended: Callable[[], Step] | None = None,
) -> Step:
    """Return the next step of a restart. A stopped container gets here after its settle and is started.

    `stop` decides if a planned one runs, `ended` if it ended before, by default to start it. `doubted` decides after a
    failed stop; with `None` it is stopped again.
    """
    if not facts.container_known:
        return Wait(reason=Reason.ENGINE_UNREACHABLE, message=f"the container engine does not answer: {facts.unknown}")
    if free.stage is Stage.PLANNED and is_up(facts, free):
        return stop()
    if free.stage is Stage.PLANNED and ended is not None:
        return ended()
    if free.stage is Stage.STOPPING and is_up(facts, free):
        return doubted() or wait_until_stopped(facts, free, doubted)
    if free.stage in (Stage.PLANNED, Stage.STOPPING):
        return wait_until_stopped(facts, free, doubted)
    container = facts.container
    if container is not None and not (container.running or container.managed):
        message = f"container {container.name} is gone or not managed, so it is not started"
        return _abandoned(Reason.NOT_MANAGED, message)
    return _start_stopped(facts, free) if free.stage is Stage.DEAD else _verify_running(facts, free)


def _start_stopped(facts: Facts, free: Intent) -> Step:
    """Start only a container that gpuwarden ended."""
    container = facts.container
    if container is None:
        return _await_pod(facts, free) if "others" in free.data else _await_successor(facts, free)
    if not container.startable:
        message = "nothing is known to start this worker: start it, if you need it"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.ENDED_ELSEWHERE, message=message)
    if container.running:
        runs_on = container.incarnation == free.key
        reason = Reason.REPLACED if runs_on else Reason.STARTED_ELSEWHERE
        starter = "its supervisor" if container.kind == "process" else "someone else"
        message = "runs with another worker" if runs_on else f"was started by {starter}"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=reason, message=f"the container {message}")
    if container.incarnation not in ("", free.key):  # "" if unknown: see `_verify_running`
        message = "the container was started by someone else and ended: it is left as it is"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.ENDED_ELSEWHERE, message=message)
    if container.left_down and not _tries(free):
        message = "it stays down: its engine would restart it, but someone else stopped it"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.LEFT_DOWN, message=message)
    if not facts.armed and not _tries(free) and not _is_settled(facts):
        return Wait(reason=Reason.DRY_RUN, message="disarmed, and gpuwarden did not end the container")
    return Start(message="it has stopped" + (" and its job is settled" if _is_settled(facts) else ""))


def _await_successor(facts: Facts, free: Intent) -> Step:
    """A removed container cannot be started. Another program may create the next one."""
    if _has_successor(facts, free):
        message = "another container runs in its place"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.STARTED_ELSEWHERE, message=message)
    if not _is_ours(facts, free):
        message = "the container is gone, and gpuwarden did not end it"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message=message)
    message = "the container is gone, and no other runs in its place"
    if timed_out(facts, facts.free_for_s):
        return _abandoned(Reason.CONTAINER_GONE, message)
    return Wait(reason=Reason.CONTAINER_GONE, message=message)


def _await_pod(facts: Facts, free: Intent) -> Step:
    """Wait until the controller of an evicted pod has another one ready."""
    new = facts.successor
    if free.data["others"] is None:
        message = "the pod is gone, and it has no controller that replaces it"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message=message)
    if new is not None and new.running:
        if facts.runs_for_s < facts.limits.start_seen_s:
            message = f"pod {new.name} is ready; it must be so for {facts.limits.start_seen_s:g} s"
            return Wait(reason=Reason.STABILIZING, message=message)
        message = f"pod {new.name} replaces it and is ready"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message=message)
    message = "its controller has created no other pod yet"
    if new is not None:
        message = f"pod {new.name} replaces it and is not ready: {new.unstartable}"
    if min(facts.free_for_s, facts.quiet_for_s) >= facts.limits.pod_ready_timeout_s:
        return _not_started(f"{message}, after {facts.limits.pod_ready_timeout_s:.0f} s")
    return Wait(reason=Reason.STARTING, message=message)


def _is_settled(facts: Facts) -> bool:
    settle = facts.episode.settle
    return settle is not None and settle.stage is Stage.DONE


def _is_ours(facts: Facts, free: Intent) -> bool:
    """Whether gpuwarden ended the container: by a stop, or by the fence that makes its worker exit."""
    return _tries(free) > 0 or (_is_settled(facts) and bool(_pids_before(free)))


def _has_successor(facts: Facts, free: Intent) -> bool:
    """Whether the exporter sees the target alive in another container."""
    seen = facts.place
    if seen is None or not _is_fresh(facts) or seen.container_incarnation in (None, free.key):
        return False
    return facts.evidence is None or facts.evidence.alive is True


def _verify_running(facts: Facts, free: Intent) -> Step:
    """A container that runs for a moment and ends is not fixed."""
    container, seen_s = facts.container, facts.limits.start_seen_s
    if container is not None and container.running:
        if container.starting and timed_out(facts, facts.free_for_s):
            message = f"{container.name} was started, but its start does not end: check it by hand"
            return _not_started(message)
        if container.starting:
            return Wait(reason=Reason.STARTING, message=f"{container.name} was started and is not up yet")
        if facts.runs_for_s < seen_s:
            return Wait(
                reason=Reason.STABILIZING,
                message=f"{container.name} runs; it must run for {seen_s:.0f} s",
            )
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message=f"{container.name} runs again")
    # Empty if unknown: systemd forgets the incarnation of a service that is down.
    if container is not None and container.incarnation not in ("", free.key):
        message = f"{container.name} was started and ended: check it by hand"
        return _not_started(message)
    if container is None or (_tries(free) >= TRIES_MAX and timed_out(facts, facts.free_for_s)):
        return _not_started("it did not start again: check it by hand")
    if _may_try(facts, free):
        return Start(message="it does not run yet")
    return Wait(reason=Reason.STARTING, message=f"it does not run yet, after {_tries(free)} tries")


def _not_started(message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message=message)


def warned_first(facts: Facts, free: Intent, act: Fence | Stop) -> Step:
    """Return the first step of a restart, or the warning and its grace period before it."""
    limits, warned = facts.limits, free.data.get("warned")
    if limits.warn_signal is None or (facts.container_known and not is_up(facts, free)):
        return act
    if warned is None or not (warned["done"] or warned["tries"] >= WARNINGS_MAX):
        if warned is None and not facts.container_known:
            message = f"it must be warned first, but the container engine does not answer: {facts.unknown}"
            return Wait(reason=Reason.ENGINE_UNREACHABLE, message=message)
        if facts.listener is not None:
            message = f"it has {limits.warn_grace_s:g} s for a checkpoint: {limits.warn_signal} to {facts.listener.pid}"
            return Warn(signal=limits.warn_signal, listener=facts.listener, message=message)
        if warned is None:
            return replace(act, message=f"{act.message}; not warned: {facts.deaf}")
    if not warned.get("before") and facts.warned_for_s < limits.warn_grace_s:
        return Wait(
            reason=Reason.GRACE_PERIOD, message=f"it was warned and has {limits.warn_grace_s:g} s for a checkpoint"
        )
    return act


def wait_for_evidence(facts: Facts, reason: Reason, message: str) -> Step:
    """Evidence is missing: wait while the alert fires, close when it ends."""
    if facts.episode.firing:
        return Wait(reason=reason, message=message)
    return Close(outcome=Outcome.UNCONFIRMED, reason=reason, message=f"the alert ended; {message}")


def describe_unstartable(container: ContainerState) -> str:
    """Say why a container is not stopped."""
    return f"container {container.name} is not stopped, since it could not start again: {container.unstartable}"


def is_up(facts: Facts, free: Intent) -> bool:
    """Whether the incarnation of the intent still runs."""
    container = facts.container
    return container is not None and container.incarnation == free.key and container.running


def doubt_container(facts: Facts) -> Finding | None:
    """Return why its engine forbids an act on the container, read again before each act."""
    container = facts.container
    if container is not None and not container.managed:
        return Finding(
            doubt=Doubt.NOT_MANAGED,
            message=f"container {container.name} is not managed{container.refusal and ': '}{container.refusal}",
        )
    if container is not None and container.paused:
        return Finding(doubt=Doubt.CONTAINER_PAUSED, message="the container is paused")
    if container is not None and container.unstartable and is_untouched(facts):
        return Finding(doubt=Doubt.UNSTARTABLE, message=describe_unstartable(container))
    return None


def timed_out(facts: Facts, stage_for_s: float) -> bool:
    """Whether an intent stayed in its stage too long, while the executor ran and every source answered."""
    return min(stage_for_s, facts.quiet_for_s) >= facts.limits.restart_timeout_s


def close(facts: Facts, free: Intent) -> Step:
    """Close the episode. While a target that gpuwarden ended does not run, wait for a person.

    An abandoned settle does not matter: the job was settled by others.
    """
    settle = facts.episode.settle
    if free.stage is Stage.DONE:
        runs = _has_successor(facts, free) or (facts.container is not None and facts.container.running)
        # A pod's restart is only done once the next pod was ready, also if the API does not list that pod now.
        runs = runs or (facts.container is None and free.data.get("others") is not None)
        done = "it was restarted" if runs else "it stays down, as others left it"
        job = "its job is settled" if _is_settled(facts) else "it had no job to settle"
        return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=f"{done}, and {job}")
    parts = f"restart {free.stage}" + ("" if settle is None else f", settle {settle.stage}")
    if free.data.get("abandoned") in _LEFT_RUNNING or not _is_ours(facts, free):
        return Close(outcome=Outcome.PARTLY, reason=Reason.GIVEN_UP, message=parts)
    if _has_successor(facts, free) or _runs_again(facts, free):
        message = f"{parts}; the target runs again"
        return Close(outcome=Outcome.PARTLY, reason=Reason.STARTED_ELSEWHERE, message=message)
    return Wait(reason=Reason.GIVEN_UP, message=f"{_describe_down(facts, free)}, and its restart was given up")


def _runs_again(facts: Facts, free: Intent) -> bool:
    container = facts.container or facts.successor
    if container is None or not container.running or container.incarnation == free.key or container.starting:
        return False
    return facts.runs_for_s >= facts.limits.start_seen_s


def _describe_down(facts: Facts, free: Intent) -> str:
    name = free.data["name"]
    if not facts.container_known:
        return f"it is unknown whether {name} runs"
    if facts.container is None:
        return f"{name} is gone"
    return f"{name} still runs" if is_up(facts, free) else f"{name} does not run"


def describe_exit(facts: Facts) -> str:
    """Say how the incarnation ended."""
    container = facts.container
    if container is None:
        return "the container is gone"
    return "the container was restarted by someone else" if container.running else "the container does not run"


def wait_until_stopped(facts: Facts, free: Intent, doubted: Callable[[], Step | None]) -> Step:
    """Wait until the container has stopped: not running, no process in its cgroup, no pid on its GPUs.

    If a process remains, or the driver does not list a GPU, it finally calls an operator. See `next_step`.
    """
    # Do not give up right after the queue refused a write: the process itself may hold its lock.
    given_up = timed_out(facts, facts.free_for_s) and not was_refused_lately(facts)
    spent = _tries(free) >= TRIES_MAX and given_up
    if is_up(facts, free):
        if spent:
            return give_up(facts, free, Reason.STOP_FAILED, f"it cannot be stopped, after {_tries(free)} tries")
        if _may_stop(facts, free):
            return _if_armed(facts, Stop(message="it still runs"))
        return Wait(reason=Reason.STOPPING, message=f"it still runs, after {_tries(free)} tries")
    container, had = facts.container, _pids_before(free)
    ours = container is not None and container.incarnation == free.key
    # After a restart by others, only the pids from before the stop count.
    forgotten = container is not None and not container.incarnation  # no incarnation: not restarted
    left = sorted(container.pids if ours or forgotten else container.pids & had) if container else []
    lingers: Wait | None
    if left:
        lingers = Wait(reason=Reason.STOPPING, message=f"processes {left} are still in its cgroup")
        again = ours and not spent and free.stage is Stage.STOPPING and _may_stop(facts, free)
        if again and (facts.stopped_s_ago is not None or doubted() is None):
            return _if_armed(facts, Stop(message=f"it does not run, but {lingers.message}"))
    elif facts.worker_ended and (container is None or not container.running):
        message = f"{describe_exit(facts)}, its cgroup is empty, its worker ended cleanly"
        return _mark_stopped(message)
    elif not _is_fresh(facts):
        message = f"the exporter does not report its processes: {facts.unknown or 'old sample'}"
        if facts.worker_ended and timed_out(
            facts, facts.free_for_s
        ):  # the exporter answers and no longer has the worker
            return _abandoned(Reason.EXIT_UNCONFIRMED, message)
        return Wait(reason=Reason.DRIVER_UNREACHABLE, message=message)
    else:
        lingers = on_gpus(facts, free)
        if lingers is None:
            message = f"{describe_exit(facts)}, its cgroup is empty, {_describe_gpus(facts, free)}"
            return _mark_stopped(message)
    return give_up(facts, free, lingers.reason, lingers.message) if given_up else lingers


def was_refused_lately(facts: Facts) -> bool:
    """Whether the queue refused a write lately: the process to stop may hold its lock, so it is stopped first."""
    if facts.refused_s_ago is None:
        return False
    is_down = facts.container_known and (facts.container is None or not facts.container.running)
    just_ended = is_down and facts.stopped_s_ago is not None and facts.stopped_s_ago < RETRY_S
    return facts.refused_s_ago < RETRY_S or just_ended


def take_lost(facts: Facts, free: Intent) -> Step | None:
    """Quarantine the lost GPUs of a stopped container before any job may get one."""
    if free.stage in (Stage.PLANNED, Stage.ABANDONED) or not _is_fresh(facts) or not facts.armed:
        return None
    taken = free.data.get("lost", [])
    lost = tuple(gpu for gpu in _lost_gpus(facts) if gpu in free.data.get("gpus", []) and gpu not in taken)
    if not lost:
        return None
    message = f"{', '.join(lost)} is lost and quarantined: release it by hand"
    return Quarantine(reason=Reason.GPU_LOST, message=message, lost=lost)


def _lost_gpus(facts: Facts) -> list[str]:
    """GPUs lost for long enough: one sample proves nothing."""
    lost_s = (facts.place.lost_gpus_s if facts.place else None) or {}
    return [gpu for gpu, for_s in lost_s.items() if for_s >= facts.limits.gpu_lost_s]


def on_gpus(facts: Facts, free: Intent) -> Wait | None:
    """Return the wait for processes of the container that the driver lists or may list.

    The processes of a lost GPU are still in the cgroup, if that was read.
    """
    gpu_pids = (facts.place.gpu_pids if facts.place else None) or {}
    listed = {gpu: gpu_pids.get(gpu) for gpu in free.data.get("gpus", [])}
    held = sorted(_pids_before(free).intersection(pid for pids in listed.values() for pid in pids or ()))
    without = _lost_gpus(facts) if _has_process_list(facts, free) else []
    silent = [gpu for gpu, pids in listed.items() if pids is None and gpu not in without]
    if held:
        return Wait(reason=Reason.STOPPING, message=f"the driver still lists its processes {held}")
    if silent:
        return Wait(
            reason=Reason.DRIVER_UNREACHABLE, message=f"the driver does not list the processes of {', '.join(silent)}"
        )
    return None


def _has_process_list(facts: Facts, free: Intent) -> bool:
    container = facts.container
    if container is None:
        return free.data.get("cgroup") is not None
    return container.cgroup is not None or container.process_group is not None


def _describe_gpus(facts: Facts, free: Intent) -> str:
    gpu_pids = (facts.place.gpu_pids if facts.place else None) or {}
    lost = [gpu for gpu in free.data.get("gpus", []) if gpu_pids.get(gpu) is None]
    if not lost:
        return "its GPUs do not list its pids"
    return f"its other GPUs do not list its pids, and {', '.join(lost)} is lost"


def _is_fresh(facts: Facts) -> bool:
    return facts.place is not None and facts.place.sample_age_s <= facts.limits.evidence_fresh_s


def _pids_before(free: Intent) -> set[int]:
    return set(free.data.get("pids", []))


def _tries(free: Intent) -> int:
    return int(free.data.get("tries", 0))


def _may_try(facts: Facts, free: Intent) -> bool:
    later = _tries(free) - TRIES_MAX
    return later < 0 or facts.free_for_s >= (later + 1) * RETRY_S


def _may_stop(facts: Facts, free: Intent) -> bool:
    if _tries(free) < TRIES_MAX or facts.free_for_s < facts.limits.restart_timeout_s or facts.stopped_s_ago is None:
        return _may_try(facts, free)
    return facts.stopped_s_ago >= PAUSE_S


def _if_armed(facts: Facts, step: Stop | Quarantine) -> Step:
    """After disarming, stop nothing more; a fenced job is still settled."""
    if facts.armed:
        return step
    return Wait(reason=Reason.DRY_RUN, message=f"disarmed, left as it is: {step.message}")


def give_up(facts: Facts, free: Intent, reason: Reason, message: str) -> Step:
    """A process that cannot be killed may hold its GPUs for ever: quarantine them."""
    if free.data.get("gpus") and not free.data.get("quarantined"):
        message = f"{message}: its GPUs are quarantined: release them by hand"
        return _if_armed(facts, Quarantine(reason=reason, message=message))
    return _abandoned(reason, message)


def _abandoned(reason: Reason, message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=reason, message=f"{message}: check it by hand")


def _mark_stopped(message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.SEEN_DEAD, message=message)
