"""The exporter's pages: `/metrics` for Prometheus, `/evidence` for the remediator of this host. Both only read."""

import errno
import ipaddress
import socketserver
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from exporter import testimony
from exporter.readings import Snapshot
from exporter.scrape import SNAPSHOT_FRESH_S
from gpuwarden import clock, facts
from gpuwarden.errors import GpuwardenError
from gpuwarden.statefile import Stamp

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

REQUEST_TIMEOUT_S: Final = 10
"""How long a client may take to send its request, seconds."""

_PAGE: Final = b"""<!doctype html><title>gpuwarden exporter</title><h1>gpuwarden exporter</h1>
<p><a href="/metrics">metrics</a>, <a href="/healthz">health</a>; evidence at <code>/evidence?worker=NAME</code> and
<code>/evidence?container=NAME</code></p>
"""


class PortTakenError(GpuwardenError):
    """Another program listens where we want to."""


class Pages:
    """The WSGI application."""

    def __init__(self, registry: CollectorRegistry, latest: Callable[[], Snapshot | None]) -> None:
        self._metrics = make_wsgi_app(registry)
        self._latest = latest

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") != "GET":
            return _answer(
                start_response, HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered here\n", ("Allow", "GET")
            )
        if path == "/metrics":
            return list(self._metrics(environ, start_response))
        if path == "/evidence":
            return self._evidence(environ, start_response)
        if path == "/healthz":
            return self._health(start_response)
        if path == "/":
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            return [_PAGE]
        return _answer(start_response, HTTPStatus.NOT_FOUND, "no such page: /metrics, /evidence, /healthz\n")

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
            found = testimony.about(workers[0], snapshot, now=now)
        else:
            found = testimony.about_server(containers[0], snapshot, now=now)
        if found is None:
            what = "worker" if workers else "server"
            return _answer(start_response, HTTPStatus.NOT_FOUND, f"no such {what} is seen on this host\n")
        start_response("200 OK", [("Content-Type", "application/json")])
        return [facts.render(found).encode()]

    def _health(self, start_response: "StartResponse") -> Iterable[bytes]:
        if self._fresh(clock.stamp()) is None:
            return _answer(start_response, HTTPStatus.SERVICE_UNAVAILABLE, "no fresh look at this host\n")
        return _answer(start_response, HTTPStatus.OK, "ok\n")

    def _fresh(self, now: Stamp) -> Snapshot | None:
        snapshot = self._latest()
        age_s = None if snapshot is None else snapshot.taken.age_s(now)
        return snapshot if age_s is not None and age_s <= SNAPSHOT_FRESH_S else None


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


class _QuietHandler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """A line a scrape would say nothing."""

    def address_string(self) -> str:
        """The address as it is: no name look-up stands between a scrape and its answer."""
        return str(self.client_address[0])


def server(listen: str, port: int, pages: Pages) -> WSGIServer:
    """Bind; the caller serves.

    Raises:
        PortTakenError: the port is in use; the message names it.
    """
    try:
        return make_server(listen, port, pages, server_class=_Server, handler_class=_QuietHandler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"{listen}:{port} is in use: stop what listens there, or give another --port"
            ) from None
        raise PortTakenError(f"cannot listen on {listen}:{port}: {error}") from None


def _answer(
    start_response: "StartResponse", status: HTTPStatus, text: str, *headers: tuple[str, str]
) -> Iterable[bytes]:
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [text.encode()]
