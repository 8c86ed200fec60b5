"""Paths of alert rules and dashboards, in a checkout and in an installed package.

The wheel holds them below this package, because a top-level folder `alerts` in site-packages could collide.
"""

from pathlib import Path
from typing import Final

import yaml

from gpuwarden.docs_pages import RUNBOOKS

_HERE: Final = Path(__file__).resolve().parents[1]
CHECKOUT: Final = _HERE.parent if (_HERE.parent / "pyproject.toml").is_file() else None
"""The checkout of this code; None for an installed package."""
TEMPLATES: Final = _HERE / "templates"
"""Templates of `gpuwarden init`."""

RUNBOOKS_URL: Final = f"http://127.0.0.1:9836/{RUNBOOKS}"
"""Base URL of runbooks in the shipped rules: the remediator's default address."""


def rules() -> list[Path]:
    """Alert rule files, one per topic."""
    return _find_files("alerts", "*.rules.yaml")


def rule_file(rules: Path, *, runbooks_url: str, evaluation_interval_s: int) -> str:
    """Return a rule file with its runbook links below `runbooks_url`, and the interval of groups with a remedy."""
    text = rules.read_text(encoding="utf-8").replace(RUNBOOKS_URL, f"{runbooks_url.rstrip('/')}/")
    for group in yaml.safe_load(text)["groups"]:
        if any("remedy" in rule.get("labels", {}) for rule in group["rules"]):
            name = f"  - name: {group['name']}\n"
            text = text.replace(name, f"{name}    interval: {evaluation_interval_s}s\n")
    return text


def dashboards() -> list[Path]:
    """Grafana dashboard files."""
    return _find_files("dashboards", "*.json")


def _find_files(folder: str, pattern: str) -> list[Path]:
    found = sorted(((CHECKOUT or _HERE) / folder).glob(pattern))
    if not found:
        raise FileNotFoundError(
            f"no {pattern} in {(CHECKOUT or _HERE) / folder}: the installation is incomplete; reinstall gpuwarden"
        )
    return found
