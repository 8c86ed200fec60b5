"""What the tests beside the rules say of broken rules: each through promtool, until a group of tests catches it."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from deploy import parts
from tests.alerts.mutants import ALERTS, FIRST

PROMTOOL_TIMEOUT_S = 300
AT_ONCE = 200
"""So many files are given to one call of promtool that checks them."""
TESTED_AT_ONCE = 40
"""So many to one that tests them: on a machine that is busy all of a file's mutants may take longer than a call may."""

_VERDICT = re.compile(r"^Unit Testing:  (\S+)\n(.*?)(?=^Unit Testing|\Z)", re.MULTILINE | re.DOTALL)
_CHECKED = re.compile(r"^Checking (\S+)\n(.*?)(?=^Checking|\Z)", re.MULTILINE | re.DOTALL)


class Breakage(Protocol):
    """A broken rule file."""

    @property
    def rules(self) -> str:
        """The name of the file."""

    @property
    def name(self) -> str:
        """What was broken, in words."""

    @property
    def applies(self) -> bool:
        """Whether the file still holds what is broken."""

    def text(self) -> str:
        """The whole of it."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of the mutants of one rule file: what promtool said of those that are caught, and who is left."""

    rules: str
    caught: dict[str, str]
    survived: list[str]


def judge_all(mutants: Sequence[Breakage], promtool: Path, room: Path) -> Iterator[Judged]:
    """Each rule file's, as it is done; several at once. `room` is an empty folder."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = dict.fromkeys(each.rules for each in mutants)
        judged = [
            pool.submit(judge, [each for each in mutants if each.rules == rules], promtool, room / rules)
            for rules in files
        ]
        yield from (each.result() for each in as_completed(judged))


def judge(mutants: Sequence[Breakage], promtool: Path, room: Path) -> Judged:
    """What promtool says of the mutants of one file: one group of its tests after another, on all that are left.

    Many in one process for each group: to start promtool takes longer than most groups. After those that catch the most
    for their time come those with the most series.
    """
    left: dict[str, str] = {}
    caught: dict[str, str] = {}
    rules = mutants[0].rules
    for number, mutant in enumerate(each for each in mutants if each.applies):
        folder = room / str(number)
        folder.mkdir(parents=True)
        (folder / rules).write_text(mutant.text())
        left[str(folder / "test.yaml")] = mutant.name
    test = read_test(rules)
    first = [group for begins in FIRST[rules] for group in test["tests"] if group["name"].startswith(begins)]
    rest = [group for group in test["tests"] if group not in first]
    by_size = sorted(rest, key=lambda group: len(group.get("input_series", [])), reverse=True)
    for group in (*first, *by_size):
        text = yaml.dump({**test, "tests": [group]}, Dumper=yaml.CSafeDumper)
        for file in left:
            Path(file).write_text(text)
        if not left:
            break
        files = list(left)
        for at in range(0, len(files), TESTED_AT_ONCE):
            said = run(promtool, "test", "rules", *files[at : at + TESTED_AT_ONCE], stderr=subprocess.STDOUT).stdout
            for file, verdict in _VERDICT.findall(said):
                if "FAILED" in verdict:
                    caught[left.pop(file)] = verdict
    return Judged(rules=rules, caught=caught, survived=list(left.values()))


def parsing(mutants: Sequence[Breakage], promtool: Path, room: Path) -> list[Breakage]:
    """Those of the mutants that parse: one that does not proves nothing. `room` is an empty folder."""
    written: dict[str, Breakage] = {}
    for number, mutant in enumerate(mutants):
        file = room / f"{number}.rules.yaml"
        file.write_text(mutant.text())
        written[str(file)] = mutant
    fail: set[str] = set()
    names = list(written)
    for at in range(0, len(names), AT_ONCE):
        said = run(promtool, "check", "rules", *names[at : at + AT_ONCE], stderr=subprocess.STDOUT).stdout
        fail |= {file for file, verdict in _CHECKED.findall(said) if "SUCCESS" not in verdict}
    return [mutant for file, mutant in written.items() if file not in fail]


def read_test(rules: str) -> dict[str, Any]:
    """The tests beside a rule file, all but expected values as text: to promtool `0x10` is samples, to YAML sixteen."""
    text = (ALERTS / rules.replace(".rules.", ".test.")).read_text()
    read: dict[str, Any] = yaml.load(text, yaml.CBaseLoader)  # noqa: S506 - it makes nothing but text
    for asked in (asked for group in read["tests"] for asked in group.get("promql_expr_test", [])):
        for sample in asked.get("exp_samples", []):
            sample["value"] = float(sample["value"])
    return read


def run(promtool: Path, *arguments: str | Path, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """One call of promtool."""
    return subprocess.run(
        [promtool, *arguments],
        # Thousands of small databases, each for a moment: in memory, without much collecting of garbage, and in one
        # thread, for several run side by side.
        env={
            **parts.env_for_parts(),
            "GOGC": "400",
            "GOMAXPROCS": "1",
            "TMPDIR": "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp",  # noqa: S108
        },
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=PROMTOOL_TIMEOUT_S,
        check=False,
    )
