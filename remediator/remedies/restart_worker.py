"""Remedy `restart_worker`: free the container of a worker that is wedged, and settle the job it held.

Order: confirm from the host's own exporter, write both intents, warn where that is wanted, confirm and fence, confirm
and stop, see it dead, requeue or fail, start. Where it cannot confirm it waits while the alert fires, and closes when
the alert ends. What cannot be killed puts its GPUs in quarantine. Pure.

A worker whose process is gone goes the same way: its container is stopped, if it runs, and started, if it is there.
"""

from typing import Final

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import MOVES, Condition, Move, State
from remediator.plan import (
    Advance,
    Begin,
    Close,
    ContainerState,
    Facts,
    Fail,
    Fence,
    Intent,
    JobFacts,
    Kind,
    Outcome,
    Requeue,
    Stage,
    Step,
    Stop,
    Unconfirmed,
    Wait,
    Withdraw,
    WouldAct,
)
from remediator.reasons import Doubt, Finding, Reason
from remediator.remedies import job_conditions, reported, restart

CONFIRMABLE: Final = frozenset(job_conditions.CONDITIONS)
"""The trips that it can confirm; an alert with another is refused at the door."""

QUEUE_PATIENCE_S: Final = 10.0
"""How long a queue that takes nothing holds up the stop of a confirmed wedge, seconds."""


_HELD: Final = (
    "its process was not seen dead, and by the policy its job is held then: once a person knows that it is dead, "
    '`gpuwarden job cancel`, or unconfirmed = "requeue" in the policy file, which is read anew'
)


def decide(facts: Facts) -> Step:
    """The next step of one episode."""
    free, settle = facts.episode.free, facts.episode.settle
    if free is None:
        return _consider(facts)
    step = _go_on(facts, free, settle)
    if free.stage in restart.SEEN_DEAD or isinstance(step, (Requeue, Fail)):
        # Not before: that needs the queue, the lock of which may be held by the very process that is to be stopped.
        return restart.take_lost(facts, free) or step
    return step


def _go_on(facts: Facts, free: Intent, settle: Intent | None) -> Step:
    """What comes next of what was promised: the settle's step, or the free's while the settle waits for it."""
    if settle is not None and not settle.over:
        step = _settle(facts, free, settle)
        if step is not None:
            return step
    if not free.over:
        return restart.go_on(facts, free, stop=lambda: _stop_if_still_wedged(facts, free))
    if settle is not None and not settle.over:
        message = "the container was not seen dead; settling "
        if not facts.armed:
            return Wait(reason=Reason.DRY_RUN, message=f"{message}once armed")
        if facts.limits.unconfirmed is Unconfirmed.HOLD:
            return Wait(reason=Reason.EXIT_UNCONFIRMED, message=_HELD)
        return Wait(reason=Reason.SETTLE_TIMEOUT, message=f"{message}after {facts.limits.settle_timeout_s:.0f} s")
    return restart.close(free, settle)


def _confirmed(evidence: WorkerFacts, facts: Facts) -> tuple[Condition | None, Finding]:
    """The first of the reported conditions that local evidence shows; else `None`, and why each is not."""

    def check(condition: Condition) -> Finding:
        if condition is Condition.GANG and condition not in facts.episode.conditions and not _is_fenced(facts):
            # Local evidence is of this rank alone. Without the alert it may wait for one that works again. Once its
            # attempt is fenced, that ends whatever the others do, and no scrape that failed may let it live on.
            message = "nothing says any more that the other ranks of its gang spin too"
            return Finding(doubt=Doubt.GANG_NOT_ACCUSED, message=message)
        return job_conditions.confirm(evidence, condition)

    return reported.first_confirmed(facts.episode, check)


def _is_fenced(facts: Facts) -> bool:
    settle = facts.episode.settle
    return settle is not None and settle.stage in (Stage.FENCED, Stage.DONE)


