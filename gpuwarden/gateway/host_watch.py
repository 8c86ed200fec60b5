"""Decides at intervals which hosts are lost. Any of several central gateways may."""

import asyncio
from typing import Final

import structlog
from anyio import to_thread

from gpuwarden.clock import boottime_s
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import error_text
from gpuwarden.queue import JobStore

LOOK_S: Final = 5.0
"""Interval between looks, seconds."""

GAP_S: Final = 20.0
"""After a longer pause, or jump of the database's clock, each host has its whole time again, seconds."""

log: Final = structlog.get_logger("gateway")


class HostWatch:
    """Marks hosts as lost that were not heard for `after_s` while this gateway reached the database all the time."""

    def __init__(self, store: JobStore, *, after_s: float) -> None:
        self._store, self._after_s = store, after_s
        self._since = 0.0
        self._looked: tuple[float, float] | None = None
        self._lost: frozenset[str] = frozenset()
        self._spared: frozenset[str] = frozenset()
        self._failed = ""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await to_thread.run_sync(self.look)
                self._failed = ""
            except Exception as error:  # noqa: BLE001 - without this, no host is lost any more
                if not isinstance(error, GpuwardenError) or self._failed != str(error):
                    log.warning("lost hosts are not looked for; trying again", reason=error_text(error))
                self._failed = str(error)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Look once.

        Raises:
            DatabaseError: the database does not answer.
        """
        now, now_s = self._store.now(), boottime_s()
        if self._looked is None or max(abs(now - self._looked[0]), now_s - self._looked[1]) > GAP_S:
            self._since = now
        found = self._store.seen_hosts.decide(now=now, since=self._since, after_s=self._after_s)
        self._looked = now, now_s
        for each in found.lost:
            log.warning("host lost", host=each.host, silent_s=round(each.silent_s(now)))
        lost = frozenset(each.host for each in self._store.seen_hosts.rows() if each.lost_at is not None)
        for host in sorted(self._lost - lost):
            log.info("lost host is back, or forgotten", host=host)
        spared = frozenset(each.host for each in found.spared)
        if spared - self._spared:
            log.warning("no host is lost, because more are silent than heard", hosts=sorted(spared)[:20])
        self._lost, self._spared = lost, spared
