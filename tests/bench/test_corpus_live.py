"""The corpus by a real Prometheus, which is killed and started: the rules judge it as promtool judges the same."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import pytest

from bench.corpus import judge, live, scenario_file
from bench.corpus.judge import Played
from bench.corpus.scenario import Scenario
from exporter.http.exposition import TEXT
from testbed.check_release import CHECKOUT, RULES_GLOB

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

SCENARIOS: Final = scenario_file.read(live.LIVE)
BROKEN: Final = "two identities are let through"
"""What is wrong with a broken rule: a restart of Prometheus shows it."""

TELLS: Final = "is on its next job, which wedges at once"
"""How the name of the scenario begins that tells."""


def broken(folder: Path) -> list[Path]:
    """The rules that ship, but for the broken one."""
    sound = CHECKOUT / "alerts" / "stall.rules.yaml"
    text = sound.read_text(encoding="utf-8")
    newest = "(1, timestamp(gpuwarden_job_overdue_id))"
    assert newest in text
    folder.mkdir()
    file = folder / sound.name
    file.write_text(text.replace(newest, newest.replace("1", "2")), encoding="utf-8")
    return [file, *(path for path in sorted(CHECKOUT.glob(RULES_GLOB)) if path != sound)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Played]:
    """Each by a Prometheus of its own, one of them by the broken rule as well: all at the same time."""
    folder = tmp_path_factory.mktemp("live")
    (tells,) = [each for each in SCENARIOS if each.name.startswith(TELLS)]
    with ThreadPoolExecutor(len(SCENARIOS) + 1) as pool:
        told = pool.submit(live.play, tells, folder / "broken", broken(folder / "rules"))
        found = pool.map(lambda number: live.play(SCENARIOS[number], folder / str(number)), range(len(SCENARIOS)))
        return {BROKEN: told.result(), **{each.scenario.name: each for each in found}}


@pytest.mark.parametrize("wanted", SCENARIOS, ids=lambda each: each.name)
def test_a_real_prometheus_tells_what_is_right(wanted: Scenario, played: Mapping[str, Played]) -> None:
    assert played[wanted.name].wrong() == []
    assert wanted.verdicts, "nobody was left alone where nobody is ever accused"


def test_promtool_tells_the_same() -> None:
    assert [each.wrong() for each in judge.play(SCENARIOS)] == [[]] * len(SCENARIOS)


def test_a_broken_rule_is_told(played: Mapping[str, Played]) -> None:
    assert played[BROKEN].wrong() == ["no action on w, due at 49s"]


def test_a_page_says_in_which_format_it_is_without_which_a_newer_prometheus_takes_nothing() -> None:
    targets = live._Targets(SCENARIOS[0], judge.metrics(CHECKOUT.glob(RULES_GLOB)))
    (host, *_) = targets.names

    with targets.serve() as address:
        told = httpx.get(f"http://{address}/{host}", trust_env=False)

    assert told.headers["Content-Type"] == TEXT
