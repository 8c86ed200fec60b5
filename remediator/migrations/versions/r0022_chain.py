"""Drills, and the last arrival of the watchdog alert."""

from alembic import op

from remediator.ledger.schema import ARRIVALS, DRILLS

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """Create the tables."""
    for table in (DRILLS, ARRIVALS):
        table.create(op.get_bind(), checkfirst=True)
