"""Remedy `restart_worker`: restart the container of a hung worker and settle its job. Pure.

1. Confirm with the host's exporter, and write both intents.
2. Warn, if set. Confirm and fence, confirm and stop, wait until it has stopped.
3. Requeue or fail the job, and start the container.

Without confirmation it waits while the alert fires. A container that cannot be killed puts its GPUs in quarantine.
"""

from dataclasses import replace
from typing import Final

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import MOVES, Condition, Move, State
from gpuwarden.kube import pods
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
"""The conditions that it can confirm; the webhook refuses others."""

QUEUE_TIMEOUT_S: Final = 10.0
"""How long an unwritable queue delays the stop of a confirmed worker, seconds."""


_NOT_KNOWN: Final = frozenset(
    {
        *(Doubt.STALE_EVIDENCE, Doubt.GPU_UNKNOWN, Doubt.RAM_UNKNOWN),
        *(Doubt.WORK_UNKNOWN, Doubt.SIGNS_UNKNOWN, Doubt.TIME_UNKNOWN),
    }
)
"""Doubts in which the worker may still hang."""

_HOLD_MESSAGE: Final = (
    "its process may still run, so the policy holds its job: check the process, then "
    '`gpuwarden job cancel`, or set unconfirmed = "requeue" in the policy file'
)


def decide(facts: Facts) -> Step:
    """Return the next step of one episode."""
    free, settle = facts.episode.free, facts.episode.settle
    if free is None:
        return _consider(facts)
    step = _next_step(facts, free, settle)
    if free.stage in restart.SEEN_DEAD or isinstance(step, (Requeue, Fail)):
        # Not before: the process to stop may hold the lock of the queue, which the quarantine needs.
        return restart.take_lost(facts, free) or step
    return step


def _next_step(facts: Facts, free: Intent, settle: Intent | None) -> Step:
    if settle is not None and not settle.over:
        step = _settle(facts, free, settle)
        if step is not None:
            return step
    if not free.over:
        return restart.next_step(
            facts,
            free,
            stop=lambda: _stop_if_confirmed(facts, free),
            doubted=lambda: _decide_unconfirmed(facts, free),
        )
    if settle is not None and not settle.over:
        message = "the container may still run; its job is settled "
        if not facts.armed:
            return Wait(reason=Reason.DRY_RUN, message=f"{message}once armed")
        if facts.limits.unconfirmed is Unconfirmed.HOLD:
            return Wait(reason=Reason.EXIT_UNCONFIRMED, message=_HOLD_MESSAGE)
        return Wait(reason=Reason.SETTLE_TIMEOUT, message=f"{message}after {facts.limits.settle_timeout_s:.0f} s")
    return restart.close(facts, free)


def _confirm(evidence: WorkerFacts, facts: Facts) -> tuple[Condition | None, Finding]:

    def check(condition: Condition) -> Finding:
        if condition is Condition.GANG and condition not in facts.episode.conditions and not _is_fenced(facts):
            # Local evidence covers this rank only, so the alert must still fire, unless the attempt is fenced.
            message = "the alert about its gang does not fire now"
            return Finding(doubt=Doubt.GANG_NOT_ACCUSED, message=message)
        return job_conditions.confirm(evidence, condition)

    return reported.first_confirmed(facts.episode, check)


def _is_fenced(facts: Facts) -> bool:
    settle = facts.episode.settle
    return settle is not None and settle.stage in (Stage.FENCED, Stage.DONE)


def _consider(facts: Facts) -> Step:
    """Nothing is planned yet: check the worker and its container, and confirm."""
    episode, evidence = facts.episode, facts.evidence
    if evidence is None:
        return restart.wait_for_evidence(facts, Reason.NO_EVIDENCE, f"no local evidence: {facts.unknown}")
    if evidence.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest sample is {evidence.sample_age_s:.1f} s old"
        return restart.wait_for_evidence(facts, Reason.STALE_EVIDENCE, message)
    if episode.incarnation is not None and evidence.worker_incarnation != episode.incarnation:
        return Close(
            outcome=Outcome.SUPERSEDED,
            reason=Reason.REPLACED,
            message="the reported worker was replaced",
        )
    if _is_of_another_attempt(facts, evidence):
        return _close_other_attempt(facts, evidence)
    condition, found = _confirm(evidence, facts)
    if condition is None:
        return restart.wait_for_evidence(facts, Reason.UNCONFIRMED, f"not confirmed on this host: {found.message}")
    if (excuse := _reason_to_close(facts, evidence)) is not None:
        return Close(outcome=Outcome.SUPERSEDED, reason=excuse[0], message=excuse[1])
    container = facts.container or _removed(facts, evidence)
    if container is None or evidence.container_incarnation is None:
        return restart.wait_for_evidence(
            facts, Reason.NO_CONTAINER, f"the worker's container is unknown: {facts.unknown or 'not seen'}"
        )
    if (unfit := _check_container(facts, container, evidence)) is not None:
        return unfit
    if not facts.armed:
        if episode.dry_run_recorded:
            return Wait(reason=Reason.DRY_RUN, message="dry run: would act")
        return WouldAct(
            message=f"would fence job {episode.job_id}, {_actions(container)}: {found.message}",
            container_kind=container.kind,
            container_handle=container.handle,
        )
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
        gone=evidence.alive is False and not container.pids,
    )


