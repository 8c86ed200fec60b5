"""What becomes of alerts, however they came: each is admitted or refused, and all of them made durable at once."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import structlog

from remediator import alert as alerts
from remediator.ledger.ledger import Ledger
from remediator.remedies import REMEDIES
from remediator.webhook.batch_writer import Joined

log: Final = structlog.get_logger("remediator")


@dataclass(frozen=True, kw_only=True)
class _Payload:
    found: Sequence[alerts.Alert]
    refusals: Sequence[alerts.Refusal]


class Inbox:
    """Takes alerts in for one host's remediator. Safe to share between threads.

    Args:
        ledger: where alerts are made durable.
        host: this host's key. Alerts for another are recorded and refused, unless its executor works this ledger too.
    """

    def __init__(self, ledger: Ledger, *, host: str) -> None:
        self._ledger = ledger
        self._host = host
        self._joined = Joined(self._write)

    def take(self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal]) -> "Future[tuple[int, int]]":
        """Make what was delivered durable, with what cannot be read of it; then, how many were accepted and refused.

        The watchdog's are neither: nothing is kept of them. The future raises DatabaseError where none is durable.
        """
        payload = _Payload(found=[each for each in found if not alerts.is_beat(each)], refusals=refusals)
        if payload.found or payload.refusals:
            return self._joined(payload)
        nothing: Future[tuple[int, int]] = Future()
        nothing.set_result((0, 0))
        return nothing

    def newest(self) -> int:
        """What is to be noted before an Alertmanager is asked for its list: see `take_listed`.

        Raises:
            DatabaseError: it cannot be read.
        """
        return self._ledger.inbox.newest_alert()

    def take_listed(
        self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal], *, asked_after: int
    ) -> tuple[int, int]:
        """As `take`, of what an Alertmanager has listed; what was resolved since it was asked is neither.

        Raises:
            DatabaseError: none of them is durable.
        """
        payload = _Payload(found=[each for each in found if not alerts.is_beat(each)], refusals=refusals)
        accepted, refused = self._judge(payload, self._hosts(payload.found))
        if not accepted and not refused:
            return 0, 0
        now = self._ledger.now()
        over = self._ledger.inbox.accept_listed(accepted, refused, asked_after=asked_after, now=now)
        if over:
            log.info("alerts that were listed are resolved by now", count=len(over))
        return len(accepted) - len(over), _told(refused)

    def _write(self, payloads: Sequence[_Payload]) -> list[tuple[int, int]]:
        """All of them in one transaction."""
        hosts = self._hosts([each for payload in payloads for each in payload.found])
        judged = [self._judge(payload, hosts) for payload in payloads]
        accepted = [each for its, _ in judged for each in its]
        refused = [each for _, its in judged for each in its]
        self._ledger.inbox.accept(accepted, refused, now=self._ledger.now())
        _told(refused)
        return [(len(its), len(others)) for its, others in judged]

    def _judge(self, payload: _Payload, hosts: Collection[str]) -> tuple[list[alerts.Alert], list[alerts.Refusal]]:
        judged = [(each, alerts.admit(each, hosts=hosts, remedies=REMEDIES)) for each in payload.found]
        accepted = [each for each, refusal in judged if refusal is None]
        return accepted, [*payload.refusals, *(refusal for _, refusal in judged if refusal is not None)]

    def _hosts(self, found: Sequence[alerts.Alert]) -> Collection[str]:
        """Whose alerts are taken up here; the ledger is asked only where an alert names another host than this."""
        if not self._ledger.shared or all(each.labels.get("host") == self._host for each in found):
            return {self._host}
        return {self._host, *self._ledger.executors.last_beats()}


def _told(refused: Sequence[alerts.Refusal]) -> int:
    """How many they are, once each is in the log."""
    for refusal in refused:
        log.warning("alert refused", reason=refusal.reason, because=refusal.message)
    return len(refused)
