"""Episodes about hosts, tenants and runs. No table is another; an older version does not know what they are about.

An executor that finds the newer revision does nothing more, where it would have failed at each look.
"""

revision = "0008"
down_revision = "0007"

REFUSES = (
    (
        "SELECT count(*) FROM episodes WHERE subject IN ('host', 'tenant', 'run') AND closed_at IS NULL",
        "{} episodes about hosts, tenants or runs are open (`gpuwarden ledger list`): let them close",
    ),
    (
        "SELECT count(*) FROM alerts WHERE state = 'new'",
        "{} alerts have not been taken up yet, and may be about hosts, tenants or runs: let the executor take them up",
    ),
)
LOSES = (
    (
        "SELECT count(*) FROM episodes WHERE subject IN ('host', 'tenant', 'run')",
        "what {} closed episodes were about: the older version knows neither hosts nor tenants nor runs",
    ),
)


def upgrade() -> None:
    """Change nothing."""


def downgrade() -> None:
    """Change nothing; whoever was asked has seen to it that no open episode is about a host, a tenant or a run."""