def _removed(facts: Facts, evidence: WorkerFacts) -> ContainerState | None:
    """The container of a dead worker, if its engine has it no more: only the job is left to settle."""
    kind, handle = evidence.container_kind, evidence.container_id
    if not (facts.container_known and evidence.process_ended and evidence.alive is False and kind and handle):
        return None
    return ContainerState(
        kind=kind, handle=handle, name=evidence.container or handle, incarnation=evidence.container_incarnation or "",
        running=False, managed=True, pids=frozenset(), cgroup=None, startable=False,
    )  # fmt: skip


def _actions(container: ContainerState) -> str:
    if not container.startable:
        return f"end the processes {sorted(container.pids)} that it left, and settle" if container.pids else "settle"
    if container.left_down:
        return "settle and leave it down"
    if container.kind == pods.KIND:
        return f"evict the pod of {container.name} and settle"
    return f"stop {container.name}, settle and {'leave its start to others' if container.vanishes else 'start'}"


def _close_other_attempt(facts: Facts, evidence: WorkerFacts) -> Step:
    """The evidence is about another attempt, or none: then the job file may be unreadable for one sample."""
    if evidence.job_id is None and not facts.job_known:
        message = f"the worker's job file has no job, and the queue does not answer: {facts.unknown}"
        return restart.wait_for_evidence(facts, Reason.QUEUE_UNREACHABLE, message)
    if evidence.job_id is None and _holds(facts, evidence):
        attempt = facts.episode.attempt
        message = f"the worker's job file has no job, but by the queue it holds attempt {attempt}"
        return restart.wait_for_evidence(facts, Reason.UNCONFIRMED, message)
    return Close(outcome=Outcome.SUPERSEDED, reason=Reason.ATTEMPT_OVER, message="the reported attempt is over")


def _is_of_another_attempt(facts: Facts, evidence: WorkerFacts) -> bool:
    return (evidence.job_id, evidence.attempt) != (facts.episode.job_id, facts.episode.attempt)


def _holds(facts: Facts, evidence: WorkerFacts) -> bool:
    """Whether this worker holds the attempt by the queue, or held it when it was fenced."""
    job = facts.job
    if job is None or (job.attempt, job.claimed_by) != (facts.episode.attempt, evidence.worker_incarnation):
        return False
    return job.state is State.FENCING or job.state in MOVES[Move.FENCE].sources


def _reason_to_close(facts: Facts, evidence: WorkerFacts) -> tuple[Reason, str] | None:
    """Return why the queue makes the restart unnecessary.

    If the lease expired or an operator took the job, the container still hangs: no reason. A result is one. A dead
    worker without a job is one too: its files stay, and it would be restarted for ever.
    """
    job, attempt = facts.job, facts.episode.attempt
    if job is not None and job.attempt == attempt and job.state in (State.COMPLETED, State.FINISHED):
        return Reason.ATTEMPT_OVER, f"attempt {attempt} has completed"
    if evidence.alive is False and facts.job_known and not _holds(facts, evidence):
        return Reason.JOB_NOT_HELD, f"the worker is dead, and attempt {attempt} is not held by it"
    return None


def _check_container(facts: Facts, container: ContainerState, evidence: WorkerFacts) -> Step | None:
    if not container.managed:
        message = f"container {container.name} is not managed: {container.refusal or 'nothing is done to it'}"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message=message)
    if container.paused:
        message = f"container {container.name} is paused: unpause it first"
        return restart.wait_for_evidence(facts, Reason.CONTAINER_PAUSED, message)
    if container.unstartable:
        return restart.wait_for_evidence(facts, Reason.UNSTARTABLE, restart.describe_unstartable(container))
    count, own = evidence.container_workers, 1 if evidence.alive else 0
    if not container.startable and not container.pids:
        count = own  # nothing is stopped
    if count is None:
        message = f"number of workers in container {container.name} unknown"
        return restart.wait_for_evidence(facts, Reason.UNCONFIRMED, message)
    if count != own:
        others = f"{count} live workers" if own else f"{count} live workers and the dead one"
        message = f"container {container.name} holds {others}; a shared container is not restarted"
        return Close(outcome=Outcome.REFUSED, reason=Reason.SHARED_CONTAINER, message=message)
    if not own and not facts.job_known:
        message = f"unknown whether the dead worker still holds its job: {facts.unknown}"
        return restart.wait_for_evidence(facts, Reason.QUEUE_UNREACHABLE, message)
    # A container that ended with its worker is started for it.
    if container.incarnation != evidence.container_incarnation or (evidence.alive and not container.running):
        return restart.wait_for_evidence(facts, Reason.RESTARTED, "the container is not the one of the evidence")
    return None


