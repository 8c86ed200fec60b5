"""Our scenarios."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from bench.corpus import host, page, scenario_file
from bench.corpus.scenario import NOTICES, Scenario
from deploy.standalone import debian_packages
from tools.mutation.rules import files

PAGE: Final = page.PAGE.read_text(encoding="utf-8")
SCENARIOS: Final = scenario_file.read()


class Everything:
    """Every name."""

    def __contains__(self, _: object) -> bool:
        return True


def named(begins: str) -> Scenario:
    (found,) = [each for each in SCENARIOS if each.name.startswith(begins)]
    return found


def write_judged_rules(folder: Path) -> list[Path]:
    """Write our rules without the alerts that no verdict reads, which are most. Playing them takes half as long."""
    written = []
    for file in files():
        topic = yaml.safe_load(file.read_text())
        for group in topic["groups"]:
            group["rules"] = [
                rule
                for rule in group["rules"]
                if "record" in rule or "remedy" in rule.get("labels", {}) or rule["alert"] in NOTICES
            ]
        topic["groups"] = [group for group in topic["groups"] if group["rules"]]
        written.append(folder / file.name)
        written[-1].write_text(yaml.safe_dump(topic, sort_keys=False))
    return written


def without_promtool() -> str | None:
    try:
        debian_packages.find("promtool")
    except debian_packages.PartMissing as missing:
        return str(missing)
    return None


Series = Mapping[host.Key, Sequence[float | str | None]]
Always = Callable[[Scenario, frozenset[str]], Series]
