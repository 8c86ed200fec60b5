"""The alert rules with the real promtool, and what `testbed.check_release` refuses."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from deploy.standalone import debian_packages
from testbed import check_release
from tools.mutation.rules import ALERTS

STALL = "stall.rules.yaml"
STALL_TEST = "stall.test.yaml"
TESTS = check_release.CHECKOUT / check_release.TESTS


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return debian_packages.find("promtool")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A copy of all files that `testbed.check_release` reads."""
    return copied(tmp_path, ALERTS.iterdir(), TESTS.iterdir())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A valid checkout with one rule file."""
    return copied(tmp_path, [ALERTS / STALL], [TESTS / STALL_TEST])


def copied(checkout: Path, alerts: Iterable[Path], tests: Iterable[Path]) -> Path:
    (checkout / "alerts").mkdir()
    (checkout / check_release.TESTS).mkdir(parents=True)
    for file in alerts:
        shutil.copy(file, checkout / "alerts")
    for file in tests:
        shutil.copy(file, checkout / check_release.TESTS)
    (checkout / "docs" / "runbooks").mkdir(parents=True)
    (checkout / "docs" / "reference").mkdir()
    for file in (checkout / "alerts").glob("*.rules.yaml"):
        for name in re.findall(r"- alert: (\w+)", file.read_text()):
            shutil.copy(check_release.CHECKOUT / "docs" / "runbooks" / f"{name}.md", checkout / "docs" / "runbooks")
    shutil.copy(check_release.CHECKOUT / "docs" / "runbooks" / check_release.INDEX, checkout / "docs" / "runbooks")
    for page in check_release.METRICS_PAGES:
        shutil.copy(check_release.CHECKOUT / "docs" / "reference" / page, checkout / "docs" / "reference")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    return checkout


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{old!r} is not in {file}"
    file.write_text(text.replace(old, new, 1))


def track(checkout: Path, name: str, text: str) -> None:
    """Add a file that git tracks."""
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text(text)
    subprocess.run(["git", "add", "--", name], cwd=checkout, check=True)


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
@pytest.mark.parametrize(
    "checked",
    [
        pytest.param(each, marks=pytest.mark.slow) if each is check_release.rules_pass_their_tests else each
        for each in check_release.CHECKS
    ],
    ids=lambda checked: checked.__name__,
)
def test_our_rules_pass(checked: Callable[[Path], list[str]], shipped: Path) -> None:
    assert checked(shipped) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param("remedy: restart_worker", 'remedy: ""', "label remedy is missing or empty", id="names no remedy"),
        pytest.param("condition: stall", "team: a", "label condition is missing", id="has no condition"),
        pytest.param(
            "condition: stall",
            "condition: stal",
            "condition stal is unknown; known: stall",
            id="misspells its condition",
        ),
        pytest.param("        labels:", "        for: 1m\n        labels:", "`for` is set", id="waits"),
        pytest.param("        labels:", "        for: 0s\n        labels:", "`for` is set", id="waits for 0 s"),
        pytest.param(
            "        labels:", "        keep_firing_for: 1m\n        labels:", "`keep_firing_for` is set", id="lingers"
        ),
    ],
)
def test_acting_alert_is_refused_when_it(old: str, new: str, problem: str, checkout: Path) -> None:
    edit(checkout / "alerts" / STALL, old, new)

    problems = check_release.acting_alerts_are_complete(checkout)

    assert len(problems) == 1
    assert problems[0].startswith(f"{STALL}: GpuwardenJobStalled: {problem}")


@pytest.mark.parametrize("acts", [True, False], ids=["acting", "without remedy"])
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param("severity: critical", "team: a", "label severity is missing", id="has no severity"),
        pytest.param("summary:", "title:", "annotation summary is missing", id="has no summary"),
        pytest.param("description:", "text:", "annotation description is missing", id="has no description"),
        pytest.param("runbook_url:", "runbook:", "annotation runbook_url is missing", id="has no runbook"),
        pytest.param("JobStalled.md", "Stall.md", "runbook_url is http://127.0.0.1:9836/docs/runbooks/GpuwardenStall.md",
                     id="links another alert's runbook"),
    ],
)  # fmt: skip
def test_alert_is_refused_when_it(old: str, new: str, problem: str, acts: bool, checkout: Path) -> None:
    edit(checkout / "alerts" / STALL, old, new)
    if not acts:
        edit(checkout / "alerts" / STALL, "          remedy: restart_worker\n", "")

    problems = check_release.alerts_have_runbooks(checkout)

    assert len(problems) == 1
    assert problems[0].startswith(f"{STALL}: GpuwardenJobStalled: {problem}")


def test_alert_without_runbook_is_refused(checkout: Path) -> None:
    (checkout / "docs/runbooks/GpuwardenJobStalled.md").unlink()

    assert check_release.alerts_have_runbooks(checkout) == [
        f"{STALL}: GpuwardenJobStalled: missing page docs/runbooks/GpuwardenJobStalled.md"
    ]


def test_runbook_without_alert_is_refused(checkout: Path) -> None:
    (checkout / "docs/runbooks/GpuwardenJobStaled.md").touch()

    assert check_release.alerts_have_runbooks(checkout) == [
        "docs/runbooks/GpuwardenJobStaled.md: no alert has this name"
    ]


@pytest.mark.parametrize("acts", [True, False], ids=["acting", "without remedy"])
@pytest.mark.parametrize(
    ("sections", "acting", "without_remedy"),
    [
        (["Meaning", "Impact", "What gpuwarden does", "Diagnosis", "Mitigation", "False alarm", "Limits"], True, False),
        (["Meaning", "Impact", "Diagnosis", "Mitigation", "False alarm", "Limits"], False, True),
        (["Meaning", "Impact", "Diagnosis", "Mitigation", "Limits"], False, True),
        (["Meaning", "Impact", "Diagnosis", "Mitigation"], False, True),
        (["Meaning", "Diagnosis", "Mitigation"], False, False),
        (["Meaning", "Impact", "Mitigation", "Diagnosis"], False, False),
        (["Meaning", "Impact", "Diagnosis", "Mitigation", "Silence"], False, False),
        ([], False, False),
    ],
    ids=["whole", "nothing done", "one optional", "required only", "one missing", "wrong order", "unknown", "none"],
)
def test_runbook_needs_the_sections(
    sections: list[str], acting: bool, without_remedy: bool, acts: bool, checkout: Path
) -> None:
    if not acts:
        edit(checkout / "alerts" / STALL, "          remedy: restart_worker\n", "")
    write_runbook(checkout, "".join(f"\n## {each}\nWords.\n\n```bash\n# a comment\n```\n" for each in sections))

    found = check_release.runbooks_follow_the_template(checkout)

    assert (found == []) is (acting if acts else without_remedy)
    assert all(problem.startswith("GpuwardenJobStalled.md: has the sections GpuwardenJobStalled") for problem in found)


@pytest.mark.parametrize(("acts", "most"), [(True, 300), (False, 120)], ids=["acting", "without remedy"])
@pytest.mark.parametrize("more", [0, 1], ids=["as many as allowed", "one more"])
def test_runbook_with_too_many_words_is_refused(acts: bool, most: int, more: int, checkout: Path) -> None:
    titles: tuple[str, ...] = check_release.SECTIONS
    if not acts:
        edit(checkout / "alerts" / STALL, "          remedy: restart_worker\n", "")
        titles = tuple(each for each in titles if each in check_release.WITHOUT_REMEDY)
    body = "".join(f"\n## {each}\n" for each in titles) + "\n```bash\nthis is a command\n```\n"
    words = most - 1 - sum(len(each.split()) for each in titles) + more
    write_runbook(checkout, body + "word " * words + "\n")

    found = check_release.runbooks_follow_the_template(checkout)

    assert found == ([f"GpuwardenJobStalled.md: {most + 1} words, at most {most}"] if more else [])


def test_runbook_that_the_index_does_not_list_is_refused(checkout: Path) -> None:
    edit(checkout / "docs/runbooks/index.md", "(GpuwardenJobStalled.md)", "(GpuwardenJobStuck.md)")

    assert check_release.runbooks_follow_the_template(checkout) == ["index.md: does not list GpuwardenJobStalled"]


def write_runbook(checkout: Path, body: str) -> None:
    (checkout / "docs/runbooks/GpuwardenJobStalled.md").write_text(f"# GpuwardenJobStalled\n{body}")


@pytest.mark.parametrize(
    ("says", "problems"),
    [
        ("    gpuwarden ledger list --last 10", []),
        ("```bash\ngpuwarden ledger list --last 10    # newest\n```\n", []),
        ("```bash\ngpuwarden ledger lst\n```\n", ["`gpuwarden ledger lst` is no command"]),
        ("```text\ngpuwarden ledger lst\n```\n", []),
        ("Then `gpuwarden arm --remedy restart_worker --host HOST`.", []),
        ("Of itself gpuwarden lists nothing.", []),
        ("    gpuwarden ledger lst", ["`gpuwarden ledger lst` is no command"]),
        ("| x | `gpuwarden arm --remdy restart_worker` |", ["`gpuwarden arm` has no option --remdy"]),
        ("    gpuwarden ledger list --las 10", ["`gpuwarden ledger list` has no option --las"]),
    ],
    ids=[
        "a command",
        "in a block",
        "an unknown command in a block",
        "output",
        "in a sentence",
        "prose",
        "an unknown command",
        "an unknown option",
        "half an option",
    ],
)
def test_runbook_with_unknown_command_is_refused(says: str, problems: list[str], checkout: Path) -> None:
    write_runbook(checkout, f"\n{says}\n")

    found = check_release.runbooks_commands_exist(checkout)

    assert found == [f"GpuwardenJobStalled.md: {problem}" for problem in problems]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "gpuwarden_job_step_beat_age_seconds",
            "gpuwarden_job_step_beat_seconds",
            "series gpuwarden_job_step_beat_seconds is not published",
        ),
        ("topk by", "gpuwarden:beat or topk by", "series gpuwarden:beat is not published"),
        (
            "topk by",
            '{__name__=~"up|gpuwarden_job_(info|beat)"} or topk by',
            "series gpuwarden_job_beat is not published",
        ),
        ("remedy: restart_worker", "remedy: restart_wroker", "remedy restart_wroker is unknown; known: "),
    ],
    ids=["unknown series", "unknown record", "unknown series in a pattern", "unknown remedy"],
)
def test_rule_is_refused_that_names(old: str, new: str, problem: str, checkout: Path) -> None:
    edit(checkout / "alerts" / STALL, old, new)

    problems = check_release.rules_name_known_series(checkout)

    assert len(problems) == 1
    assert problems[0].startswith(f"{STALL}: GpuwardenJobStalled: {problem}")


def test_alert_without_remedy_may_have_for(checkout: Path) -> None:
    edit(checkout / "alerts" / STALL, "          remedy: restart_worker\n", "")
    edit(checkout / "alerts" / STALL, "        labels:", "        for: 1m\n        labels:")

    assert check_release.acting_alerts_are_complete(checkout) == []


def test_rule_file_without_tests_is_refused(checkout: Path) -> None:
    (checkout / check_release.TESTS / STALL_TEST).unlink()

    assert check_release.rules_have_tests(checkout) == [f"{STALL}: no tests; write {check_release.TESTS}/{STALL_TEST}"]


def test_tests_of_an_unnamed_rule_file_are_refused(checkout: Path) -> None:
    edit(checkout / check_release.TESTS / STALL_TEST, "alerts/stall.rules.yaml]", "alerts/stal.rules.yaml]")

    assert check_release.rules_have_tests(checkout) == [
        f"{STALL_TEST}: rule_files do not name {STALL}",
        f"{STALL_TEST}: rule_files name ../../../alerts/stal.rules.yaml, which does not exist",
    ]


def test_untested_alert_is_refused(checkout: Path) -> None:
    text = (checkout / "alerts" / STALL).read_text()
    name = "GpuwardenJobUntested"
    (checkout / "alerts" / STALL).write_text(f"{text}      - alert: {name}\n        expr: vector(1)\n")

    assert check_release.alerts_are_tested(checkout) == [f"{STALL}: no test has exp_alerts for {name}"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("119s, alertname: GpuwardenJobStalled", "119s, alertname: GpuwardenJobStaled",
                     id="that is expected not to fire"),
        pytest.param('alertname="GpuwardenJobStalled", alertstate="firing"}', 'alertname="GpuwardenJobStaled"}',
                     id="in an expression"),
    ],
)  # fmt: skip
def test_unknown_alert_in_tests_is_refused(old: str, new: str, checkout: Path) -> None:
    edit(checkout / check_release.TESTS / STALL_TEST, old, new)

    problems = check_release.alerts_are_tested(checkout)

    assert problems
    assert all("names GpuwardenJobStaled, which no rule defines" in problem for problem in problems)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(STALL_TEST, "    interval: 1s\n", "", id="a test without an interval"),
        pytest.param(STALL_TEST, "  - name: fires", "  - title: fires", id="a test without a name"),
        pytest.param(STALL_TEST, "tests:\n", "tests: [\n", id="broken YAML"),
        pytest.param(STALL, "groups:", "group:", id="rules without groups"),
    ],
)
def test_unreadable_file_is_named(file: str, old: str, new: str, checkout: Path) -> None:
    edit(checkout / (check_release.TESTS if file == STALL_TEST else "alerts") / file, old, new)

    with pytest.raises(check_release.FileError, match=rf"^{file}: "):
        check_release.alerts_are_tested(checkout)


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
def test_invalid_rule_is_refused_with_promtools_error(checkout: Path) -> None:
    edit(checkout / "alerts" / STALL, "topk by", "topk buy")

    (problem,) = check_release.rules_are_valid(checkout)

    assert "could not parse expression" in problem


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
def test_failing_rule_is_refused_with_promtools_error(checkout: Path) -> None:
    edit(checkout / "alerts" / STALL, ">=", ">")
    (checkout / check_release.TESTS / "another.test.yaml").write_text(
        f"rule_files: [../../../alerts/{STALL}]\ntests: []\n"
    )

    (problem,) = check_release.rules_pass_their_tests(checkout)

    assert "FAILED" in problem
    assert STALL_TEST in problem


@pytest.mark.parametrize(
    ("checked", "glob"),
    [
        (check_release.rules_are_valid, check_release.RULES_GLOB),
        (check_release.rules_pass_their_tests, check_release.TESTS_GLOB),
    ],
    ids=["rules", "tests"],
)
def test_checkout_without_alerts_is_refused(checked: Callable[[Path], list[str]], glob: str, tmp_path: Path) -> None:
    (problem,) = checked(tmp_path)

    assert problem.startswith(f"no {glob} in ")


@pytest.mark.needs_parts
@pytest.mark.parametrize("name", ["deploy/start.sh", ".ci/run"])
def test_tracked_script_with_shellcheck_error_is_refused(name: str, checkout: Path) -> None:
    try:
        debian_packages.find("shellcheck")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))
    track(checkout, name, "#!/bin/sh\nrm $1\n")

    (problem,) = check_release.scripts_are_sound(checkout)

    assert "SC2086" in problem


def test_untracked_script_is_ignored(checkout: Path) -> None:
    (checkout / "mine.sh").write_text("#!/bin/sh\nrm $1\n")

    assert check_release.scripts_are_sound(checkout) == []


def test_scripts_outside_a_checkout_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    (problem,) = check_release.scripts_are_sound(tmp_path)

    assert problem.startswith("git cannot list the tracked scripts: fatal: not a git repository")


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
def test_valid_checkout_prints_each_check_and_exits_0(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_release.main(checkout) == 0
    assert [line[:7] for line in capsys.readouterr().out.splitlines()] == ["ok     "] * len(check_release.CHECKS)


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
def test_skipped_check_is_named_and_not_run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(checkout / "alerts" / STALL, ">=", ">")

    assert check_release.main(checkout) == 1
    assert "FAILED rules pass their tests\n" in capsys.readouterr().out
    assert check_release.main(checkout, ["--but", "rules_pass_their_tests"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("ok")] == ["       rules pass their tests: skipped"]
    assert len(lines) == len(check_release.CHECKS)


def test_unknown_check_cannot_be_skipped(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        check_release.main(checkout, ["--but", "rules_pass"])

    assert "invalid choice: 'rules_pass' (choose from 'rules_are_valid', " in capsys.readouterr().err


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
def test_one_failed_check_is_printed_and_exits_1(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "docs/runbooks/GpuwardenJobStalled.md").unlink()

    assert check_release.main(checkout) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 1
    assert "FAILED alerts have runbooks\n  stall.rules.yaml: GpuwardenJobStalled: missing page docs/runbooks/" in out


def test_missing_part_fails_its_check_with_a_hint(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere(program: str) -> Path:
        raise debian_packages.PartMissing(f"{program} is nowhere: apt-get install it")

    monkeypatch.setattr(debian_packages, "find", nowhere)

    assert check_release.main(checkout) == 1
    out = capsys.readouterr().out
    assert "FAILED rules are valid\n  promtool is nowhere: apt-get install it\n" in out
    assert "ok     rules have tests" in out
