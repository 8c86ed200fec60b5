"""Counts of what is over, so that nobody counts the history again, and what outlives it when it is forgotten."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

LOSES = (
    ("SELECT count(*) FROM counts", "{} counts: the older version counts the rows that are still there"),
    (
        "SELECT count(*) FROM spent",
        "that {} containers and attempts were freed or settled, of which all else is forgotten",
    ),
)

_TOOK_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)

_OUTCOME = "CASE WHEN state = 'refused' THEN 'refused' ELSE 'accepted' END"
_SPAN_S = "closed_at - coalesce(alerted_at, opened_at)"
_BOUND = "CASE " + " ".join(f"WHEN {_SPAN_S} <= {bound} THEN '{bound}'" for bound in _TOOK_S) + " ELSE 'longer' END"

# What the metrics page counted until now: host, what it is, the two words that tell it from its like, how often, the
# sum. An alert that was refused counts for the host that received it, and for every host where that was not noted yet;
# one that no executor has taken is counted as it is asked for. Each firing alert that was tied to an episode has its
# line in the journal, and each episode was opened by one of them.
_COUNTED = f"""
SELECT coalesce(host, ''), 'alerts', {_OUTCOME}, coalesce(reason, ''), count(*), 0.0
FROM alerts WHERE state <> 'new' GROUP BY coalesce(host, ''), {_OUTCOME}, coalesce(reason, '')
UNION ALL
SELECT host, 'episodes', outcome, trip, count(*), 0.0
FROM episodes WHERE closed_at IS NOT NULL AND outcome IS NOT NULL GROUP BY host, outcome, trip
UNION ALL
SELECT host, 'took', outcome, {_BOUND}, count(*), sum(CASE WHEN {_SPAN_S} > 0 THEN {_SPAN_S} ELSE 0.0 END)
FROM episodes WHERE closed_at IS NOT NULL AND outcome IS NOT NULL GROUP BY host, outcome, {_BOUND}
UNION ALL
SELECT host, 'intents', kind, stage, count(*), 0.0
FROM intents WHERE stage IN ('done', 'abandoned', 'withdrawn') GROUP BY host, kind, stage
UNION ALL
SELECT coalesce(j.host, e.host), 'steps', j.act, j.step, count(*), 0.0
FROM journal j JOIN episodes e ON e.episode_id = j.episode_id
WHERE j.act IN ('did', 'failed', 'would') GROUP BY coalesce(j.host, e.host), j.act, j.step
UNION ALL
SELECT host, 'duplicates', '', '', sum(tied) - count(*), 0.0
FROM (
    SELECT e.host AS host, e.episode_id, count(j.entry_id) AS tied FROM episodes e
    LEFT JOIN journal j ON j.episode_id = e.episode_id AND j.act = 'saw' AND j.step = 'alert firing'
    GROUP BY e.host, e.episode_id
) AS each_episode
GROUP BY host HAVING sum(tied) > count(*)
"""  # noqa: S608 - the words are our own


def upgrade() -> None:
    """Add them, from the rows that are there."""
    op.add_column("episodes", sa.Column("alerted_at", sa.Float))
    op.execute(
        "UPDATE episodes SET alerted_at = (SELECT received_at FROM alerts WHERE alert_id ="
        " (SELECT min(a.alert_id) FROM alerts a WHERE a.episode_id = episodes.episode_id))"
    )
    op.create_index("episodes_by_close", "episodes", ["closed_at"])
    op.create_table("spent", *(sa.Column(name, sa.String, primary_key=True) for name in ("kind", "key")))
    op.create_table(
        "counts",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("host", "what", "one", "two")),
        sa.Column("times", sa.BigInteger, nullable=False),
        sa.Column("sum_s", sa.Float, nullable=False),
    )
    op.execute(f"INSERT INTO counts (host, what, one, two, times, sum_s) {_COUNTED}")


def downgrade() -> None:
    """Remove them."""
    op.drop_table("counts")
    op.drop_table("spent")
    op.drop_index("episodes_by_close", "episodes")
    op.drop_column("episodes", "alerted_at")
