"""`gpuwarden ledger list|show|refused`, as a person and as a program read it."""

import json
from pathlib import Path

import pytest

from gpuwarden.cli import main
from remediator.alert import Refusal
from remediator.ledger import Ledger
from remediator.plan import Outcome
from tests.remediator.builders import HOST, NOW, alert


def filled(ledger: Ledger, **labels: str) -> None:
    ledger.accept([alert(**labels)], [], now=NOW)  # type: ignore[arg-type]
    ledger.take_new(HOST, now=NOW)
    ledger.record(1, "did", "stop", "took 1.2 s", now=NOW + 3.25)
    ledger.close_episode(1, Outcome.MENDED, "all is well", now=NOW + 4)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["ledger", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_an_empty_ledger_says_so(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.stories() == []

    assert main(["ledger", "--ledger", ledger_url, "list"]) == 0

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no episode yet\n")


def test_list_shows_an_episode_a_line(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)
    ledger.accept([alert("b", worker="w2", job_id=None)], [], now=NOW)
    ledger.take_new(HOST, now=NOW)

    lines = said(capsys, "--ledger", ledger_url, "list")

    assert [line.partition("  ")[2] for line in lines] == [
        "episode 1: stall of w1 on box1, job 7 attempt 1: mended (all is well)",
        "episode 2: stall of w2 on box1, no job: open",
    ]
    assert len(said(capsys, "--ledger", ledger_url, "list", "--last", "1")) == 1


def test_show_tells_the_whole_story_with_its_times(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(ledger)

    assert said(capsys, "--ledger", ledger_url, "show", "1") == [
        "episode 1: stall of w1 on box1, job 7 attempt 1: mended (all is well)",
        "     +0.0 s  saw      alert firing       wedged",
        "     +3.2 s  did      stop               took 1.2 s",
        "     +4.0 s  decided  close: mended      all is well",
    ]


def test_what_another_host_wrote_names_that_host(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(ledger)
    other = Ledger.open(ledger_url, host="box2")
    other.record(1, "did", "requeue", "stall: retry 1 of 3", now=NOW + 5)
    other.close()

    told = said(capsys, "--ledger", ledger_url, "show", "1")

    assert told[2].endswith("took 1.2 s")
    assert "(box1)" not in "".join(told)
    assert told[-1] == "     +5.0 s  did      requeue            (box2) stall: retry 1 of 3"


def test_json_is_one_object_a_line(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger)

    (listed,) = [json.loads(line) for line in said(capsys, "--ledger", ledger_url, "list", "--json")]
    (shown,) = [json.loads(line) for line in said(capsys, "--ledger", ledger_url, "show", "1", "--json")]

    assert (listed["episode_id"], listed["outcome"], listed["opened_at"], listed["entries"]) == (1, "mended", NOW, [])
    assert shown["entries"][1] == {
        "at": NOW + 3.25,
        "act": "did",
        "step": "stop",
        "because": "took 1.2 s",
        "host": HOST,
    }


def test_refused_alerts_are_listed_with_why(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Refusal(reason="no_host", because="it names no host", fingerprint="f", labels={"worker": "w1"})
    ledger.accept([], [refusal], now=NOW)

    (line,) = said(capsys, "--ledger", ledger_url, "refused")
    (found,) = said(capsys, "--ledger", ledger_url, "refused", "--json")

    assert line.endswith("  no_host        it names no host")
    assert json.loads(found) == {
        "at": NOW, "reason": "no_host", "because": "it names no host", "labels": {"worker": "w1"},
    }  # fmt: skip


def test_an_unknown_episode_is_one_line_and_1(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(ledger)

    assert main(["ledger", "--ledger", ledger_url, "show", "99"]) == 1

    said_of_it = capsys.readouterr().err
    assert said_of_it == "gpuwarden ledger: the ledger has no episode 99: `gpuwarden ledger list` names them\n"


def test_the_ledger_may_come_from_the_environment(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(ledger)
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_LEDGER", ledger_url)

    assert len(said(capsys, "list")) == 1


def test_a_mistyped_ledger_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--ledger", f"sqlite:///{tmp_path}/ledgr.db", "list"]) == 1

    assert "there is no ledger at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_url_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--ledger", "ledger.db", "list"]) == 1

    assert capsys.readouterr().err == (
        "gpuwarden ledger: 'ledger.db' is no database URL: "
        "sqlite:////absolute/path.db or postgresql://user@server/database is one\n"
    )


def test_nothing_that_a_label_said_steers_a_terminal_or_forges_a_line(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "w1\x1b[2J\n  +9.9 s  did  forged\r\x07\u202e"
    filled(ledger, worker=hostile, summary="é\x1b]0;owned\x07\nforged")

    for arguments in (["list"], ["show", "1"]):
        lines = said(capsys, "--ledger", ledger_url, *arguments)

        assert all(line.isprintable() for line in lines)
        assert len(lines) == (1 if arguments == ["list"] else 4)
    assert "é\\x1b]0;owned\\x07\\nforged" in lines[1]
