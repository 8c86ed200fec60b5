"""Before the first release, changed tables raise the number."""

from alembic import op

from remediator.ledger.schema import METADATA

revision = "0017"
down_revision = None


def upgrade() -> None:
    """Make them."""
    METADATA.create_all(op.get_bind(), checkfirst=False)
