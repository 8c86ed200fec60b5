"""Workers that a person locked or drains; the flag of a dead worker."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

LOSES = (
    ("SELECT count(*) FROM workers WHERE locked_at IS NOT NULL", "the locks of {} workers: they claim again"),
    ("SELECT count(*) FROM workers WHERE draining = incarnation", "that {} workers are to end: they go on"),
    ("SELECT count(*) FROM dead_workers", "the flags of {} dead workers"),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("workers", sa.Column("draining", sa.String))
    op.add_column("workers", sa.Column("locked_at", sa.Float))
    op.add_column("workers", sa.Column("locked_by", sa.String))
    op.add_column("workers", sa.Column("locked_because", sa.String))
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


def downgrade() -> None:
    """Remove them."""
    op.drop_table("dead_workers")
    for column in ("locked_because", "locked_by", "locked_at", "draining"):
        op.drop_column("workers", column)
