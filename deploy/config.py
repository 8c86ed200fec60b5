"""Configuration of Prometheus and Alertmanager for one host: everything on loopback, the host as a target label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from remediator.alert import WATCHDOG


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast the chain turns; seconds. Evaluating every second is cheap on one box and saves seconds of dead GPU."""

    scrape_s: int = 5
    evaluate_s: int = 1
    group_interval_s: int = 1
    repeat_s: int = 3600


WATCHDOG_S: Final = 60
"""How often the alert that always fires is delivered, seconds."""


def prometheus_config(
    *, host: str, exporter: str, remediator: str, alertmanager: str, prometheus: str, rules: list[Path], pace: Pace
) -> str:
    """prometheus.yml. Addresses are `host:port`; `host` outlives its targets because it is a label of theirs.

    It scrapes itself, at `prometheus`, so that a rule which cannot be evaluated is told of.
    """
    return _yaml(
        {
            "global": {"scrape_interval": f"{pace.scrape_s}s", "evaluation_interval": f"{pace.evaluate_s}s"},
            "rule_files": [str(path) for path in rules],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [address], "labels": {"host": host}}]}
                for name, address in (
                    ("gpuwarden-exporter", exporter),
                    ("gpuwarden-remediator", remediator),
                    ("prometheus", prometheus),
                )
            ],
        }
    )


def alertmanager_config(*, webhook: str, token_file: Path, pace: Pace) -> str:
    """alertmanager.yml: what names a remedy goes to the remediator at once, resolved too, and so does the watchdog."""
    return _yaml(
        {
            "route": {
                "receiver": "nobody",
                "routes": [
                    {
                        "receiver": "gpuwarden",
                        "matchers": [f'alertname="{WATCHDOG}"'],
                        "group_wait": "0s",
                        "group_interval": f"{WATCHDOG_S // 2}s",
                        "repeat_interval": f"{WATCHDOG_S - 10}s",  # of two intervals the second is past it for sure
                    },
                    {
                        "receiver": "gpuwarden",
                        "matchers": ['remedy=~".+"'],
                        "group_by": ["alertname", "host", "worker", "container"],
                        "group_wait": "0s",
                        "group_interval": f"{pace.group_interval_s}s",
                        "repeat_interval": f"{pace.repeat_s}s",
                    },
                ],
            },
            "receivers": [
                {"name": "nobody"},
                {
                    "name": "gpuwarden",
                    "webhook_configs": [
                        {
                            "url": webhook,
                            "send_resolved": True,
                            "http_config": {"authorization": {"credentials_file": str(token_file)}},
                        }
                    ],
                },
            ],
        }
    )


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False)
    return text
