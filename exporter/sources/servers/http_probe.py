"""Asks servers over HTTP, from this host: one event loop in a thread of its own, so that no server delays another.

One asking is a GET that is bounded in time and size. Nothing but the status counts, and no redirect is followed. It is
made by hand because HTTP clients bound each read and not the whole call: a server that drips would hold the prober.
Only the numeric addresses that engines gave their containers are called, never a name.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from exporter.evidence.server_health import ProbeState, check_status_line
from exporter.model.container import Container, Probe
from gpuwarden import __version__, clock

AT_ONCE_MAX: Final = 64
"""Servers of one host that are asked at the same time."""

LINE_MAX: Final = 1024
"""Bytes within which a server's first line must end."""

BODY_MAX: Final = 64 * 2**10
"""Bytes of an answer that are taken and thrown away, so that a server need not log a broken connection."""

GAP_S: Final = 5.0
"""How much later than planned an asking may begin, or end, before the time in between counts as a gap, seconds."""


class Prober:
    """Asks every server that it was last told of, every `interval_s`, and gives each `answer_s` to answer; seconds.

    At most `at_once_max` servers are asked at the same time. The others wait in the order in which they were due, so
    that no tenant's servers crowd out another's.
    """

    def __init__(self, *, interval_s: float = 5.0, answer_s: float = 3.0, at_once_max: int = AT_ONCE_MAX) -> None:
        self._interval_s, self._answer_s, self._at_once_max = interval_s, answer_s, at_once_max
        self._askers: dict[str, _Asker] = {}
        self._slots = asyncio.Semaphore(at_once_max)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def pace_s(self) -> float:
        """How long it may take to ask each server there is once, seconds: the interval; more if many hang."""
        return max(self._interval_s, len(self._askers) * self._answer_s / self._at_once_max)

    @property
    def fresh_s(self) -> float:
        """What an asking told is believed for this long, seconds."""
        return self.pace_s + self._answer_s + GAP_S

    def tend(self, servers: Iterable[Container]) -> None:
        """Ask these from now on, by incarnation, and no others. One that is paused is not asked, and not forgotten.

        Raises:
            RuntimeError: no thread can be started; the next call tries again.
        """
        wanted = {each.incarnation: each for each in servers}
        askers = {each: self._askers.get(each) or _Asker(server) for each, server in wanted.items()}
        for incarnation, server in wanted.items():
            askers[incarnation].server = server
        self._askers = askers  # replaced whole: the loop goes through it meanwhile
        if askers or self._thread is not None:
            self._running().call_soon_threadsafe(self._begin)

    def asking(self, incarnation: str) -> ProbeState:
        """What has come of asking one, up to now."""
        asker = self._askers.get(incarnation)
        return ProbeState() if asker is None else asker.asking

    def close(self) -> None:
        """Ask no server any more."""
        self._askers = {}
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._thread is None:
            thread = threading.Thread(target=self._loop.run_forever, name="probes", daemon=True)
            thread.start()
            self._thread = thread
        return self._loop

    def _begin(self) -> None:
        for asker in self._askers.values():
            if asker.task is None or asker.task.done():
                asker.task = asyncio.get_running_loop().create_task(self._ask_on(asker))

    async def _ask_on(self, asker: "_Asker") -> None:
        due_s = time.monotonic()
        while self._askers.get(asker.server.incarnation) is asker:
            async with self._slots:
                await asker.ask(answer_s=self._answer_s, gap_max_s=self.pace_s + GAP_S)
            now_s = time.monotonic()
            due_s = max(due_s + self._interval_s, now_s)
            await asyncio.sleep(due_s - now_s)


class _Asker:
    """One server, and what has come of asking it."""

    def __init__(self, server: Container) -> None:
        self.server = server
        self.asking = ProbeState()
        self.task: asyncio.Task[None] | None = None

    async def ask(self, *, answer_s: float, gap_max_s: float) -> None:
        """Ask it once. Askings further apart than `gap_max_s` prove nothing about the time between."""
        server = self.server.server
        if server is None or self.server.paused or server.address is None or not isinstance(server.probe, Probe):
            self.asking = self.asking.forgotten()
            return
        began_s = clock.boottime_s()
        answered, because = await ask(server.address, server.probe.port, server.probe.target, within_s=answer_s)
        ended_s = clock.boottime_s()
        if self.server.paused or ended_s - began_s > answer_s + GAP_S:
            self.asking = self.asking.forgotten()  # paused in the middle, or the machine was suspended
            return
        self.asking = self.asking.then(answered, began_s=began_s, ended_s=ended_s, gap_max_s=gap_max_s, because=because)


async def ask(address: str, port: int, target: str, *, within_s: float) -> tuple[bool, str]:
    """GET `target` at a numeric address; whether that was answered in time, and if not what came instead."""
    request = (
        f"GET {target} HTTP/1.1\r\nHost: localhost:{port}\r\nUser-Agent: gpuwarden/{__version__}\r\n"
        "Accept: */*\r\nConnection: close\r\n\r\n"
    )
    line: bytes | None = None
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(address, port, limit=LINE_MAX)
            try:
                writer.write(request.encode("ascii"))
                line = await _first_line(reader)
                await _throw_away(reader)
            finally:
                writer.transport.abort()  # `close` would wait for a server that does not read
    except TimeoutError:
        if line is None:
            return False, f"it does not answer within {within_s:g} s"
    except OSError as error:
        if line is None:
            return False, f"it cannot be asked: {os.strerror(error.errno) if error.errno else error}"
    return check_status_line(line or b"")


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    line = b""
    while b"\n" not in line and len(line) < LINE_MAX and (part := await reader.read(LINE_MAX)):
        line += part
    return line


async def _throw_away(reader: asyncio.StreamReader) -> None:
    left = BODY_MAX
    while left > 0 and (part := await reader.read(min(left, 4096))):
        left -= len(part)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
