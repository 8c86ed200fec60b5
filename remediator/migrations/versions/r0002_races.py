"""Leases on intents, the host that an alert is for, and the host that did what the journal tells."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

LOSES = (
    ("SELECT count(*) FROM intents WHERE holder IS NOT NULL", "who holds {} intents"),
    ("SELECT count(*) FROM journal WHERE host IS NOT NULL", "on which hosts {} entries of the journal were written"),
)


def upgrade() -> None:
    """Add them."""
    op.add_column("intents", sa.Column("holder", sa.String))
    op.add_column("intents", sa.Column("held_until", sa.Float))
    op.create_index("intents_by_stage", "intents", ["kind", "stage"])
    op.create_index("intents_by_episode", "intents", ["episode_id"])
    op.add_column("journal", sa.Column("host", sa.String))
    op.add_column("alerts", sa.Column("host", sa.String))
    names = ("alert_id", "state", "host")
    alerts = sa.table("alerts", *map(sa.column, names), sa.column("labels", sa.JSON))
    accepted = sa.select(alerts.c.alert_id, alerts.c.labels).where(alerts.c.state != "refused")
    for row in op.get_bind().execute(accepted).all():
        host = sa.update(alerts).where(alerts.c.alert_id == row.alert_id).values(host=row.labels.get("host"))
        op.execute(host)


def downgrade() -> None:
    """Remove them."""
    op.drop_column("alerts", "host")
    op.drop_column("journal", "host")
    for index in ("intents_by_episode", "intents_by_stage"):
        op.drop_index(index, "intents")
    for column in ("held_until", "holder"):
        op.drop_column("intents", column)
