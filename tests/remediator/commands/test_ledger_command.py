"""`gpuwarden ledger list|show|refused|capture`: text and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.cli.main import main
from gpuwarden.format import format_time
from remediator.alert import Refusal
from remediator.ledger.captures import Capture
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome, Wait
from remediator.reasons import Reason
from tests.remediator.builders import HOST, NOW, alert, missing


def filled(ledger: Ledger, **labels: str) -> None:
    ledger.inbox.accept([alert(**labels)], [], now=NOW)  # type: ignore[arg-type]
    ledger.inbox.take_new(HOST, now=NOW)
    ledger.journal.record(1, "did", "stop", "took 1.2 s", now=NOW + 3.25)
    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "all is well", now=NOW + 4)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["ledger", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_empty_ledger_is_reported(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.reports.newest() == []

    assert main(["ledger", "--ledger", ledger_url, "list"]) == 0

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no episodes yet\n")


def test_list_prints_one_line_per_episode(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)
    ledger.inbox.accept([alert("b", worker="w2", job_id=None)], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)

    lines = said(capsys, "--ledger", ledger_url, "list")

    assert [line.partition("  ")[2] for line in lines] == [
        f"episode 1: stall of w1 on box1, job 7 attempt 1: {Outcome.FIXED} (all is well)",
        "episode 2: stall of w2 on box1, no job: open",
    ]
    assert len(said(capsys, "--ledger", ledger_url, "list", "--last", "1")) == 1


def test_show_prints_all_entries_and_times(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)

    assert said(capsys, "--ledger", ledger_url, "show", "1") == [
        f"episode 1: stall of w1 on box1, job 7 attempt 1: {Outcome.FIXED} (all is well)",
        "     +0.0 s  saw      alert: firing      stalled",
        "     +3.2 s  did      stop               took 1.2 s",
        f"     +4.0 s  decided  {f'close: {Outcome.FIXED}':<18} all is well",
    ]


def test_entry_of_another_host_names_it(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)
    other = Ledger.open(ledger_url, host="box2")
    other.journal.record(1, "did", "requeue", "stall: retry 1 of 3", now=NOW + 5)
    other.close()

    output = said(capsys, "--ledger", ledger_url, "show", "1")

    assert output[2].endswith("took 1.2 s")
    assert "(box1)" not in "".join(output)
    assert output[-1] == "     +5.0 s  did      requeue            (box2) stall: retry 1 of 3"


def test_json_is_one_object_per_line(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)

    (listed,) = [json.loads(line) for line in said(capsys, "--ledger", ledger_url, "list", "--json")]
    (shown,) = [json.loads(line) for line in said(capsys, "--ledger", ledger_url, "show", "1", "--json")]

    assert (listed["episode_id"], listed["outcome"], listed["opened_at"], listed["entries"]) == (1, "fixed", NOW, [])
    assert shown["entries"][1] == {
        "at": NOW + 3.25,
        "act": "did",
        "step": "stop",
        "message": "took 1.2 s",
        "host": HOST,
        "state": None,
        "reason": None,
    }


def test_refused_alerts_are_listed_with_a_reason(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Refusal(reason=Reason.NO_HOST, message="no label `host`", fingerprint="f", labels={"worker": "w1"})
    ledger.inbox.accept([], [refusal], now=NOW)

    (line,) = said(capsys, "--ledger", ledger_url, "refused")
    (found,) = said(capsys, "--ledger", ledger_url, "refused", "--json")

    assert missing(line, " no_host ", "no label `host`") == []
    assert json.loads(found) == {
        "at": NOW, "reason": "no_host", "message": "no label `host`", "labels": {"worker": "w1"},
    }  # fmt: skip


def test_unknown_episode_exits_1(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)

    assert main(["ledger", "--ledger", ledger_url, "show", "99"]) == 1

    assert missing(capsys.readouterr().err, "gpuwarden ledger: ", "episode 99", "`gpuwarden ledger list`") == []


def test_acknowledged_episode_is_closed_with_name_and_reason(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.commands.ledger.operator_name", lambda: "ann@box1")
    ledger.inbox.accept([alert()], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    ledger.journal.wait(1, Wait(reason=Reason.GIVEN_UP, message="c1 does not run"), now=NOW)

    (line,) = said(capsys, "--ledger", ledger_url, "acknowledge", "1", "--reason", "its rack is off")

    assert line == "episode 1 of w1 on box1 acknowledged by ann@box1: its rack is off"
    found = ledger.reports.get(1)
    assert found is not None
    assert (found.outcome, found.reason) == ("partly_fixed", "acknowledged")
    assert found.message == "acknowledged by ann@box1: its rack is off"


@pytest.mark.parametrize(
    ("wait", "says"), [(Reason.PAUSED, "but paused"), (None, "but no wait")], ids=["another wait", "no wait"]
)
def test_only_a_restart_that_was_given_up_is_acknowledged(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str], wait: Reason | None, says: str
) -> None:
    ledger.inbox.accept([alert()], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    if wait is not None:
        ledger.journal.wait(1, Wait(reason=wait, message="held"), now=NOW)

    assert main(["ledger", "--ledger", ledger_url, "acknowledge", "1"]) == 1

    assert capsys.readouterr().err.endswith(f"episode 1 has no restart that was given up, {says}\n")
    assert len(ledger.episodes.list_open()) == 1


def test_closed_episode_is_not_acknowledged(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(ledger)

    assert main(["ledger", "--ledger", ledger_url, "acknowledge", "1"]) == 1

    assert capsys.readouterr().err.endswith("episode 1 is closed already: fixed\n")


def test_ledger_is_read_from_the_environment(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(ledger)
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_LEDGER", ledger_url)

    assert len(said(capsys, "list")) == 1


def test_missing_ledger_is_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--ledger", f"sqlite:///{tmp_path}/ledgr.db", "list"]) == 1

    assert missing(capsys.readouterr().err, f"{tmp_path}/ledgr.db") == []
    assert list(tmp_path.iterdir()) == []


def test_invalid_url_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--ledger", "ledger.db", "list"]) == 1

    assert capsys.readouterr().err == (
        "gpuwarden ledger: invalid database URL 'ledger.db': "
        "use sqlite:////absolute/path.db or postgresql://user@server/database\n"
    )


def test_labels_cannot_steer_a_terminal(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "w1\x1b[2J\n  +9.9 s  did  forged\r\x07\u202e"
    filled(ledger, worker=hostile, summary="é\x1b]0;owned\x07\nforged")
    ledger.journal.record(1, "decided", f"lock {hostile}", "", now=NOW)

    for arguments in (["list"], ["show", "1"]):
        lines = said(capsys, "--ledger", ledger_url, *arguments)

        assert all(line.isprintable() for line in lines)
        assert len(lines) == (1 if arguments == ["list"] else 5)
    assert "é\\x1b]0;owned\\x07\\nforged" in lines[1]


# --- captures


def captured(ledger: Ledger, *, armed: bool = True, **changed: Any) -> None:
    """An episode with a capture 3.2 s after it opened."""
    ledger.inbox.accept([alert()], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    (episode,) = ledger.episodes.list_open(HOST)
    frames = [{"function": "forward", "file": "/jobs/train.py", "line": 12}]
    stack = {"name": "MainThread", "owns_gil": True, "frames": frames, "frames_cut": 3}
    waits = {
        "tid": 4001, "name": "python3", "state": "S", "cpu_ticks": 812, "wchan": "futex_wait_queue",
        "stack": ["futex_wait_queue+0x1", "do_futex+0x2"], "python": stack,
    }  # fmt: skip
    runs = {"tid": 4002, "name": "heart", "state": "R", "cpu_ticks": 1, "wchan": None, "stack": None}
    document: dict[str, Any] = {
        "armed": armed, "took_s": 0.25, "cut_short": None, "left_out_bytes": 0, "curves": [],
        "facts": {"alive": True, "step_beat_age_s": 130.0, "phase": "step", "step": 5, "gpu_idle_s": None},
        "processes": [{"pid": 4001, "name": "python3", "state": "S", "threads": 2, "seen": [waits, runs]}],
        "logs": [{"source": "the container's log", "lines": ["step 4", "step 5"]}],
        "notes": ["no Python stacks of process 9: it has ended"],
    }  # fmt: skip
    kept = Capture(armed=armed, took_s=0.25, document=document | changed)
    assert ledger.captures.save(episode, kept, now=NOW + 3.25)


def test_show_names_waits_and_frames(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    captured(ledger)
    main = "thread 4001 MainThread, sleeping, in futex_wait_queue, 812 ticks of CPU"

    assert said(capsys, "--ledger", ledger_url, "show", "1")[2:] == [
        "     +3.2 s  saw      capture            processes: 1, threads: 2, Python stacks: 1, curves: 0; took 0.2 s",
        "     +3.2 s  captured before the stop:",
        f"    4001 python3: {main}, holds the GIL: forward (train.py:12)",
        "    4001 python3: thread 4002 heart, running, no wait known, 1 ticks of CPU",
        "    no Python stacks of process 9: it has ended",
    ]


def test_show_is_short_for_many_threads(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    thread = {"tid": 1, "name": "t", "state": "S", "cpu_ticks": 0, "wchan": None, "stack": None}
    process = {"pid": 1, "name": "p", "state": "S", "threads": 40, "seen": [thread] * 40}
    captured(ledger, armed=False, processes=[process], notes=[])

    output = said(capsys, "--ledger", ledger_url, "show", "1")[3:]

    assert missing(output[0], "dry run") == []
    assert missing(output[-1], "24 more threads", "`gpuwarden ledger capture`") == []
    assert len(output) == 18


def test_capture_prints_everything(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    captured(ledger, cut_short="cut short after 5 s", left_out_bytes=7)

    heading, *output = said(capsys, "--ledger", ledger_url, "capture", "1")

    assert heading.startswith("captured before the stop at 20")
    assert heading.endswith(f" on {HOST}, in 0.2 s")
    assert output == [
        "  cut short after 5 s",
        "  no Python stacks of process 9: it has ended",
        "  7 bytes left out (--capture-max-bytes)",
        "  exporter: alive True, step_beat_age_s 130.0, phase step, step 5",
        "  process 4001 python3, sleeping, 2 threads",
        "    thread 4001 MainThread, sleeping, in futex_wait_queue, 812 ticks of CPU, holds the GIL",
        "      kernel: futex_wait_queue+0x1 < do_futex+0x2",
        "      forward (/jobs/train.py:12)",
        "      3 more frames",
        "    thread 4002 heart, running, no wait known, 1 ticks of CPU",
        "  last lines of the container's log:",
        "    step 4",
        "    step 5",
    ]


def drawn(metric: str, *values: float | None, gpu: str | None = None) -> dict[str, Any]:
    """One curve that ends when the episode opened."""
    at = NOW - 60 * (len(values) - 1)
    return {"metric": metric, "gpu": gpu, "source": "http://a", "at": at, "step_s": 60, "values": list(values)}


CURVES = [
    drawn("gpuwarden_job_step_beat_age_seconds", 0.25, 1.0, None, 61.0, 121.0),
    drawn("gpuwarden_container_gpu_utilization_ratio", 0.93, 0.5, None, 0.0, 0.0, gpu="GPU-0"),
    drawn("gpuwarden_container_gpu_memory_bytes", 0.0, 0.0, None, 0.0, None, gpu="GPU-0"),
    drawn("gpuwarden_container_memory_bytes", 2.0**30, 2.0**30, None, 2.0**30, 2.0**30),
    drawn("of_a_later_version", -1.0, None, None, None, None),
]
"""A worker without step beats, with an idle GPU and constant RAM. One sample is missing."""


def test_curves_are_lines_with_gaps(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    captured(ledger, curves=CURVES, notes=[], processes=[])

    output = said(capsys, "--ledger", ledger_url, "show", "1")
    lines = [
        "  beat age            |▁▁ ▅█| 0.2 s to 121.0 s, last 121.0 s",
        "  GPU use of GPU-0    |█▅ ▁▁| 0% to 93%, last 0%",
        "  GPU memory of GPU-0 |▁▁ ▁ | 0 MiB to 0 MiB, last unknown",
        "  RAM                 |██ ██| 1024 MiB to 1024 MiB, last 1024 MiB",
        "  of_a_later_version  |▁    | -1.0 s to -1.0 s, last unknown",
    ]
    assert output[2].endswith("processes: 0, threads: 0, Python stacks: 0, curves: 5; took 0.2 s")
    assert output[4:] == ["    -240 s to +0 s, step 60 s:", *(f"    {line}" for line in lines)]

    full = said(capsys, "--ledger", ledger_url, "capture", "1")
    heading = f"  {format_time(NOW - 240)} to {format_time(NOW)}, step 60 s:"
    assert full[2:8] == [heading, *(f"  {line}" for line in lines)]


def test_dense_curve_shows_its_maxima(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = [None, *(8.0 if number == 60 else 1.0 for number in range(120))]
    captured(ledger, curves=[drawn("gpuwarden_job_step_beat_age_seconds", *values)])

    short, full = (
        next(line.split("|")[1] for line in said(capsys, "--ledger", ledger_url, what, "1") if "beat age" in line)
        for what in ("show", "capture")
    )

    assert (len(short), len(full)) == (60, 121)
    assert (full[0], full[61], full.count("█")) == (" ", "█", 1)
    assert (short.count("█"), short.count("▂"), short[30]) == (1, 59, "█")


def test_capture_as_json_is_the_saved_document(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(ledger)

    (line,) = said(capsys, "--ledger", ledger_url, "capture", "1", "--json")

    output = json.loads(line)
    assert (output["at"], output["host"]) == (NOW + 3.25, HOST)
    assert output["document"] == ledger.captures.of_episode(1)[0].document


def test_episode_without_a_capture_is_reported(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(ledger)

    assert main(["ledger", "--ledger", ledger_url, "capture", "1"]) == 0

    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "no capture of episode 1\n")
    assert main(["ledger", "--ledger", ledger_url, "capture", "9"]) == 1


def test_names_of_processes_cannot_steer_a_terminal(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "x\x1b[2J\nforged\r\x07\u202e"
    frames = [{"function": hostile, "file": f"/{hostile}/{hostile}", "line": 1}]
    stack = {"name": hostile, "owns_gil": False, "frames": frames, "frames_cut": 0}
    thread = {
        "tid": 1, "name": hostile, "state": "S", "cpu_ticks": 0, "wchan": hostile, "stack": [hostile],
        "python": stack,
    }  # fmt: skip
    captured(
        ledger,
        processes=[{"pid": 1, "name": hostile, "state": "S", "threads": 1, "seen": [thread]}],
        logs=[{"source": hostile, "lines": [hostile]}],
        notes=[hostile],
        facts={"phase": hostile},
        cut_short=hostile,
        curves=[drawn(hostile, 1.0, gpu=hostile)],
    )

    for what, count in (("show", 9), ("capture", 12)):
        lines = said(capsys, "--ledger", ledger_url, what, "1")

        assert all(line.isprintable() for line in lines)
        assert len(lines) == count
        assert "\\x1b[2J\\nforged" in "".join(lines)
