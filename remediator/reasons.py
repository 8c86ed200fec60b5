"""Reason codes: why an episode waits or ended, and why an alert was refused. Pure.

`Reason` is stored in the ledger, published as the label `reason`, and listed in docs/reference/reasons.md.
`Doubt` is internal.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """A code, and in `text` one line that explains it."""

    text: str

    def __new__(cls, word: str, text: str) -> Self:
        """Make a member from its code and text."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.text = text
        return member

    # What holds an armed remedy
    DRY_RUN = "dry_run", "the remedy is not armed on this host; `gpuwarden arm` arms it"
    PAUSED = "paused", "an operator paused the host; ends at its time, or with `gpuwarden resume`"
    SILENCED = "silenced", "Alertmanager silences every alert of the episode; ends with the silence"
    SILENCES_UNKNOWN = "silences_unknown", "an Alertmanager does not answer, and `--silences-unknown hold` is set"
    COOLDOWN = "cooldown", "the container was restarted less than `--cooldown-s` ago"
    GPU_COOLDOWN = "gpu_cooldown", "another container on the GPU is being restarted, or was within `--vram-cooldown-s`"
    APPROVAL = "approval", "armed with `--approval`: an operator must approve (`gpuwarden approve`) or decline"
    DECLINED = "declined", "an operator declined it; `gpuwarden approve` allows it"
    CIRCUIT_BREAKER = (
        "circuit_breaker",
        "the circuit breaker is open; an operator closes it (`gpuwarden breaker reset`)",
    )
    GRACE_PERIOD = "grace_period", "the worker was warned and has its grace period for a checkpoint"

    # What local evidence says
    UNCONFIRMED = "unconfirmed", "the evidence of the host's own exporter does not confirm the alert, or no longer does"
    NO_EVIDENCE = "no_evidence", "the host's own exporter does not answer, or does not know the target"
    STALE_EVIDENCE = "stale_evidence", "the exporter's newest sample is too old"
    NO_CONTAINER = (
        "no_container",
        "the container is unknown: no label names it, or exporter and engine do not show it",
    )
    CONTAINER_PAUSED = "container_paused", "the container is paused (`docker pause`); ends when it is unpaused"
    RESTARTED = "restarted", "the container is not the one that the evidence describes"
    NOT_MANAGED = "not_managed", "the container did not opt in (`gpuwarden.managed=true`)"
    SHARED_CONTAINER = "shared_container", "other live workers share the container"
    HAS_WORKERS = "has_workers", "workers live in the container; it is judged by their jobs"
    NOT_RESTARTABLE = "not_restartable", "the engine removes the container when it stops (`--rm`)"
    REPLACED = "replaced", "another incarnation replaced the one that the alert names"
    ATTEMPT_OVER = "attempt_over", "the attempt that the alert names is over"
    JOB_NOT_HELD = "job_not_held", "the dead worker does not hold the job any more"

    # While an action runs
    QUEUE_UNREACHABLE = "queue_unreachable", "the queue does not answer"
    ENGINE_UNREACHABLE = "engine_unreachable", "the container engine does not answer"
    DRIVER_UNREACHABLE = "driver_unreachable", "the exporter or GPU driver does not report the running processes"
    STOPPING = "stopping", "the container, or processes of it, still run after the stop"
    STOP_FAILED = "stop_failed", "the container cannot be stopped"
    EXIT_UNCONFIRMED = "exit_unconfirmed", "it is not confirmed that the processes exited"
    SEEN_DEAD = "seen_dead", "the container does not run, and no process of it is left"
    STARTING = "starting", "the container was started and is not up yet"
    STABILIZING = "stabilizing", "the container runs; it counts as started once it has run for a moment"
    START_FAILED = "start_failed", "the container did not start again, or ended after its start"
    STARTED_ELSEWHERE = "started_elsewhere", "someone else started the container"
    LEFT_DOWN = "left_down", "someone else stopped a container that its engine would restart; it is left down"
    CONTAINER_GONE = "container_gone", "the container does not exist any more"
    ENDED_ELSEWHERE = "ended_elsewhere", "the container ended without gpuwarden"
    GPU_LOST = "gpu_lost", "a GPU is lost; it is out of use until an operator releases it"
    SETTLE_TIMEOUT = "settle_timeout", "the settle timeout runs before the job is requeued or failed"
    NO_JOB = "no_job", "the queue has no such job"
    OTHER_WORKER = "other_worker", "another worker holds the attempt"
    NOT_RETRIED = "not_retried", "jobs of this class are not retried"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted", "the job has no attempt left, or would have none"
    RETRIES_EXHAUSTED = "retries_exhausted", "the job has used all its retries"
    DONE = "done", "nothing is left to do"
    GIVEN_UP = "given_up", "an intent was abandoned"
    CLOSED_MEANWHILE = "closed_meanwhile", "another executor closed the episode"
    RESTARTED_ALREADY = "restarted_already", "this incarnation of the container was restarted already"

    # Of a silent host
    EXECUTOR_ALIVE = "executor_alive", "the silent host's own executor is alive"
    OBSERVATION_TOO_SHORT = "observation_too_short", "this executor has not observed the silence for long enough"
    MAJORITY_SILENT = "majority_silent", "more hosts are silent than alive; look for the common cause"
    WORKERS_ALIVE = "workers_alive", "workers of the silent host renew their leases, or never did"
    NO_JOBS = "no_jobs", "the silent host has no jobs"
    JOBS_HELD = "jobs_held", "the jobs of the lost host are held; `gpuwarden job cancel` ends one"

    # Of a run whose items fail
    NO_RUN = "no_run", "no label names a run, or the queue has no such run"
    NO_FAULT_FOUND = "no_fault_found", "no worker or job of the run is faulty"
    OTHER_WORKER_FAULTY = "other_worker_faulty", "a worker of another host is the faulty one; that host's executor acts"
    INSUFFICIENT_DATA = "insufficient_data", "another worker has not ended its first item yet"
    JOBS_IN_DOUBT = "jobs_in_doubt", "jobs of the run are fenced or on lost hosts"
    NOT_RECORDED = "not_recorded", "it is unknown whether the decision was carried out"

    # Of an alert that was refused or abandoned
    MALFORMED = "malformed", "the alert cannot be read"
    NO_HOST = "no_host", "the alert has no label `host`"
    OTHER_HOST = "other_host", "no executor of this ledger runs on the alert's host"
    UNKNOWN_REMEDY = "unknown_remedy", "the label `remedy` names no remedy"
    UNKNOWN_CONDITION = "unknown_condition", "the remedy cannot confirm the label `condition`"
    NO_WORKER = "no_worker", "the remedy needs the label `worker`"
    NO_SERVER = "no_server", "the remedy is for containers without workers, and the alert names a worker"
    NO_HOST_ALONE = "no_host_alone", "the remedy is for whole hosts, and the alert names a worker or a container"
    ABANDONED = "abandoned", "no executor processed the alert within `--retention-days`"


