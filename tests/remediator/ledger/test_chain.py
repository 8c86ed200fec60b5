"""Drills and arrivals of the watchdog alert, in real databases."""

import pytest

from remediator.alert import Alert
from remediator.ledger import chain
from remediator.ledger.chain import WatchdogArrival
from remediator.ledger.ledger import Ledger
from tests.remediator.builders import HOST, alert

pytestmark = pytest.mark.both_databases


def drill_alert(number: object, *, host: str = HOST, firing: bool = True) -> Alert:
    return alert(
        f"d{number}", firing=firing, host=host, drill=str(number), remedy="drill", condition="drill",
        worker=None, container=None, incarnation=None, job_id=None, attempt=None,
    )  # fmt: skip


def test_drill_is_delivered_then_taken_by_the_executor_of_its_host(ledger: Ledger) -> None:
    drill, other = ledger.chain.start([HOST, "box2"], who="ann", timeout_s=60.0)
    assert (drill.host, drill.delivered_at, drill.decided_at) == (HOST, None, None)
    assert ledger.reports.totals(HOST).drills == [(drill.drill_id, HOST), (other.drill_id, "box2")]
    now = ledger.now()

    ledger.inbox.accept([drill_alert(drill.drill_id), drill_alert(other.drill_id, host="box2")], [], now=now)

    assert [each.delivered_at for each in ledger.chain.read([drill.drill_id, other.drill_id])] == [now, now]
    assert ledger.inbox.new_targets(HOST) == [("host", HOST)]
    assert ledger.inbox.take_new(HOST, now=now + 1.0) == 1
    mine, its = ledger.chain.read([drill.drill_id, other.drill_id])
    assert (mine.delivered_at, mine.decided_at) == (now, now + 1.0)
    assert (its.delivered_at, its.decided_at) == (now, None)
    assert not ledger.episodes.list_open()
    assert ledger.reports.totals(HOST).drill_passed_at == now + 1.0


def test_ended_drill_is_not_published_and_is_the_last_one_of_its_host(ledger: Ledger) -> None:
    first = ledger.chain.start([HOST], who="ann", timeout_s=60.0)[0]
    ledger.chain.end({first.drill_id: None})
    second = ledger.chain.start([HOST], who="ann", timeout_s=60.0)[0]
    ledger.chain.end({second.drill_id: "webhook"})

    assert ledger.reports.totals(HOST).drills == []
    assert [(each.drill_id, each.broken) for each in ledger.chain.last()] == [(second.drill_id, "webhook")]
    assert ledger.chain.last(host="box2") == []


def test_old_drills_are_deleted(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ledger.chain.start([HOST], who="ann", timeout_s=60.0)[0]
    monkeypatch.setattr(chain, "KEPT_S", -1.0)

    second = ledger.chain.start([HOST], who="ann", timeout_s=60.0)[0]

    assert [each.drill_id for each in ledger.chain.read([first.drill_id, second.drill_id])] == [second.drill_id]


@pytest.mark.parametrize("number", ["", "x", "9" * 30, "0"])
def test_alert_of_no_drill_is_taken_and_ignored(ledger: Ledger, number: str) -> None:
    ledger.inbox.accept([drill_alert(number), drill_alert(1, firing=False)], [], now=ledger.now())

    assert ledger.inbox.take_new(HOST, now=ledger.now()) == 2
    assert not ledger.episodes.list_open()
    assert ledger.chain.last() == []


def test_watchdog_keeps_its_last_arrival_and_gap(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger.chain.watchdog() is None
    now = iter((1000.0, 1300.0, 1601.0, 1661.0))
    monkeypatch.setattr(ledger.chain._clock, "now", lambda: next(now))
    found = []

    for _ in range(4):
        ledger.chain.mark_watchdog()
        found.append(ledger.chain.watchdog())

    assert found == [
        WatchdogArrival(at=1000.0, gap_from=None, gap_to=None),
        WatchdogArrival(at=1300.0, gap_from=None, gap_to=None),
        WatchdogArrival(at=1601.0, gap_from=1300.0, gap_to=1601.0),
        WatchdogArrival(at=1661.0, gap_from=1300.0, gap_to=1601.0),
    ]
