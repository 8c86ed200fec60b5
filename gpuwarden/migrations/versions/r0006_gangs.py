"""Jobs of several ranks, which end as one."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

AT_WORK = "state IN ('waiting', 'running', 'fencing', 'node_lost', {}'blocked')"


def upgrade() -> None:
    """Add them."""
    op.add_column("jobs", sa.Column("gang", sa.BigInteger))
    op.add_column("jobs", sa.Column("rank", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("ranks", sa.Integer, nullable=False, server_default="1"))
    op.add_column("jobs", sa.Column("recalled", sa.Boolean, nullable=False, server_default=sa.false()))
    _partial("jobs_by_gang", ("gang",), "gang IS NOT NULL")
    op.drop_index("jobs_at_work", "jobs")
    _partial("jobs_at_work", ("state", "queue"), AT_WORK.format("'finished', "))


def downgrade() -> None:
    """Remove them; a rank that is done is one that is queued again, for nothing ends it with the others."""
    op.execute("UPDATE jobs SET state = 'queued', result = NULL WHERE state = 'finished'")
    op.drop_index("jobs_at_work", "jobs")
    _partial("jobs_at_work", ("state", "queue"), AT_WORK.format(""))
    op.drop_index("jobs_by_gang", "jobs")
    for column in ("recalled", "ranks", "rank", "gang"):
        op.drop_column("jobs", column)


def _partial(name: str, columns: tuple[str, ...], where: str) -> None:
    op.create_index(name, "jobs", list(columns), sqlite_where=sa.text(where), postgresql_where=sa.text(where))
