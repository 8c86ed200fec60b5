"""A host's connections to its central gateway, without an HTTP library: both share the cores of this machine."""

import asyncio
import json
import time
from collections import deque
from typing import Final

from gpuwarden.gateway.operations import Operation
from gpuwarden.gateway.upstream import KEEP_ALIVE_S, Answer, failed
from gpuwarden.gateway.wire import HOST, PREFIX, REQUEST_ID

IDLE_S: Final = KEEP_ALIVE_S
"""How long an idle connection is used again, seconds."""

ANSWER_S: Final = 60.0
"""Longest wait for an answer, seconds. It is longer than a long poll."""


class Connections:
    """An upstream of a host's gateway: its requests, each on an idle connection or a new one.

    Args:
        host: its name.
        port: of the central gateway.
        token: of the host.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._port = port
        self._head = (
            f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n{HOST}: {host}\r\n"
            "Content-Type: application/json\r\n"
        )
        self._idle: deque[tuple[float, _Connection]] = deque()

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:  # noqa: ARG002
        """See `Upstream`."""
        body = operation.model_dump_json().encode()
        repeats = f"{REQUEST_ID}: {request_id}\r\n" if request_id else ""
        head = f"POST {PREFIX}{operation.path} HTTP/1.1\r\n{self._head}{repeats}Content-Length: {len(body)}\r\n\r\n"
        connection = None
        try:
            connection = self._reusable() or await _connected(self._port)
            async with asyncio.timeout(ANSWER_S):
                status, text = await connection.ask(head.encode() + body)
        except (TimeoutError, OSError) as error:
            return failed(503, "queue", f"no answer to {operation.path}: {error!r}")
        self._idle.append((time.monotonic(), connection))
        return Answer(status=status, content=json.loads(text), outcome="")

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    def _reusable(self) -> "_Connection | None":
        """The connection that was used last. Older ones are closed."""
        while self._idle and self._idle[0][0] < time.monotonic() - IDLE_S:
            self._idle.popleft()[1].close()
        while self._idle:
            connection = self._idle.pop()[1]
            if connection.is_open():
                return connection
        return None


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the gateway closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or self._answer is None or self._answer.done():
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._received = b""
            self._answer.set_result((int(head[9:12]), body))

    async def ask(self, sent: bytes) -> tuple[int, bytes]:
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        try:
            return await self._answer
        except BaseException:
            self.close()
            raise

    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def _connected(port: int) -> _Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
    return protocol
