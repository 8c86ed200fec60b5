"""Scenario files: defaults, errors, and the examples in the docs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bench.corpus import __main__ as judging
from bench.corpus import host, page, scenario_file
from bench.corpus.old_names import OLD_NAMES
from bench.corpus.scenario import REMEDIES
from bench.corpus.scenario_file import ScenarioError
from gpuwarden.job import Condition
from testbed.check_release import CHECKOUT
from tests.bench.corpus.scenes import without_promtool

SOUND: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 4m: hangs}
  verdict: {condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}
"""


def test_missing_keys_have_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SOUND)

    (one,) = scenario_file.read(tmp_path)

    assert (one.place, one.scrape_s, one.evaluate_s, one.plays_s) == (
        "a.yaml:1",
        15,
        30,
        360 + scenario_file.AFTERWARDS_S,
    )


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("- name: a", "- nam: a", "a.yaml:1: name: expected a sentence, found nothing"),
        ("  why: b\n", "", "a.yaml:1: why: expected a sentence"),
        ("  why: b", "  why: b\n  wy: c", "a.yaml:3: wy: unknown key; use one of name, why"),
        ("4m: hangs", "4m: hang", "a.yaml:4: 4m: unknown activity 'hang'; use one of: loads, maps"),
        ("4m: hangs", "4m: {does: hangs, cpu: 1}", "a.yaml:4: 4m: unknown part cpu; use one of: does"),
        ("4m: hangs", "4m: {does: hangs, process: gone}", "process: invalid 'gone' (use one of: works, waits"),
        ("4m: hangs", "4m: {does: hangs, phase: train}", "phase: invalid 'train' (use one of: load, step"),
        ("4m: hangs", "4m: {does: hangs, step_every_s: 0.5}", "invalid 0.5 (expected a whole number, 1 or more)"),
        ("4m: hangs", "4m: {does: hangs, cpu_cores: all}", "cpu_cores: invalid 'all' (expected a number)"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: -1}", "io_mib_per_s: invalid -1 (expected 0 or more)"),
        ("0s: loads", "gpus: 0, 0s: loads", "gpus: invalid 0 (expected a list such as [0, 1]"),
        ("0s: loads", "ran_s: 20m, 0s: loads", "ran_s: invalid '20m' (expected a whole number, 0 or more)"),
        ("0s: loads", "container: 1, 0s: loads", "container: invalid 1 (expected a name)"),
        ("4m: hangs", "4m: {does: hangs, gpu_ratio: 95}", "a.yaml:4: 4m: gpu_ratio: invalid 95 (expected a ratio"),
        ("4m: hangs", "4m: {does: hangs, gpu_ratio: [0, 1]}", "a.yaml:4: w at 240s: gpu_ratio needs one number"),
        ("4m: hangs", "4m: {does: hangs, heartbeat: 1}", "heartbeat: invalid 1 (expected true or false)"),
        ("4m: hangs", "0m: hangs", "a.yaml:4: 0m: not later than the time before it; put the times in order"),
        ("0s: loads", "1s: loads", "a.yaml:4: w does nothing at 0s; add an activity"),
        ("0s: loads", "silence_s: 9, 0s: loads", "silence_s: unknown key; use a time"),
        ("0s: loads", "job_class: gpus, 0s: loads", "a.yaml:4: job_class: invalid 'gpus' (use one of:"),
        ("    w: {0s: loads, 4m: hangs}", "    w: loads", "a.yaml:4: expected `key: value` pairs"),
        ("    w: {0s: loads, 4m: hangs}", "    w:", "pairs, found nothing"),
        ("4m: hangs", "240: hangs", "run, works_in, asked_every_s (a time has a unit: 240s, or 240m)"),
        ("verdict: {condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "verdict:",
         "a.yaml:5: verdict: empty; write none, or {condition"),
        ("  workers:\n    w: {0s: loads, 4m: hangs}\n", "", "a.yaml:1: 'a' has no program; add workers"),
        ("  verdict:", "  servers: {w: {0s: answers}}\n  verdict:", "a.yaml:1: duplicate name 'w'; give each"),
        ("  verdict:", "  gpus: {0: {1m: gone}}\n  verdict:", "a.yaml:5: 1m: invalid 'gone' (use one of: works, lost"),
        ("  verdict:", "  gpus: {one: {1m: lost}}\n  verdict:", "a.yaml:5: one: invalid GPU number; write 0, or 0:1"),
        ("  verdict:", "  hosts: {a: {1: asleep}}\n  verdict:", "a.yaml:5: 1: unknown key"),
        ("  verdict:", "  scrape: 15\n  verdict:", "a.yaml:5: scrape: invalid time 15; write 90s, 4m or 1h30m"),
        ("  verdict:", "  scrape: 0s\n  verdict:", "a.yaml:1: scrape and evaluate must be 1s or more"),
        ("  verdict:", "  plays: 5m\n  verdict:", "a.yaml:5: plays: ends before the last event at 360s"),
        ("verdict: {condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "plays: 9m",
         "a.yaml:1: no verdict; write `verdict: none`, or the expected action"),
        ("{condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "never",
         "a.yaml:5: verdict: invalid 'never'"),
        ("condition: stall", "condition: stalled", "a.yaml:5: condition: invalid 'stalled'; use one of: stall"),
        ("restart_worker", "restart", "a.yaml:5: remedy: invalid 'restart'; use one of: restart_worker"),
        ("of: w", "of: v", "a.yaml:5: of: unknown worker 'v'; use one of: w"),
        ("of: w", "of: a", "a.yaml:5: of: unknown worker 'a'; use one of: w"),
        ("restart_worker", "hold_lost_host", "a.yaml:5: of: unknown host 'w'; use one of: a"),
        ("restart_worker", "restart_container", "a.yaml:5: of: unknown server 'w'; use one of: (there is none)"),
        ("restart_worker", "recycle_container", "a.yaml:5: of: unknown tenant 'w'; use one of: (there is none)"),
        ("of: w, ", "", "a.yaml:5: of: no worker; use one of: w"),
        ("0s: loads", "run: 2020-13-45, 0s: loads", "a.yaml:4: run: invalid value (month must"),
        ("0s: loads", "run: !r r, 0s: loads", "a.yaml:4: run: invalid value (could not determine"),
        ("  why: b", "  why: \x02", "a.yaml:1: invalid YAML (control characters are not allowed)"),
        ("4m: hangs", "4m: {does: hangs, unread: [[ram]]}", "4m: unread: invalid [['ram']] (use any of: ram"),
        ("  verdict:", "  gpus: {0: {1m: {throttled: {a: 1}}}}\n  verdict:", "throttled: invalid {'a': 1} (use any of"),
        ("of: w", "of: [w, v]", "a.yaml:5: of: unknown worker 'v'; use one of: w"),
        ("of: w", "of: []", "a.yaml:5: of: no worker; use one of: w"),
        ("of: w", "of: [w, w]", "a.yaml:5: of: w has a verdict already; keep the first"),
        ("  verdict:", "  told: {alert: A, of: w, due: 6m}\n  verdict:", "5: alert: invalid 'A'; use one of: Gpu"),
        ("  verdict:", "  told: {alert: GpuwardenSharedJobStalled, of: a, due: 6m}\n  verdict:",
         "a.yaml:5: of: unknown worker 'a'; use one of: w"),
        ("  verdict:", "  told: {alert: GpuwardenSharedJobStalled, of: w, since: 6m}\n  verdict:",
         "a.yaml:5: due: invalid time None"),
        ("0s: loads", "works_in: thread, 0s: loads", "works_in: invalid 'thread' (use one of: child, orphan)"),
        ("due: 6m", "due: 6m, then: lock", "a.yaml:5: then: invalid 'lock'; with remedy wrangle use one of: lock"),
        ("due: 6m", "due: 3m", "a.yaml:5: due: earlier than `since`"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: 1, io_mib_per_s: 2}",
         "a.yaml:4: duplicate key 'io_mib_per_s'; keep one"),
        ("4m: hangs", "4m: hangs, 4m: steps", "a.yaml:4: duplicate key '4m'; keep one"),
        ("4m: hangs", "4m: {does: hangs,\n      does: steps}", "a.yaml:5: duplicate key 'does'; keep one"),
        ("of: w,", "of: w, of: w,", "a.yaml:5: duplicate key 'of'; keep one"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: {a: 1, a: 2}}", "a.yaml:4: duplicate key 'a'; keep one"),
        ("4m: hangs", "gpus: [{a: 1, a: 2}]", "a.yaml:4: duplicate key 'a'; keep one"),
        ("  verdict:", "  gpus: {0: {1m: lost}, 0: {2m: lost}}\n  verdict:", "a.yaml:5: duplicate key '0'"),
        ("  verdict:", "  gpus: {0: {1m: lost}, 00: {2m: lost}}\n  verdict:", "a.yaml:5: 00: invalid GPU number"),
        ("0s: loads", "gpus: [0, 0], 0s: loads", "gpus: invalid [0, 0] (duplicate number)"),
        ("  why: b", "  why: b\n  why: c", "a.yaml:3: duplicate key 'why'; keep one"),
        ("  why: b", "  why: [b", "a.yaml:3: invalid YAML"),
        ("  why: b", "\twhy: b", "(found a tab character that violates indentation); indent by spaces"),
        ("  why: b", "  why: b: c", "invalid YAML (mapping values are not allowed in this context); quote a sentence"),
        ("  why: b", "   why: b", "indent all keys of a scenario equally"),
        ("0s: loads", "gpus: [1:0:0], 0s: loads", "gpus: invalid ['1:0:0'] (expected a list such as"),
        ("  verdict:", "  gpus: {b/0: {1m: lost}}\n  verdict:", "b/0: invalid GPU number; write 0, or 0:1"),
        ("  verdict:", "  gpus: {1:0: {1m: lost}}\n  verdict:", "invalid 'lost' (use one of: works, vanished, "),
        ("  verdict:", "  gpus: {0: {1m: {is: lost}}}\n  verdict:", "1m: unknown part is; use one of: state"),
        ("  verdict:", "  gpus: {0: {1m: {xid: all}}}\n  verdict:", "1m: xid: invalid 'all' (expected a whole number"),
        ("  verdict:", "  gpus: {0: {1m: {throttled: heat}}}\n  verdict:", "invalid 'heat' (use any of"),
        ("  verdict:", "  told: {alert: GpuwardenGpuXid, of: 0, due: 6m}\n  verdict:",
         "a.yaml:5: of: unknown GPU '0'; use one of: a/0"),
        ("  verdict:", "  told: [&t {alert: GpuwardenGpuXid, of: a/0, due: 6m}, *t]\n  verdict:",
         "a.yaml:5: of: duplicate GpuwardenGpuXid of a/0; keep the first"),
        (SOUND, "name: a\n", "a.yaml:1: not a list of scenarios; begin each with `- name:`"),
        (SOUND, "# nothing yet\n", "a.yaml:1: no scenario; begin each with `- name:`"),
        (SOUND, "[]", "no scenario; write one in a *.yaml file there"),
        (SOUND, SOUND + SOUND, "a.yaml:6: a.yaml:1 has the same name; use another one"),
    ],
)  # fmt: skip
def test_invalid_scenario_error_says_where_and_what_to_write(
    old: str, new: str, complaint: str, tmp_path: Path
) -> None:
    assert old in SOUND
    (tmp_path / "a.yaml").write_text(SOUND.replace(old, new, 1))

    with pytest.raises(ScenarioError, match=re.escape(complaint)):
        scenario_file.read(tmp_path)


