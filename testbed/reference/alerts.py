"""docs/reference/alerts.md: every alert, from the rule files."""

import re
from collections.abc import Iterator
from typing import Final

from gpuwarden.docs_pages import by_heading
from testbed.check_release import CHECKOUT, AlertRule, alert_rules

HEADINGS: Final = {
    "Jobs": r"^(budget|gang|gpu|health|shared|stall|steps|stuck)\.",
    "Workers and runs": r"^(gone|queue|worker|wrangling)\.",
    "Servers and VRAM": r"^(demand|seats|server|vram)\.",
    "Hosts": r"^host\.",
    "GPUs and drivers": r"^(attribution|faults)\.",
    "Exporter": r"^telemetry\.",
    "Gateway": r"^gateway\.",
    "Remediator": r"^remediator\.",
    "Prometheus and Alertmanager": r"^(chain|evaluation)\.",
}
"""Headings, and the rule files under each."""

_INTRO: Final = """# Alerts

<!-- Written by `python -m testbed.reference`; change alerts/*.rules.yaml, not this page. -->

Each alert links to its runbook. With a remedy, gpuwarden acts if the remedy is armed and the host's own evidence
confirms the alert: see [remedies](remedies.md). Without a remedy, the alert is for people; the watchdog
alert goes to gpuwarden. `for` is how long the expression must hold before the alert fires. Alerts with a remedy have
no delay: the [condition](conditions.md) has its own timeout.
"""
WATCHDOG: Final = "GpuwardenWatchdog"
_CHOICE: Final = re.compile(r"(\{\{ (?:if|with) [^}]*\}\})(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}")
_TEMPLATE: Final = re.compile(r"\{\{[^}]*?\$(?:labels\.)?(\w+)[^}]*\}\}B?")


def page() -> str:
    """Render the page.

    Raises:
        ValueError: a rule file is under no heading.
    """
    found = alert_rules(CHECKOUT)
    files = by_heading(dict.fromkeys(file.name for file, _ in found), HEADINGS)
    lines = [_INTRO]
    for heading, names in files.items():
        lines += [f"## {heading}", "", "| alert | severity | remedy | for | summary |", "|---|---|---|---|---|"]
        lines += [_row(rule) for file, rule in found if file.name in names]
        lines.append("")
    return "\n".join(lines)


def _row(rule: AlertRule) -> str:
    remedy = (
        f"`{rule.labels['remedy']}`" if "remedy" in rule.labels else "gpuwarden" if rule.alert == WATCHDOG else "people"
    )
    link = f"[{rule.alert}](../runbooks/{rule.alert}.md)"
    texts = _plain(rule.labels["severity"]), remedy, str(rule.wait or 0), _plain(rule.annotations["summary"])
    return f"| {link} | {' | '.join(texts)} |"


def _plain(text: str) -> str:
    """A template with names instead of labels, and both results of a choice."""
    return _TEMPLATE.sub(lambda found: found[1].upper(), _CHOICE.sub(_both, text))


def _both(found: re.Match[str]) -> str:
    """`{{ with $labels.a }}{{ . }}{{ else }}b{{ end }}` is `A or b`."""
    return f"{found[1] if found[2] == '{{ . }}' else found[2]} or {found[3]}"


def names() -> Iterator[str]:
    """Every alert's name."""
    return (str(rule.alert) for _, rule in alert_rules(CHECKOUT))
