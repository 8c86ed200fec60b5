"""`python -m testbed.check_release` checks what ships beside the code: alert rules, tests, runbooks, scripts.

promtool passes a test that names a rule file or an alert that does not exist, so that is checked here. To add a check:
a function that is given the checkout and returns what is wrong, and its line in CHECKS. `--but NAME` leaves one out,
for whoever runs it otherwise: the tests run each of them on what ships.
"""

import argparse
import contextlib
import functools
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from deploy.standalone import config_files, debian_packages, package_data
from gpuwarden.cli import main as cli
from gpuwarden.docs_pages import RUNBOOKS
from gpuwarden.job import Trip
from remediator.remedies import REMEDIES

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RULES_GLOB: Final = "alerts/*.rules.yaml"
TESTS: Final = "tests/alerts/rules"
TESTS_GLOB: Final = f"{TESTS}/*.test.yaml"
RUN_TIMEOUT_S: Final = 300
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - promtool makes folders of its own in it

# In C where PyYAML has it: the tests are thousands of lines, and several checks read them.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FOREIGN_SERIES: Final = frozenset(
    {"up", "ALERTS", "prometheus_rule_evaluation_failures_total", "prometheus_rule_group_iterations_missed_total"}
)
"""What rules ask for that Prometheus itself publishes."""
METRICS_PAGES: Final = ("metrics.md", "metrics-queue.md", "metrics-remediator.md")
"""Pages of docs/ that are written from the code and list every series."""

_PUBLISHED = re.compile(r"^\| `([a-z0-9_]+)` \|", re.MULTILINE)
_SERIES = re.compile(r"\b(?:gpuwarden[_:]|prometheus_|up\b)[a-z0-9_:]*")
_BY_NAME = re.compile(r'__name__=~"([^"]*)"')
_ALERTNAME = re.compile(r'alertname="([^"]*)"')
_COMMAND = re.compile(r"(?:^    |`)gpuwarden ([a-z]+(?: [a-z]+)?)([^`\n#|]*)", re.MULTILINE)
"""A command in the code of a runbook: its name of one or two words, and the rest."""
_OPTION = re.compile(r"(?<!\S)--[a-z-]+")
_File = TypeVar("_File", bound=BaseModel)


class FileError(Exception):
    """A file under alerts/ cannot be read as what its name says. The message names it and the place in it."""


class _Rule(BaseModel):
    """One rule; a recording rule has no `alert`. `wait` is its `for`."""

    alert: str | None = None
    record: str | None = None
    expr: str = ""
    wait: Any = Field(default=None, alias="for")
    keep_firing_for: Any = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _RuleGroup(BaseModel):
    rules: list[_Rule]


class _RuleFile(BaseModel):
    groups: list[_RuleGroup]


class _Expectation(BaseModel):
    """What one alert, or one expression, is expected to be. An alert without `exp_alerts` is expected not to fire."""

    alertname: str = ""
    exp_alerts: list[Any] | None = None
    expr: str = ""


class _Case(BaseModel):
    """One unit test. Without `interval`, promtool would load every sample at time 0 and prove nothing."""

    name: str
    interval: str
    alert_rule_test: list[_Expectation] = []
    promql_expr_test: list[_Expectation] = []


class _TestFile(BaseModel):
    rule_files: list[str]
    tests: list[_Case]


def rules_are_valid(checkout: Path) -> list[str]:
    """Promtool's own check of the rule files."""
    files = sorted(checkout.glob(RULES_GLOB))
    return run_part("promtool", "check", "rules", *map(str, files)) if files else [f"no {RULES_GLOB} in {checkout}"]


def rules_pass_their_tests(checkout: Path) -> list[str]:
    """Promtool's unit tests: a process for each file, as many at once as there are processors."""
    files = sorted(checkout.glob(TESTS_GLOB))
    if not files:
        return [f"no {TESTS_GLOB} in {checkout}"]
    # A small database for each group of tests, for a moment: in memory, and without much collecting of garbage.
    env = {"GOGC": "400", "GOMAXPROCS": "1"} | ({"TMPDIR": str(MEMORY)} if os.access(MEMORY, os.W_OK) else {})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda file: run_part("promtool", "test", "rules", str(file), env=env), files)
        return [problem for problems in found for problem in problems]


def rules_have_tests(checkout: Path) -> list[str]:
    """Each rule file has a test file that names it, and no test file names a rule file that does not exist."""
    problems = []
    for file in sorted(checkout.glob(RULES_GLOB)):
        test = checkout / TESTS / file.name.replace(".rules.", ".test.")
        if not test.is_file():
            problems.append(f"{file.name}: no tests; write {TESTS}/{test.name}")
        elif file.resolve() not in [(test.parent / named).resolve() for named in _read(test, _TestFile).rule_files]:
            problems.append(f"{test.name}: its rule_files do not name {file.name}, so that it tests nothing of it")
    for file in sorted(checkout.glob(TESTS_GLOB)):
        absent = [named for named in _read(file, _TestFile).rule_files if not (file.parent / named).is_file()]
        problems += [f"{file.name}: its rule_files name {named}, which is not there" for named in absent]
    return problems


