"""`python -m deploy.check`: what ships beside the code is whole: alert rules, their tests and runbooks, shell scripts.

promtool passes a test that names a rule file or an alert that does not exist, so that is checked here. To add a check:
a function that is given the checkout and returns what is wrong, and its line in CHECKS.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml
from pydantic import BaseModel, Field, ValidationError

from deploy import parts
from gpuwarden.job import Trip

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RULES_GLOB: Final = "alerts/*.rules.yaml"
TESTS_GLOB: Final = "alerts/*.test.yaml"
RUN_TIMEOUT_S: Final = 120

_RULES, _TEST = ".rules.yaml", ".test.yaml"
_ALERTNAME = re.compile(r'alertname="([^"]*)"')


class Rule(BaseModel):
    """One rule. `for` and `keep_firing_for` are `None` where the rule has none; a recording rule has no `alert`."""

    alert: str | None = None
    wait: Any = Field(default=None, alias="for")
    keep_firing_for: Any = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RuleGroup(BaseModel):
    """One group of a rule file."""

    rules: list[Rule]


class RuleFile(BaseModel):
    """What promtool and Prometheus read as a rule file."""

    groups: list[RuleGroup]


class AlertTest(BaseModel):
    """What one alert is expected to be at one time; without `exp_alerts` it is expected not to fire."""

    alertname: str
    exp_alerts: list[Any] | None = None


class ExprTest(BaseModel):
    """One expression's expected samples."""

    expr: str


class Test(BaseModel):
    """One test. Without `interval`, promtool loads every sample at time 0 and proves nothing."""

    name: str
    interval: str
    alert_rule_test: list[AlertTest] = []
    promql_expr_test: list[ExprTest] = []


class TestFile(BaseModel):
    """What promtool reads as a test file."""

    rule_files: list[str]
    tests: list[Test]


def rules_are_valid(checkout: Path) -> list[str]:
    """Promtool's own check of the rule files."""
    files = sorted(checkout.glob(RULES_GLOB))
    return run_part("promtool", "check", "rules", *map(str, files)) if files else [f"no {RULES_GLOB} in {checkout}"]


def rules_pass_their_tests(checkout: Path) -> list[str]:
    """Promtool's unit tests."""
    files = sorted(checkout.glob(TESTS_GLOB))
    return run_part("promtool", "test", "rules", *map(str, files)) if files else [f"no {TESTS_GLOB} in {checkout}"]


def rules_have_tests(checkout: Path) -> list[str]:
    """Each rule file has a test file beside it that names it, and no test file names one that is not there."""
    problems = []
    for file in sorted(checkout.glob(RULES_GLOB)):
        beside = file.with_name(file.name.removesuffix(_RULES) + _TEST)
        if not beside.is_file():
            problems.append(f"{file.name}: no tests; write {beside.name} beside it")
        elif file.name not in _read(beside, TestFile).rule_files:
            problems.append(f"{beside.name}: its rule_files do not name {file.name}, so that it tests nothing of it")
    for file in sorted(checkout.glob(TESTS_GLOB)):
        for named in _read(file, TestFile).rule_files:
            if not (file.parent / named).is_file():
                problems.append(f"{file.name}: its rule_files name {named}, which is not there")
    return problems


def alerts_are_tested(checkout: Path) -> list[str]:
    """Each alert fires in a test, with its labels and annotations; each alert named in a test exists."""
    exist = {rule.alert for _, rule in _alerts(checkout)}
    fire: set[str] = set()
    problems = []
    for file in sorted(checkout.glob(TESTS_GLOB)):
        for test in _read(file, TestFile).tests:
            fire |= {expected.alertname for expected in test.alert_rule_test if expected.exp_alerts}
            named = {expected.alertname for expected in test.alert_rule_test}
            named |= {name for each in test.promql_expr_test for name in _ALERTNAME.findall(each.expr)}
            problems += [
                f"{file.name}: {test.name!r} names alert {name}, which no rule has: it would pass whatever happens"
                for name in sorted(named - exist)
            ]
    return problems + [
        f"{file.name}: no test's exp_alerts see {rule.alert} fire"
        for file, rule in _alerts(checkout)
        if rule.alert not in fire
    ]


