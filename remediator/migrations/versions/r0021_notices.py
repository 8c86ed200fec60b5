"""Notifications of people."""

from alembic import op

from remediator.ledger.schema import NOTICE_RECIPIENTS, NOTICES

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """Create the tables."""
    for table in (NOTICES, NOTICE_RECIPIENTS):
        table.create(op.get_bind(), checkfirst=True)
