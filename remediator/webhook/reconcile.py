"""Fetch the alerts that Alertmanager left out of a call because of its `max_alerts`.

Every repeat leaves them out too. One Alertmanager at a time is queried, in the background, with retries. Its alerts are
stored as if delivered, except those resolved since the query.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Final

import structlog
from anyio import to_thread
from prometheus_client import CollectorRegistry, Counter

from gpuwarden.errors import GpuwardenError
from remediator import payload as payloads
from remediator.clients import http as answers
from remediator.metrics.ledger import SERIES
from remediator.webhook.intake import Inbox

log: Final = structlog.get_logger("remediator")

ANSWER_S: Final = 10.0
"""Timeout of one Alertmanager, seconds."""

ANSWER_MAX_BYTES: Final = 16 * 2**20
"""Maximum size of an answer."""

REST_S: Final = 30.0
"""Pause between two rounds, seconds. Each round stores all listed alerts again."""

RECEIVERS_MAX: Final = 10
"""Maximum receivers in one round."""

ATTEMPTS_MAX: Final = 10
"""Failed queries before an Alertmanager waits for the next call."""

_ACTIVE: Final = {"active": "true", "silenced": "false", "inhibited": "false"}


class Reconciler:
    """Queries Alertmanagers for left-out alerts, in one event loop.

    Args:
        urls: base URLs; empty only logs a hint.
        inbox: stores the alerts.
        alerts_max: alerts stored at once.
        registry: registry for the counters.
    """

    def __init__(self, urls: Sequence[str], inbox: Inbox, *, alerts_max: int, registry: CollectorRegistry) -> None:
        self._urls = urls
        self._inbox = inbox
        self._alerts_max = alerts_max
        # Failed queries, by Alertmanager and receiver.
        self._pending: dict[tuple[str, str], int] = {}
        self._round: asyncio.Task[None] | None = None
        self._left_out = Counter(
            "gpuwarden_remediator_alerts_truncated",
            SERIES["gpuwarden_remediator_alerts_truncated_total"].meaning,
            registry=registry,
        )
        self._done = Counter(
            "gpuwarden_remediator_reconciliations",
            SERIES["gpuwarden_remediator_reconciliations_total"].meaning,
            ("outcome",),
            registry=registry,
        )
        for outcome in ("done", "failed"):
            self._done.labels(outcome)

    def fetch_left_out(self, count: int, receiver: str) -> None:
        """Fetch `count` alerts that were left out of a call to `receiver`. Returns at once."""
        self._left_out.inc(count)
        if not self._urls:
            reason = "set --alertmanager to fetch them, or raise max_alerts in Alertmanager"
            log.warning("alerts left out of a call and lost", count=count, reason=reason)
            return
        if len({receiver, *(each for _, each in self._pending)}) > RECEIVERS_MAX:
            reason = f"{RECEIVERS_MAX} other receivers are pending"
            log.warning("alerts left out of a call and lost", count=count, reason=reason)
            return
        log.warning("alerts left out of a call, fetching them", count=count)
        self._pending |= {(url, receiver): 0 for url in self._urls}
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._rounds())

    async def _rounds(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, {}
            for (url, receiver), failures in pending.items():
                if not await self._reconcile(url, receiver) and failures + 1 < ATTEMPTS_MAX:
                    self._pending.setdefault((url, receiver), failures + 1)
            await asyncio.sleep(REST_S)

    async def _reconcile(self, url: str, receiver: str) -> bool:
        asked = answers.shown(url)
        try:
            # Abandoned at shutdown: the next call fetches the rest.
            newest = await to_thread.run_sync(self._inbox.newest_alert, abandon_on_cancel=True)
            body = await _ask(url, receiver)
            accepted, refused = await to_thread.run_sync(self._take, body, newest, abandon_on_cancel=True)
        except (ValueError, RecursionError, GpuwardenError) as error:
            self._done.labels("failed").inc()
            reason = str(error)[:300]
            log.error("left-out alerts not fetched", alertmanager=asked, reason=reason)  # noqa: TRY400
            return False
        self._done.labels("done").inc()
        log.info("left-out alerts fetched", alertmanager=asked, accepted=accepted, refused=refused)
        return True

    def _take(self, body: bytes, asked_after: int) -> tuple[int, int]:
        accepted = refused = 0
        for payload in payloads.listed(json.loads(body), alerts_max=self._alerts_max):
            listed = payloads.parse(payload, alerts_max=self._alerts_max)
            took = self._inbox.take_listed(*listed, asked_after=asked_after)
            accepted, refused = accepted + took[0], refused + took[1]
        return accepted, refused


async def _ask(url: str, receiver: str) -> bytes:
    """Read the firing alerts of a receiver from Alertmanager's API."""
    params = {**_ACTIVE, "receiver": receiver} if receiver else _ACTIVE
    async with answers.limited_client(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as client:
        return await client.get(f"{url.rstrip('/')}/api/v2/alerts", params)
