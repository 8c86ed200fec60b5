"""Where the files that ship beside the code lie: alert rules and dashboards, in a checkout and in an installed package.

The wheel holds `alerts/*.rules.yaml` and `dashboards/*.json` below this package, for a folder named `alerts` in
site-packages would be anybody's.
"""

from pathlib import Path
from typing import Final

from gpuwarden.docs_pages import RUNBOOKS

_HERE: Final = Path(__file__).resolve().parents[1]
CHECKOUT: Final = _HERE.parent if (_HERE.parent / "pyproject.toml").is_file() else None
"""The checkout this code runs from; None where it is an installed package."""
TEMPLATES: Final = _HERE / "templates"
"""Files that `gpuwarden init` fills in."""

RUNBOOKS_URL: Final = f"http://127.0.0.1:9836/{RUNBOOKS}"
"""Below which URL the rules, as they ship, link the page of each alert: the remediator's, as it listens by default."""


def rules() -> list[Path]:
    """The alert rules, a file a topic."""
    return _shipped("alerts", "*.rules.yaml")


def linked(rules: Path, runbooks_url: str) -> str:
    """The text of a file of rules whose alerts link their pages below `runbooks_url`."""
    return rules.read_text(encoding="utf-8").replace(RUNBOOKS_URL, f"{runbooks_url.rstrip('/')}/")


def dashboards() -> list[Path]:
    """The Grafana dashboards, as Grafana imports them."""
    return _shipped("dashboards", "*.json")


def _shipped(folder: str, pattern: str) -> list[Path]:
    found = sorted(((CHECKOUT or _HERE) / folder).glob(pattern))
    if not found:
        raise FileNotFoundError(
            f"no {pattern} in {(CHECKOUT or _HERE) / folder}: the installation is not whole; install gpuwarden anew"
        )
    return found
