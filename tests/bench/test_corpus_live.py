"""The corpus with a real Prometheus, which is killed and started, and with promtool."""

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
"""Name of a rule's fault that a restart of Prometheus shows."""

DETECTING: Final = "is on its next job, which wedges at once"
"""Begin of the name of the scenario that detects it."""


def broken(folder: Path) -> list[Path]:
    """Our rules with a broken one."""
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
    """Play all scenarios at the same time, one of them also with the broken rule."""
    folder = tmp_path_factory.mktemp("live")
    (detecting,) = [each for each in SCENARIOS if each.name.startswith(DETECTING)]
    with ThreadPoolExecutor(len(SCENARIOS) + 1) as pool:
        response = pool.submit(live.play, detecting, folder / "broken", broken(folder / "rules"))
        found = pool.map(lambda number: live.play(SCENARIOS[number], folder / str(number)), range(len(SCENARIOS)))
        return {BROKEN: response.result(), **{each.scenario.name: each for each in found}}


@pytest.mark.parametrize("wanted", SCENARIOS, ids=lambda each: each.name)
def test_verdict_is_right_with_a_real_prometheus(wanted: Scenario, played: Mapping[str, Played]) -> None:
    assert played[wanted.name].wrong() == []
    assert wanted.verdicts, "a scenario without an action proves nothing here"


def test_verdict_is_right_with_promtool() -> None:
    assert [each.wrong() for each in judge.play(SCENARIOS)] == [[]] * len(SCENARIOS)


def test_broken_rule_is_detected(played: Mapping[str, Played]) -> None:
    assert played[BROKEN].wrong() == ["no action on w, due at 49s"]


def test_page_has_a_content_type() -> None:
    targets = live._Targets(SCENARIOS[0], judge.metrics(CHECKOUT.glob(RULES_GLOB)))
    (host, *_) = targets.names

    with targets.serve() as address:
        response = httpx.get(f"http://{address}/{host}", trust_env=False)

    assert response.headers["Content-Type"] == TEXT
