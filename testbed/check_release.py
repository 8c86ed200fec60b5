"""`python -m testbed.check_release` checks alert rules, rule tests, runbooks and scripts.

promtool accepts a test of a rule file or alert that does not exist, so this is checked here. To add a check, add a
function that returns problems, and list it in CHECKS. `--but NAME` skips a check.
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
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from deploy.standalone import config_files, debian_packages, package_data
from gpuwarden.cli import main as cli
from gpuwarden.docs_pages import RUNBOOKS
from gpuwarden.job import Condition
from remediator.alert import DRILL
from remediator.remedies import REMEDIES
from tools.site import word_count

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RULES_GLOB: Final = "alerts/*.rules.yaml"
TESTS: Final = "tests/alerts/rules"
TESTS_GLOB: Final = f"{TESTS}/*.test.yaml"
RUN_TIMEOUT_S: Final = 300
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - promtool creates folders in it

# The C loader if PyYAML has it: several checks read thousands of lines.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FOREIGN_SERIES: Final = frozenset(
    {"up", "ALERTS", "prometheus_rule_evaluation_failures_total", "prometheus_rule_group_iterations_missed_total"}
)
"""Series that Prometheus itself publishes."""
METRICS_PAGES: Final = ("metrics.md", "metrics-gateway.md", "metrics-queue.md", "metrics-remediator.md")
"""Generated pages of docs/reference/ that list every series."""

SECTIONS: Final = ("Meaning", "Impact", "What gpuwarden does", "Diagnosis", "Mitigation", "False alarm", "Limits")
"""Sections of a runbook, in order."""
WITHOUT_REMEDY: Final = frozenset({"Meaning", "Impact", "Diagnosis", "Mitigation"})
"""Sections that an alert without a remedy needs; it may have the last two as well."""
WORDS_MAX: Final = 300
WORDS_MAX_WITHOUT_REMEDY: Final = 120
INDEX: Final = "index.md"

_PUBLISHED = re.compile(r"^\| `([a-z0-9_]+)` \|", re.MULTILINE)
_SERIES = re.compile(r"\b(?:gpuwarden[_:]|prometheus_|up\b)[a-z0-9_:]*")
_BY_NAME = re.compile(r'__name__=~"([^"]*)"')
_ALERTNAME = re.compile(r'alertname="([^"]*)"')
_COMMAND = re.compile(r"(?:^    |`)gpuwarden ([a-z]+(?: [a-z]+)?)([^`\n#|]*)", re.MULTILINE)
"""A command in a runbook: its name of one or two words, and the rest."""
_BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^##? (.+)$", re.MULTILINE)
_OPTION = re.compile(r"(?<!\S)--[a-z-]+")
_File = TypeVar("_File", bound=BaseModel)


class FileError(Exception):
    """A file under alerts/ is invalid. The message names file and position."""


class AlertRule(BaseModel):
    """One rule; a recording rule has no `alert`. `wait` is its `for`."""

    alert: str | None = None
    record: str | None = None
    expr: str = ""
    wait: Any = Field(default=None, alias="for")
    keep_firing_for: Any = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _RuleGroup(BaseModel):
    rules: list[AlertRule]


class _RuleFile(BaseModel):
    groups: list[_RuleGroup]


class _Expectation(BaseModel):
    """Expectation for one alert or expression. Without `exp_alerts` the alert must not fire."""

    alertname: str = ""
    exp_alerts: list[Any] | None = None
    expr: str = ""


class _Case(BaseModel):
    """One unit test. Without `interval` promtool would load all samples at time 0."""

    name: str
    interval: str
    alert_rule_test: list[_Expectation] = []
    promql_expr_test: list[_Expectation] = []


class _TestFile(BaseModel):
    rule_files: list[str]
    tests: list[_Case]


def rules_are_valid(checkout: Path) -> list[str]:
    """Promtool accepts the rule files."""
    files = sorted(checkout.glob(RULES_GLOB))
    return run_part("promtool", "check", "rules", *map(str, files)) if files else [f"no {RULES_GLOB} in {checkout}"]


def rules_pass_their_tests(checkout: Path) -> list[str]:
    """Promtool's unit tests pass. Runs one process per file, in parallel."""
    files = sorted(checkout.glob(TESTS_GLOB))
    if not files:
        return [f"no {TESTS_GLOB} in {checkout}"]
    # Many small, short-lived databases: in memory, with little garbage collection.
    env = {"GOGC": "400", "GOMAXPROCS": "1"} | ({"TMPDIR": str(MEMORY)} if os.access(MEMORY, os.W_OK) else {})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda file: run_part("promtool", "test", "rules", str(file), env=env), files)
        return [problem for problems in found for problem in problems]


