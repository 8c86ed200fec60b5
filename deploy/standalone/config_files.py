"""Configuration of Prometheus and Alertmanager for one host. All addresses are on loopback."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from remediator.alert import DRILL, WATCHDOG
from remediator.remedies import REMEDIES


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Intervals of Prometheus and Alertmanager, seconds. Evaluating every second is cheap on one host."""

    scrape_s: int = 5
    evaluate_s: int = 1
    group_interval_s: int = 1
    repeat_s: int = 3600


CENTRAL: Final = "gpuwarden-gateway-central"
"""Service of the central gateway, and its job of Prometheus."""

REPORTS: Final = "gpuwarden-reports"
"""Job of Prometheus for the reports of hosts."""

WATCHDOG_S: Final = 60
"""Interval at which the watchdog alert is delivered, seconds."""

HOST_LOST: Final = "GpuwardenHostLost"
"""This alert goes to operators and to the remediator: only operators can bring the host back."""

KNOWN: Final = "|".join((*REMEDIES, DRILL))
"""Regular expression of the remedies that the remediator takes, and of drills."""

FOR_OPERATORS_TOO: Final = (
    (f'alertname="{HOST_LOST}"',),
    # The remediator refuses these alerts, and no other receiver gets them.
    ('remedy=~".+"', f'remedy!~"{KNOWN}"'),
    (f'remedy=~"{KNOWN}"', f'alertname!="{HOST_LOST}"', 'host=""'),
)
"""Matchers of alerts with a remedy that operators receive too."""

IMPLIED: Final = (
    "GpuwardenExporterDown",
    "GpuwardenTelemetryStale",
    "GpuwardenCollectorFailing",
    "GpuwardenScrapeIntervalTooLong",
    "GpuwardenGpuTelemetryDown",
    "GpuwardenRemediatorDown",
    "GpuwardenExecutorDown",
    "GpuwardenGatewayDown",
)
"""Alerts that a lost host also raises."""

ABOUT_REMEDIATOR: Final = (
    "GpuwardenRemediatorDown",
    "GpuwardenExecutorDown",
    "GpuwardenWebhookNotReceiving",
    "GpuwardenNotificationsFailing",
)
"""Alerts about the remediator itself. It does not relay them."""

DIRECT: Final = "people-direct"
"""Receiver of operators without the remediator."""

BREAKER_OPEN: Final = "GpuwardenCircuitBreakerOpen"
"""Every host of a ledger raises this alert: operators receive it once."""

_WORKER_DEAD: Final = "GpuwardenWorkerDead|GpuwardenWorkerGone"
_NOT_FIXED: Final = "GpuwardenRemediationOverdue"

INHIBITIONS: Final[list[dict[str, list[str]]]] = [
    # A lost host explains its other alerts. The circuit breaker is not one of them.
    {
        "source_matchers": [f'alertname="{HOST_LOST}"'],
        "target_matchers": ['remedy=""', f'alertname=~"{"|".join(IMPLIED)}"'],
        "equal": ["host"],
    },
    # A lost GPU explains its other alerts. The source alert has the label `inhibits="gpu"`. An alert about a working
    # GPU must not have it: it would hide other alerts for weeks.
    {
        "source_matchers": ['inhibits="gpu"', 'gpu=~".+"'],
        "target_matchers": ['remedy=""', 'alertname=~"Gpuwarden.+"'],
        "equal": ["host", "gpu"],
    },
    # A dead worker explains a slow job. In a shared container its own alert is refused, so the other alert must still
    # be sent.
    {
        "source_matchers": [f'alertname=~"{_WORKER_DEAD}"'],
        "target_matchers": ['remedy=""', 'alertname="GpuwardenJobSlow"'],
        "equal": ["host", "worker", "container"],
    },
    {
        "source_matchers": [f'alertname="{_NOT_FIXED}"', f'alert=~"{_WORKER_DEAD}"'],
        "target_matchers": ['remedy=""', f'alertname="{_NOT_FIXED}"', f'alert!~"{_WORKER_DEAD}"'],
        "equal": ["host", "worker", "container"],
    },
]
"""Alerts that are not sent while another fires.

Alerts with a remedy are never inhibited, because the remediator would not get them. An inhibited "resolved" is never
sent, and a silenced alert still inhibits. Stall and health alerts of a dead worker are sent: the ledger merges all
conditions of an attempt into one episode.
"""


