"""For which trip a worker's incarnation was retired."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add it."""
    op.add_column("workers", sa.Column("retired_for", sa.String))
