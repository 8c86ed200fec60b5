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
        """Make what was delivered durable, with what cannot be read of it; how many were accepted and refused.

        The watchdog's are neither: nothing is kept of them.

        Raises:
            DatabaseError: none of them is durable.
        """
        accepted, refused = self._judge(found, refusals)
        if accepted or refused:
            self._ledger.accept(accepted, refused, now=self._ledger.now())
        return len(accepted), _told(refused)

    def newest(self) -> int:
        """What is to be noted before an Alertmanager is asked for its list: see `take_listed`.

        Raises:
            DatabaseError: it cannot be read.
        """
        return self._ledger.newest_alert()

    def take_listed(
        self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal], *, asked_after: int
    ) -> tuple[int, int]:
        """As `take`, of what an Alertmanager has listed; what was resolved since it was asked is neither.

        Raises:
            DatabaseError: none of them is durable.
        """
        accepted, refused = self._judge(found, refusals)
        if not accepted and not refused:
            return 0, 0
        now = self._ledger.now()
        over = self._ledger.accept_listed(accepted, refused, asked_after=asked_after, now=now)
        if over:
            log.info("alerts that were listed are resolved by now", count=len(over))
        return len(accepted) - len(over), _told(refused)

    def _judge(
        self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal]
    ) -> tuple[list[alerts.Alert], list[alerts.Refusal]]:
        found = [each for each in found if not alerts.is_beat(each)]
        hosts = self._hosts(found)
        judged = [(each, alerts.admit(each, hosts=hosts, remedies=REMEDIES)) for each in found]
        accepted = [each for each, refusal in judged if refusal is None]
        return accepted, [*refusals, *(refusal for _, refusal in judged if refusal is not None)]

    def _hosts(self, found: Sequence[alerts.Alert]) -> Collection[str]:
        """Whose alerts are taken up here; the ledger is asked only where an alert names another host than this."""
        if not self._ledger.shared or all(each.labels.get("host") == self._host for each in found):
            return {self._host}
        return {self._host, *self._ledger.executors()}


def _told(refused: Sequence[alerts.Refusal]) -> int:
    """How many they are, once each is in the log."""
    for refusal in refused:
        log.warning("alert refused", reason=refusal.reason, because=refusal.because)
    return len(refused)
