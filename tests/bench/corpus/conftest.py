"""Played scenarios, and series with a sample each second."""

from collections.abc import Mapping

import pytest

from bench.corpus import host, judge
from bench.corpus.judge import Played
from bench.corpus.scenario import Scenario
from tests.bench.corpus.scenes import SCENARIOS, Always, Series, without_promtool


@pytest.fixture(scope="module")
def played() -> Mapping[str, Played]:
    """Every scenario by its name, from one run of promtool."""
    if missing := without_promtool():
        pytest.skip(missing)
    return {each.scenario.name: each for each in judge.play(SCENARIOS)}


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Always:
    """The series of a scenario with a sample each second."""

    def always(one: Scenario, wanted: frozenset[str]) -> Series:
        with monkeypatch.context() as each_second:
            each_second.setattr(host.Host, "needs_sample", lambda *_: True)
            return host.series(one, wanted=wanted)

    return always
