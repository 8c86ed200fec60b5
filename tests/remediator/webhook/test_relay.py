"""Alerts for operators become notices of administrators: one when an alert fires, one when it ends."""

from typing import Any

import httpx
import pytest

from gpuwarden.db.errors import DatabaseError
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import GATHER_S, Notice
from tests.asking import PLAIN
from tests.remediator.builders import payload, sent
from tests.remediator.webhook.test_app import AUTHORIZED, Served, in_process

__all__ = ["in_process"]

PATH = "/api/v1/notifications"


def post(served: Served, *alerts: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{served.url}{PATH}", json=payload(*alerts), headers=headers, trust_env=False, verify=PLAIN)


def stored(ledger: Ledger) -> list[Notice]:
    ledger.notices.expand(1, now=ledger.now())
    claimed = ledger.notices.claim("administrator 0", now=ledger.now() + GATHER_S)
    return [] if claimed is None else claimed.notices


def test_repeated_alert_is_one_notice_and_its_end_another(in_process: Served) -> None:
    fires, other = sent(), sent("f2", alertname="Other")
    ends, again = sent(status="resolved"), {**fires, "startsAt": "2026-01-02T00:00:00Z"}
    for alerts in ([fires, other], [fires, other], [ends], [again]):
        answer = post(in_process, *alerts, **AUTHORIZED)
        assert (answer.status_code, answer.json()) == (202, {"accepted": len(alerts), "refused": 0})

    found = stored(in_process.ledger)
    assert [(each.kind, each.title) for each in found] == [
        ("alert", "stalled"), ("alert", "stalled"), ("alert_over", "resolved: stalled"), ("alert", "stalled"),
    ]  # fmt: skip
    assert found[1].text == "Other: stalled.\nd"


def test_event_with_a_notice_of_its_own_is_not_relayed(in_process: Served) -> None:
    breaker = sent(alertname="GpuwardenCircuitBreakerOpen")
    runbook = {**sent("f2"), "annotations": {"runbook_url": "http://r"}}
    assert post(in_process, breaker, runbook, **AUTHORIZED).status_code == 202

    (found,) = stored(in_process.ledger)
    assert found.text.endswith("Next: follow http://r")


def test_call_without_the_token_is_refused(in_process: Served) -> None:
    assert post(in_process, sent()).status_code == 401
    assert stored(in_process.ledger) == []


def test_invalid_alert_is_counted_and_the_others_are_relayed(in_process: Served) -> None:
    answer = post(in_process, {}, sent(), **AUTHORIZED)

    assert answer.json() == {"accepted": 1, "refused": 1}
    assert len(stored(in_process.ledger)) == 1


def test_alertmanager_retries_while_the_ledger_cannot_be_written(
    in_process: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise DatabaseError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(in_process.ledger.notices, "add", fails)
        assert post(in_process, sent(), **AUTHORIZED).status_code == 503

    assert post(in_process, sent(), **AUTHORIZED).status_code == 202
    assert len(stored(in_process.ledger)) == 1
