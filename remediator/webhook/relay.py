"""Turns the alerts for operators into notices for administrators, which `remediator.notify` sends.

An alert is one notice when it fires and one when it ends, however often Alertmanager repeats it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import structlog

from remediator.alert import Alert, Refusal
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import Notice
from remediator.notify.messages import describe
from remediator.webhook.batch_writer import GroupCommit

log: Final = structlog.get_logger("remediator")

NOTICED: Final = frozenset({"GpuwardenCircuitBreakerOpen", "GpuwardenWorkerLocked"})
"""Administrators have a notice of these events already."""


class Relay:
    """Stores notices of alerts. Safe to share between threads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._group_commit = GroupCommit(self._write)

    def take(self, found: Sequence[Alert], refusals: Sequence[Refusal]) -> "Future[tuple[int, int]]":
        """Store the notices. Returns the numbers of accepted and invalid alerts.

        The future raises DatabaseError if nothing was stored.
        """
        for each in refusals:
            log.warning("alert for operators not relayed", message=each.message)
        return self._group_commit((found, len(refusals)))

    def _write(self, calls: Sequence[tuple[Sequence[Alert], int]]) -> list[tuple[int, int]]:
        now = self._ledger.now()
        self._ledger.notices.add([each for found, _ in calls for each in notices(found, now=now)])
        return [(len(found), refused) for found, refused in calls]


def notices(found: Sequence[Alert], *, now: float) -> Iterator[Notice]:
    """The notices of some alerts. `now`: Unix seconds."""
    for alert in found:
        name = alert.labels.get("alertname", "an alert without a name")
        if name in NOTICED:
            continue
        its = {each: alert.annotations.get(each, "") for each in ("summary", "description", "runbook_url")}
        kind = "alert" if alert.firing else "alert_over"
        title, text = describe(kind, name=name, **its)
        key = f"{kind} {alert.fingerprint} {alert.starts_at}"
        yield Notice(key=key, kind=kind, title=title, text=text, at=now)
