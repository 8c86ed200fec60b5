"""Configuration of Prometheus and Alertmanager for one host: everything on loopback, the host as a target label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from remediator.alert import WATCHDOG
from remediator.remedies import REMEDIES


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast the chain turns; seconds. Evaluating every second is cheap on one box and saves seconds of dead GPU."""

    scrape_s: int = 5
    evaluate_s: int = 1
    group_interval_s: int = 1
    repeat_s: int = 3600


WATCHDOG_S: Final = 60
"""How often the alert that always fires is delivered, seconds."""

LOST: Final = "GpuwardenNodeLost"
"""The alert that is acted on and that people are told of, too: only they can bring the host back."""

_KNOWN: Final = "|".join(REMEDIES)
TOLD: Final = (
    (f'alertname="{LOST}"',),
    # What the remediator refuses for certain, by what is wrong with it: nobody else would hear of it.
    ('remedy=~".+"', f'remedy!~"{_KNOWN}"'),
    (f'remedy=~"{_KNOWN}"', f'alertname!="{LOST}"', 'host=""'),
)
"""Which alerts that name a remedy people are told of, too: what each of these matches."""

SILENT: Final = (
    "GpuwardenExporterDown",
    "GpuwardenTelemetryStale",
    "GpuwardenSourceFailing",
    "GpuwardenScrapeTooSparse",
    "GpuwardenGpuTelemetryDown",
    "GpuwardenRemediatorDown",
    "GpuwardenExecutorSilent",
)
"""What a host that is silent raises besides, or goes on raising for a while."""

BRAKE: Final = "GpuwardenBrakeLatched"
"""The alert that every host of one ledger raises about the same thing: people are called once."""

_DEAD: Final = "GpuwardenWorkerDead|GpuwardenWorkerGone"
_UNMENDED: Final = "GpuwardenUnmended"

INHIBITIONS: Final[list[dict[str, list[str]]]] = [
    # Of a host that nobody hears of, which people are told, what its silence explains. A latched brake is not
    # among that.
    {
        "source_matchers": [f'alertname="{LOST}"'],
        "target_matchers": ['remedy=""', f'alertname=~"{"|".join(SILENT)}"'],
        "equal": ["host"],
    },
    # Of a GPU that is lost, what follows from that. An alert says that it is the cause by its label `causes="gpu"`; one
    # that lasts while the GPU works has it not, for what else befalls it would go unsaid for weeks. Of two that say so
    # neither is held back.
    {
        "source_matchers": ['causes="gpu"', 'gpu=~".+"'],
        "target_matchers": ['remedy=""', 'alertname=~"Gpuwarden.+"'],
        "equal": ["host", "gpu"],
    },
    # Of a worker that is dead, what that explains: that its job is slow, or silent as well. Not what is said of it in a
    # container that it shares, for there its own alert is refused and that one is all that people hear.
    {
        "source_matchers": [f'alertname=~"{_DEAD}"'],
        "target_matchers": ['remedy=""', 'alertname="GpuwardenJobSlowed"'],
        "equal": ["host", "worker", "container"],
    },
    {
        "source_matchers": [f'alertname="{_UNMENDED}"', f'wedge=~"{_DEAD}"'],
        "target_matchers": ['remedy=""', f'alertname="{_UNMENDED}"', f'wedge!~"{_DEAD}"'],
        "equal": ["host", "worker", "container"],
    },
]
"""Which alerts are not sent while another fires.

What is not sent is not acted on, so nothing with a remedy is ever held back: an alert that is silenced, or that lasts
while nobody mends it, holds back all the same, and a "resolved" that is held back never comes. A dead worker's stall
and health are sent too: the ledger takes all trips of one attempt for one episode."""


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


def alertmanager_config(*, webhook: str, token_file: Path, pace: Pace, outside: str | None = None) -> str:
    """alertmanager.yml: what names a remedy goes to the remediator at once, resolved too, and so does the watchdog.

    A lost host is told to people, too, and so is what the remediator refuses: a remedy that is none, as one of another
    program's rules, or an alert that says of no host. A latched brake is one call, whichever hosts tell of it. The
    watchdog goes to `outside` as well, the URL of a service that calls somebody when it stays away. All else is for the
    receiver `people`, which is whoever is called where this is used: it has nobody in it.
    """
    beat: dict[str, object] = {
        "matchers": [f'alertname="{WATCHDOG}"'],
        "group_wait": "0s",
        "group_interval": f"{WATCHDOG_S // 2}s",
        "repeat_interval": f"{WATCHDOG_S - 10}s",  # of two intervals the second is past it for sure
    }
    acting = {
        "receiver": "gpuwarden",
        "matchers": ['remedy=~".+"'],
        "group_by": ["alertname", "host", "worker", "container"],
        "group_wait": "0s",
        "group_interval": f"{pace.group_interval_s}s",
        "repeat_interval": f"{pace.repeat_s}s",
    }
    told = [{"receiver": "people", "matchers": list(matchers), "continue": True} for matchers in TOLD]
    brake = {"receiver": "people", "matchers": [f'alertname="{BRAKE}"'], "group_by": ["alertname"]}
    authorization = {"http_config": {"authorization": {"credentials_file": str(token_file)}}}
    beats = [{"receiver": "gpuwarden", **beat}]
    receivers: list[dict[str, object]] = [
        {"name": "people"},
        {"name": "gpuwarden", "webhook_configs": [{"url": webhook, "send_resolved": True, **authorization}]},
    ]
    if outside is not None:
        beats.insert(0, {"receiver": "outside", "continue": True, **beat})
        receivers.append({"name": "outside", "webhook_configs": [{"url": outside, "send_resolved": False}]})
    return _yaml(
        {
            "route": {
                "receiver": "people",
                "group_by": ["alertname", "host"],
                "group_wait": "30s",
                "group_interval": "5m",
                "repeat_interval": "12h",
                "routes": [*beats, *told, brake, acting],
            },
            "inhibit_rules": INHIBITIONS,
            "receivers": receivers,
        }
    )


def web_config(token_file: str) -> str:
    """The remediator's web configuration file: whoever shows a token of that file, beside it, is let in."""
    return _yaml({"bearer_token_file": token_file})


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False)
    return text
