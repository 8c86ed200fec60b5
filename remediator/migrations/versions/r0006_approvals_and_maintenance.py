"""Arming with approval: what a person is asked about, and the answers. Planned maintenance."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")

LOSES = (
    (
        "SELECT count(*) FROM standing_orders WHERE act = 'ask'",
        "that {} orders arm with approval: the older version takes each for a disarming",
    ),
    (
        "SELECT count(*) FROM standing_orders WHERE act IN ('approve', 'decline')",
        "what people answered {} times when they were asked (`gpuwarden ledger orders`)",
    ),
    (
        "SELECT count(*) FROM standing_orders WHERE act = 'maintain'",
        "{} maintenances: the older version acts in them (`gpuwarden maintenance list`)",
    ),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("episodes", sa.Column("asked", sa.String))
    op.add_column("standing_orders", sa.Column("episode_id", _ID))
    op.add_column("standing_orders", sa.Column("key", sa.String))
    op.add_column("standing_orders", sa.Column("since", sa.Float))
    op.add_column("standing_orders", sa.Column("ends", _ID))
    op.create_index("standing_orders_by_episode", "standing_orders", ["episode_id", "order_id"])


def downgrade() -> None:
    """Remove them. What acted only on what was approved acts on nothing, and least of all by an older arming."""
    op.execute("UPDATE standing_orders SET act = 'disarm' WHERE act = 'ask'")
    op.execute("DELETE FROM standing_orders WHERE act IN ('approve', 'decline', 'maintain', 'maintained')")
    op.drop_index("standing_orders_by_episode", "standing_orders")
    for column in ("ends", "since", "key", "episode_id"):
        op.drop_column("standing_orders", column)
    op.drop_column("episodes", "asked")
