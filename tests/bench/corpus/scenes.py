"""Our scenarios."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench.corpus import host, page, scenario_file
from bench.corpus.scenario import Scenario
from deploy.standalone import debian_packages

PAGE: Final = page.PAGE.read_text(encoding="utf-8")
SCENARIOS: Final = scenario_file.read()


class Everything:
    """Every name."""

    def __contains__(self, _: object) -> bool:
        return True


def named(begins: str) -> Scenario:
    (found,) = [each for each in SCENARIOS if each.name.startswith(begins)]
    return found


def without_promtool() -> str | None:
    try:
        debian_packages.find("promtool")
    except debian_packages.PartMissing as missing:
        return str(missing)
    return None


Series = Mapping[host.Key, Sequence[float | str | None]]
Always = Callable[[Scenario, frozenset[str]], Series]
