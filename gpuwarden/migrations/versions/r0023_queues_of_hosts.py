"""A host's token may be limited to queues."""

import sqlalchemy
from alembic import op

from gpuwarden.queue.schema import HOST_TOKENS

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    """Add the column."""
    if "queues" not in {each["name"] for each in sqlalchemy.inspect(op.get_bind()).get_columns("host_tokens")}:
        op.add_column("host_tokens", sqlalchemy.Column("queues", HOST_TOKENS.c.queues.type))
