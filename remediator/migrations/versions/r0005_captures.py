"""What the processes of a target were doing right before its stop."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LOSES = (("SELECT count(*) FROM captures", "what was captured before {} stops (`gpuwarden ledger evidence`)"),)


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "captures",
        sa.Column("capture_id", _ID, primary_key=True),
        sa.Column("episode_id", _ID, sa.ForeignKey("episodes.episode_id"), nullable=False),
        sa.Column("intent_id", _ID, sa.ForeignKey("intents.intent_id")),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("host", sa.String),
        sa.Column("document", sa.JSON, nullable=False),
    )
    op.create_index("captures_by_episode", "captures", ["episode_id", "capture_id"])
    op.create_index("one_capture_per_free", "captures", ["intent_id"], unique=True)
    is_dry = sa.text("intent_id IS NULL")
    op.create_index(
        "one_capture_per_dry_run",
        "captures",
        ["episode_id"],
        unique=True,
        sqlite_where=is_dry,
        postgresql_where=is_dry,
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("captures")
