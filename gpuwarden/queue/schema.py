"""The queue's tables. Times are Unix seconds, durations seconds."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    false,
)

from gpuwarden.db.migrate import Schema, partial_index
from gpuwarden.job import ATTEMPTS_MAX

METADATA = MetaData()


def _partial(name: str, *columns: str, where: str) -> Index:
    return partial_index(name, *columns, sqlite=where, postgresql=where)


# SQLite assigns ids only to a key of type INTEGER (64 bits).
ID = BigInteger().with_variant(Integer, "sqlite")

AT_WORK = "state IN ('waiting', 'running', 'fencing', 'host_lost', 'finished', 'blocked')"
"""Unfinished jobs that are not claimable. SQLite uses the index only for this exact text."""

NO_BLOCK = "kind <> 'blocked'"

UNWELL = "state IN ('failed', 'cancelled')"
"""Failed and cancelled jobs."""

RUNS = Table(
    "runs",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("state", String, nullable=False),  # running | completed | failed | cancelled
    Column("submitted_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("wrangled", Boolean, nullable=False, server_default=false()),
    Column("forgiven_at", Float),
    Column("forgiven_by", String),
    Column("notify", String),  # may contain a password
    partial_index("runs_wrangled", "state", sqlite="wrangled = 1", postgresql="wrangled"),
)

QUEUES = Table(
    "queues",
    METADATA,
    Column("queue", String, primary_key=True),
    Column("job_class", String),
    Column("budget_s", Float),
    # Null: held until the host is back or an operator ends the job.
    Column("lost_hold_s", Float),
    Column("retention_days", Integer),  # null: 90. 0: all jobs are kept
    Column("set_at", Float, nullable=False),
    Column("set_by", String, nullable=False),
)

JOBS = Table(
    "jobs",
    METADATA,
    Column("job_id", ID, primary_key=True),
    Column("run_id", ForeignKey("runs.run_id")),
    Column("queue", String, nullable=False),
    Column("job_class", String, nullable=False),
    Column("model", String),
    Column("payload", JSON, nullable=False),
    Column("submitted_budget_s", Float),  # null: from the queue or class
    Column("budget_s", Float, nullable=False),
    Column("stall_timeout_s", Float, nullable=False),
    Column("busy_timeout_s", Float),  # null: from the host
    Column("steps_total", Integer),
    Column("state", String, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("attempts_max", Integer, nullable=False, server_default=str(ATTEMPTS_MAX)),
    # Retries after an exception of the job.
    Column("retries_max", Integer, nullable=False, server_default="0"),
    Column("retries", Integer, nullable=False, server_default="0"),
    Column("retry_at", Float),  # not claimable before
    Column("watchdog_retries", Integer, nullable=False),
    Column("reclaims", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("queued_at", Float),  # when the job last became claimable
    Column("needs", Integer, nullable=False, server_default="0"),
    Column("pending", Integer, nullable=False, server_default="0"),
    # The id of rank 0. Null: a job of one rank.
    Column("gang", BigInteger),
    Column("rank", Integer, nullable=False, server_default="0"),
    Column("ranks", Integer, nullable=False, server_default="1"),
    # Fenced while its gang was requeued: its requeue then does not requeue the gang again.
    Column("requeued_with_ranks", Boolean, nullable=False, server_default=false()),
    # The claim and the end of its lease, or of the fence.
    Column("claimed_by", String),
    Column("host", String),
    Column("worker", String),
    Column("claimed_at", Float),
    Column("lease_expires_at", Float),
    Column("reason", String),
    Column("traceback", String),  # of the last attempt that raised an exception
    Column("ended_at", Float),
    Column("result", JSON(none_as_null=True)),
    Column("notify", String),
    Column("submitted_by", String),  # user@host
    # Partial indexes: the cost of a claim does not depend on other jobs.
    _partial("jobs_claimable", "queue", "priority", "job_id", "queued_at", where="state = 'queued'"),
    _partial("jobs_by_model", "queue", "model", "priority", "job_id", where="state = 'queued' AND model IS NOT NULL"),
    _partial("jobs_by_lease", "lease_expires_at", where="lease_expires_at IS NOT NULL"),
    _partial("jobs_by_worker", "host", "worker", where="worker IS NOT NULL"),
    _partial("jobs_by_gang", "gang", where="gang IS NOT NULL"),
    _partial("jobs_by_run", "run_id", "state", where="run_id IS NOT NULL"),
    Index("jobs_by_queue", "queue", "job_id"),
    _partial("jobs_at_work", "state", "queue", where=AT_WORK),
    _partial("jobs_unwell", "state", "job_id", where=UNWELL),
    _partial("jobs_ended", "queue", "state", "ended_at", where="ended_at IS NOT NULL"),
    _partial("jobs_by_end", "ended_at", "job_id", where="ended_at IS NOT NULL"),
    _partial(
        "jobs_tried_again",
        *("queue", "watchdog_retries", "reclaims"),
        where="watchdog_retries > 0 OR reclaims > 0",
    ),
)

# Retries of deleted jobs, for the metric.
DELETED_RETRIES = Table(
    "deleted_retries",
    METADATA,
    Column("queue", String, primary_key=True),
    Column("watchdog_retries", BigInteger, nullable=False),
    Column("reclaims", BigInteger, nullable=False),
)

# Both jobs are in one run.
DEPENDENCIES = Table(
    "dependencies",
    METADATA,
    Column("job_id", ForeignKey("jobs.job_id"), primary_key=True),
    Column("needs_job_id", ForeignKey("jobs.job_id"), primary_key=True),
    Index("dependencies_by_needed", "needs_job_id"),
)

WORKERS = Table(
    "workers",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("queue", String, nullable=False),
    Column("incarnation", String, nullable=False),
    Column("current_model", String),  # while a job runs
    Column("loaded_model", String),  # kept between jobs
    Column("last_seen_at", Float, nullable=False),
    Column("completed_at", Float),  # when it last completed a job
    # Its process is being ended, and it claims nothing.
    Column("retired_incarnation", String),
    Column("retired_for", String),  # the condition, if it had a job
    Column("draining_incarnation", String),
    # An operator's lock holds for all incarnations.
    Column("locked_at", Float),
    Column("locked_by", String),
    Column("locked_reason", String),
    Column("unlocked_at", Float),
    Column("unlocked_by", String),
)

# Jobs that a worker gave back after an error that its process could not survive, of the last hour.
FATAL_ERRORS = Table(
    "worker_fatal_errors",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
)

# Stamped again while the worker is dead, deleted at its next contact.
DEAD_WORKERS = Table(
    "dead_workers",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("queue", String, nullable=False),
    Column("incarnation", String, nullable=False),
    Column("since", Float, nullable=False),
    Column("stamped_at", Float, nullable=False),
    Column("reason", String, nullable=False),
)

WORKER_GPUS = Table(
    "worker_gpus",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("gpu", String, primary_key=True),
)

# The last slot and GPUs of a requeued job.
GPU_AVOIDANCE = Table(
    "job_gpu_avoidance",
    METADATA,
    Column("job_id", ForeignKey("jobs.job_id"), primary_key=True),
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("gpu", String, primary_key=True),  # empty: the slot
    Column("until", Float, nullable=False),
)

# One row for each slot that held the GPU: all slots that share it stop claims.
QUARANTINED_GPUS = Table(
    "quarantined_gpus",
    METADATA,
    Column("gpu", String, primary_key=True),
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),  # empty: no slot
    Column("since", Float, nullable=False),
    Column("reason", String, nullable=False),
)

# Tokens of hosts for the gateway.
HOST_TOKENS = Table(
    "host_tokens",
    METADATA,
    Column("token_id", String, primary_key=True),  # a part of the token
    Column("token_hash", String, nullable=False),  # SHA-256 of the token
    Column("host", String, nullable=False),
    Column("scopes", String, nullable=False),  # see gpuwarden.queue.hosts.tokens.Scope, with commas
    Column("queues", JSON(none_as_null=True)),  # null: all
    Column("created_at", Float, nullable=False),
    Column("last_seen_at", Float),
    # Valid before. Null: no end is set, which one token of a host has.
    Column("revoked_at", Float),
    partial_index(
        "host_tokens_by_host", "host", sqlite="revoked_at IS NULL", postgresql="revoked_at IS NULL", unique=True
    ),
)

# When each host was last heard, written while a central gateway runs.
HOSTS = Table(
    "hosts",
    METADATA,
    Column("host", String, primary_key=True),
    Column("heard_at", Float, nullable=False),
    Column("lost_at", Float),  # null: not lost
)

# The newest report of each kind of a host that is not scraped.
HOST_REPORTS = Table(
    "host_reports",
    METADATA,
    Column("host", String, primary_key=True),
    Column("kind", String, primary_key=True),  # see gpuwarden.queue.hosts.reports.Kind
    Column("received_at", Float, nullable=False),
    Column("page", LargeBinary, nullable=False),  # its series as text, with gzip
)

# Orders to end a task of another runner. They are also the record of who ordered what.
TASK_ORDERS = Table(
    "task_orders",
    METADATA,
    Column("order_id", ID, primary_key=True),
    Column("host", String, nullable=False),
    Column("task_id", BigInteger, nullable=False),
    Column("ordered_at", Float, nullable=False),
    Column("ordered_by", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("taken_at", Float),  # when the host first got it
    Column("settled_at", Float),
    Column("outcome", String),  # see gpuwarden.queue.hosts.task_orders. Null: open
    Column("message", String, nullable=False),
    Index("task_orders_by_task", "host", "task_id", "order_id"),
    partial_index(
        "task_orders_open", "host", "task_id", sqlite="outcome IS NULL", postgresql="outcome IS NULL", unique=True
    ),
)

# The outbox, written by the transaction that ends a job or a run.
OUTBOX_EVENTS = Table(
    "outbox_events",
    METADATA,
    Column("event_id", ID, primary_key=True),
    Column("kind", String, nullable=False),  # see gpuwarden.job.Kind
    Column("job_id", ForeignKey("jobs.job_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("run_id", String),
    Column("queue", String),
    Column("job_class", String),
    Column("waited_s", Float),  # until the last attempt's claim
    Column("ran_s", Float),
    Column("written_at", Float, nullable=False),
    # Order for all consumers, assigned by the first reader.
    Column("position", BigInteger),
    Column("run_failed_at", Float),  # failed events: when the run was failed
    Index("outbox_events_by_job", "job_id"),
    # A job may be blocked again.
    partial_index("one_end_per_job", "job_id", "kind", sqlite=NO_BLOCK, postgresql=NO_BLOCK, unique=True),
    Index("outbox_events_in_order", "position", unique=True),
    _partial("outbox_events_unplaced", "event_id", where="position IS NULL"),
    _partial("outbox_events_unheeded", "event_id", where="run_failed_at IS NULL AND kind = 'failed'"),
)

CONSUMERS = Table(
    "consumers",
    METADATA,
    Column("consumer", String, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("moved_at", Float, nullable=False),
)

# Pieces of a run's work, such as the frames of a render.
ITEMS = Table(
    "items",
    METADATA,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("item", String, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("state", String, nullable=False),  # pending | claimed | done | failed
    # An item is pending again once this attempt has ended.
    Column("job_id", ForeignKey("jobs.job_id")),
    Column("attempt", Integer),
    Column("host", String),
    Column("worker", String),
    Column("changed_at", Float, nullable=False),
    Column("reason", String),
    Column("result", JSON(none_as_null=True)),
    Index("items_in_order", "run_id", "state", "position"),
    _partial("items_by_job", "job_id", where="job_id IS NOT NULL"),
)

ITEM_OUTCOMES = Table(
    "item_outcomes",
    METADATA,
    Column("outcome_id", ID, primary_key=True),
    Column("run_id", String, nullable=False),
    Column("item", String, nullable=False),
    Column("outcome", String, nullable=False),  # done | failed | cleared
    Column("job_id", ForeignKey("jobs.job_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("host", String, nullable=False),
    Column("worker", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("reason", String),
    Index("item_outcomes_by_worker", "run_id", "host", "worker"),
    Index("item_outcomes_by_item", "run_id", "item"),
    Index("item_outcomes_by_job", "job_id"),
)

# Workers that finished no item of a run and cannot claim its jobs.
RUN_EXCLUSIONS = Table(
    "run_worker_exclusions",
    METADATA,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("migration", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("excluded_by", String, nullable=False),
    Column("reason", String, nullable=False),
)

QUEUE = Schema(name="queue", tables=METADATA, migrations="gpuwarden:migrations")
