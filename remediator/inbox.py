"""What becomes of alerts, however they came: each is admitted or refused, and all of them made durable at once."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import structlog

from remediator import alert as alerts
from remediator.joined import Joined
from remediator.ledger import Ledger
from remediator.remedies import REMEDIES

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
        """Make them durable, those that cannot be read among them; then, how many were accepted and refused.

        The watchdog's are neither: nothing is kept of them. The future raises DatabaseError where none is durable.
        """
        payload = _Payload(found=[each for each in found if not alerts.is_beat(each)], refusals=refusals)
        if payload.found or payload.refusals:
            return self._joined(payload)
        nothing: Future[tuple[int, int]] = Future()
        nothing.set_result((0, 0))
        return nothing

    def _write(self, payloads: Sequence[_Payload]) -> list[tuple[int, int]]:
        """All of them in one transaction."""
        hosts = self._hosts([each for payload in payloads for each in payload.found])
        accepted, refused, counts = list[alerts.Alert](), list[alerts.Refusal](), list[tuple[int, int]]()
        for payload in payloads:
            judged = [(each, alerts.admit(each, hosts=hosts, remedies=REMEDIES)) for each in payload.found]
            its = [each for each, refusal in judged if refusal is None]
            others = [*payload.refusals, *(refusal for _, refusal in judged if refusal is not None)]
            counts.append((len(its), len(others)))
            accepted += its
            refused += others
        self._ledger.accept(accepted, refused, now=self._ledger.now())
        for refusal in refused:
            log.warning("alert refused", reason=refusal.reason, because=refusal.because)
        return counts

    def _hosts(self, found: Sequence[alerts.Alert]) -> Collection[str]:
        """Whose alerts are taken up here; the ledger is asked only where an alert names another host than this."""
        if not self._ledger.shared or all(each.labels.get("host") == self._host for each in found):
            return {self._host}
        return {self._host, *self._ledger.executors()}
