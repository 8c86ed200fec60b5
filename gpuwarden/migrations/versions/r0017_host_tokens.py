"""Hosts have tokens."""

from alembic import op

from gpuwarden.queue.schema import HOST_TOKENS

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Add them."""
    HOST_TOKENS.create(op.get_bind(), checkfirst=True)