def rules_have_tests(checkout: Path) -> list[str]:
    """Each rule file has a test file, and each test file names existing rule files."""
    problems = []
    for file in sorted(checkout.glob(RULES_GLOB)):
        test = checkout / TESTS / file.name.replace(".rules.", ".test.")
        if not test.is_file():
            problems.append(f"{file.name}: no tests; write {TESTS}/{test.name}")
        elif file.resolve() not in [(test.parent / named).resolve() for named in _read(test, _TestFile).rule_files]:
            problems.append(f"{test.name}: rule_files do not name {file.name}")
    for file in sorted(checkout.glob(TESTS_GLOB)):
        absent = [named for named in _read(file, _TestFile).rule_files if not (file.parent / named).is_file()]
        problems += [f"{file.name}: rule_files name {named}, which does not exist" for named in absent]
    return problems


def alerts_are_tested(checkout: Path) -> list[str]:
    """Each alert fires in a test, with labels and annotations. Each alert named in a test exists."""
    exist = {rule.alert for _, rule in alert_rules(checkout)}
    cases = [(file, case) for file in sorted(checkout.glob(TESTS_GLOB)) for case in _read(file, _TestFile).tests]
    fire = {each.alertname for _, case in cases for each in case.alert_rule_test if each.exp_alerts}
    unseen = [(file, rule.alert) for file, rule in alert_rules(checkout) if rule.alert not in fire]
    problems = [f"{file.name}: no test has exp_alerts for {alert}" for file, alert in unseen]
    for file, case in cases:
        named = {each.alertname for each in case.alert_rule_test}
        named |= {name for each in case.promql_expr_test for name in _ALERTNAME.findall(each.expr)}
        if mistaken := ", ".join(sorted(named - exist)):
            problems.append(
                f"{file.name}: {case.name!r} names {mistaken}, which no rule defines: the test proves nothing"
            )
    return problems


def acts(labels: Mapping[str, str]) -> bool:
    """Whether gpuwarden acts on an alert with these labels. On a drill it does nothing."""
    return labels.get("remedy", DRILL) != DRILL


def acting_alerts_are_complete(checkout: Path) -> list[str]:
    """Each alert with a remedy has the required labels and no delay."""
    acting = [(file, rule) for file, rule in alert_rules(checkout) if acts(rule.labels)]
    return [f"{file.name}: {rule.alert}: {problem}" for file, rule in acting for problem in _label_problems(rule)]


def alerts_have_runbooks(checkout: Path) -> list[str]:
    """Each alert has annotations and a runbook, and each runbook has an alert."""
    found = alert_rules(checkout)
    problems = [
        f"{file.name}: {rule.alert}: {problem}" for file, rule in found for problem in _text_problems(rule, checkout)
    ]
    alerts = {rule.alert for _, rule in found}
    pages = sorted((checkout / "docs" / "runbooks").glob("*.md"))
    return problems + [
        f"docs/runbooks/{page.name}: no alert has this name"
        for page in pages
        if page.name != INDEX and page.stem not in alerts
    ]