def _consider(facts: Facts) -> Step:
    """Nothing is promised yet: is it the same worker, did it opt in, and is it wedged by what we see ourselves?"""
    episode, evidence = facts.episode, facts.evidence
    if evidence is None:
        return restart.doubt(facts, Reason.NO_EVIDENCE, f"no local evidence: {facts.unknown}")
    if evidence.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest look is {evidence.sample_age_s:.1f} s old"
        return restart.doubt(facts, Reason.STALE_EVIDENCE, message)
    if episode.incarnation is not None and evidence.worker_incarnation != episode.incarnation:
        return Close(
            outcome=Outcome.SUPERSEDED,
            reason=Reason.REPLACED,
            message="the worker that was accused has been replaced since",
        )
    if _speaks_of_another(facts, evidence):
        return _another(facts, evidence)
    condition, found = _confirmed(evidence, facts)
    if condition is None:
        return restart.doubt(facts, Reason.UNCONFIRMED, f"not confirmed on this host: {found.message}")
    if (excuse := _excuse(facts, evidence)) is not None:
        return Close(outcome=Outcome.SUPERSEDED, reason=excuse[0], message=excuse[1])
    container = facts.container
    if container is None or evidence.container_incarnation is None:
        return restart.doubt(
            facts, Reason.NO_CONTAINER, f"the worker's container is unknown: {facts.unknown or 'not seen'}"
        )
    if (unfit := _unfit(facts, container, evidence)) is not None:
        return unfit
    if not facts.armed:
        if episode.would_act:
            return Wait(reason=Reason.DRY_RUN, message="dry run: would act, and does nothing")
        acts = "settle and leave it down" if container.left_down else f"stop {container.name}, settle and start"
        return WouldAct(message=f"would fence job {episode.job_id}, {acts}: {found.message}")
    return Begin(
        condition=condition,
        free_key=container.incarnation,
        container_kind=container.kind,
        container_handle=container.handle,
        container_name=container.name,
        settle_key=None if episode.job_id is None else f"{episode.job_id}/{episode.attempt}",
        worker_incarnation=evidence.worker_incarnation,
        message=found.message,
        gpus=tuple(evidence.gpus or ()),
        pids=container.pids,
        cgroup=container.cgroup,
    )


def _another(facts: Facts, evidence: WorkerFacts) -> Step:
    """The evidence speaks of another attempt, or of none: then the job file may only be unreadable for one look."""
    if evidence.job_id is None and not facts.job_known:
        message = f"the worker's job file tells no job, and the queue does not answer: {facts.unknown}"
        return restart.doubt(facts, Reason.QUEUE_UNREACHABLE, message)
    if evidence.job_id is None and _holds(facts, evidence):
        attempt = facts.episode.attempt
        message = f"the worker's job file tells no job, and the queue says that it holds attempt {attempt}"
        return restart.doubt(facts, Reason.UNCONFIRMED, message)
    return Close(outcome=Outcome.SUPERSEDED, reason=Reason.ATTEMPT_OVER, message="the attempt that was accused is over")


def _speaks_of_another(facts: Facts, evidence: WorkerFacts) -> bool:
    return (evidence.job_id, evidence.attempt) != (facts.episode.job_id, facts.episode.attempt)


def _holds(facts: Facts, evidence: WorkerFacts) -> bool:
    """Whether the queue, which has answered, says that this worker holds the attempt, or held it when it was fenced."""
    job = facts.job
    if job is None or (job.attempt, job.claimed_by) != (facts.episode.attempt, evidence.worker_incarnation):
        return False
    return job.state is State.FENCING or job.state in MOVES[Move.FENCE].sources


def _excuse(facts: Facts, evidence: WorkerFacts) -> tuple[Reason, str] | None:
    """Why nothing is owed for what the evidence shows, by what the queue says of its job.

    A lease that ran out, or a person, takes the job and leaves the container as wedged as it was: that is no excuse. A
    result is one, for evidence is seconds old, and who sent it went on. A worker that is dead and holds nothing owes
    nothing either: its files stay, and its container would be restarted over them for ever.
    """
    job, attempt = facts.job, facts.episode.attempt
    if job is not None and job.attempt == attempt and job.state in (State.COMPLETED, State.FINISHED):
        return Reason.ATTEMPT_OVER, f"attempt {attempt} has completed"
    if evidence.alive is False and facts.job_known and not _holds(facts, evidence):
        return Reason.JOB_NOT_HELD, f"the worker is dead, and attempt {attempt} is not its own any more"
    return None


def _unfit(facts: Facts, container: ContainerState, evidence: WorkerFacts) -> Step | None:
    """Why nothing is done to a container though its worker is wedged or gone."""
    if not container.managed:
        message = f"container {container.name} did not opt in; nothing is done to it"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message=message)
    if container.paused:
        message = f"container {container.name} is paused: whoever did that goes on with it"
        return restart.doubt(facts, Reason.CONTAINER_PAUSED, message)
    count, own = evidence.container_workers, 1 if evidence.alive else 0
    if count is None:
        message = f"how many workers live in container {container.name} is unknown"
        return restart.doubt(facts, Reason.UNCONFIRMED, message)
    if count != own:
        others = f"{count} live workers" if own else f"{count} live workers beside the dead one"
        message = f"container {container.name} holds {others}; it is restarted only for one that has it alone"
        return Close(outcome=Outcome.REFUSED, reason=Reason.SHARED_CONTAINER, message=message)
    if not own and not facts.job_known:
        message = f"whether the dead worker holds its job still is unknown: {facts.unknown}"
        return restart.doubt(facts, Reason.QUEUE_UNREACHABLE, message)
    # What died with its worker is down, and is started for it.
    if container.incarnation != evidence.container_incarnation or (evidence.alive and not container.running):
        return restart.doubt(facts, Reason.RESTARTED, "the container is not the one the evidence speaks of any more")
    return None


