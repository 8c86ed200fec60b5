"""Orders to end a task on a host."""

from alembic import op

from gpuwarden.queue.schema import TASK_ORDERS

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """Create the table."""
    TASK_ORDERS.create(op.get_bind(), checkfirst=True)
