"""Runs that are wrangled, and the workers that are kept from one."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

LOSES = (
    ("SELECT count(*) FROM runs WHERE wrangled", "that {} runs are wrangled: nobody judges them"),
    ("SELECT count(*) FROM barred", "{} bars of workers from runs: they claim them again"),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("runs", sa.Column("wrangled", sa.Boolean, nullable=False, server_default=sa.false()))
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
    op.drop_column("runs", "wrangled")
