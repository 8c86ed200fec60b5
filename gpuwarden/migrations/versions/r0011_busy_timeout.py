"""Jobs have a busy timeout."""

import sqlalchemy
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add it."""
    columns = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns("jobs")}
    if "busy_timeout_s" not in columns:
        op.add_column("jobs", sqlalchemy.Column("busy_timeout_s", sqlalchemy.Float))
