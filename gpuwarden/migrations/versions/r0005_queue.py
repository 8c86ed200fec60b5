"""Dependencies, results, queues' own settings, items, an outbox with consumers; indexes of what is looked for alone."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

PARTIAL = {
    "jobs_claimable": (("queue", "priority", "job_id", "queued_at"), "state = 'queued'"),
    "jobs_by_model": (("queue", "model", "priority", "job_id"), "state = 'queued' AND model IS NOT NULL"),
    "jobs_by_lease": (("lease_expires_at",), "lease_expires_at IS NOT NULL"),
    "jobs_by_worker": (("host", "worker"), "worker IS NOT NULL"),
    "jobs_by_gang": (("gang",), "gang IS NOT NULL"),
    "jobs_by_run": (("run_id", "state"), "run_id IS NOT NULL"),
    "jobs_at_work": (
        ("state", "queue"),
        "state IN ('waiting', 'running', 'fencing', 'node_lost', 'finished', 'blocked')",
    ),
    "jobs_unwell": (("state", "job_id"), "state IN ('failed', 'cancelled')"),
    "jobs_tried_again": (("queue", "watchdog_retries", "reclaims"), "watchdog_retries > 0 OR reclaims > 0"),
}
WHOLE = {
    "jobs_claimable": ("queue", "state", "priority", "job_id"),
    "jobs_by_lease": ("lease_expires_at",),
    "jobs_by_worker": ("host", "worker"),
}

LEASE_S = 600.0

# An older version reads no state and no class that it does not know, and would run at once what it is to run later.
REFUSES = (
    (
        "SELECT count(*) FROM jobs WHERE state = 'waiting'",
        "{} jobs wait for others (`gpuwarden job list --state waiting`): let what they need complete, or cancel them",
    ),
    (
        "SELECT count(*) FROM jobs WHERE state = 'blocked' AND pending > 0",
        "{} blocked jobs need others that are not done (`gpuwarden job list --state blocked`): cancel them",
    ),
    (
        "SELECT count(*) FROM jobs WHERE gang IS NOT NULL AND state NOT IN ('completed', 'failed', 'cancelled')",
        "{} ranks of jobs that end as one are not over: let them end, or cancel them",
    ),
    (
        "SELECT count(*) FROM jobs WHERE job_class = 'ingest' AND state NOT IN ('completed', 'failed', 'cancelled')",
        "{} jobs of class ingest are not over: let them end, or cancel them",
    ),
    (
        "SELECT count(*) FROM items WHERE state IN ('pending', 'taken')",
        "{} items of runs are not done: let their runs end, or cancel them",
    ),
)
LOSES = (
    ("SELECT count(*) FROM queues", "the settings of {} queues"),
    ("SELECT count(*) FROM jobs WHERE result IS NOT NULL", "the results of {} jobs"),
    ("SELECT count(DISTINCT job_id) FROM dependencies", "which jobs {} jobs needed"),
    (
        "SELECT count(*) FROM jobs WHERE asked_budget_s IS NULL AND state NOT IN ('completed', 'failed', 'cancelled')",
        "that the budgets of {} jobs are their queue's or class's: they keep the present ones",
    ),
    (
        "SELECT count(*) FROM jobs WHERE queued_at <> submitted_at AND ended_at IS NULL",
        "since when {} jobs could be claimed: they count from their submission",
    ),
    ("SELECT count(*) FROM jobs WHERE job_class = 'ingest'", "the class of {} jobs: ingest becomes ingest_load"),
    (
        "SELECT count(*) FROM jobs WHERE state = 'node_lost'",
        "that the hosts of {} jobs seem lost: the jobs run, for a lease more",
    ),
    ("SELECT count(*) FROM runs WHERE state = 'completed'", "that {} runs have completed: they are running"),
    (
        "SELECT count(*) FROM dispatch_events WHERE kind <> 'failed'",
        "{} events of jobs that completed or were cancelled, and of runs that ended",
    ),
    ("SELECT count(*) FROM consumers", "how far {} consumers of events have read"),
    ("SELECT count(*) FROM items", "{} items of runs"),
    ("SELECT count(*) FROM item_outcomes", "{} outcomes of items"),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("jobs", sa.Column("asked_budget_s", sa.Float))
    op.add_column("jobs", sa.Column("queued_at", sa.Float))
    op.add_column("jobs", sa.Column("needs", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("pending", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("result", sa.JSON))
    op.add_column("jobs", sa.Column("gang", sa.BigInteger))
    op.add_column("jobs", sa.Column("rank", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("ranks", sa.Integer, nullable=False, server_default="1"))
    op.add_column("jobs", sa.Column("recalled", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute("UPDATE jobs SET asked_budget_s = budget_s, queued_at = submitted_at")
    for name in WHOLE:
        op.drop_index(name, "jobs")
    for name, (columns, where) in PARTIAL.items():
        _partial(name, "jobs", columns, where)
    # Until now a run did not end when its last job did.
    op.execute(
        "UPDATE runs SET state = 'completed',"
        " ended_at = (SELECT max(jobs.ended_at) FROM jobs WHERE jobs.run_id = runs.run_id)"
        " WHERE state = 'running' AND EXISTS (SELECT 1 FROM jobs WHERE jobs.run_id = runs.run_id) AND NOT EXISTS"
        " (SELECT 1 FROM jobs WHERE jobs.run_id = runs.run_id AND jobs.state <> 'completed')"
    )
    op.add_column("workers", sa.Column("loaded_model", sa.String))
    op.add_column("dispatch_events", sa.Column("queue", sa.String))
    op.add_column("dispatch_events", sa.Column("job_class", sa.String))
    op.add_column("dispatch_events", sa.Column("waited_s", sa.Float))
    op.add_column("dispatch_events", sa.Column("ran_s", sa.Float))
    op.add_column("dispatch_events", sa.Column("position", sa.BigInteger))
    op.create_index("dispatch_events_in_order", "dispatch_events", ["position"], unique=True)
    _partial("dispatch_events_unplaced", "dispatch_events", ("event_id",), "position IS NULL")
    _partial("dispatch_events_unheeded", "dispatch_events", ("event_id",), "consumed_at IS NULL AND kind = 'failed'")
    op.create_table(
        "queues",
        sa.Column("queue", sa.String, primary_key=True),
        sa.Column("job_class", sa.String),
        sa.Column("budget_s", sa.Float),
        sa.Column("lost_hold_s", sa.Float),
        sa.Column("set_at", sa.Float, nullable=False),
        sa.Column("set_by", sa.String, nullable=False),
    )
    op.create_table(
        "dependencies",
        sa.Column("job_id", ID, sa.ForeignKey("jobs.job_id"), primary_key=True),
        sa.Column("needs_job_id", ID, sa.ForeignKey("jobs.job_id"), primary_key=True),
    )
    op.create_index("dependencies_by_needed", "dependencies", ["needs_job_id"])
    op.create_table(
        "consumers",
        sa.Column("consumer", sa.String, primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("moved_at", sa.Float, nullable=False),
    )
    op.create_table(
        "items",
        sa.Column("run_id", sa.String, sa.ForeignKey("runs.run_id"), primary_key=True),
        sa.Column("item", sa.String, primary_key=True),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("job_id", ID, sa.ForeignKey("jobs.job_id")),
        sa.Column("attempt", sa.Integer),
        sa.Column("host", sa.String),
        sa.Column("worker", sa.String),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("because", sa.String),
        sa.Column("result", sa.JSON),
    )
    op.create_index("items_in_order", "items", ["run_id", "state", "place"])
    op.create_table(
        "item_outcomes",
        sa.Column("outcome_id", ID, primary_key=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("item", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("job_id", ID, sa.ForeignKey("jobs.job_id"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("because", sa.String),
    )
    op.create_index("item_outcomes_by_worker", "item_outcomes", ["run_id", "host", "worker"])
    op.create_index("item_outcomes_by_item", "item_outcomes", ["run_id", "item"])


def downgrade() -> None:
    """Remove them, and tell what is left in the words of before."""
    for table in ("item_outcomes", "items", "consumers", "dependencies", "queues"):
        op.drop_table(table)
    # Unread events of other kinds would fail their runs: an older consumer takes every event for a failure.
    op.execute("DELETE FROM dispatch_events WHERE kind <> 'failed'")
    for index in ("dispatch_events_unheeded", "dispatch_events_unplaced", "dispatch_events_in_order"):
        op.drop_index(index, "dispatch_events")
    for column in ("position", "ran_s", "waited_s", "job_class", "queue"):
        op.drop_column("dispatch_events", column)
    op.drop_column("workers", "loaded_model")
    op.execute("UPDATE runs SET state = 'running', ended_at = NULL WHERE state = 'completed'")
    op.execute("UPDATE jobs SET job_class = 'ingest_load' WHERE job_class = 'ingest'")
    jobs = sa.table("jobs", sa.column("state"), sa.column("lease_expires_at"))
    runs_for_a_lease = {"state": "running", "lease_expires_at": time.time() + LEASE_S}
    op.execute(sa.update(jobs).where(jobs.c.state == "node_lost").values(**runs_for_a_lease))
    for name in PARTIAL:
        op.drop_index(name, "jobs")
    for name, columns in WHOLE.items():
        op.create_index(name, "jobs", list(columns))
    for column in ("recalled", "ranks", "rank", "gang", "result", "pending", "needs", "queued_at", "asked_budget_s"):
        op.drop_column("jobs", column)


def _partial(name: str, table: str, columns: tuple[str, ...], where: str) -> None:
    op.create_index(name, table, list(columns), sqlite_where=sa.text(where), postgresql_where=sa.text(where))
