"""Run mutants of rules through promtool until a group of tests catches them."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.standalone import debian_packages
from testbed import check_release
from tools.mutation import narrowed
from tools.mutation.rules import ALERTS, Mutant, topic

PROMTOOL_TIMEOUT_S = 300
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - for many small files
AT_ONCE = 200
"""Files per promtool check."""
TESTED_AT_ONCE = 8
"""Files per promtool test: more could exceed the timeout on a busy machine."""

_VERDICT = re.compile(r"^Unit Testing:  (\S+)\n(.*?)(?=^Unit Testing|\Z)", re.MULTILINE | re.DOTALL)
_CATCHES: Counter[tuple[str, str]] = Counter()
"""Number of mutants that each group of tests caught, by rule file and name."""

_CHECKED = re.compile(r"^Checking (\S+)\n(.*?)(?=^Checking|\Z)", re.MULTILINE | re.DOTALL)


class UnsoundError(Exception):
    """The tests fail on the unchanged rules, so failures on mutants prove nothing."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Results for mutants of one file: promtool's output of caught ones, and the survivors."""

    rules: str
    caught: dict[str, str]
    survived: list[str]


def judge_all(mutants: Sequence[Mutant], promtool: Path, room: Path) -> Iterator[Verdict]:
    """Judge several batches in parallel and yield each result. `room` is an empty folder.

    Raises:
        UnsoundError: the tests fail on the unchanged rules.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_file = {
            rules: [each for each in mutants if each.rules == rules] for rules in {each.rules: 0 for each in mutants}
        }
        judged = [
            pool.submit(judge, of[at : at + TESTED_AT_ONCE], promtool, room / rules / str(at))
            for rules, of in of_file.items()
            for at in range(0, len(of), TESTED_AT_ONCE)
        ]
        try:
            yield from (each.result() for each in as_completed(judged))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def judge(mutants: Sequence[Mutant], promtool: Path, room: Path) -> Verdict:
    """Run mutants of one file through one group of tests after another.

    All mutants of a group share one process, because promtool's start takes longer than most groups. Each mutant, and
    the unchanged file, contains only the rules and assertions that the mutation can affect.

    Raises:
        UnsoundError: a group fails on the unchanged rules.
    """
    rules = mutants[0].rules
    sound = narrowed.read((ALERTS / rules).read_text())
    broken = {str(room / str(number)): narrowed.read(each.text) for number, each in enumerate(mutants)}
    left = {str(room / str(number)): each.name for number, each in enumerate(mutants)}
    touched = {folder: frozenset(narrowed.affected_rules(sound, document)) for folder, document in broken.items()}
    caught: dict[str, str] = {}
    for test in _sort_groups(rules, read_tests(rules)):
        (group,) = test["tests"]
        asked = {each: narrowed.group_for(each, group, sound) for each in {touched[folder] for folder in left}}
        tests = [
            _write(Path(folder), rules, {**test, "tests": [its]}, narrowed.rules_for(its, broken[folder], sound))
            for folder in left
            if (its := asked[touched[folder]])
        ]
        controls = [
            _write(room / f"sound-{number}", rules, {**test, "tests": [its]}, narrowed.rules_for(its, sound, sound))
            for number, its in enumerate(asked.values())
            if its
        ]
        if not tests:
            continue
        said = run(promtool, "test", "rules", *controls, *tests, stderr=subprocess.STDOUT).stdout
        for file, verdict in _VERDICT.findall(said):
            if "FAILED" in verdict and file in controls:
                raise UnsoundError(f"{rules}: {group['name']!r} fails on the unchanged rules:\n{verdict}")
            if "FAILED" in verdict:
                _CATCHES[rules, group["name"]] += 1
                caught[left.pop(str(Path(file).parent))] = verdict
    return Verdict(rules=rules, caught=caught, survived=list(left.values()))


def _sort_groups(rules: str, tests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with the most catches first, then those with the most series. For speed only."""

    def key(test: dict[str, Any]) -> tuple[int, int]:
        (group,) = test["tests"]
        return _CATCHES[rules, group["name"]], len(group.get("input_series", []))

    return sorted(tests, key=key, reverse=True)


def _write(folder: Path, rules: str, test: dict[str, Any], text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / rules).write_text(text)
    file = folder / "test.yaml"
    file.write_text(dump(test))
    return str(file)


def select_parsing(mutants: Sequence[Mutant], promtool: Path, room: Path) -> list[Mutant]:
    """Mutants that parse. `room` is an empty folder."""
    written: dict[str, Mutant] = {}
    for number, mutant in enumerate(mutants):
        file = room / f"{number}.rules.yaml"
        file.write_text(mutant.text)
        written[str(file)] = mutant
    fail: set[str] = set()
    names = list(written)
    for at in range(0, len(names), AT_ONCE):
        said = run(promtool, "check", "rules", *names[at : at + AT_ONCE], stderr=subprocess.STDOUT).stdout
        fail |= {file for file, verdict in _CHECKED.findall(said) if "SUCCESS" not in verdict}
    return [mutant for file, mutant in written.items() if file not in fail]


def read_tests(rules: str) -> list[dict[str, Any]]:
    """Each group of the test files of a rule file, with the settings of its file.

    Values are text: promtool reads `0x10` as samples, YAML as 16.
    """
    files = sorted((check_release.CHECKOUT / check_release.TESTS).glob(f"{topic(Path(rules))}.*"))
    read = [{**parse(file.read_text()), "rule_files": [rules]} for file in files]
    return [{**test, "tests": [group]} for test in read for group in test["tests"]]


def parse(text: str) -> dict[str, Any]:
    """Parse a test file like `read_tests`."""
    read: dict[str, Any] = yaml.load(text, yaml.CBaseLoader)  # noqa: S506 - creates only text
    for asked in (asked for group in read["tests"] for asked in group.get("promql_expr_test", [])):
        for sample in asked.get("exp_samples", []):
            sample["value"] = float(sample["value"])
    return read


def dump(test: dict[str, Any]) -> str:
    """Return a test file as text."""
    return yaml.dump(test, Dumper=yaml.CSafeDumper)


def run(promtool: Path, *arguments: str | Path, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run promtool once."""
    return subprocess.run(
        [promtool, *arguments],
        # Many small, short-lived databases: in memory, with little garbage collection, single-threaded.
        env={
            **debian_packages.env_for_parts(),
            "GOGC": "400",
            "GOMAXPROCS": "1",
            "TMPDIR": MEMORY or tempfile.gettempdir(),
        },
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=PROMTOOL_TIMEOUT_S,
        check=False,
    )