def _settle(facts: Facts, free: Intent, settle: Intent) -> Step | None:
    """The settle's next step; `None` while it waits for the free."""
    job, attempt = facts.job, facts.episode.attempt
    if free.stage in (Stage.PLANNED, Stage.STOPPING):
        if settle.stage is Stage.PLANNED and facts.queue_stuck_for_s >= QUEUE_PATIENCE_S:
            # The wedged process itself may hold the queue's lock, stopped in the middle of a write: only its end frees
            # the queue. Its job has a lease meanwhile, and is fenced before anybody else may have it.
            return None
        if settle.stage is Stage.FENCED and (not facts.job_known or restart.was_refused_lately(facts)):
            return None  # what is fenced is ended whatever the queue says, or takes, now
    if not facts.job_known:
        return Wait(reason=Reason.QUEUE_UNREACHABLE, message=f"the queue does not answer: {facts.unknown}")
    if job is None:
        return _not_settled(Reason.NO_JOB, "the queue has no such job")
    ours = job.attempt == attempt
    if settle.stage is Stage.PLANNED:
        if ours and job.state is State.FENCING:
            return Fence(message=f"attempt {attempt} is fenced already; nothing of it is accepted any more")
        if ours and job.state in MOVES[Move.FENCE].sources:
            if job.claimed_by != settle.data["incarnation"]:
                message = f"attempt {attempt} is held by another worker than the one that is wedged"
                return _not_settled(Reason.OTHER_WORKER, message)
            return _fence_if_still_wedged(facts, free)
        return _not_settled(Reason.ATTEMPT_OVER, _over(job.state, job.attempt, attempt))
    if not ours or job.state is not State.FENCING:
        message = f"found settled: {_over(job.state, job.attempt, attempt)}"
        return Advance(kind=Kind.SETTLE, stage=Stage.DONE, reason=Reason.DONE, message=message)
    seen_dead = free.stage in restart.SEEN_DEAD
    if not seen_dead and (
        facts.settle_for_s < facts.limits.settle_timeout_s
        or not facts.armed  # then what may still run is not given to anybody else
        or facts.limits.unconfirmed is Unconfirmed.HOLD
    ):
        return None
    ground = "seen dead" if seen_dead else f"not seen dead within {facts.limits.settle_timeout_s:.0f} s"
    return _requeue_or_fail(facts, job, ground, seen_dead=seen_dead)


def _not_settled(reason: Reason, message: str) -> Advance:
    return Advance(kind=Kind.SETTLE, stage=Stage.ABANDONED, reason=reason, message=message)


def _requeue_or_fail(facts: Facts, job: JobFacts, ground: str, *, seen_dead: bool) -> Step:
    condition, limits = facts.episode.condition, facts.limits
    if not job.retried:
        return Fail(reason=Reason.NOT_RETRIED, message=f"{condition}: jobs of its class are not retried ({ground})")
    if job.attempt >= job.attempts_max:
        message = f"{condition}: all {job.attempts_max} attempts are used ({ground})"
        return Fail(reason=Reason.ATTEMPTS_EXHAUSTED, message=message)
    if job.watchdog_retries >= limits.retries_max:
        message = f"{condition}: all {limits.retries_max} retries are used ({ground})"
        return Fail(reason=Reason.RETRIES_EXHAUSTED, message=message)
    retry = job.watchdog_retries + 1
    message = f"{condition}: retry {retry} of {limits.retries_max} ({ground})"
    return Requeue(message=message, avoid_s=limits.requeue_avoid_gpu_s, retry=retry, seen_dead=seen_dead)


def _fence_if_still_wedged(facts: Facts, free: Intent) -> Step:
    """A fence ends its attempt as surely as a stop does, so it too needs what is true now: time may have passed."""
    if facts.container_known and not restart.is_up(facts, free):
        found = Finding.of(confirmed=True, message=restart.down(facts))
    else:
        found = _still_wedged(facts, free)
    figures = found.message
    if not found.confirmed:
        if restart.late(facts, facts.settle_for_s):
            return Withdraw(reason=Reason.UNCONFIRMED, message=f"no longer confirmed, and nothing was done: {figures}")
        return Wait(reason=Reason.UNCONFIRMED, message=f"not fenced, for it is not confirmed any more: {figures}")
    if not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message="disarmed since it began: nothing is fenced")
    message = f"attempt {facts.episode.attempt} is wedged still; nothing of it is accepted from here on"
    return restart.warned_first(facts, free, Fence(message=message))


