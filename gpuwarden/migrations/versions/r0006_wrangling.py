"""Runs that are wrangled, the workers that are kept from one, and who undid what."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

LOSES = (
    ("SELECT count(*) FROM runs WHERE wrangled", "that {} runs are wrangled: nobody judges them"),
    ("SELECT count(*) FROM runs WHERE forgiven_at IS NOT NULL", "who forgave {} runs, and when"),
    ("SELECT count(*) FROM workers WHERE unlocked_at IS NOT NULL", "who unlocked {} workers, and when"),
    ("SELECT count(*) FROM barred", "{} bars of workers from runs: they claim them again"),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("runs", sa.Column("wrangled", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("runs", sa.Column("forgiven_at", sa.Float))
    op.add_column("runs", sa.Column("forgiven_by", sa.String))
    op.add_column("workers", sa.Column("unlocked_at", sa.Float))
    op.add_column("workers", sa.Column("unlocked_by", sa.String))
    op.create_index(
        "runs_wrangled",
        "runs",
        ["state"],
        sqlite_where=sa.text("wrangled = 1"),
        postgresql_where=sa.text("wrangled"),
    )
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


def downgrade() -> None:
    """Remove them."""
    op.drop_table("barred")
    op.drop_index("runs_wrangled", "runs")
    for name in ("unlocked_by", "unlocked_at"):
        op.drop_column("workers", name)
    for name in ("forgiven_by", "forgiven_at", "wrangled"):
        op.drop_column("runs", name)
