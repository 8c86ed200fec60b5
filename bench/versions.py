"""The rules on the Prometheus of this release, and on the newest that Debian has. For `python -m bench`.

Their own tests have to pass on both. Of every scenario of the corpus both have to tell the same: who fired, and when.
Of two who are level either may go, and what others use instead of these rules is not compared: a range begins elsewhere
in newer versions. The newer one, killed and started anew, has to judge the live scenarios right.

What the newest is changes from week to week, so that this is no test: a rule that it judges otherwise is said here.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from bench.corpus import live, scenario
from bench.corpus.judge import OURS, PEOPLE, Fired, JudgeError, Played, play
from bench.figures import BenchError, Figure, Place, figure, progress
from deploy.standalone import debian_packages
from deploy.standalone.stack import CHECKOUT
from testbed.check_release import TESTS_GLOB

_T = TypeVar("_T")

TIMEOUT_S: Final = 1800
"""For one run of all tests, which ends a program that hangs. It is minutes on a machine with other work to do."""


def measure(place: Place) -> Iterator[Figure]:
    """How long the rules' tests and the corpus take on each Prometheus, and of how many scenarios they differ.

    Raises:
        BenchError: a test that passes on one of them fails on the other, one of them did not come to an end, or, once
            all is counted, they differ about a scenario.
        PartMissing: one of them cannot be had.
    """
    tests = sorted(CHECKOUT.glob(TESTS_GLOB))
    both = {
        _version(each): each
        for each in (debian_packages.find("promtool"), debian_packages.find_newer("promtool", "promtool"))
    }
    for version, promtool in both.items():
        progress(f"versions, {len(tests)} files of tests on {version}")
        started_s = time.monotonic()
        done = _run(promtool, "test", "rules", *map(str, tests))
        if done.returncode:
            raise BenchError(f"on {version}:\n{done.stdout}{done.stderr}")
        yield figure("versions", f"{version}: all tests of the rules pass", "s", [time.monotonic() - started_s])
    otherwise: list[str] = []
    yield from _corpus(both, otherwise)
    yield from _live(place, otherwise)
    if otherwise:
        raise BenchError("they differ:\n" + "\n".join(otherwise))


def _corpus(promtools: Mapping[str, Path], otherwise: list[str]) -> Iterator[Figure]:
    """The corpus by each promtool; of whom they do not tell the same, alert by alert and second by second, is added."""
    scenarios = _judged(scenario.read)
    told: dict[str, list[Played]] = {}
    for version, promtool in promtools.items():
        progress(f"versions, {len(scenarios)} scenarios on {version}")
        started_s = time.monotonic()
        told[version] = _judged(partial(play, scenarios, promtool=promtool))
        yield figure("versions", f"{version}: {len(scenarios)} scenarios", "s", [time.monotonic() - started_s])
    before = len(otherwise)
    for each in zip(*told.values(), strict=True):
        otherwise += differing(dict(zip(told, each, strict=True)))
    what = f"of {len(scenarios)} scenarios, by {' and '.join(told)}: who fired and when differs"
    yield figure("versions", what, "", [len(otherwise) - before])


def differing(told: Mapping[str, Played]) -> list[str]:
    """A sentence where versions do not tell the same of a scenario by our rules: what each alone tells."""
    found = {version: set(_said(played)) for version, played in told.items()}
    shared = frozenset.intersection(*map(frozenset, found.values()))
    alone = {version: sorted(fired - shared) for version, fired in found.items() if fired - shared}
    (place, *_) = (each.scenario.place for each in told.values())
    said = "; ".join(f"{version} alone tells {', '.join(fired)}" for version, fired in alone.items())
    return [f"{place}: {said}"] if said else []


def _said(played: Played) -> Iterator[str]:
    """What our rules told, by words that are the same for all of whom a verdict says that either goes."""
    either = {
        of: verdict for verdict in played.scenario.verdicts if verdict.or_of for of in (verdict.of, *verdict.or_of)
    }
    for each in played.fired:
        if each.policy in (OURS, PEOPLE):
            verdict = either.get(each.of)
            level = "" if verdict is None else " or ".join((verdict.of, *verdict.or_of))
            yield _fired(replace(each, of=level, named={}) if level else each)


def _fired(fired: Fired) -> str:
    said = [
        fired.policy,
        fired.remedy,
        fired.trip,
        *(f"{label} {value}" for label, value in sorted(fired.named.items())),
    ]
    return f"{fired.alert} of {fired.of} at {fired.at_s}s ({', '.join(filter(None, said))})"


def _live(place: Place, otherwise: list[str]) -> Iterator[Figure]:
    """The live scenarios by the newer Prometheus, each by one of its own and all at the same time."""
    program = debian_packages.find_newer("prometheus", "prometheus")
    version = _version(program)
    scenarios = _judged(partial(scenario.read, live.LIVE))
    progress(f"versions, {len(scenarios)} live scenarios on {version}")
    started_s = time.monotonic()
    with ThreadPoolExecutor(len(scenarios)) as pool:
        going = [
            pool.submit(live.play, each, place.folder / f"versions-{number}", program=program)
            for number, each in enumerate(scenarios)
        ]
        played = [_judged(each.result) for each in going]
    yield figure("versions", f"{version}: {len(scenarios)} live scenarios", "s", [time.monotonic() - started_s])
    wrong = [f"{version}, live, {each.scenario.place}: {said}" for each in played for said in each.wrong()]
    yield figure("versions", f"of {len(scenarios)} live scenarios, by {version}: judged otherwise", "",
                 [sum(bool(each.wrong()) for each in played)])  # fmt: skip
    otherwise += wrong


def _judged(act: Callable[[], _T]) -> _T:
    try:
        return act()
    except (JudgeError, scenario.ScenarioError) as error:
        raise BenchError(str(error)) from error


def _version(promtool: Path) -> str:
    said = _run(promtool, "--version")
    found = re.search(r"version ([0-9.]+)", said.stdout + said.stderr)
    if found is None:
        raise BenchError(f"{promtool} does not say its version: {said.stdout}{said.stderr}")
    return f"Prometheus {found[1]}"


def _run(promtool: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [promtool, *arguments],
            env=debian_packages.env_for_parts(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise BenchError(
            f"{promtool} did not end within {TIMEOUT_S} s and was killed; run this with less beside it"
        ) from late
