"""Admit or refuse alerts from the webhook or from a list, and store them."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import structlog

from remediator import alert as alerts
from remediator.ledger.ledger import Ledger
from remediator.remedies import REMEDIES
from remediator.webhook.batch_writer import GroupCommit

log: Final = structlog.get_logger("remediator")


@dataclass(frozen=True, kw_only=True)
class _Payload:
    found: Sequence[alerts.Alert]
    refusals: Sequence[alerts.Refusal]


class Inbox:
    """Stores alerts for one host's remediator. Safe to share between threads.

    Args:
        ledger: stores the alerts.
        host: this host's key. Alerts for a host without an executor in this ledger are recorded and refused, but not
            those about a lost host in a shared ledger: any executor holds its jobs.
    """

    def __init__(self, ledger: Ledger, *, host: str) -> None:
        self._ledger = ledger
        self._host = host
        self._group_commit = GroupCommit(self._write)
        self._watchdogs = GroupCommit(self._mark_watchdogs)

    def take(self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal]) -> "Future[tuple[int, int]]":
        """Store delivered alerts and refusals. Returns the numbers of accepted and refused ones.

        Watchdog alerts are not stored. The future raises DatabaseError if nothing was stored.
        """
        payload = _Payload(found=[each for each in found if not alerts.is_watchdog(each)], refusals=refusals)
        if payload.found or payload.refusals:
            return self._group_commit(payload)
        nothing: Future[tuple[int, int]] = Future()
        nothing.set_result((0, 0))
        return nothing

    def keep_watchdog(self) -> None:
        """Store an arrival of the watchdog alert, if the ledger answers."""
        self._watchdogs(None)

    def newest_alert(self) -> int:
        """The newest stored alert, to be read before an Alertmanager is queried: see `take_listed`."""
        return self._ledger.inbox.newest_alert()

    def take_listed(
        self, found: Sequence[alerts.Alert], refusals: Sequence[alerts.Refusal], *, asked_after: int
    ) -> tuple[int, int]:
        """As `take`, for alerts in an Alertmanager's list. Alerts resolved since the query are left out.

        Raises:
            DatabaseError: nothing was stored.
        """
        payload = _Payload(found=[each for each in found if not alerts.is_watchdog(each)], refusals=refusals)
        accepted, refused = self._admit(payload, self._hosts(payload.found))
        if not accepted and not refused:
            return 0, 0
        now = self._ledger.now()
        over = self._ledger.inbox.accept_listed(accepted, refused, asked_after=asked_after, now=now)
        if over:
            log.info("listed alerts already resolved", count=len(over))
        return len(accepted) - len(over), _log_refused(refused)

    def _mark_watchdogs(self, arrived: Sequence[None]) -> Sequence[None]:
        self._ledger.chain.mark_watchdog()
        return arrived

    def _write(self, payloads: Sequence[_Payload]) -> list[tuple[int, int]]:

        hosts = self._hosts([each for payload in payloads for each in payload.found])
        admitted = [self._admit(payload, hosts) for payload in payloads]
        accepted = [each for its, _ in admitted for each in its]
        refused = [each for _, its in admitted for each in its]
        self._ledger.inbox.accept(accepted, refused, now=self._ledger.now())
        _log_refused(refused)
        return [(len(its), len(others)) for its, others in admitted]

    def _admit(self, payload: _Payload, hosts: Collection[str]) -> tuple[list[alerts.Alert], list[alerts.Refusal]]:
        admitted = [
            (each, alerts.admit(each, hosts=hosts, remedies=REMEDIES, shared=self._ledger.shared))
            for each in payload.found
        ]
        accepted = [each for each, refusal in admitted if refusal is None]
        return accepted, [*payload.refusals, *(refusal for _, refusal in admitted if refusal is not None)]

    def _hosts(self, found: Sequence[alerts.Alert]) -> Collection[str]:
        """Hosts whose alerts are accepted. Reads the ledger only if an alert names another host."""
        if not self._ledger.shared or all(each.labels.get("host") == self._host for each in found):
            return {self._host}
        return {self._host, *self._ledger.executors.last_beats()}


def _log_refused(refused: Sequence[alerts.Refusal]) -> int:

    for refusal in refused:
        log.warning("alert refused", reason=refusal.reason, message=refusal.message)
    return len(refused)