def acting_alerts_are_complete(checkout: Path) -> list[str]:
    """Each alert that a remediator acts on (it has the label `remedy`) says what it must, and acts without delay."""
    return [
        f"{file.name}: {rule.alert}: {problem}"
        for file, rule in _alerts(checkout)
        if "remedy" in rule.labels
        for problem in _lacks(rule, checkout)
    ]


def scripts_are_sound(checkout: Path) -> list[str]:
    """Shellcheck on every tracked shell script."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.sh", ".ci/run"],
        cwd=checkout, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    if listed.returncode:
        return [f"git cannot list the tracked scripts: {listed.stderr.strip()}"]
    scripts = [str(checkout / name) for name in listed.stdout.split("\0") if name and (checkout / name).is_file()]
    return run_part("shellcheck", *scripts) if scripts else []


CHECKS: Final[Mapping[str, Callable[[Path], list[str]]]] = MappingProxyType(
    {
        "alert rules are valid": rules_are_valid,
        "alert rules pass their tests": rules_pass_their_tests,
        "every rule file has its tests": rules_have_tests,
        "every alert is tested, and every tested alert exists": alerts_are_tested,
        "every acting alert is complete": acting_alerts_are_complete,
        "shell scripts are sound": scripts_are_sound,
    }
)


def run_part(program: str, *arguments: str) -> list[str]:
    """Run a real part; what it printed, as one problem, when it fails. Raises PartMissing, TimeoutExpired."""
    done = subprocess.run(
        [parts.find(program), *arguments],
        env=parts.env_for_parts(), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    return [f"{done.stdout}{done.stderr}".strip() or f"exit status {done.returncode}"] if done.returncode else []


def _lacks(rule: Rule, checkout: Path) -> list[str]:
    problems = [f"label {name} is missing" for name in ("severity", "trip") if not rule.labels.get(name)]
    problems += [] if rule.labels["remedy"] else ["label remedy is empty"]
    problems += [
        f"annotation {name} is missing" for name in ("summary", "description", "runbook") if not rule.annotations.get(name)
    ]
    if (trip := rule.labels.get("trip")) and trip not in list(Trip):
        problems.append(f"trip {trip} is unknown; known are: {', '.join(Trip)}")
    for name, found in (("for", rule.wait), ("keep_firing_for", rule.keep_firing_for)):
        if found is not None:
            problems.append(f"{name}: {found} delays it or outlasts its cause; its expression holds all the patience")
    wanted = f"docs/runbooks/{rule.alert}.md"
    if (runbook := rule.annotations.get("runbook")) and runbook != wanted:
        problems.append(f"its runbook is {runbook}; wanted: {wanted}")
    if not (checkout / wanted).is_file():
        problems.append(f"{wanted} is not there; write it")
    return problems


def _alerts(checkout: Path) -> list[tuple[Path, Rule]]:
    return [
        (file, rule)
        for file in sorted(checkout.glob(RULES_GLOB))
        for group in _read(file, RuleFile).groups
        for rule in group.rules
        if rule.alert is not None
    ]


def _read[Model: BaseModel](file: Path, model: type[Model]) -> Model:
    return model.model_validate(yaml.safe_load(file.read_text()))


def main(checkout: Path = CHECKOUT) -> int:
    """Run every check, print a line for each, and return 1 when one fails."""
    failed = 0
    for title, check in CHECKS.items():
        try:
            problems = check(checkout)
        except (OSError, parts.PartMissing, subprocess.TimeoutExpired, ValidationError, yaml.YAMLError) as error:
            problems = [str(error)]
        print(f"{'FAILED' if problems else 'ok':7}{title}")
        for problem in problems:
            print("  " + problem.replace("\n", "\n  "))
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
