"""For which trip a worker's incarnation was retired."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

LOSES = (("SELECT count(*) FROM workers WHERE retired_for IS NOT NULL", "for which trip {} workers lost their jobs"),)


def upgrade() -> None:
    """Add it."""
    op.add_column("workers", sa.Column("retired_for", sa.String))


def downgrade() -> None:
    """Remove it."""
    op.drop_column("workers", "retired_for")
