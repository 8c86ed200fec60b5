"""`gpuwarden ledger export`: all data of every episode as JSON, and files that are replaced atomically."""

import json
import stat
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.cli.main import main
from gpuwarden.db.errors import DatabaseError
from remediator.commands import export
from remediator.commands.export import moment
from remediator.ledger import export_rows
from remediator.ledger.ledger import Ledger
from tests.remediator.builders import HOST, KEY, NOW, alert
from tests.remediator.ledger.test_ledger import opened
from tests.remediator.ledger.test_retention import fixed_episode


def exported(ledger_url: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["ledger", "--ledger", ledger_url, "export", *arguments]) == 0
    return capsys.readouterr().out


def exported_episodes(ledger_url: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in exported(ledger_url, capsys, *arguments).splitlines()]


def test_line_has_the_whole_episode(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixed_episode(ledger)
    opened(ledger, worker="w2")

    first, second = exported_episodes(ledger_url, capsys)

    assert (first["worker"], first["outcome"], first["closed_at"]) == ("w1", "fixed", NOW)
    assert first["alerts"] == [
        {
            "received_at": NOW, "host": HOST, "fingerprint": "f1", "firing": True, "labels": dict(alert().labels),
            "annotations": {"summary": "stalled"}, "starts_at": "2026-01-01T00:02:10Z", "message": None,
        }
    ]  # fmt: skip
    assert [(intent["kind"], intent["key"], intent["stage"]) for intent in first["intents"]] == [
        ("free", KEY, "done"),
        ("settle", "7/1", "done"),
    ]
    assert [(line["act"], line["step"], line["state"]) for line in first["journal"]][:2] == [
        ("saw", "alert", "firing"),
        ("ordered", "arm", None),
    ]
    assert (first["journal"][-1]["step"], first["journal"][-1]["state"]) == ("close", "fixed")
    assert "captures" not in first
    assert (second["worker"], second["outcome"], second["closed_at"]) == ("w2", None, None)


def test_captures_are_exported_on_request(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixed_episode(ledger)

    (episode,) = exported_episodes(ledger_url, capsys, "--captures")

    (capture,) = episode["captures"]
    assert capture == {"at": NOW, "host": HOST, "document": {"processes": [], "cut_short": None, "curves": []}}


def test_period_selects_episodes_open_in_it(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def workers(*arguments: str) -> list[str]:
        return [episode["worker"] for episode in exported_episodes(ledger_url, capsys, *arguments)]

    now = time.time()
    for n, age_s in enumerate((7200.0, 3600.0, 60.0)):
        fixed_episode(ledger, worker=f"w{n}", key=f"key {n}", settle_key=f"{n}/1", at=now - age_s)

    assert workers() == ["w0", "w1", "w2"]
    assert workers("--since", "90m") == ["w1", "w2"]
    assert workers("--until", "30m") == ["w0", "w1"]
    assert workers("--since", "90m", "--until", "30m") == ["w1"]
    a_local_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now - 1800))
    assert workers("--since", a_local_time) == ["w2"]


def test_empty_ledger_exports_nothing(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.reports.newest() == []

    assert exported(ledger_url, capsys) == ""


def test_file_is_replaced_atomically_and_readable_only_by_its_owner(
    ledger: Ledger, ledger_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    file = folder / "ledger.jsonl"
    file.write_text("old export\n")
    fixed_episode(ledger)

    assert main(["ledger", "--ledger", ledger_url, "export", "--output", str(file)]) == 0

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"1 episodes written to {file}\n")
    assert json.loads(file.read_text())["worker"] == "w1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in folder.iterdir()] == ["ledger.jsonl"]


def test_file_is_unchanged_if_the_ledger_fails_during_the_export(
    ledger: Ledger,
    ledger_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    file = folder / "ledger.jsonl"
    file.write_text("old export\n")
    for n in range(2):
        fixed_episode(ledger, worker=f"w{n}", key=f"key {n}", settle_key=f"{n}/1")
    monkeypatch.setattr(export_rows, "PAGE", 1)
    page, pages = export_rows.page, list[Any]()

    def fails_at_the_second(*arguments: Any, **named: Any) -> Any:
        if pages:
            raise DatabaseError("it went away")
        pages.append(page(*arguments, **named))
        return pages[0]

    monkeypatch.setattr(export_rows, "page", fails_at_the_second)

    assert main(["ledger", "--ledger", ledger_url, "export", "--output", str(file)]) == 1

    assert "it went away" in capsys.readouterr().err
    assert file.read_text() == "old export\n"
    assert [each.name for each in folder.iterdir()] == ["ledger.jsonl"]


def test_missing_folder_is_reported(
    ledger: Ledger, ledger_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed_episode(ledger)

    assert main(["ledger", "--ledger", ledger_url, "export", "--output", str(tmp_path / "none" / "x")]) == 1

    assert "cannot be written (No such file or directory): choose another --output" in capsys.readouterr().err


def test_long_export_prints_its_progress(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        fixed_episode(ledger, worker=f"w{n}", key=f"key {n}", settle_key=f"{n}/1")
    monkeypatch.setattr(export, "PROGRESS_S", 0.0)

    assert main(["ledger", "--ledger", ledger_url, "export"]) == 0

    captured = capsys.readouterr()
    assert captured.err == "0 episodes so far\n1 episodes so far\n2 episodes so far\n"
    assert len(captured.out.splitlines()) == 3


def test_memory_does_not_grow_with_the_ledger(ledger: Ledger) -> None:
    def peak() -> int:
        tracemalloc.start()
        count = sum(1 for _ in ledger.reports.export())
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == len(ledger.reports.newest(last=1000))
        return found

    for n in range(40):
        fixed_episode(ledger, worker=f"w{n}", key=f"key {n}", settle_key=f"{n}/1")
    next(ledger.reports.export())
    short = peak()

    for n in range(40, 160):
        fixed_episode(ledger, worker=f"w{n}", key=f"key {n}", settle_key=f"{n}/1")

    assert peak() < 1.5 * short


@pytest.mark.parametrize("text", ["", "yesterday", "7", "2026-13-01"])
def test_invalid_time_is_refused(ledger_url: str, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ledger", "--ledger", ledger_url, "export", "--since", text])

    assert ended.value.code == 2
    assert "use a duration (12h, 7d) or a time (2026-01-31T08:00)" in capsys.readouterr().err


def test_date_means_local_midnight() -> None:
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment("2026-01-31"))) == "2026-01-31 00:00:00"
