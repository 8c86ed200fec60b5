"""The thread of `serve` that sends notifications. It shares nothing with the webhook but the databases."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile
from gpuwarden.notify.address import AddressError, shown
from gpuwarden.notify.sender import Send, Sender
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import Parcel
from remediator.metrics.ledger import SERIES
from remediator.notify.events import Events
from remediator.notify.messages import compose
from remediator.settings import notify_file

log: Final = structlog.get_logger("remediator")

POLL_S: Final = 2.0
"""Interval between checks for events, seconds."""

AT_ONCE_MAX: Final = 8
"""Messages that are sent at the same time."""

CLEAN_S: Final = 600.0
"""Interval between deletions of old notices, and between log lines about an error that lasts, seconds."""

RECORD_S: Final = 60.0
"""How long it tries to record a result, seconds. The claim holds longer."""

SENT_S: Final = 5.0
"""At the end, time for messages on their way, seconds. A message that is ended may be sent twice."""

JOIN_S: Final = 1.0


class Notifier(Collector):
    """Collects events, and sends them."""

    def __init__(
        self,
        ledger: Ledger,
        file: Path,
        *,
        queue: Callable[[], JobStore] | None = None,
        send: Send | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._ledger = ledger
        self._settings = ReloadingFile([file], lambda: notify_file.read(file))
        self._events = Events(ledger, queue)
        self._sender = Sender()
        self._send = send or self._sender
        self._poll_s = poll_s
        self._stopped = threading.Event()
        self._sending: dict[str, threading.Thread] = {}
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[str, float]] = {}
        self._next_clean_at = 0.0

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop. Messages still on their way after `SENT_S` are ended, and sent after the next start."""
        self._stopped.set()
        self._thread.join(JOIN_S)
        self.close()

    def close(self) -> None:
        """Wait for the messages on their way, end the others, and close the queue."""
        self.wait_until_sent(SENT_S)
        self._sender.close()
        self.wait_until_sent(JOIN_S)
        self._events.close()

    def describe(self) -> list[Metric]:
        """Nothing: it would read the ledger."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        count = len(self._settings.value.administrators)
        yield SERIES.gauge("gpuwarden_remediator_notification_administrators", count)
        sent = SERIES.counter("gpuwarden_remediator_notifications_total")
        for outcome in ("sent", "failed", "dropped"):
            sent.add_metric((outcome,), self._counts[outcome])
        yield sent
        try:
            unsent, now = self._ledger.notices.unsent(), self._ledger.now()
        except GpuwardenError:
            return
        yield SERIES.gauge("gpuwarden_remediator_notifications_waiting", unsent.waiting)
        if unsent.failing_since is not None:
            failing = SERIES.gauge("gpuwarden_remediator_notifications_failing_seconds")
            failing.add_metric((), max(0.0, now - unsent.failing_since))
            yield failing

    def tick(self, now: float) -> None:
        """Collect events, start the messages that are due, and clean up."""
        settings = self._reloaded()
        try:
            self._events.collect(settings, now=now)
        except GpuwardenError as error:
            self._log_once("events not read, retried", str(error))
        notices = self._ledger.notices
        notices.expand(len(settings.administrators), now=now)
        for recipient in notices.due(len(settings.administrators), now=now):
            self._start(recipient, now)
        if now >= self._next_clean_at:
            self._next_clean_at = now + CLEAN_S
            notices.delete_old(now=now)
            self._log_failing(now)

    def _log_failing(self, now: float) -> None:
        unsent = self._ledger.notices.unsent()
        if unsent.failing_since is not None and now - unsent.failing_since >= CLEAN_S:
            for_s, reason = round(now - unsent.failing_since), unsent.failing[0][1]
            log.error("notifications fail", for_s=for_s, waiting=unsent.waiting, reason=reason)

    def wait_until_sent(self, timeout_s: float) -> None:
        """Wait for the messages on their way."""
        end_s = time.monotonic() + timeout_s
        for each in list(self._sending.values()):
            each.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_s):
            try:
                self.tick(self._ledger.now())
            except GpuwardenError as error:
                self._log_once("notifications wait", str(error))
            except Exception:
                log.exception("unexpected error in notifications")

    def _reloaded(self) -> notify_file.NotifySettings:
        try:
            if self._settings.reload():
                log.warning("notify file reloaded", administrators=len(self._settings.value.administrators))
        except GpuwardenError as error:
            self._log_once("notify file not reloaded, old content in use", str(error))
        return self._settings.value

    def _log_once(self, event: str, reason: str) -> None:
        now, (last, at) = time.monotonic(), self._logged.get(event, ("", 0.0))
        if last != reason or now > at + CLEAN_S:
            self._logged[event] = reason, now
            log.error(event, reason=reason)

    def _start(self, recipient: str, now: float) -> None:
        self._sending = {name: each for name, each in self._sending.items() if each.is_alive()}
        if recipient in self._sending or len(self._sending) >= AT_ONCE_MAX:
            return
        parcel = self._ledger.notices.claim(recipient, now=now)
        if parcel is None:
            return
        thread = threading.Thread(target=self._deliver, args=(parcel, now), daemon=True)
        self._sending[recipient] = thread
        thread.start()

    def _deliver(self, parcel: Parcel, now: float) -> None:
        count = sum(parcel.counts.values())
        settings, notices = self._settings.value, self._ledger.notices
        try:
            address = parcel.address
            if parcel.administrator is not None:
                if parcel.administrator >= len(settings.administrators):
                    notices.drop(parcel, now=now)
                    self._counts["dropped"] += count
                    return
                address = settings.administrators[parcel.administrator]
            to = shown(address or "")
            try:
                error = self._send(settings.url(address or ""), compose(parcel.notices, parcel.counts))
            except AddressError as invalid:
                error = str(invalid)
            if error is None:
                self._mark_sent(parcel, now)
                self._counts["sent"] += 1
                log.info("notification sent", to=to, events=count)
                return
            self._counts["failed"] += 1
            dropped = notices.mark_failed(parcel, error, now=now)
            self._counts["dropped"] += dropped
            log.warning("notification not sent", to=to, events=count, reason=error)
            if dropped:
                log.error("notifications dropped after an hour", to=to, events=dropped, reason=error)
        except GpuwardenError as failed:
            log.error("result of a notification not recorded, it is sent again", reason=str(failed))  # noqa: TRY400

    def _mark_sent(self, parcel: Parcel, now: float) -> None:
        """Record that the message was accepted. A database that restarts does not make it a second one."""
        end_s = time.monotonic() + RECORD_S
        while True:
            try:
                return self._ledger.notices.mark_sent(parcel, now=now)
            except GpuwardenError:
                if time.monotonic() > end_s or self._stopped.wait(self._poll_s):
                    raise
