"""Probe servers over HTTP, in one event loop in a thread.

Only the status counts, and redirects are not followed. HTTP clients limit the time of each read and not of the call, so
none is used. Targets are numeric addresses from the engines.
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
"""Servers that are probed at the same time."""

LINE_MAX: Final = 1024
"""Bytes within which the first line must end."""

BODY_MAX: Final = 64 * 2**10
"""Bytes of a response that are read, so that a server logs no broken connection."""

GAP_S: Final = 5.0
"""Delay of a probe, seconds, that counts as a gap."""


class Prober:
    """Probe every server each `interval_s`, with a timeout of `answer_s`, at most `at_once_max` at a time; seconds."""

    def __init__(self, *, interval_s: float = 5.0, answer_s: float = 3.0, at_once_max: int = AT_ONCE_MAX) -> None:
        self._interval_s, self._answer_s, self._at_once_max = interval_s, answer_s, at_once_max
        self._probes: dict[str, _ServerProbe] = {}
        self._slots = asyncio.Semaphore(at_once_max)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def round_s(self) -> float:
        """Seconds for one probe of every server: the interval, or more if many hang."""
        return max(self._interval_s, len(self._probes) * self._answer_s / self._at_once_max)

    @property
    def fresh_s(self) -> float:
        """Seconds for which a probe result counts."""
        return self.round_s + self._answer_s + GAP_S

    def set_servers(self, servers: Iterable[Container]) -> None:
        """Probe these servers from now on, by incarnation. A paused one keeps its state without probes.

        Raises:
            RuntimeError: no thread can be started; the next call tries again.
        """
        wanted = {each.incarnation: each for each in servers}
        probes = {each: self._probes.get(each) or _ServerProbe(server) for each, server in wanted.items()}
        for incarnation, server in wanted.items():
            probes[incarnation].server = server
        self._probes = probes  # replaced as a whole: the loop reads it
        if probes or self._thread is not None:
            self._start_loop().call_soon_threadsafe(self._begin)

    def state(self, incarnation: str) -> ProbeState:
        """The results for one server."""
        server_probe = self._probes.get(incarnation)
        return ProbeState() if server_probe is None else server_probe.state

    def close(self) -> None:
        """Stop all probes."""
        self._probes = {}
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._thread is None:
            thread = threading.Thread(target=self._loop.run_forever, name="probes", daemon=True)
            thread.start()
            self._thread = thread
        return self._loop

    def _begin(self) -> None:
        for server_probe in self._probes.values():
            if server_probe.task is None or server_probe.task.done():
                server_probe.task = asyncio.get_running_loop().create_task(self._probe_loop(server_probe))

    async def _probe_loop(self, server_probe: "_ServerProbe") -> None:
        due_s = time.monotonic()
        while self._probes.get(server_probe.server.incarnation) is server_probe:
            async with self._slots:
                await server_probe.ask(answer_s=self._answer_s, gap_max_s=self.round_s + GAP_S)
            now_s = time.monotonic()
            due_s = max(due_s + self._interval_s, now_s)
            await asyncio.sleep(due_s - now_s)


class _ServerProbe:
    """One server and its results."""

    def __init__(self, server: Container) -> None:
        self.server = server
        self.state = ProbeState()
        self.task: asyncio.Task[None] | None = None

    async def ask(self, *, answer_s: float, gap_max_s: float) -> None:
        """Probe the server once."""
        server = self.server.server
        if server is None or self.server.paused or server.address is None or not isinstance(server.probe, Probe):
            self.state = self.state.reset()
            return
        began_s = clock.boottime_s()
        answered, message = await ask(server.address, server.probe.port, server.probe.target, within_s=answer_s)
        ended_s = clock.boottime_s()
        if self.server.paused or ended_s - began_s > answer_s + GAP_S:
            self.state = self.state.reset()  # it was paused, or the host was suspended
            return
        self.state = self.state.add_probe(
            answered, began_s=began_s, ended_s=ended_s, gap_max_s=gap_max_s, message=message
        )


async def ask(address: str, port: int, target: str, *, within_s: float) -> tuple[bool, str]:
    """Send a GET to a numeric address; returns whether it was answered in time, and if not, why."""
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
                await _discard_body(reader)
            finally:
                writer.transport.abort()  # `close` would wait for a server that does not read
    except TimeoutError:
        if line is None:
            return False, f"no answer within {within_s:g} s"
    except OSError as error:
        if line is None:
            return False, f"connection failed: {os.strerror(error.errno) if error.errno else error}"
    return check_status_line(line or b"")


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    line = b""
    while b"\n" not in line and len(line) < LINE_MAX and (part := await reader.read(LINE_MAX)):
        line += part
    return line


async def _discard_body(reader: asyncio.StreamReader) -> None:
    left = BODY_MAX
    while left > 0 and (part := await reader.read(min(left, 4096))):
        left -= len(part)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
