"""Episodes about servers: a container can bear the name of a worker, and each may have an open episode."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Say what an episode is about; all there are yet are about workers."""
    op.add_column("episodes", sa.Column("subject", sa.String, nullable=False, server_default="worker"))
    op.drop_index("one_open_episode_per_worker", "episodes")
    is_open = sa.text("closed_at IS NULL")
    op.create_index(
        "one_open_episode_per_subject",
        "episodes",
        ["host", "subject", "worker"],
        unique=True,
        sqlite_where=is_open,
        postgresql_where=is_open,
    )