def alerts_are_tested(checkout: Path) -> list[str]:
    """Each alert fires in a test, with its labels and annotations; each alert named in a test exists."""
    exist = {rule.alert for _, rule in _alerts(checkout)}
    cases = [(file, case) for file in sorted(checkout.glob(TESTS_GLOB)) for case in _read(file, _TestFile).tests]
    fire = {each.alertname for _, case in cases for each in case.alert_rule_test if each.exp_alerts}
    unseen = [(file, rule.alert) for file, rule in _alerts(checkout) if rule.alert not in fire]
    problems = [f"{file.name}: no exp_alerts of any test see {alert} fire" for file, alert in unseen]
    for file, case in cases:
        named = {each.alertname for each in case.alert_rule_test}
        named |= {name for each in case.promql_expr_test for name in _ALERTNAME.findall(each.expr)}
        if mistaken := ", ".join(sorted(named - exist)):
            problems.append(
                f"{file.name}: {case.name!r} names {mistaken}, which no rule has: it passes whatever happens"
            )
    return problems


def acting_alerts_are_complete(checkout: Path) -> list[str]:
    """Each alert that a remediator acts on (it has the label `remedy`) says what it must, and acts without delay."""
    acting = [(file, rule) for file, rule in _alerts(checkout) if "remedy" in rule.labels]
    return [f"{file.name}: {rule.alert}: {problem}" for file, rule in acting for problem in _lacks(rule)]


def alerts_have_runbooks(checkout: Path) -> list[str]:
    """Each alert says what it must and links a page of its own, and each page has its alert."""
    found = _alerts(checkout)
    problems = [f"{file.name}: {rule.alert}: {problem}" for file, rule in found for problem in _tells(rule, checkout)]
    alerts = {rule.alert for _, rule in found}
    pages = sorted((checkout / "docs" / "runbooks").glob("*.md"))
    return problems + [f"docs/runbooks/{page.name}: no alert is called so" for page in pages if page.stem not in alerts]


def runbooks_commands_exist(checkout: Path) -> list[str]:
    """Each `gpuwarden` command in the code of a runbook exists, and has the options that it is given there."""
    return [
        f"{page.name}: `gpuwarden {words}` {problem}"
        for page, text in _runbooks(checkout)
        for words, rest in _COMMAND.findall(text)
        for problem in _misses(words, _OPTION.findall(rest))
    ]


def _misses(words: str, options: Sequence[str]) -> list[str]:
    """What is wrong with a command, by its own help."""
    told = _help(words)
    if told is None:
        return ["is no command"]
    return [f"has no option {option}" for option in options if not re.search(rf"{option}\b(?!-)", told)]


@functools.cache
def _help(words: str) -> str | None:
    """The help of a command; `None` for one that does not exist."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.main([*words.split(), "--help"])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return told.getvalue() if code == 0 else None


def _runbooks(checkout: Path) -> list[tuple[Path, str]]:
    """The page of each alert that has one."""
    names = sorted({f"{rule.alert}.md" for _, rule in _alerts(checkout)})
    pages = [page for name in names if (page := checkout / "docs" / "runbooks" / name).is_file()]
    return [(page, page.read_text(encoding="utf-8")) for page in pages]


def rules_name_what_there_is(checkout: Path) -> list[str]:
    """Each series that a rule asks for is published or recorded, and each remedy is one that there is."""
    read = [(file, _read(file, _RuleFile)) for file in sorted(checkout.glob(RULES_GLOB))]
    rules = [(file, rule) for file, found in read for group in found.groups for rule in group.rules]
    known = {rule.record for _, rule in rules if rule.record} | FOREIGN_SERIES
    for page in METRICS_PAGES:
        known |= set(_PUBLISHED.findall((checkout / "docs" / page).read_text(encoding="utf-8")))
    problems = []
    for file, rule in rules:
        where = f"{file.name}: {rule.alert or rule.record}"
        problems += [f"{where}: {name} is published by nobody" for name in sorted(series_of(rule.expr) - known)]
        if (remedy := rule.labels.get("remedy")) and remedy not in REMEDIES:
            problems.append(f"{where}: remedy {remedy} is unknown; known are: {', '.join(REMEDIES)}")
    return problems


def series_of(expression: str) -> set[str]:
    """The names of series in an expression, those that a pattern of `__name__` spells out among them."""
    bare = re.sub(r"#[^\n]*", "", expression)
    named: set[str] = set()
    for pattern in _BY_NAME.findall(bare):
        named |= set(_spelled_out(pattern))
    return named | set(_SERIES.findall(re.sub(r'"[^"]*"', '""', bare)))


def _spelled_out(pattern: str) -> list[str]:
    """The names that a pattern of alternatives stands for, such as `up|a_(b|c)_d`."""
    if group := re.search(r"\(([^()]*)\)", pattern):
        before, after = pattern[: group.start()], pattern[group.end() :]
        return [name for each in group[1].split("|") for name in _spelled_out(before + each + after)]
    return pattern.split("|")


def configuration_is_accepted(checkout: Path) -> list[str]:
    """What deploy.standalone.config_files writes is what this Prometheus and this Alertmanager accept."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder)
        token = written / "token"
        token.write_text("0123456789abcdef", encoding="ascii")
        prometheus, alertmanager = written / "prometheus.yml", written / "alertmanager.yml"
        one = "127.0.0.1:1"
        rules = sorted(checkout.glob(RULES_GLOB))
        prometheus.write_text(
            config_files.prometheus_config(
                host="h",
                exporter=one,
                remediator=one,
                alertmanager=one,
                prometheus=one,
                rules=rules,
                intervals=config_files.Intervals(),
            )
        )
        alertmanager.write_text(
            config_files.alertmanager_config(
                webhook=f"http://{one}/", token_file=token, intervals=config_files.Intervals()
            )
        )
        found = run_part("promtool", "check", "config", str(prometheus))
        return found + run_part("amtool", "check-config", str(alertmanager))


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


