"""The ledger's tables. Times are Unix seconds."""

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table

from gpuwarden.db.migrate import Schema

METADATA = MetaData()

# SQLite numbers rows by itself only where the key is called INTEGER, which has 64 bits there.
ID = BigInteger().with_variant(Integer, "sqlite")

EPISODES = Table(
    "episodes",
    METADATA,
    Column("episode_id", ID, primary_key=True),
    Column("remedy", String, nullable=False),
    Column("trip", String, nullable=False),
    Column("host", String, nullable=False),
    Column("subject", String, nullable=False, server_default="worker"),  # worker | server | tenant | host
    Column("worker", String, nullable=False),  # its name: the worker, the container, the host
    Column("incarnation", String),  # what was accused: the worker's incarnation; of a server the container's
    Column("job_id", ID),
    Column("attempt", ID),
    Column("alerted_at", Float),  # when its first alert had arrived
    Column("opened_at", Float, nullable=False),
    Column("would_act", Boolean, nullable=False),  # a dry run has recorded what it would have done
    Column("asked", String),  # the container's incarnation that a person was last asked about
    Column("closed_at", Float),
    Column("outcome", String),
    Column("reason", String),
    Column("message", String),
    # What it waits for; all three are null while it is at work.
    Column("wait_reason", String),
    Column("wait_message", String),
    Column("wait_since", Float),
    Index("episodes_by_close", "closed_at"),
)
Index(
    "one_open_episode_per_subject",
    EPISODES.c.host,
    EPISODES.c.subject,
    EPISODES.c.worker,
    unique=True,
    sqlite_where=EPISODES.c.closed_at.is_(None),
    postgresql_where=EPISODES.c.closed_at.is_(None),
)

