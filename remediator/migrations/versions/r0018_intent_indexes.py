"""Open intents of an episode, and retired intents of a target, have an index."""

from alembic import op

from remediator.ledger.schema import INTENTS

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add them."""
    for name in ("intents_owed", "intents_retired"):
        next(index for index in INTENTS.indexes if index.name == name).create(op.get_bind(), checkfirst=True)