def _stop_if_still_wedged(facts: Facts, free: Intent) -> Step:
    """Facts are read again before the act: what shows life after the fence stops itself, and is not killed."""
    evidence, settle = facts.evidence, facts.episode.settle
    fenced = _is_fenced(facts)
    if evidence is not None and not fenced and (excuse := _excuse(facts, evidence)) is not None:
        return Withdraw(reason=excuse[0], message=f"{excuse[1]}, and nothing was done")
    if fenced and _is_succeeded(facts, free):
        return _see_succeeded(facts, free)
    found = _still_wedged(facts, free)
    figures = found.message
    if found.confirmed and not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message="disarmed since it began: nothing is stopped")
    if found.confirmed:
        unfenced = settle is not None and settle.stage is Stage.PLANNED
        step = Stop(message=figures + ("; not fenced yet, for the queue takes nothing" if unfenced else ""))
        return step if fenced else restart.warned_first(facts, free, step)
    if evidence is not None and _goes_on(facts, free, evidence):
        message = "the attempt that was accused is over and its worker goes on"
        return _not_freed(Reason.ATTEMPT_OVER, message)
    if restart.late(facts, facts.free_for_s):
        if settle is None:
            return Withdraw(reason=Reason.UNCONFIRMED, message=f"no longer confirmed, and nothing was done: {figures}")
        return _not_freed(Reason.UNCONFIRMED, f"no longer confirmed: {figures}")
    return Wait(reason=Reason.UNCONFIRMED, message=f"not stopped, for it is not confirmed any more: {figures}")


def _not_freed(reason: Reason, message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=reason, message=message)


def _still_wedged(facts: Facts, free: Intent) -> Finding:
    """Whether fresh evidence confirms that this attempt, in the container that was promised to, is wedged now."""
    evidence = facts.evidence
    if evidence is None:
        return Finding(doubt=Doubt.NO_EVIDENCE, message=f"no local evidence: {facts.unknown}")
    if evidence.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest look is {evidence.sample_age_s:.1f} s old"
        return Finding(doubt=Doubt.STALE_EVIDENCE, message=message)
    if evidence.container_incarnation != free.key:
        message = "the evidence does not speak of the container that was promised to"
        return Finding(doubt=Doubt.OTHER_CONTAINER, message=message)
    if _speaks_of_another(facts, evidence):
        return Finding(doubt=Doubt.OTHER_ATTEMPT, message="the evidence speaks of another attempt")
    if facts.container is not None and facts.container.paused:
        return Finding(doubt=Doubt.CONTAINER_PAUSED, message="the container is paused")
    return _confirmed(evidence, facts)[1]


def _lives_there(facts: Facts, free: Intent, evidence: WorkerFacts) -> bool:
    """Whether a worker of that name is seen now to hold its lock in the container that was promised to."""
    fresh = evidence.sample_age_s <= facts.limits.evidence_fresh_s
    return fresh and evidence.alive is True and evidence.container_incarnation == free.key


def _goes_on(facts: Facts, free: Intent, evidence: WorkerFacts) -> bool:
    """Whether the worker has another attempt, or none; one look that tells no job is no proof without the queue."""
    if not _lives_there(facts, free, evidence) or not _speaks_of_another(facts, evidence):
        return False
    return evidence.job_id is not None or (facts.job_known and not _holds(facts, evidence))


def _is_succeeded(facts: Facts, free: Intent) -> bool:
    """Whether another incarnation holds the worker's lock: the kernel gives it when the old one has ended."""
    evidence, settle = facts.evidence, facts.episode.settle
    if evidence is None or settle is None or not _lives_there(facts, free, evidence):
        return False
    return bool(evidence.worker_incarnation != settle.data["incarnation"])


def _see_succeeded(facts: Facts, free: Intent) -> Step:
    """The fenced worker ended by itself, and something in its container started the next: nothing is to be stopped."""
    lingers = restart.on_gpus(facts, free)
    if lingers is None:
        message = "its worker has ended by itself, for another one holds its lock in the same container"
        return Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.REPLACED, message=message)
    if restart.late(facts, facts.free_for_s):
        return _not_freed(lingers.reason, f"{lingers.message}: a person must look")
    return lingers


def _over(state: State, attempt: int, alerted: int | None) -> str:
    if attempt != alerted:
        return f"attempt {alerted} is over; the job is {state} at attempt {attempt}"
    return f"the job is {state}"
