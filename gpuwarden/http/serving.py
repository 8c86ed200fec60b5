"""The HTTP server of both programs: uvicorn with a web configuration file and limits on slow callers.

A connection has `REQUEST_TIMEOUT_S` for its TLS handshake and first header, again for each later header, and again to
take an answer. Over the connection limits, the connection that waits longest for its header is closed, or the new one.

Each connection gets the current TLS context, so a renewed certificate needs no restart.
"""

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gpuwarden.errors import GpuwardenError
from gpuwarden.http.web_config import WebConfig

log: Final = structlog.get_logger("gpuwarden")

REQUEST_TIMEOUT_S: Final = 10
"""Time for the handshake and header, and for the answer, seconds."""

EARLY_MAX_BYTES: Final = 16 * 1024
"""Most bytes that a connection sends before it has its answer."""

CONNECTIONS_MAX: Final = 100
"""Most open connections."""

ADDRESS_CONNECTIONS_MAX: Final = 25
"""Most open connections from one address."""

BACKLOG: Final = 2048
"""Connections that the kernel queues. Further callers retry after 1 s."""

KEEP_ALIVE_S: Final = 5
"""How long an idle connection is kept for the next request, seconds. Over the limits it is closed for a new one."""

GRACEFUL_S: Final = 5
"""Time for open requests after a stop signal, seconds."""


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or SIGINT. SIGHUP reloads a changed web configuration.

    Args:
        app: the ASGI application.
        web: TLS and authentication.
        at_start: called once requests are answered.
        at_end: called by the handler of the first stop signal.
        connections_max: most open connections, if not the usual limits.
        keep_alive_s: how long an idle connection is kept, seconds.
    """

    def __init__(
        self,
        app: Any,
        web: WebConfig,
        *,
        at_start: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
        connections_max: int | None = None,
        keep_alive_s: int = KEEP_ALIVE_S,
    ) -> None:
        config = _Config(app, web, keep_alive_s=keep_alive_s)
        if connections_max is not None:
            config.slots = _Slots(connections_max, connections_max)
        super().__init__(config)
        self._web = web
        self._at_start, self._at_end = at_start, at_end
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self._look)
        self._at_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a stop signal."""
        if not self.should_exit:
            self._at_end()
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """Stop, from any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        """As in uvicorn, with one wake a second instead of ten: saves 0.2 % of a core."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but a signal that was obeyed is not raised once more: the exit status is 0."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    def _look(self) -> None:
        reason = self._web.look()
        if reason:
            log.warning("SIGHUP: reload failed, old web configuration in use", reason=reason)
        else:
            log.info("SIGHUP: files reloaded; options need a restart", web=self._web.describe())