def prometheus_config(
    *,
    host: str,
    exporter: str,
    remediator: str,
    alertmanager: str,
    prometheus: str,
    gateways: Mapping[str, str] | None = None,
    rules: list[Path],
    intervals: Intervals,
) -> str:
    """Return prometheus.yml. Addresses are `host:port`. `host` becomes a target label.

    Prometheus scrapes itself, so that failing rules raise an alert. Gateways are by service. The central one also has
    the reports of other hosts.
    """
    addresses = {"gpuwarden-exporter": exporter, "gpuwarden-remediator": remediator, "prometheus": prometheus}
    addresses |= gateways or {}
    scraped: list[dict[str, object]] = [
        {"job_name": name, "static_configs": [{"targets": [address], "labels": {"host": host}}]}
        for name, address in addresses.items()
    ]
    if CENTRAL in addresses:
        reports = {"honor_labels": True, "metrics_path": "/reports"}
        scraped.append({"job_name": REPORTS, **reports, "static_configs": [{"targets": [addresses[CENTRAL]]}]})
    return _yaml(
        {
            "global": {"scrape_interval": f"{intervals.scrape_s}s", "evaluation_interval": f"{intervals.evaluate_s}s"},
            "rule_files": [str(path) for path in rules],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": scraped,
        }
    )


def alertmanager_config(
    *,
    webhook: str,
    token_file: Path,
    intervals: Intervals,
    outside: str | None = None,
    people: Mapping[str, Sequence[Mapping[str, object]]] | None = None,
    relay: str | None = None,
) -> str:
    """Return alertmanager.yml.

    The remediator receives alerts with a remedy at once, resolved ones too, and the watchdog. Operators (receiver
    `people`, with the integrations of `people`) receive everything else, lost hosts and alerts that the remediator
    refuses.

    `outside` is the URL of a service that calls an operator when the watchdog stops. `relay` is the URL with which the
    remediator notifies people. Alerts about the remediator itself do not take it.
    """
    watchdog: dict[str, object] = {
        "matchers": [f'alertname="{WATCHDOG}"'],
        "group_wait": "0s",
        "group_interval": f"{WATCHDOG_S // 2}s",
        "repeat_interval": f"{WATCHDOG_S - 10}s",  # below two group intervals
    }
    acting = {
        "receiver": "gpuwarden",
        "matchers": ['remedy=~".+"'],
        "group_by": ["alertname", "host", "worker", "container"],
        "group_wait": "0s",
        "group_interval": f"{intervals.group_interval_s}s",
        "repeat_interval": f"{intervals.repeat_s}s",
    }
    for_operators = [
        {"receiver": "people", "matchers": list(matchers), "continue": True} for matchers in FOR_OPERATORS_TOO
    ]
    breaker = {"receiver": "people", "matchers": [f'alertname="{BREAKER_OPEN}"'], "group_by": ["alertname"]}
    authorization = {"http_config": {"authorization": {"credentials_file": str(token_file)}}}
    watchdog_routes = [{"receiver": "gpuwarden", **watchdog}]
    direct_routes: list[dict[str, object]] = []
    receivers: list[dict[str, object]] = [
        {"name": "people", **(people or {})},
        {"name": "gpuwarden", "webhook_configs": [{"url": webhook, "send_resolved": True, **authorization}]},
    ]
    if outside is not None:
        watchdog_routes.insert(0, {"receiver": "outside", "continue": True, **watchdog})
        receivers.append({"name": "outside", "webhook_configs": [{"url": outside, "send_resolved": False}]})
    if relay is not None:
        direct_routes.append({"receiver": DIRECT, "matchers": [f'alertname=~"{"|".join(ABOUT_REMEDIATOR)}"']})
        hook = {"url": relay, "send_resolved": True, **authorization}
        receivers[0] = {"name": "people", **(people or {}), "webhook_configs": [hook]}
        receivers.append({"name": DIRECT, **(people or {})})
    return _yaml(
        {
            "route": {
                "receiver": "people",
                "group_by": ["alertname", "host"],
                "group_wait": "30s",
                "group_interval": "5m",
                "repeat_interval": "12h",
                "routes": [*watchdog_routes, *direct_routes, *for_operators, breaker, acting],
            },
            "inhibit_rules": INHIBITIONS,
            "receivers": receivers,
        }
    )


def web_config(token_file: str) -> str:
    """Return the remediator's web configuration file, which names the token file."""
    return _yaml({"bearer_token_file": token_file})


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False)
    return text
