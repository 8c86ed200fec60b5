"""Ended jobs are counted by an index."""

from alembic import op

from gpuwarden.queue.schema import JOBS

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add it."""
    (ended,) = (index for index in JOBS.indexes if index.name == "jobs_ended")
    ended.create(op.get_bind(), checkfirst=True)
