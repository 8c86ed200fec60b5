"""Scenario files: their defaults, what cannot be understood, and the page that describes them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bench.corpus import __main__ as judging
from bench.corpus import host, scenario_file
from bench.corpus.old_names import OLD_NAMES
from bench.corpus.scenario import REMEDIES
from bench.corpus.scenario_file import ScenarioError
from gpuwarden.job import Condition
from testbed.check_release import CHECKOUT
from tests.bench.corpus.scenes import PAGE, without_promtool

SOUND: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 4m: hangs}
  verdict: {condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}
"""


def test_what_is_not_said_has_its_default(tmp_path: Path) -> None:
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
        ("- name: a", "- nam: a", "a.yaml:1: name: a sentence is wanted, and is missing"),
        ("  why: b\n", "", "a.yaml:1: why: a sentence is wanted"),
        ("  why: b", "  why: b\n  wy: c", "a.yaml:3: wy: is nothing that is known here; wanted is one of name, why"),
        ("4m: hangs", "4m: hang", "a.yaml:4: 4m: nobody knows how one 'hang'; known are: loads, maps"),
        ("4m: hangs", "4m: {does: hangs, cpu: 1}", "a.yaml:4: 4m: cpu is no part of what is done; wanted is one"),
        ("4m: hangs", "4m: {does: hangs, process: gone}", "process: 'gone' will not do (it is none of: works, waits"),
        ("4m: hangs", "4m: {does: hangs, phase: train}", "phase: 'train' will not do (it is none of: load, step"),
        ("4m: hangs", "4m: {does: hangs, step_every_s: 0.5}", "0.5 will not do (a whole number is wanted, 1 or more)"),
        ("4m: hangs", "4m: {does: hangs, cpu_cores: all}", "cpu_cores: 'all' will not do (a number is wanted)"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: -1}", "io_mib_per_s: -1 will not do (it is 0 or more)"),
        ("0s: loads", "gpus: 0, 0s: loads", "gpus: 0 will not do (a list of their numbers is wanted, such as [0, 1]"),
        ("0s: loads", "ran_s: 20m, 0s: loads", "ran_s: '20m' will not do (a whole number is wanted, 0 or more)"),
        ("0s: loads", "container: 1, 0s: loads", "container: 1 will not do (a name is wanted)"),
        ("4m: hangs", "4m: {does: hangs, gpu_ratio: 95}", "a.yaml:4: 4m: gpu_ratio: 95 will not do (it is a ratio"),
        ("4m: hangs", "4m: {does: hangs, gpu_ratio: [0, 1]}", "a.yaml:4: w at 240s: gpu_ratio has not one figure"),
        ("4m: hangs", "4m: {does: hangs, heartbeat: 1}", "heartbeat: 1 will not do (true or false is wanted)"),
        ("4m: hangs", "0m: hangs", "a.yaml:4: 0m: is not later than the one before; put the times in order"),
        ("0s: loads", "1s: loads", "a.yaml:4: w does nothing at 0s; say what"),
        ("0s: loads", "silence_s: 9, 0s: loads", "silence_s: is nothing that is known here; wanted is a time"),
        ("0s: loads", "job_class: gpus, 0s: loads", "a.yaml:4: job_class: 'gpus' will not do (it is none of:"),
        ("    w: {0s: loads, 4m: hangs}", "    w: loads", "a.yaml:4: `key: value` pairs are wanted here"),
        ("    w: {0s: loads, 4m: hangs}", "    w:", "are wanted here, and there is nothing"),
        ("4m: hangs", "240: hangs", "run, works_in, asked_every_s (a time has a unit: 240s, or 240m)"),
        ("verdict: {condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "verdict:",
         "a.yaml:5: verdict: there is none; write none, or {condition"),
        ("  workers:\n    w: {0s: loads, 4m: hangs}\n", "", "a.yaml:1: 'a' has nobody in it; give it workers"),
        ("  verdict:", "  servers: {w: {0s: answers}}\n  verdict:", "a.yaml:1: two are called 'w'; give each a name"),
        ("  verdict:", "  gpus: {0: {1m: gone}}\n  verdict:", "a.yaml:5: 1m: 'gone' is none of: works, lost"),
        ("  verdict:", "  gpus: {one: {1m: lost}}\n  verdict:", "a.yaml:5: one: is no number of a GPU; write 0, 1"),
        ("  verdict:", "  hosts: {a: {1: asleep}}\n  verdict:", "a.yaml:5: 1: is nothing that is known here"),
        ("  verdict:", "  scrape: 15\n  verdict:", "a.yaml:5: scrape: 15 is no time; write it like 90s, 4m or 1h30m"),
        ("  verdict:", "  scrape: 0s\n  verdict:", "a.yaml:1: scrape and evaluate are 1s or more"),
        ("  verdict:", "  plays: 5m\n  verdict:", "a.yaml:5: plays: it ends before all that happens has, which"),
        ("verdict: {condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "plays: 9m",
         "a.yaml:1: no verdict; write `verdict: none`, or what"),
        ("{condition: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "never",
         "a.yaml:5: verdict: 'never'"),
        ("condition: stall", "condition: stalled", "a.yaml:5: condition: 'stalled' is none of: stall"),
        ("restart_worker", "restart", "a.yaml:5: remedy: 'restart' is none of: restart_worker"),
        ("of: w", "of: v", "a.yaml:5: of: no worker is called 'v'; wanted is one of: w"),
        ("of: w", "of: a", "a.yaml:5: of: no worker is called 'a'; wanted is one of: w"),
        ("restart_worker", "hold_lost_host", "a.yaml:5: of: no host is called 'w'; wanted is one of: a"),
        ("restart_worker", "restart_container", "a.yaml:5: of: no server is called 'w'; wanted is one of: none"),
        ("restart_worker", "recycle_container", "a.yaml:5: of: no tenant is called 'w'; wanted is one of: none"),
        ("of: w, ", "", "a.yaml:5: of: no worker is named; wanted is one of: w"),
        ("0s: loads", "run: 2020-13-45, 0s: loads", "a.yaml:4: run: what stands there cannot be read (month must"),
        ("0s: loads", "run: !r r, 0s: loads", "a.yaml:4: run: what stands there cannot be read (could not determine"),
        ("  why: b", "  why: \x02", "a.yaml:1: this is no YAML (control characters are not allowed)"),
        ("4m: hangs", "4m: {does: hangs, unread: [[ram]]}", "4m: unread: [['ram']] will not do (wanted is any of: ram"),
        ("  verdict:", "  gpus: {0: {1m: {throttled: {a: 1}}}}\n  verdict:", "{'a': 1} will not do (wanted is any of"),
        ("of: w", "of: [w, v]", "a.yaml:5: of: no worker is called 'v'; wanted is one of: w"),
        ("of: w", "of: []", "a.yaml:5: of: no worker is named; wanted is one of: w"),
        ("of: w", "of: [w, w]", "a.yaml:5: of: w has a verdict already; keep the first"),
        ("  verdict:", "  told: {alert: A, of: w, due: 6m}\n  verdict:", "a.yaml:5: alert: 'A' is none of: Gpuwarden"),
        ("  verdict:", "  told: {alert: GpuwardenSharedJobStalled, of: a, due: 6m}\n  verdict:",
         "a.yaml:5: of: no worker is called 'a'; wanted is one of: w"),
        ("  verdict:", "  told: {alert: GpuwardenSharedJobStalled, of: w, since: 6m}\n  verdict:",
         "a.yaml:5: due: None is no time"),
        ("0s: loads", "works_in: thread, 0s: loads", "works_in: 'thread' will not do (it is none of: child, orphan)"),
        ("due: 6m", "due: 6m, then: lock", "a.yaml:5: then: 'lock' will not do; wanted is, of who is to be wrangled"),
        ("due: 6m", "due: 3m", "a.yaml:5: due: it comes before what went wrong"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: 1, io_mib_per_s: 2}",
         "a.yaml:4: 'io_mib_per_s' stands here twice; keep one"),
        ("4m: hangs", "4m: hangs, 4m: steps", "a.yaml:4: '4m' stands here twice; keep one"),
        ("4m: hangs", "4m: {does: hangs,\n      does: steps}", "a.yaml:5: 'does' stands here twice; keep one"),
        ("of: w,", "of: w, of: w,", "a.yaml:5: 'of' stands here twice; keep one"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: {a: 1, a: 2}}", "a.yaml:4: 'a' stands here twice; keep one"),
        ("4m: hangs", "gpus: [{a: 1, a: 2}]", "a.yaml:4: 'a' stands here twice; keep one"),
        ("  verdict:", "  gpus: {0: {1m: lost}, 0: {2m: lost}}\n  verdict:", "a.yaml:5: '0' stands here twice"),
        ("  verdict:", "  gpus: {0: {1m: lost}, 00: {2m: lost}}\n  verdict:", "a.yaml:5: 00: is no number of a GPU"),
        ("0s: loads", "gpus: [0, 0], 0s: loads", "gpus: [0, 0] will not do (one is there twice)"),
        ("  why: b", "  why: b\n  why: c", "a.yaml:3: 'why' stands here twice; keep one"),
        ("  why: b", "  why: [b", "a.yaml:3: this is no YAML"),
        ("  why: b", "\twhy: b", "(found a tab character that violates indentation); indent by spaces"),
        ("  why: b", "  why: b: c", "this is no YAML (mapping values are not allowed in this context); put a sentence"),
        ("  why: b", "   why: b", "indent the keys of one scenario alike"),
        ("0s: loads", "gpus: [1:0:0], 0s: loads", "gpus: ['1:0:0'] will not do (a list of their numbers is wanted"),
        ("  verdict:", "  gpus: {b/0: {1m: lost}}\n  verdict:", "b/0: is no number of a GPU; write 0, 1 and so on"),
        ("  verdict:", "  gpus: {1:0: {1m: lost}}\n  verdict:", "1m: 'lost' is none of: works, vanished, unlisted"),
        ("  verdict:", "  gpus: {0: {1m: {is: lost}}}\n  verdict:", "1m: is is no part of how it is; wanted is one"),
        ("  verdict:", "  gpus: {0: {1m: {xid: all}}}\n  verdict:", "1m: xid: 'all' will not do (a whole number"),
        ("  verdict:", "  gpus: {0: {1m: {throttled: heat}}}\n  verdict:", "'heat' will not do (wanted is any of"),
        ("  verdict:", "  told: {alert: GpuwardenGpuXid, of: 0, due: 6m}\n  verdict:",
         "a.yaml:5: of: no GPU is called '0'; wanted is one of: a/0"),
        ("  verdict:", "  told: [&t {alert: GpuwardenGpuXid, of: a/0, due: 6m}, *t]\n  verdict:",
         "a.yaml:5: of: GpuwardenGpuXid tells of a/0 already; keep the first"),
        (SOUND, "name: a\n", "a.yaml:1: a list of scenarios is wanted; begin each with `- name:`"),
        (SOUND, "# nothing yet\n", "a.yaml:1: there is no scenario in it; begin each with `- name:`"),
        (SOUND, "[]", "no scenario; write one in a file *.yaml there"),
        (SOUND, SOUND + SOUND, "a.yaml:6: a.yaml:1 has the same name; say in it what is different"),
    ],
)  # fmt: skip
def test_a_bad_scenario_says_where_and_what_to_write(old: str, new: str, complaint: str, tmp_path: Path) -> None:
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
  told: {alert: GpuwardenJobSlow, of: w, due: 6m}
