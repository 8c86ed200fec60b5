"""The freeing half of a remedy: stop a container, see it dead, start it; whoever lived in it. Pure.

A remedy decides what is to be freed and confirms it before the first stop; what follows is the same for all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from remediator.plan import (
    Advance,
    Close,
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
from remediator.reasons import Reason

TRIES_MAX: Final = 5
"""How often a stop, or a start, is tried at the executor's pace; then at `RETRY_S`, for as long as patience lasts."""

RETRY_S: Final = 10.0
"""Between later tries of a stop or a start, seconds: an engine that restarts refuses everything for a while."""

PAUSE_S: Final = 300.0
"""Between the tries of a stop once patience is over, seconds: each is on record, and nobody knows when they end."""

WARNINGS_MAX: Final = 2
"""How often one worker is warned at most: again only where nobody knows whether the first time was done."""

SEEN_DEAD: Final = frozenset({Stage.DEAD, Stage.STARTING, Stage.DONE})
"""Stages of a free at which its container was seen dead."""


def go_on(
    facts: Facts,
    free: Intent,
    *,
    stop: Callable[[], Step],
    ended: Callable[[], Step] | None = None,
    doubted: Callable[[], Step | None] | None = None,
) -> Step:
    """The free's next step. What is seen dead comes here only once its settle is over, and so starts after it.

    `stop` chooses what becomes of what is only promised and still runs. `ended`, where it is given, chooses what
    becomes of what is only promised and ended, or was restarted, without us; else that is seen dead and started.
    `doubted`, where it is given, chooses what becomes of what a stop did not end, unless it is to be stopped again;
    else it is: what was fenced has nothing left to lose.
    """
    if not facts.container_known:
        return Wait(reason=Reason.ENGINE_UNREACHABLE, message=f"the container engine does not answer: {facts.unknown}")
    if free.stage is Stage.PLANNED and is_up(facts, free):
        return stop()
    if free.stage is Stage.PLANNED and ended is not None:
        return ended()
    if free.stage is Stage.STOPPING and doubted is not None and is_up(facts, free):
        return doubted() or see_dead(facts, free)
    if free.stage in (Stage.PLANNED, Stage.STOPPING):
        return see_dead(facts, free)
    return _start_again(facts, free) if free.stage is Stage.DEAD else _see_up(facts, free)


def _start_again(facts: Facts, free: Intent) -> Step:
    """It is seen dead and its job is settled. Nobody's container is started that we did not end."""
    container = facts.container
    if container is None:
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message="the container is gone")
    if container.running:
        goes_on = container.incarnation == free.key
        reason = Reason.REPLACED if goes_on else Reason.STARTED_ELSEWHERE
        message = "goes on with another worker in it" if goes_on else "was started by someone else"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=reason, message=f"the container {message}")
    if container.incarnation not in ("", free.key):  # an empty one: see `_see_up`
        message = "the container was started by someone else, and has ended since: it is left as it is"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.ENDED_ELSEWHERE, message=message)
    if container.left_down and not _tries(free):
        message = "it is left down: its engine restarts whatever ends, and was told to stop it, not by us"
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.LEFT_DOWN, message=message)
    settle = facts.episode.settle
    settled = settle is not None and settle.stage is Stage.DONE
    # What was fenced ends by itself: that end is our doing as much as a stop, and is given back as one.
    if not facts.armed and not _tries(free) and not settled:
        return Wait(reason=Reason.DRY_RUN, message="disarmed since it began, and it was not we who ended the container")
    return Start(message="it is seen dead" + (" and its job is settled" if settled else ""))


def _see_up(facts: Facts, free: Intent) -> Step:
    """It was told to start. What runs for a moment and ends was not mended."""
    container, seen_s = facts.container, facts.limits.start_seen_s
    if container is not None and container.running:
        if container.starting and late(facts, facts.free_for_s):
            message = f"{container.name} was started, and its start does not come to an end: a person must look"
            return _not_started(message)
        if container.starting:
            return Wait(reason=Reason.STARTING, message=f"{container.name} was started, and is not up yet")
        if facts.runs_for_s < seen_s:
            return Wait(
                reason=Reason.STABILIZING,
                message=f"{container.name} runs; it is believed when it does {seen_s:.0f} s on",
            )
        return Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message=f"{container.name} runs again")
    # An empty one is of what nobody knows any more what ran in it: systemd forgets that of a service that is down.
    if container is not None and container.incarnation not in ("", free.key):
        message = f"{container.name} was started, and has ended by itself since: a person must look"
        return _not_started(message)
    if container is None or (_tries(free) >= TRIES_MAX and late(facts, facts.free_for_s)):
        return _not_started("it did not start again: a person must look")
    if _may_try(facts, free):
        return Start(message="it does not run yet")
    return Wait(reason=Reason.STARTING, message=f"it does not run yet, after {_tries(free)} tries")


def _not_started(message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message=message)


