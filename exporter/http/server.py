"""The exporter's pages: `/metrics` for Prometheus, `/evidence` for the remediator of this host, `/` for people.

All of them only read. `/-/healthy` and `/-/ready` tell one sentence and are for whoever asks; the others are for those
whom the web configuration lets in (exporter/doorkeeper.py).
"""

import contextlib
import errno
import gzip
import html
import io
import ipaddress
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry

from exporter.collectors.registry import SNAPSHOT_FRESH_S
from exporter.doorkeeper import BusyError, Doorkeeper
from exporter.http import evidence, exposition
from exporter.model.readings import NUMBERED, WITH_NODES, Snapshot, SourceHealth
from gpuwarden import __version__, clock
from gpuwarden import evidence as facts
from gpuwarden.errors import GpuwardenError
from gpuwarden.http import bind_errors
from gpuwarden.state_file import Stamp

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

REQUEST_TIMEOUT_S: Final = 10
"""How long a client may take to shake hands and send its request, both together, seconds; and to take the answer."""

CONNECTIONS_MAX: Final = 100
"""Connections answered at one time; one more is closed."""

ADDRESS_CONNECTIONS_MAX: Final = 25
"""Of these from one address, so that one caller cannot shut out the others."""

GZIP_LEVEL: Final = 1
"""The least: names and labels that come again and again pack well at once, and what the others spare costs more."""

