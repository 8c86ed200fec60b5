"""When each host was last heard."""

from alembic import op

from gpuwarden.queue.schema import HOSTS

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Create the table."""
    HOSTS.create(op.get_bind(), checkfirst=True)