def warned_first(facts: Facts, free: Intent, act: Fence | Stop) -> Step:
    """The first act of a free, or what comes before it where its worker is to be warned: the signal, then its grace.

    Nothing is taken from the worker meanwhile: whatever shows life in its grace is not confirmed any more, and is left
    alone. A worker that was warned under a promise taken back since had its grace then.
    """
    limits, warned = facts.limits, free.data.get("warned")
    if limits.warn_signal is None or (facts.container_known and not is_up(facts, free)):
        return act
    if warned is None or not (warned["done"] or warned["tries"] >= WARNINGS_MAX):
        if warned is None and not facts.container_known:
            message = f"it is to be warned first, and the container engine does not answer: {facts.unknown}"
            return Wait(reason=Reason.ENGINE_UNREACHABLE, message=message)
        if facts.listener is not None:
            message = f"it has {limits.warn_grace_s:g} s for a checkpoint: {limits.warn_signal} to {facts.listener.pid}"
            return Warn(signal=limits.warn_signal, listener=facts.listener, message=message)
        if warned is None:
            return replace(act, message=f"{act.message}; not warned: {facts.deaf}")
    if not warned.get("before") and facts.warned_for_s < limits.warn_grace_s:
        return Wait(
            reason=Reason.GRACE_PERIOD, message=f"it was warned, and has {limits.warn_grace_s:g} s for a checkpoint"
        )
    return act


def doubt(facts: Facts, reason: Reason, message: str) -> Step:
    """Not enough to act on: wait while the alert fires, let go when it ends."""
    if facts.episode.firing:
        return Wait(reason=reason, message=message)
    return Close(outcome=Outcome.UNCONFIRMED, reason=reason, message=f"the alert ended; {message}")


def is_up(facts: Facts, free: Intent) -> bool:
    """Whether the incarnation that was promised to still runs; the engine has answered."""
    container = facts.container
    return container is not None and container.incarnation == free.key and container.running


def late(facts: Facts, stage_for_s: float) -> bool:
    """Whether patience with an intent's stage has run out: it counts only while we looked on and all answered."""
    return min(stage_for_s, facts.quiet_for_s) >= facts.limits.restart_timeout_s


def close(free: Intent, settle: Intent | None) -> Step:
    """A settle that was abandoned owes nothing: the job had been settled by somebody else, or was never this one's."""
    if free.stage is Stage.DONE:
        settled = settle is not None and settle.stage is Stage.DONE
        job = "its job is settled" if settled else "held no job that was its to settle"
        return Close(outcome=Outcome.MENDED, reason=Reason.DONE, message=f"the container is free and {job}")
    parts = f"free {free.stage}" + ("" if settle is None else f", settle {settle.stage}")
    return Close(outcome=Outcome.PARTLY, reason=Reason.GIVEN_UP, message=parts)


def down(facts: Facts) -> str:
    """What has become of an incarnation that does not run any more, in words."""
    container = facts.container
    if container is None:
        return "the container is gone"
    return "the container was restarted by someone else" if container.running else "the container does not run"


def see_dead(facts: Facts, free: Intent) -> Step:
    """Dead is: not running, no process in its cgroup, and none of its pids on its GPUs.

    Also where it ended, or was restarted, before we stopped it: then nothing confirms that what is left of it may be
    stopped. What speaks against it, or a driver that tells nothing of one of its GPUs, is waited for, and a person
    called in the end; a silent exporter is only waited for.
    """
    # What the queue has just refused to take note of is not given up: the process itself may hold the queue's lock.
    given_up = late(facts, facts.free_for_s) and not was_refused_lately(facts)
    spent = _tries(free) >= TRIES_MAX and given_up
    if is_up(facts, free):
        if spent:
            return _give_up(facts, free, Reason.STOP_FAILED, f"it cannot be stopped, after {_tries(free)} tries")
        if _may_stop(facts, free):
            return _if_armed(facts, Stop(message="it still runs"))
        return Wait(reason=Reason.STOPPING, message=f"it still runs, after {_tries(free)} tries")
    container, had = facts.container, _had(free)
    ours = container is not None and container.incarnation == free.key
    # Whoever restarted it since has processes of their own in there: then only those seen before the stop count.
    forgotten = container is not None and not container.incarnation  # nobody can have restarted that
    left = sorted(container.pids if ours or forgotten else container.pids & had) if container else []
    lingers: Wait | None
    if left:
        lingers = Wait(reason=Reason.STOPPING, message=f"processes {left} are still in its cgroup")
        if ours and not spent and free.stage is Stage.STOPPING and _may_stop(facts, free):
            return _if_armed(facts, Stop(message=f"it does not run, but {lingers.message}"))
    elif facts.worker_ended and (container is None or not container.running):
        message = f"{down(facts)}, its cgroup is empty, its worker ended cleanly"
        return _seen_dead(message)
    elif not _fresh(facts):
        message = f"the exporter does not say whether its processes are gone: {facts.unknown or 'an old look'}"
        if facts.worker_ended and late(facts, facts.free_for_s):  # it does answer, and knows no such worker any more
            return _abandoned(Reason.EXIT_UNCONFIRMED, message)
        return Wait(reason=Reason.DRIVER_UNREACHABLE, message=message)
    else:
        lingers = on_gpus(facts, free)
        if lingers is None:
            message = f"{down(facts)}, its cgroup is empty, {_unlisted(facts, free)}"
            return _seen_dead(message)
    return _give_up(facts, free, lingers.reason, lingers.message) if given_up else lingers