CHECKS: Final[tuple[Callable[[Path], list[str]], ...]] = (
    rules_are_valid,
    rules_pass_their_tests,
    rules_have_tests,
    alerts_are_tested,
    acting_alerts_are_complete,
    alerts_have_runbooks,
    runbooks_commands_exist,
    rules_name_what_there_is,
    configuration_is_accepted,
    scripts_are_sound,
)


def run_part(program: str, *arguments: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Run a real part, with `env` besides; what it printed, as one problem, when it fails.

    Raises:
        PartMissing: there is no such program.
        TimeoutExpired: it took longer than RUN_TIMEOUT_S.
    """
    done = subprocess.run(
        [debian_packages.find(program), *arguments],
        env={**debian_packages.env_for_parts(), **(env or {})},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    return [f"{done.stdout}{done.stderr}".strip() or f"exit status {done.returncode}"] if done.returncode else []


def _lacks(rule: _Rule) -> list[str]:
    problems = [f"label {name} is missing or empty" for name in ("remedy", "trip") if not rule.labels.get(name)]
    if (trip := rule.labels.get("trip")) and trip not in list(Trip):
        problems.append(f"trip {trip} is unknown; known are: {', '.join(Trip)}")
    held = [
        name for name, found in (("for", rule.wait), ("keep_firing_for", rule.keep_firing_for)) if found is not None
    ]
    return problems + [f"`{name}` is set; the durations that it compares are all its patience" for name in held]


def _tells(rule: _Rule, checkout: Path) -> list[str]:
    """What a person who is told misses."""
    annotations = ("summary", "description", "runbook_url")
    problems = [] if rule.labels.get("severity") else ["label severity is missing or empty"]
    problems += [f"annotation {name} is missing or empty" for name in annotations if not rule.annotations.get(name)]
    wanted = f"{package_data.RUNBOOKS_URL}{rule.alert}.md"
    if (runbook := rule.annotations.get("runbook_url")) and runbook != wanted:
        problems.append(f"its runbook_url is {runbook}; wanted: {wanted}")
    if not (checkout / (page := f"{RUNBOOKS}{rule.alert}.md")).is_file():
        problems.append(f"{page} is not there; write it")
    return problems


def _alerts(checkout: Path) -> list[tuple[Path, _Rule]]:
    read = [(file, _read(file, _RuleFile)) for file in sorted(checkout.glob(RULES_GLOB))]
    return [(file, rule) for file, found in read for group in found.groups for rule in group.rules if rule.alert]


def _read(file: Path, model: type[_File]) -> _File:
    try:
        return model.model_validate(yaml.load(file.read_text(), _LOADER))  # noqa: S506 - both are safe ones
    except (ValidationError, yaml.YAMLError) as error:
        raise FileError(f"{file.name}: {error}") from error


def main(checkout: Path = CHECKOUT, arguments: Sequence[str] = ()) -> int:
    """Run every check but those left out, print a line for each, and return 1 when one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.check_release", description=(__doc__ or "").split(":", 1)[0]
    )
    parser.add_argument("--but", action="append", default=[], choices=[check.__name__ for check in CHECKS],
                        metavar="NAME", help="leave this check out; may be given several times")  # fmt: skip
    left_out = parser.parse_args(arguments).but
    failed = 0
    for check in CHECKS:
        if check.__name__ in left_out:
            print(f"{'':7}{check.__name__.replace('_', ' ')}: left out")
            continue
        try:
            problems = check(checkout)
        except (OSError, FileError, debian_packages.PartMissing, subprocess.TimeoutExpired) as error:
            problems = [str(error)]
        print(f"{'FAILED' if problems else 'ok':7}{check.__name__.replace('_', ' ')}")
        for problem in problems:
            print("  " + problem.replace("\n", "\n  "))
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(arguments=sys.argv[1:]))
