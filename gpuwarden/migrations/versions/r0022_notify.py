"""Jobs and runs have addresses of the people to notify, jobs have a submitter, and a blocked job has an event."""

import sqlalchemy
from alembic import op

from gpuwarden.queue.schema import JOBS, OUTBOX_EVENTS, RUNS

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """Add the columns."""
    for table, names in ((JOBS, ("notify", "submitted_by")), (RUNS, ("notify",))):
        there = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns(table.name)}
        for name in names:
            if name not in there:
                op.add_column(table.name, sqlalchemy.Column(name, table.c[name].type))
    its = sqlalchemy.inspect(op.get_bind()).get_unique_constraints("outbox_events")
    if "one_event_of_a_kind_per_job" in {each["name"] for each in its}:
        with op.batch_alter_table("outbox_events") as events:  # SQLite copies the table
            events.drop_constraint("one_event_of_a_kind_per_job", type_="unique")
    for index in OUTBOX_EVENTS.indexes:
        if index.name in ("one_end_per_job", "outbox_events_by_job"):
            index.create(op.get_bind(), checkfirst=True)
