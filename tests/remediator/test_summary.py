"""A day in figures: as a command prints it, and as each host's executor logs it once."""

import json
import time
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from gpuwarden.cli import main
from gpuwarden.queue import JobStore
from remediator import summary
from remediator.ledger import Ledger, Story
from remediator.plan import Outcome
from tests.remediator.builders import HOST, NOW, alert
from tests.remediator.test_execute import PACE, executor, looping
from tests.remediator.world import World
from tests.waiting import eventually

DAY = summary.DAY_S


def filled(ledger: Ledger, *, now: float = NOW) -> None:
    """One that a dry run would have mended, one that was mended, one that is held, one of another host."""
    alerts = [alert(worker, worker=worker, summary="s\x1b[2J") for worker in ("w1", "w2", "w3")]
    ledger.accept([*alerts, alert("w9", worker="w9", host="box2")], [], now=now)
    ledger.take_new(HOST, now=now)
    ledger.take_new("box2", now=now)
    ledger.would_act(1, "would stop c1: silent 130 s", now=now + 1)
    ledger.record(1, "decided", "wait: dry_run", "dry run", now=now + 1)
    ledger.record(2, "did", "stop", "took 1 s", now=now + 2)
    ledger.record(2, "failed", "start", "no", now=now + 3)
    ledger.record(2, "did", "start", "took 1 s", now=now + 4)
    ledger.close_episode(2, Outcome.MENDED, "all is well", now=now + 5)
    ledger.record(3, "decided", "wait: cooldown", "freed 12 s ago", now=now + 6)


def of(ledger: Ledger, *, since: float, host: str | None = None) -> summary.Summary:
    return summary.summarize(ledger.stories_since(since, host=host), since=since, now=since + DAY)


def test_a_summary_counts_what_was_done_and_tells_what_would_have_been(ledger: Ledger) -> None:
    filled(ledger)

    found = of(ledger, since=NOW - 10, host=HOST)

    assert (found.episodes, found.outcomes, found.did, found.failed, found.waiting) == (
        3,
        {"mended": 1},
        {"stop": 1, "start": 1},
        {"start": 1},
        {"dry_run": 1, "cooldown": 1},
    )
    (would,) = found.would
    assert (would.episode_id, would.worker, would.because, would.outcome) == (
        1,
        "w1",
        "would stop c1: silent 130 s",
        None,
    )
    assert of(ledger, since=NOW - 10).episodes == 4


def test_what_was_closed_before_is_left_out_and_what_still_waits_is_told_again(ledger: Ledger) -> None:
    filled(ledger)

    found = of(ledger, since=NOW + DAY, host=HOST)

    assert (found.episodes, found.did, found.outcomes) == (2, {}, {})
    assert [each.worker for each in found.would] == ["w1"], "a person has yet to decide on it"


def test_what_a_dry_run_would_have_done_before_and_is_over_by_now_is_not_told_again(ledger: Ledger) -> None:
    filled(ledger)
    ledger.close_episode(1, Outcome.UNCONFIRMED, "the alert ended", now=NOW + DAY + 5)

    assert of(ledger, since=NOW + DAY).would == []
    assert [each.outcome for each in of(ledger, since=NOW).would] == ["unconfirmed"]


def test_an_episode_that_nobody_looked_at_yet_is_at_work() -> None:
    story = Story(
        episode_id=1, remedy="r", trip="stall", host=HOST, worker="w1", job_id=None, attempt=None, opened_at=NOW,
        closed_at=None, outcome=None, because=None,
    )  # fmt: skip

    assert summary.summarize([story], since=NOW, now=NOW).waiting == {"at work": 1}


def test_the_command_prints_it_for_people_and_as_json(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(ledger, now=time.time() - 60)

    assert main(["ledger", "--ledger", ledger_url, "summary", "--host", HOST]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["ledger", "--ledger", ledger_url, "summary", "--since", "1h", "--json"]) == 0
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert lines[0].endswith(": 3 episodes")
    assert lines[1] == "  would have acted on w1 on box1 (episode 1, still open):"
    assert lines[2].endswith("  would stop c1: silent 130 s")
    assert lines[3:] == [
        "  done: 1 start, 1 stop",
        "  failed: 1 start",
        "  closed: 1 mended",
        "  open and waiting: 1 cooldown, 1 dry_run",
    ]
    assert (told["episodes"], len(told["would"]), told["until"] - told["since"]) == (4, 1, 3600.0)


def test_a_quiet_day_says_so(ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.stories() == []

    assert main(["ledger", "--ledger", ledger_url, "summary"]) == 0

    assert capsys.readouterr().out.splitlines()[1:] == ["  nothing wedged"]


@pytest.mark.parametrize(
    ("at", "hour", "expected"),
    [
        ((2026, 1, 31, 8, 0, 0), 8, "2026-01-31"),
        ((2026, 1, 31, 7, 59, 59), 8, "2026-01-30"),
        ((2026, 1, 1, 0, 0, 0), 1, "2025-12-31"),
        ((2026, 1, 31, 0, 0, 0), 0, "2026-01-31"),
    ],
)
def test_a_day_begins_at_its_hour(at: tuple[int, ...], hour: int, expected: str) -> None:
    assert summary.day(time.mktime((*at, 0, 0, -1)), hour=hour) == expected  # type: ignore[arg-type]


def test_each_day_is_logged_once_whatever_is_started_again(ledger: Ledger, store: JobStore) -> None:
    filled(ledger, now=time.time() - 60)
    pace = replace(PACE, summary_hour=0)

    def summaries() -> list[str]:
        """Run an executor until it has beaten anew; the summaries that it logged."""
        before = ledger.executors().get(HOST)
        with capture_logs() as logged, looping(executor(ledger, store, World(), pace=pace, armed=False)):
            eventually(lambda: ledger.executors().get(HOST) != before and ledger.summed_up_on(HOST), "it beats")
            eventually(lambda: ledger.summed_up_on(HOST) == summary.day(time.time(), hour=0), "it has told")
        return [f"{each['host']} {each['episodes']} {each['waiting']}" for each in logged if each["event"] == WORD]

    assert summaries() == [], "its first day has nothing behind it"
    ledger.sum_up(HOST, "2026-01-31")
    assert len(summaries()) == 1
    assert summaries() == []


WORD = "daily summary"
