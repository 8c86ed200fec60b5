"""The first tables: episodes, the inbox, intents, the journal, captures, executors, orders and counts.

Until a release is out, a change of the tables edits this revision and raises its number: a database of another number
is refused.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "episodes",
        sa.Column("episode_id", _ID, primary_key=True),
        sa.Column("remedy", sa.String, nullable=False),
        sa.Column("trip", sa.String, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False, server_default="worker"),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("incarnation", sa.String),
        sa.Column("job_id", _ID),
        sa.Column("attempt", _ID),
        sa.Column("alerted_at", sa.Float),
        sa.Column("opened_at", sa.Float, nullable=False),
        sa.Column("would_act", sa.Boolean, nullable=False),
        sa.Column("asked", sa.String),
        sa.Column("closed_at", sa.Float),
        sa.Column("outcome", sa.String),
        sa.Column("reason", sa.String),
        sa.Column("message", sa.String),
        sa.Column("wait_reason", sa.String),
        sa.Column("wait_message", sa.String),
        sa.Column("wait_since", sa.Float),
    )
    op.create_index("episodes_by_close", "episodes", ["closed_at"])
    _unique_where("one_open_episode_per_subject", "episodes", ["host", "subject", "worker"], "closed_at IS NULL")
    op.create_table(
        "alerts",
        sa.Column("alert_id", _ID, primary_key=True),
        sa.Column("received_at", sa.Float, nullable=False),
        sa.Column("host", sa.String),
        sa.Column("fingerprint", sa.String, nullable=False),
        sa.Column("firing", sa.Boolean, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("annotations", sa.JSON, nullable=False),
        sa.Column("starts_at", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("message", sa.String),
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
        sa.Column("retired", sa.String),
    )
    _unique_where("one_intent_per_target", "intents", ["kind", "key"], "retired IS NULL")
    op.create_index("intents_by_stage", "intents", ["kind", "stage"])
    op.create_index("intents_by_episode", "intents", ["episode_id"])
    op.create_index("intents_by_time", "intents", ["kind", "entered_at"])
    op.create_table("spent", *(sa.Column(name, sa.String, primary_key=True) for name in ("kind", "key")))
    op.create_table(
        "journal",
        sa.Column("entry_id", _ID, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("episode_id", _ID, sa.ForeignKey("episodes.episode_id"), nullable=False),
        sa.Column("act", sa.String, nullable=False),
        sa.Column("step", sa.String, nullable=False),
        sa.Column("state", sa.String),
        sa.Column("reason", sa.String),
        sa.Column("message", sa.String, nullable=False),
        sa.Column("host", sa.String),
    )
    op.create_index("journal_by_episode", "journal", ["episode_id", "entry_id"])
    op.create_table(
        "run_decisions",
        sa.Column("decision_id", _ID, primary_key=True),
        sa.Column("episode_id", _ID, sa.ForeignKey("episodes.episode_id"), nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("host", sa.String),
        sa.Column("worker", sa.String),
        sa.Column("decided_at", sa.Float, nullable=False),
        sa.Column("done_at", sa.Float),
    )
    op.create_index("run_decisions_by_episode", "run_decisions", ["episode_id", "decision_id"])
    op.create_index("run_decisions_by_time", "run_decisions", ["decided_at"])
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
    _unique_where("one_capture_per_dry_run", "captures", ["episode_id"], "intent_id IS NULL")
    op.create_table(
        "executors",
        sa.Column("host", sa.String, primary_key=True),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("armed", sa.Boolean, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("beat_at", sa.Float, nullable=False),
        sa.Column("errors", sa.Integer, nullable=False),
        sa.Column("workers", sa.Integer),
    )
    op.create_table(
        "standing_orders",
        sa.Column("order_id", _ID, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("act", sa.String, nullable=False),
        sa.Column("topic", sa.String, nullable=False),
        sa.Column("host", sa.String),
        sa.Column("remedy", sa.String),
        sa.Column("until", sa.Float),
        sa.Column("episode_id", _ID),
        sa.Column("key", sa.String),
        sa.Column("since", sa.Float),
        sa.Column("ends", _ID),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("because", sa.String, nullable=False),
    )
    op.create_index("standing_orders_by_scope", "standing_orders", ["topic", "host", "remedy", "order_id"])
    op.create_index("standing_orders_by_episode", "standing_orders", ["episode_id", "order_id"])
    op.create_table(
        "counts",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("host", "what", "one", "two")),
        sa.Column("times", sa.BigInteger, nullable=False),
        sa.Column("sum_s", sa.Float, nullable=False),
    )


def _unique_where(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, unique=True, sqlite_where=where, postgresql_where=where)
