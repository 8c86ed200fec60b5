"""HTTP calls at a constant rate, or as fast as possible, over plain sockets.

At a constant rate each latency counts from the time when the call was due, so a stalled server is late with every
call of that time. The client is cheap because it shares the cores with the server: requests are made in advance.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from bench.figures import BenchError

CONNECTIONS: Final = 64
ADDRESS_CONNECTIONS: Final = 16
"""The webhook limits connections per address."""

LATE_S: Final = 0.005
"""Calls that the client sends later than this count as late."""

ANSWER_S: Final = 30.0
IDLE_S: Final = 2.0


@dataclass(kw_only=True)
class Answered:
    """Latencies, total duration, and number of calls sent late."""

    latencies_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0
    late: int = 0

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.latencies_ms) / self.took_s


def request(port: int, path: str, body: bytes, *, token: str = "") -> bytes:
    """The bytes of a POST."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def at_rate(port: int, requests: Sequence[bytes], *, rate: float, wanted: int) -> Answered:
    """Send `rate` requests per second.

    Raises:
        BenchError: a status is not `wanted`.
    """
    return _run(_at_rate(port, requests, rate, wanted))


def flat_out(port: int, requests: Sequence[bytes], *, connections: int, wanted: int) -> Answered:
    """Send requests as fast as they are answered, one at a time per connection.

    Raises:
        BenchError: a status is not `wanted`.
    """
    return _run(_flat_out(port, requests, connections, wanted))


def _run(calls: Coroutine[None, None, Answered]) -> Answered:
    gc.collect()
    gc.disable()  # a collection takes 90 ms, which would count as latency
    try:
        return asyncio.run(calls)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        gc.enable()


async def _at_rate(port: int, requests: Sequence[bytes], rate: float, wanted: int) -> Answered:
    found = Answered()
    async with _connections(port, CONNECTIONS) as idle, asyncio.TaskGroup() as calls:

        async def call(sent: bytes, due_s: float) -> None:
            connection = await idle.get()
            found.late += time.perf_counter() - due_s > LATE_S
            await connection.call(sent, wanted)
            found.latencies_ms.append((time.perf_counter() - due_s) * 1000)
            found.took_s = time.perf_counter() - began_s
            idle.put_nowait(connection)

        began_s = time.perf_counter()
        for number, sent in enumerate(requests):
            due_s = began_s + number / rate
            if (early_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            calls.create_task(call(sent, due_s))
    return found


async def _flat_out(port: int, requests: Sequence[bytes], connections: int, wanted: int) -> Answered:
    found, left = Answered(), iter(requests)
    async with _connections(port, connections) as idle, asyncio.TaskGroup() as calls:

        async def send() -> None:
            connection = await idle.get()
            for each in left:
                sent_s = time.perf_counter()
                await connection.call(each, wanted)
                found.latencies_ms.append((time.perf_counter() - sent_s) * 1000)
                found.took_s = time.perf_counter() - began_s

        began_s = time.perf_counter()
        for _ in range(connections):
            calls.create_task(send())
    return found


class _Connection:
    """A connection that is opened again after `IDLE_S`, because servers close idle ones (uvicorn after 5 s)."""

    def __init__(self, port: int, own_address: str) -> None:
        self._port, self._own_address = port, own_address
        self._used_s = 0.0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, sent: bytes, wanted: int) -> None:
        if self._streams is None or time.perf_counter() - self._used_s > IDLE_S:
            await self.close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(self._own_address, 0))
        await _call(*self._streams, sent, wanted)
        self._used_s = time.perf_counter()

    async def close(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._streams = None


@asynccontextmanager
async def _connections(port: int, count: int) -> AsyncIterator["asyncio.LifoQueue[_Connection]"]:
    """Idle connections; the last used comes first."""
    connections = [_Connection(port, f"127.0.0.{1 + number // ADDRESS_CONNECTIONS}") for number in range(count)]
    idle: asyncio.LifoQueue[_Connection] = asyncio.LifoQueue()
    for each in connections:
        idle.put_nowait(each)
    try:
        yield idle
    finally:
        for each in connections:
            await each.close()


async def _call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes, wanted: int) -> None:
    writer.write(sent)
    try:
        async with asyncio.timeout(ANSWER_S):
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        raise BenchError(f"call failed: {error!r}") from None
    if not head.startswith(b"HTTP/1.1 %d " % wanted):
        raise BenchError(f"expected status {wanted}: {head.partition(b'{')[0][:80]!r} {body[:200]!r}")
