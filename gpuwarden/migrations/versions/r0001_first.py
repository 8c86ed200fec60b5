"""The first tables: runs, jobs, workers, the outbox."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LOSES = (
    ("SELECT count(*) FROM jobs", "all {} jobs"),
    ("SELECT count(*) FROM runs", "all {} runs"),
    ("SELECT count(*) FROM workers", "all {} workers"),
    ("SELECT count(*) FROM dispatch_events", "all {} dispatch events"),
)
REFUSES = (("SELECT count(*) FROM jobs WHERE state = 'running'", "{} jobs run: let them end, or cancel them"),)


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
    )
    op.create_table(
        "jobs",
        sa.Column("job_id", _ID, primary_key=True),
        sa.Column("run_id", sa.String, sa.ForeignKey("runs.run_id")),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("job_class", sa.String, nullable=False),
        sa.Column("model", sa.String),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("budget_s", sa.Float, nullable=False),
        sa.Column("stall_timeout_s", sa.Float, nullable=False),
        sa.Column("steps_total", sa.Integer),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("watchdog_retries", sa.Integer, nullable=False),
        sa.Column("reclaims", sa.Integer, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("claimed_by", sa.String),
        sa.Column("host", sa.String),
        sa.Column("worker", sa.String),
        sa.Column("claimed_at", sa.Float),
        sa.Column("lease_expires_at", sa.Float),
        sa.Column("because", sa.String),
        sa.Column("ended_at", sa.Float),
    )
    op.create_index("jobs_claimable", "jobs", ["queue", "state", "priority", "job_id"])
    op.create_table(
        "workers",
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("worker", sa.String, primary_key=True),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("incarnation", sa.String, nullable=False),
        sa.Column("current_model", sa.String),
        sa.Column("last_seen_at", sa.Float, nullable=False),
    )
    op.create_table(
        "dispatch_events",
        sa.Column("event_id", _ID, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.job_id"), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("run_id", sa.String),
        sa.Column("written_at", sa.Float, nullable=False),
        sa.Column("consumed_at", sa.Float),
        sa.UniqueConstraint("job_id", "kind", name="one_event_of_a_kind_per_job"),
    )


def downgrade() -> None:
    """Remove them."""
    for table in ("dispatch_events", "workers", "jobs", "runs"):
        op.drop_table(table)
