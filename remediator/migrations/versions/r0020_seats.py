"""A heartbeat says whether its executor advertises GPU memory."""

import sqlalchemy
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Add it."""
    columns = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns("executors")}
    if "seats_on" not in columns:
        no = sqlalchemy.false()
        op.add_column("executors", sqlalchemy.Column("seats_on", sqlalchemy.Boolean, nullable=False, server_default=no))