def runbooks_follow_the_template(checkout: Path) -> list[str]:
    """Each runbook has the sections in order and is short, and the index lists it."""
    acting = {rule.alert for _, rule in alert_rules(checkout) if acts(rule.labels)}
    _, index = _read_page(checkout / "docs" / "runbooks" / INDEX)
    problems = []
    for page, text in _runbooks(checkout):
        found = _SECTION.findall(_FENCED.sub("", text))
        is_acting = page.stem in acting
        may_have = SECTIONS if is_acting else [each for each in SECTIONS if each != "What gpuwarden does"]
        needs = frozenset(SECTIONS) if is_acting else WITHOUT_REMEDY
        wanted = [page.stem, *(each for each in may_have if each in needs or each in found)]
        if found != wanted:
            problems.append(f"{page.name}: has the sections {', '.join(found)}; expected {', '.join(wanted)}")
        words, most = word_count(text), WORDS_MAX if is_acting else WORDS_MAX_WITHOUT_REMEDY
        if words > most:
            problems.append(f"{page.name}: {words} words, at most {most}")
        if f"[{page.stem}]({page.name})" not in index:
            problems.append(f"{INDEX}: does not list {page.stem}")
    return problems


def runbooks_commands_exist(checkout: Path) -> list[str]:
    """Each `gpuwarden` command in a runbook exists and has its options."""
    return [
        f"{page.name}: `gpuwarden {words}` {problem}"
        for page, text in [*_runbooks(checkout), _read_page(checkout / "docs" / "runbooks" / INDEX)]
        for words, rest in _COMMAND.findall(_BASH.sub(lambda block: textwrap.indent(block[1], "    "), text))
        for problem in _command_problems(words, _OPTION.findall(rest))
    ]


def _command_problems(words: str, options: Sequence[str]) -> list[str]:
    """Problems of a command, by its help."""
    text = _help(words)
    if text is None:
        return ["is no command"]
    return [f"has no option {option}" for option in options if not re.search(rf"{option}\b(?!-)", text)]


