"""A failed job has the end of its traceback."""

import sqlalchemy
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add it."""
    columns = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns("jobs")}
    if "traceback" not in columns:
        op.add_column("jobs", sqlalchemy.Column("traceback", sqlalchemy.String))
