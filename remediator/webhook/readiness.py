"""Whether the ledger can be used now: for a readiness probe, which anyone may ask as often as they like.

One look at a time, whoever asks, and its answer stands for a moment: however often it is asked, the ledger is free for
others.
"""

import asyncio
import time
from typing import Final

from anyio import to_thread

from gpuwarden.db.engine import DatabaseError
from remediator.ledger.ledger import Ledger

READY_S: Final = 2.0
"""How long the ledger may take to be read and written, seconds: less than a probe or Alertmanager waits for us."""

STANDS_S: Final = 1.0
"""How long the answer of one look stands, seconds."""


class Readiness:
    """Looks at the ledger, from the thread of one event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._look: asyncio.Task[str | None] | None = None
        self._ended_s = 0.0

    async def lacks(self) -> str | None:
        """Why the ledger cannot be used now; `None` where it can."""
        if self._look is None or (self._look.done() and time.monotonic() - self._ended_s >= STANDS_S):
            self._look = asyncio.create_task(self._ask())
        look = self._look
        await asyncio.wait({look}, timeout=READY_S)
        return look.result() if look.done() else f"the ledger could not be read and written within {READY_S:g} s"

    async def _ask(self) -> str | None:
        try:
            # Let go of at an end of the process, however long the database takes to answer.
            await to_thread.run_sync(self._ledger.health.check_usable, abandon_on_cancel=True)
        except DatabaseError as error:
            return str(error)
        else:
            return None
        finally:
            self._ended_s = time.monotonic()
