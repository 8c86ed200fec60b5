"""The links of the chain in order. A link that fails because of an earlier one is unknown. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deploy.doctor.checks import alerts, databases, exporter, host, prometheus
from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, Verdict


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link, its check, and the earlier links that it needs."""

    name: str
    check: Callable[[Facts], Finding | None]
    needs: Sequence[str] = ()


LINKS: Final = (
    Link(name="installation", check=host.installation),
    Link(name="settings", check=host.settings, needs=("installation",)),
    Link(name="host key", check=host.host_key, needs=("installation",)),
    Link(name="permissions", check=host.permissions, needs=("installation",)),
    Link(name="disk", check=host.disk, needs=("installation",)),
    Link(name="ledger", check=databases.ledger, needs=("installation", "disk")),
    Link(name="queue", check=databases.queue, needs=("installation", "disk")),
    Link(name="exporter", check=exporter.exporter, needs=("installation", "host key")),
    Link(name="gpus", check=exporter.gpus, needs=("exporter",)),
    Link(name="watched", check=exporter.watched, needs=("exporter",)),
    Link(name="prometheus", check=prometheus.prometheus, needs=("installation",)),
    Link(name="clock", check=host.clock, needs=("prometheus",)),
    Link(name="host label", check=prometheus.host_label, needs=("host key", "exporter", "prometheus")),
    Link(name="rules", check=prometheus.rules, needs=("prometheus",)),
    Link(name="alertmanager", check=alerts.alertmanager, needs=("installation",)),
    Link(name="route", check=alerts.route, needs=("alertmanager",)),
    Link(name="webhook", check=alerts.webhook, needs=("installation", "ledger")),
    Link(name="targets", check=prometheus.targets, needs=("exporter", "host label", "webhook")),
    Link(name="token", check=alerts.token, needs=("route", "webhook")),
    Link(name="watchdog", check=alerts.watchdog, needs=("clock", "rules", "alertmanager", "route", "webhook", "token")),
    Link(name="executor", check=databases.executor, needs=("host key", "ledger")),
    Link(name="notifications", check=databases.notifications, needs=("ledger", "webhook")),
    Link(name="contacts", check=alerts.contacts, needs=("alertmanager",)),
)


def diagnose(facts: Facts, links: Sequence[Link] = LINKS) -> Mapping[str, Finding]:
    """Check each link. Excluded parts and the links that need them are left out."""
    found: dict[str, Finding] = {}
    because: dict[str, str] = {}
    for link in links:
        finding = None if set(link.needs) - found.keys() else link.check(facts)
        if finding is None:
            continue
        broken = [name for name in link.needs if found[name].verdict in (Verdict.FAILED, Verdict.UNKNOWN)]
        if finding.verdict is not Verdict.OK and broken:
            because[link.name] = because.get(broken[0], broken[0])
            finding = Finding(verdict=Verdict.UNKNOWN, says=f"not checked: depends on {because[link.name]}")
        found[link.name] = finding
    return found
