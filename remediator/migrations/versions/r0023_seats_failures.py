"""A heartbeat counts the failures to keep the seats of the node."""

import sqlalchemy
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    """Add the count."""
    columns = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns("executors")}
    if "seats_failures" not in columns:
        count = sqlalchemy.Column("seats_failures", sqlalchemy.Integer, nullable=False, server_default="0")
        op.add_column("executors", count)
