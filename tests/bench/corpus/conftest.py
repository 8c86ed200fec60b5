"""Played scenarios, and series with a sample each second."""

from collections.abc import Mapping

import pytest

from bench.corpus import host, judge
from bench.corpus.judge import Played
from bench.corpus.scenario import Scenario
from tests.bench.corpus.scenes import SCENARIOS, Always, Series, without_promtool, write_judged_rules


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Played]:
    """Every scenario by its name, from one run of promtool with the rules that verdicts read."""
    if missing := without_promtool():
        pytest.skip(missing)
    rules = write_judged_rules(tmp_path_factory.mktemp("judged"))
    return {each.scenario.name: each for each in judge.play(SCENARIOS, rules)}


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Always:
    """The series of a scenario with a sample each second."""

    def always(one: Scenario, wanted: frozenset[str]) -> Series:
        with monkeypatch.context() as each_second:
            each_second.setattr(host.Host, "needs_sample", lambda *_: True)
            return host.series(one, wanted=wanted)

    return always
