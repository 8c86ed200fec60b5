"""The ledger's tables, as remediator.ledger.schema has them.

Until a release is out, a change of the tables raises this revision's number: a database of another number is refused.
The release writes the tables out here, because the revisions after it start from them.
"""

from alembic import op

from remediator.ledger.schema import METADATA

revision = "0011"
down_revision = None


def upgrade() -> None:
    """Make them."""
    METADATA.create_all(op.get_bind(), checkfirst=False)
