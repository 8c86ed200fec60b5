"""Reports of hosts that are not scraped."""

from alembic import op

from gpuwarden.queue.schema import HOST_REPORTS

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Create the table."""
    HOST_REPORTS.create(op.get_bind(), checkfirst=True)
