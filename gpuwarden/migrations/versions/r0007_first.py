"""The queue's tables.

Until a release is out, a change of the tables edits this revision and raises its number: a database of another number
is refused.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("wrangled", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("forgiven_at", sa.Float),
        sa.Column("forgiven_by", sa.String),
    )
    _partial("runs_wrangled", "runs", ["state"], where="wrangled", sqlite_where="wrangled = 1")
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
        "jobs",
        sa.Column("job_id", _ID, primary_key=True),
        sa.Column("run_id", sa.String, sa.ForeignKey("runs.run_id")),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("job_class", sa.String, nullable=False),
        sa.Column("model", sa.String),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("asked_budget_s", sa.Float),
        sa.Column("budget_s", sa.Float, nullable=False),
        sa.Column("stall_timeout_s", sa.Float, nullable=False),
        sa.Column("steps_total", sa.Integer),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("attempts_max", sa.Integer, nullable=False, server_default="20"),
        sa.Column("watchdog_retries", sa.Integer, nullable=False),
        sa.Column("reclaims", sa.Integer, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("queued_at", sa.Float),
        sa.Column("needs", sa.Integer, nullable=False, server_default="0"),
        sa.Column("pending", sa.Integer, nullable=False, server_default="0"),
        sa.Column("gang", sa.BigInteger),
        sa.Column("rank", sa.Integer, nullable=False, server_default="0"),
        sa.Column("ranks", sa.Integer, nullable=False, server_default="1"),
        sa.Column("recalled", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("claimed_by", sa.String),
        sa.Column("host", sa.String),
        sa.Column("worker", sa.String),
        sa.Column("claimed_at", sa.Float),
        sa.Column("lease_expires_at", sa.Float),
        sa.Column("because", sa.String),
        sa.Column("ended_at", sa.Float),
        sa.Column("result", sa.JSON(none_as_null=True)),
    )
    _partial(
        "jobs_at_work",
        "jobs",
        ["state", "queue"],
        where="state IN ('waiting', 'running', 'fencing', 'node_lost', 'finished', 'blocked')",
    )
    _partial("jobs_by_gang", "jobs", ["gang"], where="gang IS NOT NULL")
    _partial("jobs_by_lease", "jobs", ["lease_expires_at"], where="lease_expires_at IS NOT NULL")
    _partial(
        "jobs_by_model",
        "jobs",
        ["queue", "model", "priority", "job_id"],
        where="state = 'queued' AND model IS NOT NULL",
    )
    _partial("jobs_by_run", "jobs", ["run_id", "state"], where="run_id IS NOT NULL")
    _partial("jobs_by_worker", "jobs", ["host", "worker"], where="worker IS NOT NULL")
    _partial("jobs_claimable", "jobs", ["queue", "priority", "job_id", "queued_at"], where="state = 'queued'")
    _partial(
        "jobs_tried_again",
        "jobs",
        ["queue", "watchdog_retries", "reclaims"],
        where="watchdog_retries > 0 OR reclaims > 0",
    )
    _partial("jobs_unwell", "jobs", ["state", "job_id"], where="state IN ('failed', 'cancelled')")
    op.create_table(
        "dependencies",
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.job_id"), primary_key=True),
        sa.Column("needs_job_id", _ID, sa.ForeignKey("jobs.job_id"), primary_key=True),
    )
    op.create_index("dependencies_by_needed", "dependencies", ["needs_job_id"])
    op.create_table(
        "workers",
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("incarnation", sa.String, nullable=False),
        sa.Column("current_model", sa.String),
        sa.Column("loaded_model", sa.String),
        sa.Column("last_seen_at", sa.Float, nullable=False),
        sa.Column("retired", sa.String),
        sa.Column("retired_for", sa.String),
        sa.Column("draining", sa.String),
        sa.Column("locked_at", sa.Float),
        sa.Column("locked_by", sa.String),
        sa.Column("locked_because", sa.String),
        sa.Column("unlocked_at", sa.Float),
        sa.Column("unlocked_by", sa.String),
    )
    op.create_table(
        "dead_workers",
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("incarnation", sa.String, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("stamped_at", sa.Float, nullable=False),
        sa.Column("because", sa.String, nullable=False),
    )
    op.create_table(
        "worker_gpus",
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("gpu", sa.String, primary_key=True),
    )
    op.create_table(
        "avoided",
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.job_id"), primary_key=True),
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("gpu", sa.String, primary_key=True),
        sa.Column("until", sa.Float, nullable=False),
    )
    op.create_table(
        "quarantined_gpus",
        sa.Column("gpu", sa.String, primary_key=True),
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("because", sa.String, nullable=False),
    )
    op.create_table(
        "dispatch_events",
        sa.Column("event_id", _ID, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.job_id"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("run_id", sa.String),
        sa.Column("queue", sa.String),
        sa.Column("job_class", sa.String),
        sa.Column("waited_s", sa.Float),
        sa.Column("ran_s", sa.Float),
        sa.Column("written_at", sa.Float, nullable=False),
        sa.Column("position", sa.BigInteger),
        sa.Column("consumed_at", sa.Float),
        sa.UniqueConstraint("job_id", "kind", name="one_event_of_a_kind_per_job"),
    )
    op.create_index("dispatch_events_in_order", "dispatch_events", ["position"], unique=True)
    _partial(
        "dispatch_events_unheeded", "dispatch_events", ["event_id"], where="consumed_at IS NULL AND kind = 'failed'"
    )
    _partial("dispatch_events_unplaced", "dispatch_events", ["event_id"], where="position IS NULL")
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
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.job_id")),
        sa.Column("attempt", sa.Integer),
        sa.Column("host", sa.String),
        sa.Column("worker", sa.String),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("because", sa.String),
        sa.Column("result", sa.JSON(none_as_null=True)),
    )
    op.create_index("items_in_order", "items", ["run_id", "state", "place"])
    op.create_table(
        "item_outcomes",
        sa.Column("outcome_id", _ID, primary_key=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("item", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.job_id"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("because", sa.String),
    )
    op.create_index("item_outcomes_by_item", "item_outcomes", ["run_id", "item"])
    op.create_index("item_outcomes_by_worker", "item_outcomes", ["run_id", "host", "worker"])
    op.create_table(
        "barred",
        sa.Column("run_id", sa.String, sa.ForeignKey("runs.run_id"), primary_key=True),
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("migration", sa.Integer, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("barred_by", sa.String, nullable=False),
        sa.Column("because", sa.String, nullable=False),
    )


def _partial(name: str, table: str, columns: list[str], *, where: str, sqlite_where: str | None = None) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(sqlite_where or where), postgresql_where=sa.text(where))
