"""`gpuwarden ledger summary`: counts of a period as text and JSON."""

import json
import time

import pytest

from gpuwarden.cli.main import main
from remediator.commands import summary
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome, Wait
from remediator.reasons import Reason
from tests.remediator.builders import HOST, NOW, alert

DAY = 86400.0

pytestmark = pytest.mark.both_databases


def filled(ledger: Ledger, *, now: float = NOW) -> None:
    """Four episodes: held by a dry run, fixed, held by a cool-down, and one of another host."""
    alerts = [alert(worker, worker=worker, summary="s\x1b[2J") for worker in ("w1", "w2", "w3")]
    ledger.inbox.accept([*alerts, alert("w9", worker="w9", host="box2")], [], now=now)
    ledger.inbox.take_new(HOST, now=now)
    ledger.inbox.take_new("box2", now=now)
    ledger.journal.record_dry_run(1, "would stop c1: silent 130 s", now=now + 1)
    ledger.journal.wait(1, Wait(reason=Reason.DRY_RUN, message="dry run"), now=now + 1)
    ledger.journal.record(2, "did", "stop", "took 1 s", now=now + 2)
    ledger.journal.record(2, "failed", "start", "no", now=now + 3)
    ledger.journal.record(2, "did", "start", "took 1 s", now=now + 4)
    ledger.episodes.close(2, Outcome.FIXED, Reason.DONE, "all is well", now=now + 5)
    ledger.journal.wait(3, Wait(reason=Reason.COOLDOWN, message="freed 12 s ago"), now=now + 6)


def of(ledger: Ledger, *, since: float, host: str | None = None) -> summary.Summary:
    return summary.summarize(ledger.reports.activity_since(since, host=host), since=since, now=since + DAY)


def test_summary_counts_actions_and_lists_dry_run_actions(ledger: Ledger) -> None:
    filled(ledger)

    found = of(ledger, since=NOW - 10, host=HOST)

    assert (found.episodes, found.outcomes, found.did, found.failed, found.waiting) == (
        3,
        {"fixed": 1},
        {"stop": 1, "start": 1},
        {"start": 1},
        {"dry_run": 1, "cooldown": 1},
    )
    (would,) = found.would
    assert (would.episode_id, would.worker, would.message, would.outcome) == (
        1,
        "w1",
        "would stop c1: silent 130 s",
        None,
    )
    assert of(ledger, since=NOW - 10).episodes == 4


def test_earlier_closed_episode_is_left_out_and_open_dry_run_repeated(ledger: Ledger) -> None:
    filled(ledger)

    found = of(ledger, since=NOW + DAY, host=HOST)

    assert (found.episodes, found.did, found.outcomes) == (2, {}, {})
    assert [each.worker for each in found.would] == ["w1"], "an operator has not decided yet"


def test_ended_dry_run_action_is_not_reported_again(ledger: Ledger) -> None:
    filled(ledger)
    ledger.episodes.close(1, Outcome.UNCONFIRMED, Reason.DONE, "the alert ended", now=NOW + DAY + 5)

    assert of(ledger, since=NOW + DAY).would == []
    assert [each.outcome for each in of(ledger, since=NOW).would] == ["unconfirmed"]


def test_unprocessed_episode_is_at_work(ledger: Ledger) -> None:
    ledger.inbox.accept([alert()], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)

    assert of(ledger, since=NOW).waiting == {"at work": 1}


def test_summary_prints_text_and_json(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(ledger, now=time.time() - 60)

    assert main(["ledger", "--ledger", ledger_url, "summary", "--host", HOST]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["ledger", "--ledger", ledger_url, "summary", "--since", "1h", "--json"]) == 0
    (parsed,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert lines[0].endswith(": 3 episodes")
    assert lines[1] == "  would have acted on w1 on box1 (episode 1, still open):"
    assert lines[2].endswith("  would stop c1: silent 130 s")
    assert lines[3:] == [
        "  done: 1 start, 1 stop",
        "  failed: 1 start",
        f"  closed: 1 {Outcome.FIXED}",
        "  open: 1 cooldown, 1 dry_run",
    ]
    assert (parsed["episodes"], len(parsed["would"]), parsed["until"] - parsed["since"]) == (4, 1, 3600.0)


def test_day_without_failures_is_reported(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.reports.newest() == []

    assert main(["ledger", "--ledger", ledger_url, "summary"]) == 0

    assert capsys.readouterr().out.splitlines()[1:] == ["  no failures"]
