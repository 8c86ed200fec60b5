"""Creates the tables of the code; later revisions change older databases."""

from alembic import op

from gpuwarden.queue.schema import METADATA

revision = "0010"
down_revision = None


def upgrade() -> None:
    """Make them."""
    METADATA.create_all(op.get_bind(), checkfirst=False)