class SocketServer:
    """Serves an application on one Unix socket, in a running event loop.

    Args:
        app: the ASGI application.
        connections_max: most open connections.
    """

    def __init__(self, app: Any, *, connections_max: int) -> None:
        self._config = _Config(app, WebConfig(None))
        self._config.slots = _Slots(connections_max, connections_max)
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Answer on a listening socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connection, sock=listener)

    def close(self) -> None:
        """Stop, after the open requests."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    def _connection(self) -> "_Connection":
        return _Connection(self._config, self._state, {})


class _Config(uvicorn.Config):
    def __init__(self, app: Any, web: WebConfig, *, keep_alive_s: int = KEEP_ALIVE_S) -> None:
        # Not httptools, uvicorn's default if installed: it reads headers without a limit.
        super().__init__(
            app,
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=GRACEFUL_S,
        )
        self.web = web
        self.slots = _Slots(CONNECTIONS_MAX, ADDRESS_CONNECTIONS_MAX)
        _forward(logging.getLogger("uvicorn.error"))


class _Slots:
    """Counts open connections, in total and per address. `waiting` has those without a request, oldest first."""

    def __init__(self, most: int, most_of_address: int) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._taken: Counter[str] = Counter()
        self.waiting: dict[_Connection, str] = {}

    def take(self, address: str) -> bool:
        crowded = self._taken[address] >= self._most_of_address
        if crowded or self._taken.total() >= self._most:
            oldest = next((each for each, its in self.waiting.items() if its == address or not crowded), None)
            if oldest is None:
                return False
            oldest.give_way()
        self._taken[address] += 1
        return True

    def release(self, address: str) -> None:
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]


class _Connection(H11Protocol):
    """One connection. It keeps its slot until it is closed and its last request is answered."""

    config: _Config

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._socket: asyncio.Transport | None = None
        self._peer = ("", 0)
        self._slot = self._answering = False
        self._early = b""
        self._securing: asyncio.Task[None] | None = None
        self._request_by: asyncio.TimerHandle | None = None
        self._answer_by: asyncio.TimerHandle | None = None
        self._application, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a slot and start TLS if configured."""
        peer = transport.get_extra_info("peername")
        if peer is None:  # it has hung up
            transport.close()
            return
        self._peer = (_unmapped(peer[0]), peer[1]) if isinstance(peer, tuple) else ("", 0)  # else a Unix socket
        self._slot = self.config.slots.take(self._peer[0])
        if not self._slot:
            transport.close()
            return
        self._socket = transport
        self._expect_header()
        context = self.config.web.tls()
        if context is None:
            self._begin(transport)
        else:
            self._securing = self.loop.create_task(self._secure(transport, context))

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side. A failed handshake can call this twice."""
        for timer in (self._request_by, self._answer_by):
            if timer is not None:
                timer.cancel()
        self._socket = None
        self.app = self._application  # without a reference to itself, it is freed at once
        if self.transport is not None:  # else no request has begun
            super().connection_lost(exc)
        self._release()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request. With TLS it can come before the handshake task continues."""
        if self.transport is None:
            self._early += data
            return
        super().data_received(data)
        if self._socket is not None and len(self.conn.trailing_data[0]) > EARLY_MAX_BYTES:
            self._socket.abort()
        header_is_whole = self.cycle is not None and not self.cycle.response_complete
        if header_is_whole:
            self.config.slots.waiting.pop(self, None)
            if self._request_by is not None:
                self._request_by.cancel()
                self._request_by = None
        elif self._request_by is None:
            self._expect_header()

    def give_way(self) -> None:
        """Close it for a new caller, while it waits for a header."""
        if self._socket is not None:
            self._socket.abort()
        self._release()

    def on_response_complete(self) -> None:
        """Start the time in which the caller must take the answer."""
        super().on_response_complete()
        if self._socket is not None and self.cycle.response_complete:  # else its next request has begun
            self.config.slots.waiting[self] = self._peer[0]
        self._expect_answer_taken()

    def pause_writing(self) -> None:
        """Start the time in which the caller must take a part of the answer."""
        super().pause_writing()
        self._expect_answer_taken()

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            secured = await self.loop.start_tls(
                transport, self, context, server_side=True, ssl_shutdown_timeout=REQUEST_TIMEOUT_S
            )
        except OSError:  # no TLS, an old version, or an unknown certificate
            secured = None
        if secured is None or secured.is_closing():  # None if the caller hangs up in the handshake
            transport.abort()
            self.connection_lost(None)
            return
        self._begin(secured)
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def _begin(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.client = self._peer

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self._answering = True
        try:
            await self._application(scope, receive, send)
        finally:
            self._answering = False
            if self._socket is None:
                self._release()

    def _expect_header(self) -> None:
        if self._socket is not None:
            self._request_by = self.loop.call_later(REQUEST_TIMEOUT_S, self._socket.abort)
            self.config.slots.waiting[self] = self._peer[0]

    def _expect_answer_taken(self) -> None:
        if self._answer_by is not None:
            self._answer_by.cancel()
        self._answer_by = self.loop.call_later(REQUEST_TIMEOUT_S, self._end_if_not_taken)

    def _end_if_not_taken(self) -> None:
        self._answer_by = None
        if self._socket is not None and self._socket.get_write_buffer_size():
            self._socket.abort()

    def _release(self) -> None:
        self.config.slots.waiting.pop(self, None)
        if self._slot and not self._answering:
            self._slot = False
            self.config.slots.release(self._peer[0])


def _unmapped(address: str) -> str:
    """The IPv4 address of a caller on a socket of both families."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return address if mapped is None else str(mapped)


class _Forward(logging.Handler):
    """Writes a library's log records as this program's events."""

    def emit(self, record: logging.LogRecord) -> None:
        log.error("web server error", reason=record.getMessage().strip(), exc_info=record.exc_info)


def _forward(logger: logging.Logger) -> None:
    logger.handlers, logger.propagate = [_Forward(level=logging.ERROR)], False


def bind(address: str, port: int) -> socket.socket:
    """A listening socket. `::` includes IPv4.

    Raises:
        GpuwardenError: the address or port is not available.
    """
    ipv6 = ":" in address
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        server = socket.create_server(
            (address, port), family=family, backlog=BACKLOG, dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6()
        )
    except OSError as error:
        where = f"[{address}]:{port}" if ipv6 else f"{address}:{port}"
        reason = (error.strerror or str(error)).partition(" (while")[0]  # Python repeats the address there
        raise GpuwardenError(": ".join(filter(None, (f"cannot listen on {where} ({reason})", hint(error))))) from None
    # asyncio turns Nagle's delay (40 ms per answer) off only for a socket made from its descriptor.
    return socket.socket(fileno=server.detach())


def hint(error: OSError) -> str | None:
    """Advice for a failed bind, if any."""
    if error.errno == errno.EADDRINUSE:
        return "stop what listens there, or give another --port"
    if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:  # getaddrinfo's errors are below 0
        return "give --listen an address of this host, or 0.0.0.0 for all of them"
    if error.errno == errno.EAFNOSUPPORT:
        return "this host has no IPv6: give --listen an address of IPv4, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return "give a --port of 1024 or more, which needs no root"
    return None
