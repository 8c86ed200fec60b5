"""What becomes of alerts, however they came: each is admitted or refused, and all of them made durable at once."""

from collections.abc import Collection, Sequence
from typing import Final

import structlog

from remediator import alert as alerts
from remediator.ledger import Ledger
from remediator.remedies import REMEDIES

log: Final = structlog.get_logger("remediator")


class Inbox:
    """Takes alerts in for one host's remediator. Safe to share between threads.

    Args:
        ledger: where alerts are made durable.
        host: this host's key. Alerts for another are recorded and refused, unless its executor works this ledger too.
    """

    def __init__(self, ledger: Ledger, *, host: str) -> None:
        self._ledger = ledger
        self._host = host

    def take(self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal]) -> tuple[int, int]:
        """Make them durable, those that cannot be read among them; how many were accepted and refused.

        The watchdog's are neither: nothing is kept of them.

        Raises:
            DatabaseError: none of them is durable.
        """
        found = [each for each in found if not alerts.is_beat(each)]
        if not found and not refusals:
            return 0, 0
        hosts = self._hosts(found)
        judged = [(each, alerts.admit(each, hosts=hosts, remedies=REMEDIES)) for each in found]
        accepted = [each for each, refusal in judged if refusal is None]
        refused = [*refusals, *(refusal for _, refusal in judged if refusal is not None)]
        self._ledger.accept(accepted, refused, now=self._ledger.now())
        for refusal in refused:
            log.warning("alert refused", reason=refusal.reason, because=refusal.because)
        return len(accepted), len(refused)

    def _hosts(self, found: Sequence[alerts.Alert]) -> Collection[str]:
        """Whose alerts are taken up here; the ledger is asked only where an alert names another host than this."""
        if not self._ledger.shared or all(each.labels.get("host") == self._host for each in found):
            return {self._host}
        return {self._host, *self._ledger.executors()}
