"""The ledger's tables. Times are Unix seconds."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    false,
)

from gpuwarden.db.migrate import Schema, partial_index

METADATA = MetaData()

# SQLite numbers rows only if the key's type is INTEGER, which has 64 bits.
ID = BigInteger().with_variant(Integer, "sqlite")

OWED = "stage NOT IN ('done', 'abandoned', 'withdrawn')"
"""Open intents. Databases use the index only for this exact text."""

RETIRED = "retired IS NOT NULL"

ACTED = "act IN ('did', 'failed', 'would')"
"""Journal entries of acts, for the same reason."""

EPISODES = Table(
    "episodes",
    METADATA,
    Column("episode_id", ID, primary_key=True),
    Column("remedy", String, nullable=False),
    Column("condition", String, nullable=False),
    Column("host", String, nullable=False),
    Column("subject", String, nullable=False, server_default="worker"),  # of remediator.plan.Subject
    Column("worker", String, nullable=False),  # the target's name
    Column("incarnation", String),  # incarnation of the worker or container
    Column("job_id", ID),
    Column("attempt", ID),
    Column("alerted_at", Float),  # arrival of its first alert
    Column("opened_at", Float, nullable=False),
    Column("dry_run_recorded", Boolean, nullable=False),  # a dry run recorded its action
    Column("approval_asked_for", String),  # incarnation that approval was last asked for
    Column("closed_at", Float),
    Column("outcome", String),
    Column("reason", String),
    Column("message", String),
    # The current wait; null while a step runs.
    Column("wait_reason", String),
    Column("wait_message", String),
    Column("wait_since", Float),
    Index("episodes_by_close", "closed_at"),
    Index("episodes_by_outcome", "outcome", "closed_at"),
)
partial_index(
    "one_open_episode_per_subject",
    EPISODES.c.host,
    EPISODES.c.subject,
    EPISODES.c.worker,
    unique=True,
    sqlite=EPISODES.c.closed_at.is_(None),
    postgresql=EPISODES.c.closed_at.is_(None),
)


ALERTS = Table(
    "alerts",
    METADATA,
    Column("alert_id", ID, primary_key=True),
    Column("received_at", Float, nullable=False),
    Column("host", String),  # host that processes it, or null for any; for a refused alert, the receiver
    Column("fingerprint", String, nullable=False),
    Column("firing", Boolean, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("annotations", JSON, nullable=False),
    Column("starts_at", String, nullable=False),
    Column("state", String, nullable=False),  # new | linked | ignored | refused | abandoned
    Column("reason", String),  # of remediator.reasons, if not processed
    Column("message", String),
    Column("episode_id", ForeignKey("episodes.episode_id")),
    Index("alerts_by_state", "state", "alert_id"),
    Index("alerts_by_episode", "episode_id", "alert_id"),
)

# The key is a container incarnation or job/attempt. At most one intent per key is not retired.
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
    Column("retired", String),  # unused or withdrawn: the key is free
    Index("intents_by_stage", "kind", "stage"),
    Index("intents_by_episode", "episode_id"),
    Index("intents_by_time", "kind", "entered_at"),
    partial_index("intents_owed", "episode_id", sqlite=OWED, postgresql=OWED),
    partial_index("intents_retired", "key", sqlite=RETIRED, postgresql=RETIRED),
)

partial_index(
    "one_intent_per_target",
    INTENTS.c.kind,
    INTENTS.c.key,
    unique=True,
    sqlite=INTENTS.c.retired.is_(None),
    postgresql=INTENTS.c.retired.is_(None),
)

# Keys of deleted intents, which are never used again.
USED_INTENT_KEYS = Table(
    "used_intent_keys",
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
    Column("state", String),  # stage of an intent, outcome of a close, firing or resolved
    Column("reason", String),  # of remediator.reasons
    Column("message", String, nullable=False),
    Column("host", String),  # the writing host
    Index("journal_by_episode", "episode_id", "entry_id"),
    partial_index("journal_by_act", "act", "at", sqlite=ACTED, postgresql=ACTED),
)


RUN_DECISIONS = Table(
    "run_decisions",
    METADATA,
    Column("decision_id", ID, primary_key=True),
    Column("episode_id", ForeignKey("episodes.episode_id"), nullable=False),
    Column("kind", String, nullable=False),  # lock | move | block
    Column("host", String),  # of the worker
    Column("worker", String),  # null: the whole run
    Column("decided_at", Float, nullable=False),
    Column("done_at", Float),
    Index("run_decisions_by_episode", "episode_id", "decision_id"),
    Index("run_decisions_by_time", "decided_at"),
)


CAPTURES = Table(
    "captures",
    METADATA,
    Column("capture_id", ID, primary_key=True),
    Column("episode_id", ForeignKey("episodes.episode_id"), nullable=False),
    Column("intent_id", ForeignKey("intents.intent_id")),  # null in a dry run
    Column("at", Float, nullable=False),
    Column("host", String),
    Column("document", JSON, nullable=False),  # see remediator.capture.capture
    Index("captures_by_episode", "episode_id", "capture_id"),
)
Index("one_capture_per_free", CAPTURES.c.intent_id, unique=True)
partial_index(
    "one_capture_per_dry_run",
    CAPTURES.c.episode_id,
    unique=True,
    sqlite=CAPTURES.c.intent_id.is_(None),
    postgresql=CAPTURES.c.intent_id.is_(None),
)

EXECUTORS = Table(
    "executors",
    METADATA,
    Column("host", String, primary_key=True),
    Column("pid", Integer, nullable=False),
    Column("armed", Boolean, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("workers", Integer),  # containers that its exporter watches
    Column("seats_on", Boolean, nullable=False, server_default=false()),  # it advertises the node's GPU memory
    Column("seats_failures", Integer, nullable=False, server_default="0"),
)

# Rows never change.
ORDERS = Table(
    "standing_orders",
    METADATA,
    Column("order_id", ID, primary_key=True),
    Column("at", Float, nullable=False),
    Column("act", String, nullable=False),  # of remediator.remedies.guards.Act
    Column("topic", String, nullable=False),  # of remediator.remedies.guards.TOPIC
    Column("host", String),  # null: every host
    Column("remedy", String),  # null: every remedy
    Column("until", Float),
    Column("episode_id", ID),  # of an approval, with the incarnation in `key`
    Column("key", String),
    Column("since", Float),  # start of a pause
    Column("ends", ID),  # the pause that this order ends early
    Column("who", String, nullable=False),
    Column("reason", String, nullable=False),
    Index("standing_orders_by_scope", "topic", "host", "remedy", "order_id"),
    Index("standing_orders_by_episode", "episode_id", "order_id"),
)


WAITING = "state = 'waiting'"
"""Notices that are not sent yet. Databases use the index only for this exact text."""

# Notifications of people: a row for each event and recipient. A repeated event has the same key.
NOTICES = Table(
    "notices",
    METADATA,
    Column("notice_id", ID, primary_key=True),
    Column("key", String, nullable=False),
    Column("recipient", String, nullable=False),  # of notice_recipients, or administrators: all of them
    Column("kind", String, nullable=False),  # such as failed, locked, breaker
    Column("at", Float, nullable=False),
    Column("title", String, nullable=False),
    Column("text", String, nullable=False),
    Column("state", String, nullable=False),  # waiting | sent | dropped | expanded
    Column("tried_at", Float),  # the first failed attempt
    Column("claim", String),  # of the process that sends it
    Column("ended_at", Float),
    Index("one_notice_per_recipient", "key", "recipient", unique=True),
    Index("notices_by_end", "ended_at"),
    partial_index("notices_waiting", "recipient", "at", sqlite=WAITING, postgresql=WAITING),
)

NOTICE_RECIPIENTS = Table(
    "notice_recipients",
    METADATA,
    Column("recipient", String, primary_key=True),
    Column("address", String),  # null: of the administrators, in the notify file
    Column("next_at", Float, nullable=False),  # nothing is sent before
    Column("failures", Integer, nullable=False),
    Column("failing_since", Float),
    Column("error", String),
    Column("messages", Integer, nullable=False),  # of about an hour
    Column("messages_since", Float, nullable=False),
    Column("claim", String),
    Column("claimed_until", Float),
)
# A drill asks for an alert about one host.
DRILLS = Table(
    "drills",
    METADATA,
    Column("drill_id", ID, primary_key=True),
    Column("host", String, nullable=False),
    Column("who", String, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("until", Float, nullable=False),
    Column("delivered_at", Float),
    Column("decided_at", Float),
    Column("broken", String),  # the first hop that did not answer
    Index("drills_by_end", "until"),
    Index("drills_by_host", "host", "decided_at"),
)

ARRIVALS = Table(
    "arrivals",
    METADATA,
    Column("name", String, primary_key=True),  # watchdog
    Column("at", Float, nullable=False),
    Column("gap_from", Float),  # the last long time without an arrival
    Column("gap_to", Float),
)


COUNTERS = Table(
    "counters",
    METADATA,
    Column("host", String, primary_key=True),
    Column("name", String, primary_key=True),  # alerts | duplicates | episodes | took | intents | steps
    Column("label_1", String, primary_key=True),  # outcome, kind or act
    Column("label_2", String, primary_key=True),  # reason, condition, bound in seconds, stage or step
    Column("value", BigInteger, nullable=False),
    Column("sum_s", Float, nullable=False),
)

LEDGER = Schema(name="ledger", tables=METADATA, migrations="remediator:migrations")
