"""Checks of the ledger, its executor, and the queue. Pure."""

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, Unread, failed, ok, unknown, unread, warning
from gpuwarden.format import count_of, format_duration
from remediator.commands.status import BEAT_MAX_S, FAILING_S, UNSENT_S


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


def notifications(facts: Facts) -> Finding | None:
    """The running `serve` has addresses of administrators, and messages are sent."""
    found, page, place = facts.ledger, facts.webhook, facts.host.place
    if isinstance(found, Unread):
        return unknown(found.why)
    unsent = found.unsent
    if unsent.failing_since is not None and found.now_s - unsent.failing_since > FAILING_S:
        since = format_duration(found.now_s - unsent.failing_since)
        return failed(
            f"messages fail for {since}: {unsent.failing[0][1]}",
            "correct the notify file or the address; run `gpuwarden drill --notify`",
        )
    if unsent.oldest_at is not None and found.now_s - unsent.oldest_at > UNSENT_S:
        return failed(f"{count_of(unsent.waiting, 'notice')} not sent for hours", place.notify())
    if isinstance(page, Unread):
        return unknown(page.why)
    count = page.value("gpuwarden_remediator_notification_administrators")
    says = "no administrator is notified of locked workers and quarantined GPUs: the running `serve` has"
    if count is None:
        return warning(f"{says} no notify file", place.notify())
    if not count:
        return warning(f"{says} none", "add `administrators` to its notify file, which is reloaded")
    return ok(count_of(int(count), "administrator"))


def queue(facts: Facts) -> Finding | None:
    """The queue is reachable and has this version's tables."""
    found = facts.queue
    if isinstance(found, Unread):
        return None if found.skipped else unread(found, "start `gpuwarden up`, or check --queue-db and its database")
    return ok("readable and writable, tables of this version")
