"""The orders that people give, and what each executor sees and has told of."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LOSES = (
    (
        "SELECT count(*) FROM standing_orders",
        "{} orders, and with them what is armed, paused or braked: the older version acts where `--armed` says so",
    ),
    ("SELECT count(*) FROM executors WHERE workers IS NOT NULL", "how many workers {} executors see"),
)


def upgrade() -> None:
    """Add them. Whether an executor acted was its own option until now; from here on it has to be armed anew."""
    op.create_table(
        "standing_orders",
        sa.Column("order_id", _ID, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("act", sa.String, nullable=False),
        sa.Column("topic", sa.String, nullable=False),
        sa.Column("host", sa.String),
        sa.Column("remedy", sa.String),
        sa.Column("until", sa.Float),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("because", sa.String, nullable=False),
    )
    op.create_index("standing_orders_by_scope", "standing_orders", ["topic", "host", "remedy", "order_id"])
    op.create_index("intents_by_time", "intents", ["kind", "entered_at"])
    op.add_column("executors", sa.Column("workers", sa.Integer))
    op.add_column("executors", sa.Column("summed_up_on", sa.String))


def downgrade() -> None:
    """Remove them."""
    for column in ("summed_up_on", "workers"):
        op.drop_column("executors", column)
    op.drop_index("intents_by_time", "intents")
    op.drop_table("standing_orders")
