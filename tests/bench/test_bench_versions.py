"""The rules' tests on two versions of promtool: what is said of one that comes to no end."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import versions
from bench.corpus import live, scenario
from bench.corpus.judge import Fired, Played
from bench.figures import BenchError, Figure, Place
from deploy.standalone import debian_packages


def program(path: Path, then: str, version: str = "9.9.9") -> Path:
    """A promtool that tells its version, and runs tests like that."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "promtool, version {version}"; exit 0; }}\n{then}\n')
    path.chmod(0o755)
    return path


def test_a_promtool_that_comes_to_no_end_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = program(tmp_path / "promtool", "exec sleep 60")
    monkeypatch.setattr(debian_packages, "find", lambda _: hangs)
    monkeypatch.setattr(debian_packages, "find_newer", lambda *_: hangs)
    monkeypatch.setattr(versions, "TIMEOUT_S", 2)

    with pytest.raises(BenchError, match=re.escape(f"{hangs} did not end within 2 s and was killed")):
        list(versions.measure(Place(name="disk", folder=tmp_path)))


STALL = Fired(policy="gpuwarden", alert="GpuwardenJobStalled", remedy="restart_worker", trip="stall", of="w", at_s=360)


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_newer: Fired, wrong: list[str]) -> Iterator[Figure]:
    """Where the newer promtool tells that of one scenario, this one a stall, and live so much is wrong."""
    this, newer = program(tmp_path / "promtool", "exit 0"), program(tmp_path / "newer", "exit 0", "10.0.0")
    monkeypatch.setattr(debian_packages, "find", lambda _: this)
    monkeypatch.setattr(debian_packages, "find_newer", lambda *_: newer)
    monkeypatch.setattr(Played, "wrong", lambda _: wrong)
    monkeypatch.setattr(live, "play", lambda each, *_, **__: Played(scenario=each, fired=()))
    monkeypatch.setattr(
        versions, "play", lambda scenarios, *, promtool: [
            Played(scenario=each, fired=(STALL if promtool == this or number else by_newer,))
            for number, each in enumerate(scenarios)
        ]
    )  # fmt: skip
    return versions.measure(Place(name="disk", folder=tmp_path))


def test_both_are_timed_and_differ_about_nothing_where_they_tell_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {each.what: each.median for each in measured(tmp_path, monkeypatch, STALL, [])}

    many, few = len(scenario.read()), len(scenario.read(live.LIVE))
    assert list(found) == [
        "Prometheus 9.9.9: all tests of the rules pass",
        "Prometheus 10.0.0: all tests of the rules pass",
        f"Prometheus 9.9.9: {many} scenarios",
        f"Prometheus 10.0.0: {many} scenarios",
        f"of {many} scenarios, by Prometheus 9.9.9 and Prometheus 10.0.0: who fired and when differs",
        f"Prometheus 10.0.0: {few} live scenarios",
        f"of {few} live scenarios, by Prometheus 10.0.0: judged otherwise",
    ]
    assert [value for what, value in found.items() if what.startswith("of ")] == [0, 0]


@pytest.mark.parametrize(
    ("by_newer", "wrong", "counted", "said"),
    [
        pytest.param(replace(STALL, at_s=390), [], [1, 0],
                     "9.9.9 alone tells GpuwardenJobStalled of w at 360s (gpuwarden, restart_worker, stall); "
                     "Prometheus 10.0.0 alone tells GpuwardenJobStalled of w at 390s", id="at another time"),
        pytest.param(replace(STALL, named={"attempt": "2"}), [], [1, 0],
                     "(gpuwarden, restart_worker, stall, attempt 2)", id="of another attempt"),
        pytest.param(STALL, ["nothing acts on w"], [0, len(scenario.read(live.LIVE))],
                     "Prometheus 10.0.0, live, restarts.yaml:", id="live"),
    ],
)  # fmt: skip
def test_a_scenario_of_which_they_tell_otherwise_is_counted_and_said(
    by_newer: Fired, wrong: list[str], counted: list[int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Figure] = []

    with pytest.raises(BenchError, match=re.escape(said)):
        found.extend(measured(tmp_path, monkeypatch, by_newer, wrong))

    assert [each.median for each in found if each.what.startswith("of ")] == counted


def of_a_tie(*fired: Fired) -> Played:
    (tie,) = [each for each in scenario.read() if each.name.startswith("is over its budget by the very same")]
    return Played(scenario=tie, fired=fired)


VICTIM = replace(
    STALL, alert="GpuwardenVramVictim", remedy="recycle_container", trip="vram", of="a", named={"incarnation": "a@0"}
)
OTHER = replace(VICTIM, of="b", named={"incarnation": "b@0"})


@pytest.mark.parametrize(
    ("by_newer", "differ"),
    [
        pytest.param([OTHER], False, id="either of two who are level"),
        pytest.param([VICTIM, replace(STALL, policy="idle")], False, id="what others use"),
        pytest.param([VICTIM, replace(STALL, policy="people")], True, id="what people are told"),
        pytest.param([replace(OTHER, at_s=390)], True, id="later"),
        pytest.param([], True, id="nobody"),
    ],
)
def test_versions_differ_about_what_the_rules_tell_but_for_which_of_two_who_are_level(
    by_newer: list[Fired], differ: bool
) -> None:
    assert bool(versions.differing({"2": of_a_tie(VICTIM), "3": of_a_tie(*by_newer)})) is differ
