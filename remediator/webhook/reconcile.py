"""What Alertmanager left out of a call for its `max_alerts`, it leaves out of every repeat: so it is asked for.

Beside the webhook, which has answered long before. One Alertmanager is asked at a time, and again where it does not
tell; what it has is taken in as if it had been delivered, but for what was resolved since it was asked. Most of it was
delivered, and is one more piece of evidence for an open episode.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Final

import structlog
from anyio import to_thread
from prometheus_client import CollectorRegistry, Counter

from gpuwarden.errors import GpuwardenError
from remediator import alert as alerts
from remediator.clients import http as answers
from remediator.metrics.ledger import SERIES
from remediator.webhook.intake import Inbox

log: Final = structlog.get_logger("remediator")

ANSWER_S: Final = 10.0
"""How long one Alertmanager may take to tell all its alerts, seconds."""

ANSWER_MAX_BYTES: Final = 16 * 2**20
"""The largest answer that is read, bytes."""

REST_S: Final = 30.0
"""Between two rounds, seconds: what is told again is written again. A call meanwhile waits for the next round."""

RECEIVERS_MAX: Final = 10
"""Receivers that are asked for in one round."""

ATTEMPTS_MAX: Final = 10
"""How often one Alertmanager is asked in vain for one receiver's before it is left to the next call."""

_ACTIVE: Final = {"active": "true", "silenced": "false", "inhibited": "false"}


class Reconciler:
    """Asks Alertmanagers for what they left out, from the thread of one event loop.

    Args:
        urls: where they answer; with none, it only says that it could.
        inbox: what takes their alerts in.
        alerts_max: how many are taken in at once.
        registry: where what it did is counted.
    """

    def __init__(self, urls: Sequence[str], inbox: Inbox, *, alerts_max: int, registry: CollectorRegistry) -> None:
        self._urls = urls
        self._inbox = inbox
        self._alerts_max = alerts_max
        # Of which Alertmanager for which receiver, and how often it was asked in vain.
        self._wanted: dict[tuple[str, str], int] = {}
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

    def left_out(self, count: int, receiver: str) -> None:
        """A call to `receiver`, a pattern, came without `count` of its alerts; returns at once."""
        self._left_out.inc(count)
        if not self._urls:
            because = "--alertmanager is not set, with which they would be asked for; or raise its max_alerts"
            log.warning("alerts left out of a call and lost", count=count, because=because)
            return
        if len({receiver, *(each for _, each in self._wanted)}) > RECEIVERS_MAX:
            because = f"{RECEIVERS_MAX} other receivers are asked for already"
            log.warning("alerts left out of a call and lost", count=count, because=because)
            return
        log.warning("alerts left out of a call, asked for", count=count)
        self._wanted |= {(url, receiver): 0 for url in self._urls}
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._rounds())

    async def _rounds(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            for (url, receiver), in_vain in wanted.items():
                if not await self._reconcile(url, receiver) and in_vain + 1 < ATTEMPTS_MAX:
                    self._wanted.setdefault((url, receiver), in_vain + 1)
            await asyncio.sleep(REST_S)

    async def _reconcile(self, url: str, receiver: str) -> bool:
        asked = answers.shown(url)
        try:
            # Let go of at an end of the process: whatever is not durable by then is asked for at the next call.
            newest = await to_thread.run_sync(self._inbox.newest, abandon_on_cancel=True)
            body = await _ask(url, receiver)
            accepted, refused = await to_thread.run_sync(self._take, body, newest, abandon_on_cancel=True)
        except (ValueError, RecursionError, GpuwardenError) as error:
            self._done.labels("failed").inc()
            because = str(error)[:300]
            log.error("alerts left out of a call not found", alertmanager=asked, because=because)  # noqa: TRY400
            return False
        self._done.labels("done").inc()
        log.info("alerts asked for taken in", alertmanager=asked, accepted=accepted, refused=refused)
        return True

    def _take(self, body: bytes, asked_after: int) -> tuple[int, int]:
        accepted = refused = 0
        for payload in alerts.listed(json.loads(body), alerts_max=self._alerts_max):
            listed = alerts.parse(payload, alerts_max=self._alerts_max)
            took = self._inbox.take_listed(*listed, asked_after=asked_after)
            accepted, refused = accepted + took[0], refused + took[1]
        return accepted, refused


async def _ask(url: str, receiver: str) -> bytes:
    """The alerts that fire and go to this receiver, as Alertmanager's API tells them."""
    params = {**_ACTIVE, "receiver": receiver} if receiver else _ACTIVE
    async with answers.asking(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as asking:
        return await asking.get(f"{url.rstrip('/')}/api/v2/alerts", params)