def was_refused_lately(facts: Facts) -> bool:
    """Whether the free has its turn: a refusal costs the wait for a lock, which the process to be stopped may hold.

    A stop takes its grace, which may be as long; where one has ended the container, its death is looked for first.
    """
    if facts.refused_s_ago is None:
        return False
    is_down = facts.container_known and (facts.container is None or not facts.container.running)
    just_ended = is_down and facts.stopped_s_ago is not None and facts.stopped_s_ago < RETRY_S
    return facts.refused_s_ago < RETRY_S or just_ended


def take_lost(facts: Facts, free: Intent) -> Step | None:
    """Those of its GPUs that are lost go out of use, until a person releases them.

    Once its container is seen dead, and before its job is settled and its worker starts: neither they nor anybody else
    get the next job onto one.
    """
    if free.stage in (Stage.PLANNED, Stage.ABANDONED) or not _fresh(facts) or not facts.armed:
        return None
    taken = free.data.get("lost", [])
    lost = tuple(gpu for gpu in _lost(facts) if gpu in free.data.get("gpus", []) and gpu not in taken)
    if not lost:
        return None
    message = f"{', '.join(lost)} is lost, and out of use until a person releases it"
    return Quarantine(reason=Reason.GPU_LOST, message=message, lost=lost)


def _lost(facts: Facts) -> list[str]:
    """The GPUs of this host that have been lost for long enough: a look proves nothing, and a person has to undo it."""
    lost_s = (facts.place.lost_gpus_s if facts.place else None) or {}
    return [gpu for gpu, for_s in lost_s.items() if for_s >= facts.limits.gpu_lost_s]


def on_gpus(facts: Facts, free: Intent) -> Wait | None:
    """The wait for a process of the free's that the driver lists still, or may, by evidence that is there.

    A lost GPU runs nothing, and its list is not to be had any more: what holds it is still in the cgroup, where one
    has looked there.
    """
    gpu_pids = (facts.place.gpu_pids if facts.place else None) or {}
    listed = {gpu: gpu_pids.get(gpu) for gpu in free.data.get("gpus", [])}
    held = sorted(_had(free).intersection(pid for pids in listed.values() for pid in pids or ()))
    without = _lost(facts) if _was_looked_into(facts, free) else []
    silent = [gpu for gpu, pids in listed.items() if pids is None and gpu not in without]
    if held:
        return Wait(reason=Reason.STOPPING, message=f"the driver still lists its processes {held}")
    if silent:
        return Wait(
            reason=Reason.DRIVER_UNREACHABLE, message=f"the driver does not list the processes of {', '.join(silent)}"
        )
    return None


def _was_looked_into(facts: Facts, free: Intent) -> bool:
    """Whether its engine, or we, looked for processes of the container where they were, and not only for itself."""
    container = facts.container
    if container is None:
        return free.data.get("cgroup") is not None
    return container.cgroup is not None or container.session is not None


def _unlisted(facts: Facts, free: Intent) -> str:
    """That no GPU lists its processes, of those that tell."""
    gpu_pids = (facts.place.gpu_pids if facts.place else None) or {}
    lost = [gpu for gpu in free.data.get("gpus", []) if gpu_pids.get(gpu) is None]
    if not lost:
        return "no GPU of its lists its pids"
    return f"no GPU of its that tells lists its pids, and {', '.join(lost)} is lost"


def _fresh(facts: Facts) -> bool:
    return facts.place is not None and facts.place.sample_age_s <= facts.limits.evidence_fresh_s


def _had(free: Intent) -> set[int]:
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
    """Disarmed in the middle: nothing more is taken from anybody. What was taken is still given back."""
    if facts.armed:
        return step
    return Wait(reason=Reason.DRY_RUN, message=f"disarmed since it began, and left as it is: {step.message}")


def _give_up(facts: Facts, free: Intent, reason: Reason, message: str) -> Step:
    """What cannot be killed may hold its GPUs for ever: nobody else is sent there before a person has looked."""
    if free.data.get("gpus") and not free.data.get("quarantined"):
        message = f"{message}: its GPUs are out of use until a person releases them"
        return _if_armed(facts, Quarantine(reason=reason, message=message))
    return _abandoned(reason, message)


def _abandoned(reason: Reason, message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=reason, message=f"{message}: a person must look")


def _seen_dead(message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.SEEN_DEAD, message=message)
