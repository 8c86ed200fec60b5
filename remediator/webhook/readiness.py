"""Readiness: whether the ledger can be used now. Checks run one at a time and are cached, so probes cost little."""

import asyncio
import time
from typing import Final

from anyio import to_thread

from gpuwarden.db.errors import DatabaseError
from remediator.ledger.ledger import Ledger

READY_S: Final = 2.0
"""Timeout of a check, seconds. Shorter than the timeouts of probes and Alertmanager."""

STANDS_S: Final = 1.0
"""How long a result is cached, seconds."""


class Readiness:
    """Checks the ledger, in one event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._look: asyncio.Task[str | None] | None = None
        self._ended_s = 0.0

    async def not_ready_reason(self) -> str | None:
        """Why the ledger cannot be used now; `None` if it can."""
        if self._look is None or (self._look.done() and time.monotonic() - self._ended_s >= STANDS_S):
            self._look = asyncio.create_task(self._ask())
        look = self._look
        await asyncio.wait({look}, timeout=READY_S)
        return look.result() if look.done() else f"the ledger could not be read and written within {READY_S:g} s"

    async def _ask(self) -> str | None:
        try:
            # Abandoned at shutdown, however slow the database is.
            await to_thread.run_sync(self._ledger.health.check_usable, abandon_on_cancel=True)
        except DatabaseError as error:
            return str(error)
        else:
            return None
        finally:
            self._ended_s = time.monotonic()