@functools.cache
def _help(words: str) -> str | None:
    """Help of a command; `None` if it does not exist."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.main([*words.split(), "--help"])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return text.getvalue() if code == 0 else None


def _runbooks(checkout: Path) -> list[tuple[Path, str]]:
    """Runbook pages of the alerts."""
    names = sorted({f"{rule.alert}.md" for _, rule in alert_rules(checkout)})
    pages = [page for name in names if (page := checkout / "docs" / "runbooks" / name).is_file()]
    return [_read_page(page) for page in pages]


def _read_page(page: Path) -> tuple[Path, str]:
    return page, page.read_text(encoding="utf-8")


def rules_name_known_series(checkout: Path) -> list[str]:
    """Rules use only published or recorded series and known remedies."""
    read = [(file, _read(file, _RuleFile)) for file in sorted(checkout.glob(RULES_GLOB))]
    rules = [(file, rule) for file, found in read for group in found.groups for rule in group.rules]
    known = {rule.record for _, rule in rules if rule.record} | FOREIGN_SERIES
    for page in METRICS_PAGES:
        known |= set(_PUBLISHED.findall((checkout / "docs" / "reference" / page).read_text(encoding="utf-8")))
    problems = []
    for file, rule in rules:
        where = f"{file.name}: {rule.alert or rule.record}"
        problems += [f"{where}: series {name} is not published" for name in sorted(series_of(rule.expr) - known)]
        if (remedy := rule.labels.get("remedy")) and remedy not in {*REMEDIES, DRILL}:
            problems.append(f"{where}: remedy {remedy} is unknown; known: {', '.join(REMEDIES)}")
    return problems


def series_of(expression: str) -> set[str]:
    """Names of series in an expression, including those in a pattern of `__name__`."""
    bare = re.sub(r"#[^\n]*", "", expression)
    named: set[str] = set()
    for pattern in _BY_NAME.findall(bare):
        named |= set(_expand_pattern(pattern))
    return named | set(_SERIES.findall(re.sub(r'"[^"]*"', '""', bare)))


def _expand_pattern(pattern: str) -> list[str]:
    """Names that match a pattern of alternatives, such as `up|a_(b|c)_d`."""
    if group := re.search(r"\(([^()]*)\)", pattern):
        before, after = pattern[: group.start()], pattern[group.end() :]
        return [name for each in group[1].split("|") for name in _expand_pattern(before + each + after)]
    return pattern.split("|")


def configuration_is_accepted(checkout: Path) -> list[str]:
    """Prometheus and Alertmanager accept the files of deploy.standalone.config_files."""
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
    """Shellcheck passes on each tracked shell script."""
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
    runbooks_follow_the_template,
    runbooks_commands_exist,
    rules_name_known_series,
    configuration_is_accepted,
    scripts_are_sound,
)


def run_part(program: str, *arguments: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Run a program with extra `env`. Returns its output as one problem if it fails.

    Raises:
        PartMissing: the program was not found.
        TimeoutExpired: it took longer than RUN_TIMEOUT_S.
    """
    done = subprocess.run(
        [debian_packages.find(program), *arguments],
        env={**debian_packages.env_for_parts(), **(env or {})},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    return [f"{done.stdout}{done.stderr}".strip() or f"exit status {done.returncode}"] if done.returncode else []


def _label_problems(rule: AlertRule) -> list[str]:
    problems = [f"label {name} is missing or empty" for name in ("remedy", "condition") if not rule.labels.get(name)]
    if (condition := rule.labels.get("condition")) and condition not in list(Condition):
        problems.append(f"condition {condition} is unknown; known: {', '.join(Condition)}")
    held = [
        name for name, found in (("for", rule.wait), ("keep_firing_for", rule.keep_firing_for)) if found is not None
    ]
    return problems + [f"`{name}` is set: an alert with a remedy must not be delayed" for name in held]


def _text_problems(rule: AlertRule, checkout: Path) -> list[str]:
    """Missing labels, annotations or runbook of an alert."""
    annotations = ("summary", "description", "runbook_url")
    problems = [] if rule.labels.get("severity") else ["label severity is missing or empty"]
    problems += [f"annotation {name} is missing or empty" for name in annotations if not rule.annotations.get(name)]
    wanted = f"{package_data.RUNBOOKS_URL}{rule.alert}.md"
    if (runbook := rule.annotations.get("runbook_url")) and runbook != wanted:
        problems.append(f"runbook_url is {runbook}, expected {wanted}")
    if not (checkout / (page := f"{RUNBOOKS}{rule.alert}.md")).is_file():
        problems.append(f"missing page {page}")
    return problems


def alert_rules(checkout: Path) -> list[tuple[Path, AlertRule]]:
    """Each alert and its rule file."""
    read = [(file, _read(file, _RuleFile)) for file in sorted(checkout.glob(RULES_GLOB))]
    return [(file, rule) for file, found in read for group in found.groups for rule in group.rules if rule.alert]


def _read(file: Path, model: type[_File]) -> _File:
    try:
        return model.model_validate(yaml.load(file.read_text(), _LOADER))  # noqa: S506 - both are safe loaders
    except (ValidationError, yaml.YAMLError) as error:
        raise FileError(f"{file.name}: {error}") from error


def main(checkout: Path = CHECKOUT, arguments: Sequence[str] = ()) -> int:
    """Run the checks and print one line for each. Returns 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.check_release", description=(__doc__ or "").split(":", 1)[0]
    )
    parser.add_argument("--but", action="append", default=[], choices=[check.__name__ for check in CHECKS],
                        metavar="NAME", help="skip this check; may be repeated")  # fmt: skip
    left_out = parser.parse_args(arguments).but
    failed = 0
    for check in CHECKS:
        if check.__name__ in left_out:
            print(f"{'':7}{check.__name__.replace('_', ' ')}: skipped")
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
