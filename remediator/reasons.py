"""Reason codes: why an episode waits or ended, and why an alert was refused. Pure.

`Reason` is stored in the ledger, published as the label `reason`, and listed in docs/reference/reasons.md.
`Doubt` is internal.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Code(StrEnum):
    """A code with two texts for docs/reference/reasons.md: what it means, and what an operator does."""

    text: str
    advice: str

    def __new__(cls, word: str, text: str, advice: str) -> Self:
        """Make a member from its code and texts."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.text, member.advice = text, advice
        return member

    @property
    def needs_operator(self) -> bool:
        """Whether the advice asks an operator to act."""
        return not self.advice.startswith(("Nothing", "Wait"))


class Reason(Code):
    """Why an episode waits or ended, and why an alert was refused."""

    # What holds an armed remedy
    DRY_RUN = "dry_run", "the remedy is not armed on this host", "Arm it: `gpuwarden arm`."
    PAUSED = "paused", "an operator paused the host", "Wait for the end of the pause, or end it: `gpuwarden resume`."
    SILENCED = "silenced", "Alertmanager silences every alert of the episode", "Wait, or expire the silence."
    SILENCES_UNKNOWN = (
        "silences_unknown",
        "an Alertmanager does not answer, and `--silences-unknown hold` is set",
        "Repair Alertmanager.",
    )
    COOLDOWN = (
        "cooldown",
        "the container was restarted less than `--cooldown-s` ago",
        "Nothing: gpuwarden acts after that time. Look for the cause of the repeated failure.",
    )
    GPU_COOLDOWN = (
        "gpu_cooldown",
        "another container on the GPU is being restarted, or was within `--vram-cooldown-s`",
        "Nothing.",
    )
    APPROVAL = (
        "approval",
        "the remedy is armed with `--approval`",
        "Run `gpuwarden approve EPISODE` or `gpuwarden decline EPISODE`.",
    )
    DECLINED = (
        "declined",
        "an operator declined the action",
        "Nothing, or allow it after all: `gpuwarden approve EPISODE`.",
    )
    CIRCUIT_BREAKER = (
        "circuit_breaker",
        "the circuit breaker is open: too many restarts",
        "Find the common cause. Then run `gpuwarden breaker reset`.",
    )
    GRACE_PERIOD = "grace_period", "the worker was warned and has time for a checkpoint", "Nothing."

    # What local evidence says
    UNCONFIRMED = (
        "unconfirmed",
        "the host's own exporter does not confirm the alert, or no longer does",
        "Nothing. If the worker does hang, the message names the missing fact.",
    )
    NO_EVIDENCE = (
        "no_evidence",
        "the host's own exporter does not answer, or does not know the target",
        "Check the exporter, and `--exporter` of `execute`.",
    )
    STALE_EVIDENCE = "stale_evidence", "the exporter's newest sample is too old", "Check the exporter's load and log."
    NO_CONTAINER = (
        "no_container",
        "exporter or engine does not show the target's container",
        "Check that `execute` uses its engine: `--docker`, `--podman`, `--systemd-unit` or `--pod-namespaces`.",
    )
    CONTAINER_PAUSED = "container_paused", "the container is paused", "Run `docker unpause`."
    UNSTARTABLE = (
        "unstartable",
        "a start of the container would fail, so it is not stopped",
        "Restore what the message names, or create the container again.",
    )
    RESTARTED = "restarted", "the container restarted after the exporter's sample", "Nothing."
    NOT_MANAGED = (
        "not_managed",
        "the container did not opt in",
        "Set its label `gpuwarden.managed=true`, if gpuwarden may restart it. For a pod: `gpuwarden/managed=true`.",
    )
    SHARED_CONTAINER = (
        "shared_container",
        "other live workers share the container",
        "Restart it by hand, or run one worker per container.",
    )
    HAS_WORKERS = "has_workers", "workers live in the container; their jobs decide", "Nothing."
    NOT_RESTARTABLE = (
        "not_restartable",
        "the engine removes the container when it stops (`--rm`)",
        "Start it without `--rm`.",
    )
    REPLACED = "replaced", "another incarnation replaced the one that the alert names", "Nothing."
    ATTEMPT_OVER = "attempt_over", "the attempt that the alert names is over", "Nothing."
    JOB_NOT_HELD = "job_not_held", "the dead worker does not hold the job any more", "Nothing."

    # While an action runs
    QUEUE_UNREACHABLE = (
        "queue_unreachable",
        "the queue does not answer",
        "Check the database, and `--queue-db` of `execute`.",
    )
    ENGINE_UNREACHABLE = (
        "engine_unreachable",
        "the container engine does not answer",
        "Check Docker, Podman or the Kubernetes API.",
    )
    DRIVER_UNREACHABLE = (
        "driver_unreachable",
        "the exporter or GPU driver does not list the running processes",
        "Check the exporter, and `nvidia-smi`.",
    )
    DISRUPTION_BUDGET = (
        "disruption_budget",
        "a PodDisruptionBudget does not allow the eviction now",
        "Wait until more of its pods are healthy, or relax the budget that the message names.",
    )
    EVICTION_FORBIDDEN = (
        "eviction_forbidden",
        "the Kubernetes API does not allow the eviction to the executor's account",
        "Correct the Role that the message names, or remove the namespace from `--pod-namespaces`.",
    )
    SCALE_FORBIDDEN = (
        "scale_forbidden",
        "the Kubernetes API does not allow the executor's account to scale the Deployment",
        "Name the Deployment in the Role of `deploy/kubernetes/demand-gate`, or remove its annotation.",
    )
    SCALE_FAILED = (
        "scale_failed",
        "the tenant on demand could not be scaled, or ended at once",
        "Wait for the next try; see the message.",
    )
    GPU_QUARANTINED = (
        "gpu_quarantined",
        "a GPU of the tenant on demand is in quarantine, or that is unknown",
        "Repair the GPU, then run `gpuwarden gpu release GPU`.",
    )
    SCALED_ELSEWHERE = "scaled_elsewhere", "someone else scaled the tenant on demand", "Nothing."
    STOPPING = (
        "stopping",
        "the container, or a process of it, still runs after the stop",
        "Wait, or kill the processes that the message names.",
    )
    STOP_FAILED = (
        "stop_failed",
        "the container cannot be stopped",
        "Stop it by hand; perhaps restart its engine or the host.",
    )
    EXIT_UNCONFIRMED = (
        "exit_unconfirmed",
        "it is not confirmed that the processes exited",
        "Check the processes by hand.",
    )
    SEEN_DEAD = "seen_dead", "the container does not run, and no process of it is left", "Nothing: the start follows."
    STARTING = "starting", "the container was started and is not up yet", "Nothing."
    STABILIZING = "stabilizing", "the container runs; it counts as started a moment later", "Nothing."
    START_FAILED = (
        "start_failed",
        "the container did not start again, or ended after its start",
        "Read its log and start it by hand.",
    )
    STARTED_ELSEWHERE = "started_elsewhere", "someone else started the container", "Nothing."
    LEFT_DOWN = (
        "left_down",
        "someone else stopped a container that its engine would restart",
        "Start it when it may run again.",
    )
    CONTAINER_GONE = "container_gone", "the container does not exist any more", "Create it again, if you need it."
    ENDED_ELSEWHERE = "ended_elsewhere", "the container ended without gpuwarden", "Start it again, if you need it."
    GPU_LOST = (
        "gpu_lost",
        "a GPU is lost and quarantined",
        "Reset or replace the GPU. Then run `gpuwarden gpu release`.",
    )
    SETTLE_TIMEOUT = "settle_timeout", "the job is requeued or failed after `--settle-timeout-s`", "Nothing."
    NO_JOB = "no_job", "the queue has no such job", "Check that worker and `execute` use the same queue."
    OTHER_WORKER = "other_worker", "another worker holds the attempt", "Nothing."
    NOT_RETRIED = "not_retried", "jobs of this class are not retried", "Submit the job again: `gpuwarden job requeue`."
    ATTEMPTS_EXHAUSTED = (
        "attempts_exhausted",
        "the job has no attempt left, or would have none",
        "Find the cause. Then run `gpuwarden job requeue`.",
    )
    RETRIES_EXHAUSTED = (
        "retries_exhausted",
        "the job has used all its retries (`--retries-max`)",
        "Find the cause. Then run `gpuwarden job requeue`.",
    )
    DONE = "done", "nothing is left to do", "Nothing."
    GIVEN_UP = (
        "given_up",
        "a restart was given up; an open episode waits until its target runs",
        "Start the target, or `gpuwarden ledger acknowledge EPISODE`.",
    )
    ACKNOWLEDGED = "acknowledged", "an operator acknowledged a restart that was given up", "Nothing."
    CLOSED_MEANWHILE = "closed_meanwhile", "another executor closed the episode", "Nothing."
    RESTARTED_ALREADY = "restarted_already", "this incarnation of the container was restarted already", "Nothing."

    # A host is silent
    EXECUTOR_ALIVE = (
        "executor_alive",
        "the silent host's own executor is alive",
        "Check its exporter, and the network to Prometheus.",
    )
    OBSERVATION_TOO_SHORT = (
        "observation_too_short",
        "this executor has not observed the silence for long enough",
        "Nothing.",
    )
    MAJORITY_SILENT = (
        "majority_silent",
        "more hosts are silent than alive",
        "Look for the common cause, such as the network.",
    )
    WORKERS_ALIVE = (
        "workers_alive",
        "workers of the silent host renew their leases, or never did",
        "Check its exporter, and the network to Prometheus.",
    )
    NO_JOBS = "no_jobs", "the silent host has no jobs", "Nothing."
    JOBS_HELD = (
        "jobs_held",
        "the jobs of the lost host are held",
        "Restore the host, or give a job up: `gpuwarden job cancel`.",
    )

    # A GPU of a Kubernetes node is faulty
    NODE_TAINTED = (
        "node_tainted",
        "the node is tainted for a faulty GPU",
        "Repair the GPU, or run `gpuwarden gpu release GPU` or `gpuwarden seats untaint NODE`.",
    )
    TAINT_REMOVED = (
        "taint_removed",
        "a person removed the taint while the GPU is faulty",
        "Nothing: it is not set again for this fault.",
    )
    TAINTED_ALREADY = (
        "tainted_already",
        "the node has the taint, and gpuwarden did not set it",
        "Nothing, or remove it: `gpuwarden seats untaint NODE`.",
    )
    MANY_TAINTED = (
        "many_tainted",
        "as many nodes as `--breaker-targets` and `--breaker-share` allow are tainted",
        "Look for the common cause.",
    )
    NODE_UNKNOWN = (
        "node_unknown",
        "the node, its GPU or its quarantine cannot be read",
        "Check `--node-name`, the Kubernetes API, the exporter and the queue.",
    )

    # Items of a run fail
    NO_RUN = (
        "no_run",
        "no label names a run, or the queue has no such run",
        "Check the rule, or the queue of `execute`.",
    )
    NO_FAULT_FOUND = "no_fault_found", "no worker or job of the run is faulty", "Nothing."
    OTHER_WORKER_FAULTY = (
        "other_worker_faulty",
        "a worker of another host is the faulty one",
        "Nothing: that host's executor acts.",
    )
    INSUFFICIENT_DATA = "insufficient_data", "another worker has not ended its first item yet", "Nothing."
    JOBS_IN_DOUBT = (
        "jobs_in_doubt",
        "jobs of the run are fenced or on lost hosts",
        "Nothing, or see the episodes of these jobs.",
    )
    NOT_RECORDED = "not_recorded", "it is unknown whether the decision was carried out", "Run `gpuwarden wrangle list`."

    # The alert is refused or abandoned
    MALFORMED = "malformed", "the alert cannot be read", "Send alerts with Alertmanager only."
    NO_HOST = "no_host", "the alert has no label `host`", "Set it as a target label in the scrape configuration."
    OTHER_HOST = (
        "other_host",
        "no executor of this ledger runs on the alert's host",
        "Start `execute` there, or route its alerts elsewhere.",
    )
    UNKNOWN_REMEDY = (
        "unknown_remedy",
        "the label `remedy` names no remedy",
        "Correct the rule; the message lists the remedies.",
    )
    UNKNOWN_CONDITION = (
        "unknown_condition",
        "the remedy cannot confirm the label `condition`",
        "Correct the rule; the message lists the conditions.",
    )
    NO_WORKER = "no_worker", "the remedy needs the label `worker`", "Correct the rule."
    NO_SERVER = (
        "no_server",
        "the remedy is for containers without workers; the alert names a worker",
        "Correct the rule.",
    )
    NO_TENANT = "no_tenant", "the remedy needs the label `tenant`", "Correct the rule."
    NO_HOST_ALONE = (
        "no_host_alone",
        "the remedy is for whole hosts; the alert names a worker or a container",
        "Correct the rule.",
    )
    NO_GPU = "no_gpu", "the remedy needs the label `gpu`", "Correct the rule."
    UNKNOWN_TARGET = (
        "unknown_target",
        "exporter and queue do not know the target, and many such episodes are open",
        "Find their sender. If they are forged, replace the webhook's token.",
    )
    ABANDONED = (
        "abandoned",
        "no executor processed the alert within `--retention-days`",
        "Start `execute` on the alert's host.",
    )


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
    ALERT_ONLY = "alert_only"
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
    UNSTARTABLE = "unstartable"
    HAS_WORKERS = "has_workers"
    NOT_MANAGED = "not_managed"
    SHARED_CONTAINER = "shared_container"


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
