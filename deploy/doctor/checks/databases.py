"""Checks of the ledger, its executor, and the queue. Pure."""

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, Unread, failed, ok, unknown, unread
from gpuwarden.format import format_duration
from remediator.commands.status import BEAT_MAX_S


def ledger(facts: Facts) -> Finding | None:
    """The ledger is reachable and has this version's tables."""
    found = facts.ledger
    if isinstance(found, Unread):
        return None if found.skipped else unread(found, "start `gpuwarden up`, or check --ledger and its database")
    return ok("readable and writable, tables of this version")


def executor(facts: Facts) -> Finding | None:
    """This host's executor writes its heartbeat."""
    found, key = facts.ledger, facts.host.key
    if isinstance(found, Unread):
        return unknown(found.why)
    if isinstance(key, Unread):
        return unknown(key.why)
    restart = facts.host.place.restart("execute")
    beat = next((each for each in found.executors if each.host == key), None)
    if beat is None:
        return failed(f"no executor of {key} ever ran: nothing is repaired", restart)
    silent_s = found.now_s - beat.heartbeat_at
    if silent_s > BEAT_MAX_S:
        return failed(f"no heartbeat for {format_duration(silent_s)}: nothing is repaired", restart)
    return ok(f"alive, pid {beat.pid}")


def queue(facts: Facts) -> Finding | None:
    """The queue is reachable and has this version's tables."""
    found = facts.queue
    if isinstance(found, Unread):
        return None if found.skipped else unread(found, "start `gpuwarden up`, or check --queue-db and its database")
    return ok("readable and writable, tables of this version")