_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>gpuwarden exporter on {host}</title>
<h1>gpuwarden exporter</h1>
<p>Version {version}, on {host}. {look}</p>
<table><tr><th>source</th><th>at the newest look</th></tr>
{sources}</table>
<ul>
<li><a href="/metrics">/metrics</a>: for Prometheus, as text or OpenMetrics</li>
<li><a href="/-/healthy">/-/healthy</a>: the exporter answers</li>
<li><a href="/-/ready">/-/ready</a>: it has looked at this host within {fresh:g} s</li>
<li><code>/evidence?worker=NAME</code>, <code>/evidence?container=NAME</code>: for this host's own remediator</li>
</ul>
</html>
"""

_OPEN: Final = ("/-/healthy", "/-/ready")
"""What is told to whoever asks: a probe of Kubernetes or Docker has no password."""


class PortTakenError(GpuwardenError):
    """Another program listens where we want to."""


class Pages:
    """The WSGI application."""

    def __init__(
        self, registry: CollectorRegistry, latest: Callable[[], Snapshot | None], *, host: str, door: Doorkeeper
    ) -> None:
        self._registry = registry
        self._renderer = exposition.Renderer()
        self._latest = latest
        self._host = host
        self._door = door

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        """Answer one request; HEAD as GET, and without the page itself (RFC 9110, 9.3.2)."""
        if environ.get("REQUEST_METHOD") == "HEAD":
            told: list[tuple[str, list[tuple[str, str]]]] = []

            def begin(status: str, headers: list[tuple[str, str]]) -> None:
                told.append((status, headers))

            length = sum(map(len, self._answer({**environ, "REQUEST_METHOD": "GET"}, begin)))  # type: ignore[arg-type]
            ((status, headers),) = told
            start_response(status, [*headers, ("Content-Length", str(length))])
            return []
        return self._answer(environ, start_response)

    def _answer(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") != "GET":
            says = "only GET and HEAD are answered here\n"
            return _answer(start_response, HTTPStatus.METHOD_NOT_ALLOWED, says, ("Allow", "GET, HEAD"))
        try:
            admitted = path in _OPEN or self._door.admits(environ.get("HTTP_AUTHORIZATION", ""))
        except BusyError as error:
            return _answer(start_response, HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n", ("Retry-After", "1"))
        if not admitted:
            says = "a user and a password of basic_auth_users in --web-config-file are wanted\n"
            challenge = ("WWW-Authenticate", 'Basic realm="gpuwarden"')
            return _answer(start_response, HTTPStatus.UNAUTHORIZED, says, challenge)
        if path == "/metrics":
            return self._metrics(environ, start_response)
        if path == "/evidence":
            return self._evidence(environ, start_response)
        if path == "/-/healthy":
            return _answer(start_response, HTTPStatus.OK, "ok\n")
        if path == "/-/ready":
            return self._ready(start_response)
        if path == "/":
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            return [self._front().encode()]
        says = "no such page: /, /metrics, /evidence, /-/healthy, /-/ready\n"
        return _answer(start_response, HTTPStatus.NOT_FOUND, says)

    def _metrics(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        openmetrics = exposition.wants_openmetrics(environ.get("HTTP_ACCEPT", ""))
        page = self._renderer.render(self._registry.collect(), openmetrics=openmetrics)
        headers = [("Content-Type", exposition.OPENMETRICS if openmetrics else exposition.TEXT)]
        if exposition.accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            page = gzip.compress(page, compresslevel=GZIP_LEVEL)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [page]

    def _front(self) -> str:
        snapshot = self._latest()
        age_s = None if snapshot is None else snapshot.taken.age_s(clock.stamp())
        look = "It has not looked at this host yet." if age_s is None else f"Its newest look is {age_s:.1f} s old."
        rows = ((each.source, _went(each, snapshot)) for each in (() if snapshot is None else snapshot.sources))
        return _PAGE.format(
            host=html.escape(self._host),
            version=html.escape(__version__),
            look=look,
            fresh=SNAPSHOT_FRESH_S,
            sources="".join(f"<tr><td>{html.escape(name)}<td>{html.escape(says)}\n" for name, says in rows),
        )

    def _evidence(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if not ipaddress.ip_address(environ["REMOTE_ADDR"]).is_loopback:
            return _answer(start_response, HTTPStatus.FORBIDDEN, "evidence is for this host's own remediator\n")
        asked = parse_qs(environ.get("QUERY_STRING", ""))
        workers, containers = asked.get("worker", []), asked.get("container", [])
        if len(workers) + len(containers) != 1:
            says = "ask for one worker: /evidence?worker=NAME, or for one server: /evidence?container=NAME\n"
            return _answer(start_response, HTTPStatus.BAD_REQUEST, says)
        now = clock.stamp()
        snapshot = self._fresh(now)
        if snapshot is None or (snapshot.workers if workers else snapshot.servers) is None:
            return _answer(start_response, HTTPStatus.SERVICE_UNAVAILABLE, "no fresh look at this host\n")
        found: facts.ContainerFacts | None
        if workers:
            found = evidence.about(workers[0], snapshot, now=now)
        else:
            found = evidence.about_server(containers[0], snapshot, now=now)
        if found is None:
            what = "worker" if workers else "server"
            return _answer(start_response, HTTPStatus.NOT_FOUND, f"no such {what} is seen on this host\n")
        start_response("200 OK", [("Content-Type", "application/json")])
        return [facts.render(found).encode()]

    def _ready(self, start_response: "StartResponse") -> Iterable[bytes]:
        if self._fresh(clock.stamp()) is None:
            return _answer(start_response, HTTPStatus.SERVICE_UNAVAILABLE, "no fresh look at this host\n")
        return _answer(start_response, HTTPStatus.OK, "ok\n")

    def _fresh(self, now: Stamp) -> Snapshot | None:
        snapshot = self._latest()
        age_s = None if snapshot is None else snapshot.taken.age_s(now)
        return snapshot if age_s is not None and age_s <= SNAPSHOT_FRESH_S else None


def _went(source: SourceHealth, snapshot: Snapshot | None) -> str:
    """How a source's part of a look went. One can answer, and not be told all: of a GPU, or by a file of a tenant's."""
    if not source.success:
        return f"failed: {source.because}"
    took = f"in {source.duration_s * 1000:.1f} ms"
    files = None if snapshot is None else {"workers": snapshot.workers, "tasks": snapshot.tasks}.get(source.source)
    if files is not None and files.such_as:
        return f"{took}, and not trusted: {'; '.join(files.such_as.values())}"
    gpus = () if snapshot is None or snapshot.gpus is None else snapshot.gpus.gpus
    refused = [
        f"{gpu.uuid}: {gpu.unknown or ', '.join(gpu.unwatched)}"
        for gpu in gpus
        if gpu.unwatched and source.source == (NUMBERED if gpu.node is None else WITH_NODES)
    ]
    return f"{took}, and not known of {'; of '.join(refused)}" if refused else f"well, {took}"


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread of its own, whom the door lets in."""

    daemon_threads = True
    allow_reuse_address = True
    # Whoever finds no place in the kernel's queue comes again 1 s later, then 2 s and 4 s. With the 5 places that there
    # are by default 20 at once would wait so, and with one caller's 200 another one's scrape would fail.
    request_queue_size = CONNECTIONS_MAX
    door: Doorkeeper

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._answered: Counter[str] = Counter()
        self._counting = threading.Lock()
        super().__init__(*arguments, **named)

    def end(self) -> None:
        """Have `serve_forever` return, at once: a socket that is listened on no more is ready (inet_shutdown)."""
        with contextlib.suppress(OSError):  # it was told so before
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()

    def get_request(self) -> tuple[Any, Any]:
        """Whom a socket of both families calls by an IPv4 address within IPv6 is that IPv4 address: ours, too."""
        request, (address, *rest) = super().get_request()
        mapped = ipaddress.ip_address(address)
        if isinstance(mapped, ipaddress.IPv6Address) and mapped.ipv4_mapped is not None:
            address = str(mapped.ipv4_mapped)
        return request, (address, *rest)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless as many are answered as may be: who scrapes comes again."""
        if not self._take(client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started: whoever comes next may be answered
            self._release(client_address[0])
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, from its first byte to its last."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(client_address[0])

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the thread of this one connection, where a caller that is slow at it holds up nobody."""
        connection: socket.socket = request
        whole_by_s = time.monotonic() + REQUEST_TIMEOUT_S
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            secured = self.door.secure(connection)
        except OSError:  # no TLS, none that we take, or a certificate that nobody here has signed
            return
        if secured is connection:
            _QuietHandler(connection, client_address, self, whole_by_s=whole_by_s)
            return
        with secured:
            _QuietHandler(secured, client_address, self, whole_by_s=whole_by_s)

    def _take(self, address: str) -> bool:
        with self._counting:
            if self._answered.total() >= CONNECTIONS_MAX or self._answered[address] >= ADDRESS_CONNECTIONS_MAX:
                return False
            self._answered[address] += 1
            return True

    def _release(self, address: str) -> None:
        with self._counting:
            self._answered[address] -= 1
            if not self._answered[address]:
                del self._answered[address]