class Doubt(StrEnum):
    """Why local evidence does not confirm a condition. Unknown never counts as idle."""

    UNDER_BOUND = "under_bound"
    NO_CONDITION = "no_condition"
    NO_LOCK = "no_lock"
    NO_JOB = "no_job"
    NO_GANG = "no_gang"
    NO_BUDGET = "no_budget"
    NO_BOUND = "no_bound"
    NOT_ARMED = "not_armed"
    NOT_POLICED = "not_policed"
    GANG_NOT_ACCUSED = "gang_not_accused"
    GPU_UNKNOWN = "gpu_unknown"
    RAM_UNKNOWN = "ram_unknown"
    WORK_UNKNOWN = "work_unknown"
    SIGNS_UNKNOWN = "signs_unknown"
    TIME_UNKNOWN = "time_unknown"
    NOT_PROBED = "not_probed"
    NEVER_ANSWERED = "never_answered"
    ANSWER_UNKNOWN = "answer_unknown"
    MEMORY_UNKNOWN = "memory_unknown"
    RANKING_UNKNOWN = "ranking_unknown"
    PROCESSES_UNKNOWN = "processes_unknown"
    NO_MEMORY_HELD = "no_memory_held"
    ROOM = "room"
    NONE_OVER = "none_over"
    OTHER_VICTIM = "other_victim"
    NO_EVIDENCE = "no_evidence"
    STALE_EVIDENCE = "stale_evidence"
    OTHER_CONTAINER = "other_container"
    OTHER_ATTEMPT = "other_attempt"
    CONTAINER_PAUSED = "container_paused"
    HAS_WORKERS = "has_workers"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of checking a condition against local evidence. `message` has the figures."""

    doubt: Doubt | None
    message: str = field(compare=False)

    @property
    def confirmed(self) -> bool:
        """Whether the exporter's evidence confirms the condition."""
        return self.doubt is None

    @classmethod
    def of(cls, confirmed: bool, message: str) -> Self:
        """A finding from known figures."""
        return cls(doubt=None if confirmed else Doubt.UNDER_BOUND, message=message)
