"""Checks of the way of an alert: Alertmanager, its route, the webhook, its token, and contacts. Pure."""

from collections.abc import Mapping
from typing import Final

from deploy.doctor.facts import Facts, Runs
from deploy.doctor.finding import Finding, Unread, failed, ok, unknown, unread, warning
from deploy.doctor.routes import PATH, WATCHDOG_LABELS, integrations, receivers_of, remediators
from gpuwarden.format import format_duration
from remediator.alert import WATCHDOG

WATCHDOG_LATE_S: Final = 180.0
"""A watchdog alert arrives about once a minute. Without one for longer, alerts are lost, seconds."""


def alertmanager(facts: Facts) -> Finding | None:
    """Alertmanager answers."""
    found = facts.alertmanager
    if isinstance(found, Unread):
        return None if found.skipped else unread(found, facts.host.place.restart("alertmanager"))
    return ok(f"ready at {found.url}")


def route(facts: Facts) -> Finding | None:
    """The watchdog alert is routed to the webhook, and alerts with a remedy to a receiver of it."""
    found, prometheus = facts.alertmanager, facts.prometheus
    if isinstance(found, Unread):
        return unknown(found.why)
    host = facts.host.key if isinstance(facts.host.key, str) else "host"
    acting = () if isinstance(prometheus, Unread) else [each for each in prometheus.shipped if each.acts]
    wanted: dict[str, Mapping[str, str]] = {
        each.name: {**each.labels, "alertname": each.name, "host": host} for each in acting
    }
    wanted = {WATCHDOG: WATCHDOG_LABELS, **wanted}
    ours = remediators(found.config).keys()
    fix = "merge the routes and receivers of alertmanager.yml (`gpuwarden init`) into yours, then reload Alertmanager"
    for name, labels in wanted.items():
        reached = receivers_of(found.config, labels)
        if not ours & reached:
            return failed(f"{name} goes to {_named(reached)}, and not to the webhook {PATH}", fix)
    return ok("alerts with a remedy and the watchdog go to the webhook")


def webhook(facts: Facts) -> Finding | None:
    """The webhook answers and can store alerts."""
    page, restart = facts.webhook, facts.host.place.restart("serve")
    if isinstance(page, Unread):
        return None if page.skipped else unread(page, restart)
    return failed(f"not ready: {page.not_ready}", restart) if page.not_ready else ok(f"ready at {page.url}")


def token(facts: Facts) -> Finding | None:
    """The webhook accepts the credentials that Alertmanager sends."""
    answer, age_s = facts.token, watchdog_age_s(facts)
    if isinstance(answer, Unread):
        if age_s is not None and age_s <= WATCHDOG_LATE_S:
            return ok(f"accepted {format_duration(age_s)} ago, with the watchdog alert")
        return unknown(answer.why, "run the command as root" if answer.denied else "")
    if answer.status == 401:
        return failed(
            f"the webhook refuses Alertmanager's token: {answer.says}",
            f"make {answer.file or 'the credentials of the receiver'} equal to the token in remediator-web.yml",
        )
    if not answer.accepted:
        return failed(f"the webhook answers {answer.status}: {answer.says}", facts.host.place.restart("serve"))
    return ok("accepted by the webhook")


def watchdog(facts: Facts) -> Finding | None:
    """The watchdog alert, which always fires, arrives."""
    page, sender = facts.webhook, facts.alertmanager
    if isinstance(page, Unread):
        return unknown(page.why)
    if isinstance(sender, Unread):
        return unknown(sender.why)
    age_s = watchdog_age_s(facts)
    fix = "read Alertmanager's log; docs/runbooks/GpuwardenWatchdog.md"
    if age_s is None:
        up_s = WATCHDOG_LATE_S if sender.started_at is None else facts.host.now_s - sender.started_at
        if up_s < WATCHDOG_LATE_S:
            says = f"none has arrived yet: Alertmanager started {format_duration(up_s)} ago"
            return warning(says, "run this again in a minute")
        return failed("none has ever arrived", f"wait a minute and run this again; {fix}")
    if age_s > WATCHDOG_LATE_S:
        return failed(f"the last one arrived {format_duration(age_s)} ago", fix)
    return ok(f"arrived {format_duration(age_s)} ago")


def watchdog_age_s(facts: Facts) -> float | None:
    """Seconds since the watchdog alert last arrived; `None` if unknown."""
    page = facts.webhook
    at = None if isinstance(page, Unread) else page.value("gpuwarden_remediator_watchdog_timestamp_seconds")
    return None if at is None else max(0.0, facts.host.now_s - at)


def contacts(facts: Facts) -> Finding | None:
    """Alertmanager has an address for alerts about the remediator itself, which it sends without the remediator."""
    found = facts.alertmanager
    if isinstance(found, Unread):
        return unknown(found.why)
    reached = receivers_of(found.config, {"alertname": "GpuwardenExecutorDown", "severity": "critical", "host": "host"})
    names = sorted({name for receiver in reached for name in integrations(found.config, receiver)})
    if not names:
        return warning(
            f"nobody: Alertmanager's receiver {_named(reached)} has no address",
            "start `gpuwarden up` with --notify and the URL of a mail server or Slack"
            if facts.host.place.runs is Runs.UP
            else "run `gpuwarden init` with --notify and the URL of a mail server or Slack, or add a contact to that "
            "receiver in alertmanager.yml",
        )
    return ok(f"receiver {_named(reached)}: {', '.join(names)}")


def _named(receivers: list[str]) -> str:
    return ", ".join(repr(each) for each in receivers) or "no receiver"
