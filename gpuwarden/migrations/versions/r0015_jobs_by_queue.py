"""Lists of the jobs of a queue have an index."""

from alembic import op

from gpuwarden.queue.schema import JOBS

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add it."""
    next(index for index in JOBS.indexes if index.name == "jobs_by_queue").create(op.get_bind(), checkfirst=True)
