"""Which claims are still owned: one read of the queue for all that callers ask about, while they ask."""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
from anyio import CapacityLimiter, to_thread

from gpuwarden.format import error_text
from gpuwarden.queue.models import SlotClaim

LOOK_S: Final = 0.5
"""Time between reads, seconds. A worker asks each second, and learns a loss within 2 s."""

LEAST_S: Final = 0.2
"""Least time between reads for new claims, seconds."""

TRUSTED_S: Final = 2.0
"""How long a read counts, seconds. Unknown is never owned."""

ANSWER_S: Final = 4.0
"""Longest wait for a read, seconds."""

ASKED_S: Final = 5.0
"""How long a claim is read after the last question, seconds."""

log: Final = structlog.get_logger("gateway")


@dataclass(frozen=True)
class _Poll:
    name: str
    claims: set[SlotClaim]
    ended: asyncio.Future[None]

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Ownership:
    """Watches claims. For one event loop.

    Args:
        read: returns which of these claims are owned.
    """

    def __init__(self, read: Callable[[Collection[SlotClaim]], set[SlotClaim]]) -> None:
        self._read = read
        self._asked: dict[SlotClaim, float] = {}
        self._polls: dict[str, _Poll] = {}
        self._known: dict[SlotClaim, bool] = {}
        self._known_s = 0.0
        self._new = asyncio.Event()
        self._rests = True
        """Nothing is asked, and so nothing read."""
        self._rounds: list[asyncio.Future[None]] = []
        self._limiter = CapacityLimiter(1)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to read. Call it in the event loop."""
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def owns(self, claim: SlotClaim) -> bool | None:
        """Whether the claim is owned; `None` while the queue cannot be read."""
        self._asked[claim] = time.monotonic()
        found = self._found(claim)
        if found is not None:
            return found
        read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rounds.append(read)
        self._new.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await read
        return self._found(claim)

    async def lost(
        self, host: str, claims: Collection[SlotClaim], timeout_s: float, *, name: str = ""
    ) -> list[SlotClaim] | None:
        """The lost ones of these claims, as soon as there is one; none after `timeout_s`.

        `None` while the queue cannot be read. A newer question of the host ends the older one.
        """
        poll = _Poll(name, set(claims), asyncio.get_running_loop().create_future())
        older, self._polls[host] = self._polls.get(host), poll
        if older is not None:
            older.end()
        if self._rests:
            self._new.set()
        is_newest = True
        try:
            async with asyncio.timeout(timeout_s):
                await poll.ended
        except TimeoutError:
            pass
        finally:
            is_newest = self._polls.get(host) is poll
            if is_newest:
                del self._polls[host]
        if is_newest and any(self._found(claim) is None for claim in poll.claims.intersection(claims)):
            return None
        return [claim for claim in poll.claims if self._found(claim) is False]

    def add(self, claim: SlotClaim) -> str | None:
        """Add a new claim to the open question of its host. Returns the question's name; `None` if there is none."""
        poll = self._polls.get(claim.host)
        if poll is None:
            return None
        poll.claims.add(claim)
        return poll.name

    def drop(self, claim: SlotClaim) -> None:
        """Remove a claim that its worker has settled: it is not lost."""
        poll = self._polls.get(claim.host)
        if poll is not None:
            poll.claims.discard(claim)

    def _found(self, claim: SlotClaim) -> bool | None:
        return self._known.get(claim) if time.monotonic() - self._known_s < TRUSTED_S else None

    async def _watch(self) -> None:
        logged = ""
        while True:
            began_s = time.monotonic()
            self._asked = {claim: at_s for claim, at_s in self._asked.items() if began_s - at_s < ASKED_S}
            rounds, self._rounds = self._rounds, []
            self._new.clear()
            asked = set(self._asked).union(*(poll.claims for poll in self._polls.values()))
            self._rests = not asked
            if asked:
                try:
                    owned = await to_thread.run_sync(partial(self._read, asked), limiter=self._limiter)
                    self._known, self._known_s = {claim: claim in owned for claim in asked}, began_s
                    lost = asked - owned
                    for poll in list(self._polls.values()) if lost else ():
                        if not poll.claims.isdisjoint(lost):
                            poll.end()
                    logged = ""
                except Exception as error:  # noqa: BLE001 - without this task, no worker learns that its job is lost
                    if logged != str(error):
                        logged = str(error)
                        log.warning("claims of workers are not read; trying again", reason=error_text(error))
            for each in rounds:
                if not each.done():
                    each.set_result(None)
            await asyncio.sleep(LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S - LEAST_S if asked else None):
                    await self._new.wait()