def _settle(facts: Facts, free: Intent, settle: Intent) -> Step | None:
    """Return the settle's next step; `None` while it waits for the restart."""
    job, attempt = facts.job, facts.episode.attempt
    if free.stage in (Stage.PLANNED, Stage.STOPPING):
        if settle.stage is Stage.PLANNED and facts.queue_stuck_for_s >= QUEUE_TIMEOUT_S:
            # The hung process may hold the queue's lock, and only its end frees the queue.
            return None
        if settle.stage is Stage.FENCED and (not facts.job_known or restart.was_refused_lately(facts)):
            return None  # The queue is not needed to stop a fenced worker.
    if not facts.job_known:
        return Wait(reason=Reason.QUEUE_UNREACHABLE, message=f"the queue does not answer: {facts.unknown}")
    if job is None:
        return _not_settled(Reason.NO_JOB, "the queue has no such job")
    ours = job.attempt == attempt
    if settle.stage is Stage.PLANNED:
        if ours and job.state is State.FENCING:
            return Fence(message=f"attempt {attempt} is already fenced")
        if ours and job.state in MOVES[Move.FENCE].sources:
            if job.claimed_by != settle.data["incarnation"]:
                message = f"attempt {attempt} is held by another worker"
                return _not_settled(Reason.OTHER_WORKER, message)
            return _fence_if_confirmed(facts, free)
        return _not_settled(Reason.ATTEMPT_OVER, _describe_end(job.state, job.attempt, attempt))
    if not ours or job.state is not State.FENCING:
        message = f"found settled: {_describe_end(job.state, job.attempt, attempt)}"
        return Advance(kind=Kind.SETTLE, stage=Stage.DONE, reason=Reason.DONE, message=message)
    seen_dead = free.stage in restart.SEEN_DEAD
    if not seen_dead and (
        facts.settle_for_s < facts.limits.settle_timeout_s
        or not facts.armed  # disarmed: the job may still run.
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


def _fence_if_confirmed(facts: Facts, free: Intent) -> Step:
    """Confirm with new facts before the fence: it ends the attempt as a stop does."""
    found = _confirm_again(facts, free)
    if facts.container_known and not restart.is_up(facts, free) and _has_ended(facts):
        found = Finding.of(confirmed=True, message=restart.describe_exit(facts))
    figures = found.message
    if not found.confirmed:
        if restart.timed_out(facts, facts.settle_for_s):
            return Withdraw(reason=Reason.UNCONFIRMED, message=f"no longer confirmed, and nothing was done: {figures}")
        return Wait(reason=Reason.UNCONFIRMED, message=f"not fenced, because it is not confirmed now: {figures}")
    if not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message="disarmed: nothing is fenced")
    message = f"attempt {facts.episode.attempt} still hangs; its results are refused from now on"
    return restart.warned_first(facts, free, Fence(message=message))


def _stop_if_confirmed(facts: Facts, free: Intent) -> Step:
    """Confirm with new facts before the stop. A worker that is active after the fence stops itself."""
    evidence, settle = facts.evidence, facts.episode.settle
    fenced = _is_fenced(facts)
    if evidence is not None and not fenced and (excuse := _reason_to_close(facts, evidence)) is not None:
        return Withdraw(reason=excuse[0], message=f"{excuse[1]}; nothing was done")
    if fenced and _is_replaced(facts, free):
        return _advance_replaced(facts, free)
    found = _confirm_again(facts, free)
    figures = found.message
    if found.confirmed and not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message="disarmed: nothing is stopped")
    if found.confirmed:
        unfenced = settle is not None and settle.stage is Stage.PLANNED
        figures += "; not fenced yet: the queue accepts no write" if unfenced else ""
        if facts.container is not None and not facts.container.startable:
            figures += f"; it left the processes {sorted(facts.container.pids)}"
        step = Stop(message=figures)
        return step if fenced else restart.warned_first(facts, free, step)
    if evidence is not None and _has_other_work(facts, free, evidence):
        message = "the reported attempt is over and its worker runs on"
        return _not_freed(Reason.ATTEMPT_OVER, message)
    if restart.timed_out(facts, facts.free_for_s):
        if settle is None:
            return Withdraw(reason=Reason.UNCONFIRMED, message=f"no longer confirmed, and nothing was done: {figures}")
        return _not_freed(Reason.UNCONFIRMED, f"no longer confirmed: {figures}")
    return Wait(reason=Reason.UNCONFIRMED, message=f"not stopped, because it is not confirmed now: {figures}")


