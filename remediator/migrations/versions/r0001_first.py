"""The first tables: episodes, the inbox, intents, the journal, executors."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LOSES = (
    ("SELECT count(*) FROM episodes", "all {} episodes"),
    ("SELECT count(*) FROM journal", "all {} entries of the journal"),
    ("SELECT count(*) FROM alerts", "all {} alerts"),
    ("SELECT count(*) FROM intents", "all {} intents"),
    ("SELECT count(*) FROM executors", "all {} executors"),
)


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "episodes",
        sa.Column("episode_id", _ID, primary_key=True),
        sa.Column("remedy", sa.String, nullable=False),
        sa.Column("trip", sa.String, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("incarnation", sa.String),
        sa.Column("job_id", _ID),
        sa.Column("attempt", _ID),
        sa.Column("opened_at", sa.Float, nullable=False),
        sa.Column("would_act", sa.Boolean, nullable=False),
        sa.Column("closed_at", sa.Float),
        sa.Column("outcome", sa.String),
        sa.Column("because", sa.String),
    )
    still_open = sa.text("closed_at IS NULL")
    op.create_index(
        "one_open_episode_per_worker",
        "episodes",
        ["host", "worker"],
        unique=True,
        sqlite_where=still_open,
        postgresql_where=still_open,
    )
    op.create_table(
        "alerts",
        sa.Column("alert_id", _ID, primary_key=True),
        sa.Column("received_at", sa.Float, nullable=False),
        sa.Column("fingerprint", sa.String, nullable=False),
        sa.Column("firing", sa.Boolean, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("annotations", sa.JSON, nullable=False),
        sa.Column("starts_at", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("because", sa.String),
        sa.Column("episode_id", _ID, sa.ForeignKey("episodes.episode_id")),
    )
    op.create_index("alerts_by_state", "alerts", ["state", "alert_id"])
    op.create_index("alerts_by_episode", "alerts", ["episode_id", "alert_id"])
    op.create_table(
        "intents",
        sa.Column("intent_id", _ID, primary_key=True),
        sa.Column("episode_id", _ID, sa.ForeignKey("episodes.episode_id"), nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("stage", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("entered_at", sa.Float, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.UniqueConstraint("kind", "key", name="one_intent_per_target"),
    )
    op.create_table(
        "journal",
        sa.Column("entry_id", _ID, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("episode_id", _ID, sa.ForeignKey("episodes.episode_id"), nullable=False),
        sa.Column("act", sa.String, nullable=False),
        sa.Column("step", sa.String, nullable=False),
        sa.Column("because", sa.String, nullable=False),
    )
    op.create_index("journal_by_episode", "journal", ["episode_id", "entry_id"])
    op.create_table(
        "executors",
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("armed", sa.Boolean, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("beat_at", sa.Float, nullable=False),
        sa.Column("errors", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    """Remove them."""
    for table in ("executors", "journal", "intents", "alerts", "episodes"):
        op.drop_table(table)
