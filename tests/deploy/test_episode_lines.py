"""What `gpuwarden up` prints about episodes."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from deploy.standalone.episode_lines import LINES_MAX, RETRY_S, EpisodeLines
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome, Wait
from remediator.reasons import Reason
from tests.remediator.builders import HOST, NOW, alert
from tests.remediator.ledger.test_ledger import BEGIN, BOUNDLESS, armed


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with closing(Ledger.open(url, host=HOST)) as opened:
        yield opened


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def lines(ledger: Ledger, url: str, said: list[str]) -> Iterator[EpisodeLines]:  # noqa: ARG001 - it must exist
    with closing(EpisodeLines(url, say=said.append)) as found:
        found.tick(0.0)
        yield found


def see(ledger: Ledger, *workers: str) -> None:
    alerts = [alert(worker, worker=worker, summary=f"{worker} is stalled") for worker in workers]
    ledger.inbox.accept(alerts, [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)


def test_armed_episode_is_said_when_seen_decided_and_done(ledger: Ledger, lines: EpisodeLines, said: list[str]) -> None:
    see(ledger, "w1")
    lines.tick(1.0)
    assert said == ["episode 1 seen: w1 is stalled"]
    armed(ledger)
    (episode,) = ledger.episodes.list_open()
    ledger.intents.begin(episode, BEGIN, safety_limits=BOUNDLESS, now=NOW + 1)
    ledger.journal.record(1, "did", "stop", "took 1 s", now=NOW + 2)
    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "it runs again", now=NOW + 4)
    see(ledger, "w2")

    lines.tick(1.5)
    assert len(said) == 1
    lines.tick(2.0)

    assert said[1:] == [
        f"episode 1 decided: restart worker w1: {BEGIN.message}",
        "episode 1 done: fixed after 4 s: it runs again",
        "episode 2 seen: w2 is stalled",
    ]


def test_dry_run_says_what_it_would_do_and_how_to_arm(ledger: Ledger, lines: EpisodeLines, said: list[str]) -> None:
    see(ledger, "w1")
    ledger.journal.record_dry_run(1, "would stop c1", now=NOW + 1)
    ledger.journal.wait(1, Wait(reason=Reason.DRY_RUN, message="dry run: would act"), now=NOW + 1)

    lines.tick(1.0)

    assert said[1:] == ["episode 1 dry run: would stop c1; `gpuwarden arm` allows it"]


def test_wait_for_an_operator_and_a_failed_step_are_said_once(
    ledger: Ledger, lines: EpisodeLines, said: list[str]
) -> None:
    see(ledger, "w1")
    for at in (1.0, 2.0):
        ledger.journal.wait(1, Wait(reason=Reason.GRACE_PERIOD, message="it saves"), now=NOW + at)
        ledger.journal.wait(1, Wait(reason=Reason.APPROVAL, message="wants approval"), now=NOW + at)
        ledger.journal.record(1, "failed", "stop", "no such process", now=NOW + at)

    lines.tick(1.0)

    held, failed = said[1:]
    assert held == f"episode 1 held, approval: wants approval. {Reason.APPROVAL.advice}"
    assert failed == "episode 1 failed to stop: no such process"


def test_flood_of_episodes_prints_few_lines(ledger: Ledger, lines: EpisodeLines, said: list[str]) -> None:
    see(ledger, *(f"w{number}" for number in range(LINES_MAX + 3)))

    lines.tick(1.0)

    assert len(said) == LINES_MAX + 1
    assert said[-1] == "and 3 more lines: see `gpuwarden ledger list`"


def test_ledger_that_cannot_be_read_is_read_later(tmp_path: Path, said: list[str]) -> None:
    url = f"sqlite:///{tmp_path / 'absent' / 'ledger.db'}"
    with closing(EpisodeLines(url, say=said.append)) as lines:
        lines.tick(0.0)
        (tmp_path / "absent").mkdir()
        with closing(Ledger.open(url, host=HOST)) as ledger:
            lines.tick(RETRY_S)
            see(ledger, "w1")
            lines.tick(RETRY_S + 1)

    assert said == ["episode 1 seen: w1 is stalled"]