def test_old_names_are_read_as_the_new_ones(tmp_path: Path) -> None:
    new = """- name: a
  why: b
  hosts: {a: {5m: unscraped}}
  workers:
    w: {host: a, 0s: loads, 4m: {does: hangs, phase: eval, timeout_s: 60}}
  verdict: {condition: host_lost, remedy: hold_lost_host, of: a, since: 5m, due: 8m}
"""
    new += "  told: {alert: GpuwardenJobSlow, of: w, due: 6m}\n"
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "new" / "a.yaml").write_text(new)
    old = new
    for before, now in OLD_NAMES.items():
        old = old.replace(now, before)
    (tmp_path / "old" / "a.yaml").write_text(old)

    assert old != new
    assert scenario_file.read(tmp_path / "old") == scenario_file.read(tmp_path / "new")


@pytest.mark.parametrize("now", OLD_NAMES.values())
def test_new_name_exists(now: str) -> None:
    rules = "".join(path.read_text() for path in (Path(__file__).parents[3] / "alerts").glob("*.yaml"))
    known = {"timeout_s", "gpuwarden.restart-after-s", "condition", *Condition, *REMEDIES}

    assert now in known or f"alert: {now}\n" in rules


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"cannot read it \(No such file or directory\); give a file"):
        scenario_file.read(tmp_path / "none.yaml")


