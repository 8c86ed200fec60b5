"""docs/reference/container-labels.md lists the labels that the code reads."""

import re
from pathlib import Path

from exporter.evidence import server_health, vram_budgets
from gpuwarden.kube import budget

CHECKOUT = Path(__file__).resolve().parents[2]
LABEL = re.compile(r'^\w*LABEL: Final = "(gpuwarden\.[a-z-]+)"$', re.MULTILINE)


def rows() -> dict[str, str]:
    page = (CHECKOUT / "docs/reference/container-labels.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(gpuwarden\.[a-z-]+)` (\|.*)\|$", page, re.MULTILINE))


def test_page_lists_every_label_in_the_code() -> None:
    sources = [path for top in ("exporter", "remediator") for path in (CHECKOUT / top).rglob("*.py")]
    in_code = {name for path in sources for name in LABEL.findall(path.read_text(encoding="utf-8"))}

    assert vram_budgets.MANAGED_LABEL in in_code
    assert rows().keys() == in_code


def test_page_has_the_limits_and_the_default_of_the_code() -> None:
    its = rows()

    limits = f"{server_health.RESTART_AFTER_MIN_S:.0f} to {server_health.RESTART_AFTER_MAX_S:.0f}"
    assert f"| seconds, {limits} | {server_health.RESTART_AFTER_S:.0f} |" in its[server_health.TIMEOUT_LABEL]
    assert f"| whole MiB, 1 to {budget.MIB_MAX} |" in its[vram_budgets.BUDGET_LABEL]
