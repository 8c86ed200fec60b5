"""The queue's tables. Times are Unix seconds; durations seconds; states and moves are those of `gpuwarden.job`."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    false,
    text,
)

from gpuwarden.db.migrate import Schema
from gpuwarden.job import ATTEMPTS_MAX

METADATA = MetaData()


def _partial(name: str, *columns: str, where: str) -> Index:
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


# SQLite numbers rows by itself only where the key is called INTEGER, which has 64 bits there.
ID = BigInteger().with_variant(Integer, "sqlite")

AT_WORK = "state IN ('waiting', 'running', 'fencing', 'host_lost', 'finished', 'blocked')"
"""The jobs that are neither over nor claimable. SQLite uses their index only for a query that says just this."""

UNWELL = "state IN ('failed', 'cancelled')"
"""The jobs that a person looks for among millions that are well."""

RUNS = Table(
    "runs",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("state", String, nullable=False),  # running | completed | failed | cancelled
    Column("submitted_at", Float, nullable=False),
    Column("ended_at", Float),
    # Whether its owner asked that its workers and it are judged by how its items go.
    Column("wrangled", Boolean, nullable=False, server_default=false()),
    Column("forgiven_at", Float),  # when what wrangling did to it was undone last
    Column("forgiven_by", String),
    Index("runs_wrangled", "state", sqlite_where=text("wrangled = 1"), postgresql_where=text("wrangled")),
)

# What a queue's owner has set; a queue without a row goes by what its name and its jobs' classes say.
QUEUES = Table(
    "queues",
    METADATA,
    Column("queue", String, primary_key=True),
    Column("job_class", String),
    Column("budget_s", Float),
    # How long a job of a lost host is held before it is given away; null: until the host is back, or a person ends it.
    Column("lost_hold_s", Float),
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
    Column("asked_budget_s", Float),  # as submitted; null: by queue or class, looked up at each claim
    Column("budget_s", Float, nullable=False),  # of the attempt
    Column("stall_timeout_s", Float, nullable=False),
    Column("steps_total", Integer),
    Column("state", String, nullable=False),
    Column("priority", Integer, nullable=False),  # lower is sooner
    Column("attempt", Integer, nullable=False),
    Column("attempts_max", Integer, nullable=False, server_default=str(ATTEMPTS_MAX)),
    Column("watchdog_retries", Integer, nullable=False),
    Column("reclaims", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("queued_at", Float),  # since when it may be claimed, or could when it was
    Column("needs", Integer, nullable=False, server_default="0"),  # jobs that must have completed before it is queued
    Column("pending", Integer, nullable=False, server_default="0"),  # those of them that have not
    # The ranks of one gang bear the id of its first; null: a job of one rank.
    Column("gang", BigInteger),
    Column("rank", Integer, nullable=False, server_default="0"),
    Column("ranks", Integer, nullable=False, server_default="1"),
    # Fenced while its gang was queued again: when it is, too, nobody is taken along once more.
    Column("recalled", Boolean, nullable=False, server_default=false()),
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
    Column("result", JSON(none_as_null=True)),
    # Each holds only the jobs that are looked for by it, so that a claim costs the same whatever else is there; and all
    # that a count of them asks for.
    _partial("jobs_claimable", "queue", "priority", "job_id", "queued_at", where="state = 'queued'"),
    _partial("jobs_by_model", "queue", "model", "priority", "job_id", where="state = 'queued' AND model IS NOT NULL"),
    _partial("jobs_by_lease", "lease_expires_at", where="lease_expires_at IS NOT NULL"),
    _partial("jobs_by_worker", "host", "worker", where="worker IS NOT NULL"),
    _partial("jobs_by_gang", "gang", where="gang IS NOT NULL"),
    _partial("jobs_by_run", "run_id", "state", where="run_id IS NOT NULL"),
    _partial("jobs_at_work", "state", "queue", where=AT_WORK),
    _partial("jobs_unwell", "state", "job_id", where=UNWELL),
    _partial(
        "jobs_tried_again",
        *("queue", "watchdog_retries", "reclaims"),
        where="watchdog_retries > 0 OR reclaims > 0",
    ),
)

# Which jobs a job needs: it is queued once all of them have completed. Both are of one run.
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
    Column("current_model", String),  # held while a job runs; a busy gauge counts fresh rows that hold one
    Column("loaded_model", String),  # kept loaded between jobs; jobs that want it come first
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
    Column("unlocked_at", Float),  # when a lock was taken from it last
    Column("unlocked_by", String),
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

# The outbox: written in the transaction that ends a job, or its run, and read at least once by each of its consumers.
DISPATCH_EVENTS = Table(
    "dispatch_events",
    METADATA,
    Column("event_id", ID, primary_key=True),
    Column("kind", String, nullable=False),  # completed | failed | cancelled; run_ before each where a run ended
    Column("job_id", ForeignKey("jobs.job_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("run_id", String),
    Column("queue", String),
    Column("job_class", String),
    Column("waited_s", Float),  # from when the last attempt could be claimed until it was
    Column("ran_s", Float),  # from its claim to its end
    Column("written_at", Float, nullable=False),
    # Its place in the order in which all consumers see them; given to it by the first that looks, because on
    # PostgreSQL a later number of an event may be seen before an earlier one.
    Column("position", BigInteger),
    Column("consumed_at", Float),  # of a failed one: when its run was failed for it
    UniqueConstraint("job_id", "kind", name="one_event_of_a_kind_per_job"),
    Index("dispatch_events_in_order", "position", unique=True),
    _partial("dispatch_events_unplaced", "event_id", where="position IS NULL"),
    _partial("dispatch_events_unheeded", "event_id", where="consumed_at IS NULL AND kind = 'failed'"),
)

# How far each reader of the outbox has come.
CONSUMERS = Table(
    "consumers",
    METADATA,
    Column("consumer", String, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("moved_at", Float, nullable=False),
)

# What is to be done in a run besides its jobs, piece by piece: the frames of a render. Its jobs share them.
ITEMS = Table(
    "items",
    METADATA,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("item", String, primary_key=True),
    Column("place", Integer, nullable=False),  # in which order they are taken
    Column("state", String, nullable=False),  # pending | taken | done | failed
    # The attempt that took it. One that is over holds nothing: what it took is pending again.
    Column("job_id", ForeignKey("jobs.job_id")),
    Column("attempt", Integer),
    Column("host", String),
    Column("worker", String),
    Column("changed_at", Float, nullable=False),
    Column("because", String),
    Column("result", JSON(none_as_null=True)),
    Index("items_in_order", "run_id", "state", "place"),
)

# Every time an item was done or failed, and by whom: what the wrangling of workers and jobs goes by (B).
ITEM_OUTCOMES = Table(
    "item_outcomes",
    METADATA,
    Column("outcome_id", ID, primary_key=True),
    Column("run_id", String, nullable=False),
    Column("item", String, nullable=False),
    Column("outcome", String, nullable=False),  # done | failed | forgiven
    Column("job_id", ForeignKey("jobs.job_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("host", String, nullable=False),
    Column("worker", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("because", String),
    Index("item_outcomes_by_worker", "run_id", "host", "worker"),
    Index("item_outcomes_by_item", "run_id", "item"),
)

# Workers that were tried with a run and finished none of its items: they claim nothing of it any more.
BARRED = Table(
    "barred",
    METADATA,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("host", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("migration", Integer, nullable=False),  # which move of the run to other workers it was that barred it
    Column("at", Float, nullable=False),
    Column("barred_by", String, nullable=False),
    Column("because", String, nullable=False),
)

QUEUE = Schema(name="queue", tables=METADATA, migrations="gpuwarden:migrations")
