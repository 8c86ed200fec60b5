"""A cap on attempts, retired incarnations, GPUs that a job avoids or nobody uses."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LOSES = (
    ("SELECT count(*) FROM jobs WHERE attempts_max <> 20", "the cap on attempts of {} jobs"),
    ("SELECT count(*) FROM workers WHERE retired = incarnation", "that {} workers are being ended: they claim again"),
    ("SELECT count(DISTINCT gpu) FROM quarantined_gpus", "the quarantine of {} GPUs: they are used again"),
    ("SELECT count(DISTINCT job_id) FROM avoided", "which GPUs {} jobs avoid"),
    ("SELECT count(*) FROM worker_gpus", "which {} GPUs the workers have, until they are started anew"),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("jobs", sa.Column("attempts_max", sa.Integer, nullable=False, server_default="20"))
    op.create_index("jobs_by_lease", "jobs", ["lease_expires_at"])
    op.create_index("jobs_by_worker", "jobs", ["host", "worker"])
    op.add_column("workers", sa.Column("retired", sa.String))
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


def downgrade() -> None:
    """Remove them."""
    for table in ("quarantined_gpus", "avoided", "worker_gpus"):
        op.drop_table(table)
    op.drop_column("workers", "retired")
    for index in ("jobs_by_worker", "jobs_by_lease"):
        op.drop_index(index, "jobs")
    op.drop_column("jobs", "attempts_max")
