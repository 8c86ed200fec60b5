"""Episodes about servers: a container can bear the name of a worker, and each may have an open episode."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

# An older version would take an episode about a server, or whatever else, for one about a worker, and act on that.
REFUSES = (
    (
        "SELECT count(*) FROM episodes WHERE subject <> 'worker' AND closed_at IS NULL",
        "{} episodes about servers, tenants or hosts are open (`gpuwarden ledger list`): let them close",
    ),
    (
        "SELECT count(*) FROM alerts WHERE state = 'new'",
        "{} alerts have not been taken up yet, and may be about servers: let the executor take them up",
    ),
)
LOSES = (
    (
        "SELECT count(*) FROM episodes WHERE subject <> 'worker'",
        "that {} closed episodes were about servers, tenants or hosts",
    ),
)


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


def downgrade() -> None:
    """Take it away; whoever was asked has seen to it that no open episode is about a server."""
    op.drop_index("one_open_episode_per_subject", "episodes")
    is_open = sa.text("closed_at IS NULL")
    op.create_index(
        "one_open_episode_per_worker",
        "episodes",
        ["host", "worker"],
        unique=True,
        sqlite_where=is_open,
        postgresql_where=is_open,
    )
    op.drop_column("episodes", "subject")
