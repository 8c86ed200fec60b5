"""Reports of a period have indexes."""

from alembic import op

from remediator.ledger.schema import EPISODES, JOURNAL

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add them."""
    for table, name in ((EPISODES, "episodes_by_outcome"), (JOURNAL, "journal_by_act")):
        next(index for index in table.indexes if index.name == name).create(op.get_bind(), checkfirst=True)