def test_files_may_end_in_yml(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(SOUND)

    (one,) = scenario_file.read(tmp_path)

    assert one.place == "a.yml:1"


@pytest.mark.needs_parts
@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        pytest.param(("", ""), 0, ["a.yaml:1: right: a", "    360s, gpuwarden: GpuwardenJobStalled of w"], id="right"),
        pytest.param(("due: 6m", "due: 7m"), 1, [
            "a.yaml:1: wrong: a",
            "    GpuwardenJobStalled acts on w at 360s, too early: due at 420s",
            "    360s, gpuwarden: GpuwardenJobStalled of w",
        ], id="wrong"),
        pytest.param(("due: 6m}", "due: 7m}\n  not_yet: c"), 0, ["a.yaml:1: wrong, marked not_yet: a"],
                     id="marked"),
    ],
)  # fmt: skip
def test_command_prints_alerts_and_faults(
    change: tuple[str, str], status: int, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    (tmp_path / "a.yaml").write_text(
        SOUND.replace("0s: loads, 4m: hangs", "0s: loads, 3m: steps, 4m: hangs").replace(*change)
    )

    code = judging.main([str(tmp_path / "a.yaml")])

    assert code == status
    assert capsys.readouterr().out.splitlines()[: len(said)] == said


@pytest.mark.needs_parts
def test_closed_stdout_is_ignored(tmp_path: Path) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    (tmp_path / "a.yaml").write_text(SOUND.replace("due: 6m", "due: 7m"))

    judged = run_with_closed_stdout("-m", "bench.corpus", str(tmp_path))
    table = run_with_closed_stdout(
        "-c", "from bench.figures import print_text; print_text('figures'); print_text('more of them')"
    )

    assert (judged.returncode, judged.stderr) == (1, b"")
    assert (table.returncode, table.stderr) == (0, b"")


def run_with_closed_stdout(*command: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a program whose stdout has no reader."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=CHECKOUT, stdout=write_end, stderr=subprocess.PIPE, timeout=120, check=False
        )
    finally:
        os.close(write_end)


def test_a_bad_file_is_reported_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(SOUND.replace("4m: hangs", "4m: hang"))

    code = judging.main([str(tmp_path)])

    assert code == 2
    assert capsys.readouterr().err.startswith("a.yaml:4: 4m: unknown activity 'hang'; use one of: loads")


@pytest.mark.parametrize("lines", page.EXAMPLES.values(), ids=list(page.EXAMPLES))
def test_examples_of_the_page_can_be_played(lines: tuple[str, ...], tmp_path: Path) -> None:
    if not any(each.startswith(("workers", "tenants", "servers")) for each in lines):
        lines = (*lines, "workers: {w: {0s: steps}}")
    (tmp_path / "a.yaml").write_text("\n  ".join(["- name: a", "why: b", "verdict: none", *lines]))

    (one,) = scenario_file.read(tmp_path)

    assert host.series(one, wanted={"gpuwarden_container_info"})


def test_the_page_has_many_examples() -> None:
    assert len(page.EXAMPLES) > 20