"""
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
def test_the_new_name_of_an_old_one_is_a_name_of_today(now: str) -> None:
    rules = "".join(path.read_text() for path in (Path(__file__).parents[3] / "alerts").glob("*.yaml"))
    known = {"timeout_s", "gpuwarden.restart-after-s", "condition", *Condition, *REMEDIES}

    assert now in known or f"alert: {now}\n" in rules


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"cannot be read \(No such file or directory\); name a file of scenarios"):
        scenario_file.read(tmp_path / "none.yaml")


def test_a_file_of_a_folder_may_end_in_yml(tmp_path: Path) -> None:
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
            "    GpuwardenJobStalled acts on w at 360s, which is due at 420s and not before",
            "    360s, gpuwarden: GpuwardenJobStalled of w",
        ], id="wrong"),
        pytest.param(("due: 6m}", "due: 7m}\n  not_yet: c"), 0, ["a.yaml:1: wrong, and is marked not_yet: a"],
                     id="marked"),
    ],
)  # fmt: skip
def test_of_one_file_it_is_said_who_fired_when_and_what_of_that_is_wrong(
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
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    (tmp_path / "a.yaml").write_text(SOUND.replace("due: 6m", "due: 7m"))

    judged = unread("-m", "bench.corpus", str(tmp_path))
    table = unread("-c", "from bench.figures import print_text; print_text('figures'); print_text('more of them')")

    assert (judged.returncode, judged.stderr) == (1, b""), "it is wrong, as it is to who reads on"
    assert (table.returncode, table.stderr) == (0, b"")


def unread(*command: str) -> "subprocess.CompletedProcess[bytes]":
    """What becomes of a program whose reader has gone."""
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
    assert capsys.readouterr().err.startswith("a.yaml:4: 4m: nobody knows how one 'hang'; known are: loads")


SAID: Final = re.findall(
    r"^\| ([^|]+) \| (`(?:workers|tenants|servers|gpus|hosts|prometheus): .*`) \|$", PAGE, re.MULTILINE
)
"""What the page says happens, and how that is written."""


@pytest.mark.parametrize("written", [written for _, written in SAID], ids=[happens for happens, _ in SAID])
def test_what_the_page_says_how_to_write_is_understood_and_can_be_played(written: str, tmp_path: Path) -> None:
    lines = re.findall("`([^`]+)`", written)
    if not any(each.startswith(("workers", "tenants", "servers")) for each in lines):
        lines.append("workers: {w: {0s: steps}}")
    (tmp_path / "a.yaml").write_text("\n  ".join(["- name: a", "why: b", "verdict: none", *lines]))

    (one,) = scenario_file.read(tmp_path)

    assert host.series(one, wanted={"gpuwarden_container_info"})


def test_the_page_says_how_to_write_many_things() -> None:
    assert len(SAID) > 20
