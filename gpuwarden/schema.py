"""The queue's tables. Times are Unix seconds; durations seconds; states and moves are those of `gpuwarden.job`."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

from gpuwarden.database import Schema
from gpuwarden.job import ATTEMPTS_MAX

METADATA = MetaData()

# SQLite numbers rows by itself only where the key is called INTEGER, which has 64 bits there.
ID = BigInteger().with_variant(Integer, "sqlite")

RUNS = Table(
    "runs",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("state", String, nullable=False),  # running | failed | cancelled
    Column("submitted_at", Float, nullable=False),
    Column("ended_at", Float),
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
    Column("budget_s", Float, nullable=False),
    Column("stall_timeout_s", Float, nullable=False),
    Column("steps_total", Integer),
    Column("state", String, nullable=False),
    Column("priority", Integer, nullable=False),  # lower is sooner
    Column("attempt", Integer, nullable=False),
    Column("attempts_max", Integer, nullable=False, server_default=str(ATTEMPTS_MAX)),
    Column("watchdog_retries", Integer, nullable=False),
    Column("reclaims", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    # The claim: who holds the attempt, and until when without a renewal; of a fenced job, until when its settle may
    # take before any sweep gives it away. Null while nobody holds it.
    Column("claimed_by", String),
    Column("host", String),
    Column("worker", String),
    Column("claimed_at", Float),
    Column("lease_expires_at", Float),
    # Why the attempt was taken from its worker, or why the job ended as it did.
    Column("because", String),
    Column("ended_at", Float),
    Index("jobs_claimable", "queue", "state", "priority", "job_id"),
    Index("jobs_by_lease", "lease_expires_at"),
    Index("jobs_by_worker", "host", "worker"),
)

WORKERS = Table(
    "workers",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("queue", String, nullable=False),
    Column("incarnation", String, nullable=False),
    Column("current_model", String),  # held while a job runs; a busy gauge counts fresh rows that hold one
    Column("last_seen_at", Float, nullable=False),
    # An incarnation whose process is being ended: it claims nothing more. The next one is another.
    Column("retired", String),
    Column("retired_for", String),  # the trip its job was taken for; null where it held none, or was started anew
    # An incarnation that ends once it has finished what it runs.
    Column("draining", String),
    # A person's lock is of the slot, whoever is in it: nothing is claimed while it stands.
    Column("locked_at", Float),
    Column("locked_by", String),
    Column("locked_because", String),
)

# A worker that was found dead while it held a job, for whoever on its host restarts it: stamped anew while that lasts,
# and gone with its first sign of life.
DEAD_WORKERS = Table(
    "dead_workers",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("queue", String, nullable=False),
    Column("incarnation", String, nullable=False),
    Column("since", Float, nullable=False),
    Column("stamped_at", Float, nullable=False),
    Column("because", String, nullable=False),
)

# Which GPUs a worker has, as far as it knows itself; by UUID.
WORKER_GPUS = Table(
    "worker_gpus",
    METADATA,
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("gpu", String, primary_key=True),
)

# Where a requeued job does not go back to for a while: the slot it was taken from, and each of that slot's GPUs.
AVOIDED = Table(
    "avoided",
    METADATA,
    Column("job_id", ForeignKey("jobs.job_id"), primary_key=True),
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("gpu", String, primary_key=True),  # empty: the slot itself
    Column("until", Float, nullable=False),
)

# GPUs with a process that cannot be killed, or that a person took out of use: their workers claim nothing. A row for
# each slot that held one, so that slots which share a GPU without knowing it are all kept from it.
QUARANTINED_GPUS = Table(
    "quarantined_gpus",
    METADATA,
    Column("gpu", String, primary_key=True),
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),  # for workers that do not know their GPUs; empty: of no slot
    Column("since", Float, nullable=False),
    Column("because", String, nullable=False),
)

# The outbox: written in the transaction that ends a job, consumed at least once, by whoever comes first.
DISPATCH_EVENTS = Table(
    "dispatch_events",
    METADATA,
    Column("event_id", ID, primary_key=True),
    Column("kind", String, nullable=False),  # failed
    Column("job_id", ForeignKey("jobs.job_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("run_id", String),
    Column("written_at", Float, nullable=False),
    Column("consumed_at", Float),
    UniqueConstraint("job_id", "kind", name="one_event_of_a_kind_per_job"),
)

QUEUE = Schema(name="queue", tables=METADATA, migrations="gpuwarden:migrations", first="jobs")