class _Server6(Server):
    """The same on an IPv6 address; on all of them, `::`, it answers IPv4 too, whatever the host's default is."""

    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        """Bind, for both families."""
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Until(io.RawIOBase):
    """What a connection sends until a moment of the monotonic clock, however small the pieces it comes in."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._until_s = until_s

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """What comes next, 0 for its end."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Answer(io.BufferedIOBase):
    """What a connection is told. Whoever does not take it, for whatever reason, has hung up: that is no error of ours.

    Of what can be raised then wsgiref takes a part for that, and logs the rest as if the page had failed: that the time
    is over, and whatever TLS says.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, part: Any, /) -> int:
        """All of it, in the time that an answer has."""
        try:
            self._connection.sendall(part)
        except OSError:
            raise ConnectionAbortedError from None
        return len(part)


class _QuietHandler(WSGIRequestHandler):
    def __init__(self, request: Any, client_address: Any, server: Server, *, whole_by_s: float) -> None:
        self._whole_by_s = whole_by_s
        super().__init__(request, client_address, server)

    def setup(self) -> None:
        """The request is read up to its moment and no longer: each piece with a time of its own would never end."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Until(self.connection, self._whole_by_s))
        self.wfile = _Answer(self.connection)

    def handle(self) -> None:
        """Who is too slow, or hangs up, is told nothing, and no log."""
        with contextlib.suppress(OSError):
            super().handle()

    def parse_request(self) -> bool:
        """The rest of the request; the answer to it has a time of its own."""
        parsed = super().parse_request()
        self.connection.settimeout(REQUEST_TIMEOUT_S)
        return parsed

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """A line a scrape would say nothing."""

    def address_string(self) -> str:
        """The address as it is: no name look-up stands between a scrape and its answer."""
        return str(self.client_address[0])


def server(listen: str, port: int, pages: Pages, door: Doorkeeper) -> Server:
    """Bind; the caller serves.

    Raises:
        PortTakenError: the port is in use; the message names it.
    """
    ipv6 = ":" in listen
    where = f"[{listen}]:{port}" if ipv6 else f"{listen}:{port}"
    server_class = _Server6 if ipv6 else Server
    try:
        bound = make_server(listen, port, pages, server_class=server_class, handler_class=_QuietHandler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"{where} is in use: {bind_errors.hint(error)}") from None
        says = ": ".join(filter(None, (error.strerror or str(error), bind_errors.hint(error))))
        raise PortTakenError(f"cannot listen on {where}: {says}") from None
    bound.door = door
    return bound


def _answer(
    start_response: "StartResponse", status: HTTPStatus, text: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [text.encode()]