def _has_ended(facts: Facts) -> bool:
    """Whether the exporter shows that the worker of the settle does not live. Unknown is not ended."""
    evidence, settle = facts.evidence, facts.episode.settle
    if evidence is None or evidence.sample_age_s > facts.limits.evidence_fresh_s:
        return facts.worker_ended
    replaced = settle is not None and evidence.worker_incarnation != settle.data["incarnation"]
    return evidence.alive is False or replaced


def _decide_unconfirmed(facts: Facts, free: Intent) -> Step | None:
    """Decide after a failed stop; `None` if a condition is confirmed, or the worker ended by the stop.

    A worker that has been gone for long enough confirms too: the stop may have ended it before this executor started.
    """
    replaced = _is_replaced(facts, free)
    if replaced and _is_fenced(facts):
        return _advance_replaced(facts, free)
    if facts.stopped_s_ago is not None and _has_ended(facts) and not replaced:
        return None
    episode = facts.episode
    gone = replace(facts, episode=replace(episode, conditions=episode.conditions | {Condition.DEAD_WORKER}))
    found = _confirm_again(gone, free)
    if found.confirmed:
        return None
    if restart.timed_out(facts, facts.free_for_s):
        message = f"a stop did not end it, and it is not confirmed now: {found.message}: check it by hand"
        if facts.stopped_s_ago is not None and found.doubt in _NOT_KNOWN:
            return restart.give_up(facts, free, Reason.STOP_FAILED, message)
        return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.UNCONFIRMED, message=message, unspent=True)
    message = f"not stopped again, because it is not confirmed now: {found.message}"
    return Wait(reason=Reason.UNCONFIRMED, message=message)


def _not_freed(reason: Reason, message: str) -> Advance:
    return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=reason, message=message)


def _confirm_again(facts: Facts, free: Intent) -> Finding:
    evidence = facts.evidence
    if evidence is None:
        return Finding(doubt=Doubt.NO_EVIDENCE, message=f"no local evidence: {facts.unknown}")
    if evidence.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest sample is {evidence.sample_age_s:.1f} s old"
        return Finding(doubt=Doubt.STALE_EVIDENCE, message=message)
    if evidence.container_incarnation != free.key:
        message = "the evidence is about another container"
        return Finding(doubt=Doubt.OTHER_CONTAINER, message=message)
    if _is_of_another_attempt(facts, evidence):
        return Finding(doubt=Doubt.OTHER_ATTEMPT, message="the evidence is about another attempt")
    if (unfit := restart.doubt_container(facts)) is not None:
        return unfit
    if evidence.container_workers != (1 if evidence.alive else 0):
        return Finding(doubt=Doubt.SHARED_CONTAINER, message="other workers live in its container, or may")
    return _confirm(evidence, facts)[1]


def _is_in_container(facts: Facts, free: Intent, evidence: WorkerFacts) -> bool:
    fresh = evidence.sample_age_s <= facts.limits.evidence_fresh_s
    return fresh and evidence.alive is True and evidence.container_incarnation == free.key


def _has_other_work(facts: Facts, free: Intent, evidence: WorkerFacts) -> bool:
    """Whether the worker has another attempt, or none by the queue too."""
    if not _is_in_container(facts, free, evidence) or not _is_of_another_attempt(facts, evidence):
        return False
    return evidence.job_id is not None or (facts.job_known and not _holds(facts, evidence))


def _is_replaced(facts: Facts, free: Intent) -> bool:
    """Whether another incarnation holds the worker's lock, which the kernel gives only after the old one ended."""
    evidence, settle = facts.evidence, facts.episode.settle
    if evidence is None or settle is None or not _is_in_container(facts, free, evidence):
        return False
    return bool(evidence.worker_incarnation != settle.data["incarnation"])


def _advance_replaced(facts: Facts, free: Intent) -> Step:
    """The fenced worker ended and its container started the next one: stop nothing."""
    lingers = restart.on_gpus(facts, free)
    if lingers is None:
        message = "its worker ended: another one holds its lock in the same container"
        return Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.REPLACED, message=message)
    if restart.timed_out(facts, facts.free_for_s):
        return _not_freed(lingers.reason, f"{lingers.message}: check it by hand")
    return lingers


def _describe_end(state: State, attempt: int, alerted: int | None) -> str:
    if attempt != alerted:
        return f"attempt {alerted} is over; the job is {state} at attempt {attempt}"
    return f"the job is {state}"
