"""Jobs are retried after an exception."""

import sqlalchemy
from alembic import op

from gpuwarden.queue.schema import JOBS

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the columns."""
    there = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns("jobs")}
    for name in ("retries_max", "retries", "retry_at"):
        if name not in there:
            its = JOBS.c[name]
            op.add_column(
                "jobs", sqlalchemy.Column(name, its.type, nullable=its.nullable, server_default=its.server_default)
            )