# The inbox: every alert that was accepted or refused, as it came.
ALERTS = Table(
    "alerts",
    METADATA,
    Column("alert_id", ID, primary_key=True),
    Column("received_at", Float, nullable=False),
    Column("host", String),  # whose remediator takes it up, none: anybody's; of a refused one, whose received it
    Column("fingerprint", String, nullable=False),
    Column("firing", Boolean, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("annotations", JSON, nullable=False),
    Column("starts_at", String, nullable=False),
    Column("state", String, nullable=False),  # new | linked | idle | refused | abandoned
    Column("reason", String),  # of one that is not taken up: one of remediator.reasons
    Column("message", String),
    Column("episode_id", ForeignKey("episodes.episode_id")),
    Index("alerts_by_state", "state", "alert_id"),
    Index("alerts_by_episode", "episode_id", "alert_id"),
)

# What was promised. The key is the container incarnation of a free, and job/attempt of a settle: at most one of each
# that is not retired.
INTENTS = Table(
    "intents",
    METADATA,
    Column("intent_id", ID, primary_key=True),
    Column("episode_id", ForeignKey("episodes.episode_id"), nullable=False),
    Column("kind", String, nullable=False),
    Column("key", String, nullable=False),
    Column("host", String, nullable=False),
    Column("stage", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("entered_at", Float, nullable=False),
    Column("data", JSON, nullable=False),
    # Which executor works on it, and until when without another word of it. A free is worked by its host's alone.
    Column("retired", String),  # unused | withdrawn: nothing came of it, and its target may be promised the same again
    Index("intents_by_stage", "kind", "stage"),
    Index("intents_by_episode", "episode_id"),
    Index("intents_by_time", "kind", "entered_at"),
)

Index(
    "one_intent_per_target",
    INTENTS.c.kind,
    INTENTS.c.key,
    unique=True,
    sqlite_where=INTENTS.c.retired.is_(None),
    postgresql_where=INTENTS.c.retired.is_(None),
)

# The targets of intents that are forgotten: something was promised to them, and nothing is again.
SPENT = Table(
    "spent",
    METADATA,
    Column("kind", String, primary_key=True),
    Column("key", String, primary_key=True),
)

JOURNAL = Table(
    "journal",
    METADATA,
    Column("entry_id", ID, primary_key=True),
    Column("at", Float, nullable=False),
    Column("episode_id", ForeignKey("episodes.episode_id"), nullable=False),
    Column("act", String, nullable=False),  # saw | decided | did | failed | would | ordered
    Column("step", String, nullable=False),
    Column("state", String),  # what it came to: the stage of an intent, the outcome of a close, firing or resolved
    Column("reason", String),  # one of remediator.reasons
    Column("message", String, nullable=False),
    Column("host", String),  # where it was seen, decided or done
    Index("journal_by_episode", "episode_id", "entry_id"),
)

# What was decided about a run, or about a worker that fails its items, and when it was done.
RUN_DECISIONS = Table(
    "run_decisions",
    METADATA,
    Column("decision_id", ID, primary_key=True),
    Column("episode_id", ForeignKey("episodes.episode_id"), nullable=False),
    Column("kind", String, nullable=False),  # lock | move | block
    Column("host", String),  # of the worker
    Column("worker", String),  # none: the whole run
    Column("decided_at", Float, nullable=False),
    Column("done_at", Float),
    Index("run_decisions_by_episode", "episode_id", "decision_id"),
    Index("run_decisions_by_time", "decided_at"),
)

# What the processes of a target were doing right before its stop: one for each free, and one for a dry run's episode.
CAPTURES = Table(
    "captures",
    METADATA,
    Column("capture_id", ID, primary_key=True),
    Column("episode_id", ForeignKey("episodes.episode_id"), nullable=False),
    Column("intent_id", ForeignKey("intents.intent_id")),  # the free; none in a dry run
    Column("at", Float, nullable=False),
    Column("host", String),
    Column("document", JSON, nullable=False),  # remediator.capture.capture says what it holds
    Index("captures_by_episode", "episode_id", "capture_id"),
)
Index("one_capture_per_free", CAPTURES.c.intent_id, unique=True)
Index(
    "one_capture_per_dry_run",
    CAPTURES.c.episode_id,
    unique=True,
    sqlite_where=CAPTURES.c.intent_id.is_(None),
    postgresql_where=CAPTURES.c.intent_id.is_(None),
)

# Who executes, and that it lives.
EXECUTORS = Table(
    "executors",
    METADATA,
    Column("host", String, primary_key=True),
    Column("pid", Integer, nullable=False),
    Column("armed", Boolean, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("beat_at", Float, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("workers", Integer),  # how many its exporter sees; the fleet is all of them together
)

# What people ordered, and the brake: who, when, why and about what. Nothing is ever changed here.
ORDERS = Table(
    "standing_orders",
    METADATA,
    Column("order_id", ID, primary_key=True),
    Column("at", Float, nullable=False),
    Column("act", String, nullable=False),  # one of remediator.remedies.guards.Act
    Column("topic", String, nullable=False),  # arming | pause | brake | approval
    Column("host", String),  # none: every host
    Column("remedy", String),  # none: every remedy
    Column("until", Float),
    Column("episode_id", ID),  # of an approval: what it is about, and which incarnation of its container
    Column("key", String),
    Column("since", Float),  # when a pause begins
    Column("ends", ID),  # which pause is over ahead of its time
    Column("who", String, nullable=False),
    Column("because", String, nullable=False),
    Index("standing_orders_by_scope", "topic", "host", "remedy", "order_id"),
    Index("standing_orders_by_episode", "episode_id", "order_id"),
)

# How often something was over, each added as it ended: the metrics page counts no history, and forgets none of it.
COUNTS = Table(
    "counts",
    METADATA,
    Column("host", String, primary_key=True),
    Column("what", String, primary_key=True),  # alerts | duplicates | episodes | took | intents | steps
    Column("one", String, primary_key=True),  # outcome, kind or act
    Column("two", String, primary_key=True),  # reason, trip, bound in seconds, stage or step
    Column("times", BigInteger, nullable=False),
    Column("sum_s", Float, nullable=False),
)

LEDGER = Schema(name="ledger", tables=METADATA, migrations="remediator:migrations")
