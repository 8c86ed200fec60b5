"""The exporter's pages: `/metrics` for Prometheus, `/evidence` for the remediator of this host, `/` for people.

All are read-only. `/-/healthy` and `/-/ready` need no credentials; the web configuration protects the other pages.
"""

import html
import ipaddress
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from exporter.collectors.registry import SNAPSHOT_FRESH_S
from exporter.http import evidence, exposition
from exporter.model.gpu import DRM_SOURCE, NVIDIA_SOURCE
from exporter.model.snapshot import Snapshot, SourceHealth
from gpuwarden import __version__, clock
from gpuwarden import evidence as facts
from gpuwarden.format import printable
from gpuwarden.http.check_request import CheckRequest
from gpuwarden.http.web_config import WebConfig
from gpuwarden.state_file import Stamp

GZIP_LEVEL: Final = 1
"""Repeated names compress well at the lowest level; a higher one costs more than it saves."""

_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>gpuwarden exporter on {host}</title>
<h1>gpuwarden exporter</h1>

<p>Version {version}, on {host}. {sample}</p>
<table><tr><th>source</th><th>last sample</th></tr>
{sources}</table>

<ul>
<li><a href="/metrics">/metrics</a>: for Prometheus</li>
<li><a href="/-/healthy">/-/healthy</a>: the exporter answers</li>

<li><a href="/-/ready">/-/ready</a>: the last sample is at most {fresh:g} s old</li>

<li><code>/evidence</code>: facts about one worker, container or tenant, for the remediator of this host</li>
</ul>
</html>
"""


def create_app(
    registry: CollectorRegistry, latest: Callable[[], Snapshot | None], *, host: str, web: WebConfig
) -> Starlette:
    """Build the application.

    Args:
        registry: the metrics.
        latest: returns the newest snapshot.
        host: this host's key.
        web: the web configuration.
    """
    pages = _Pages(registry, latest, host=host)
    routes = [
        Route("/", pages.front),
        Route("/metrics", pages.metrics),
        Route("/evidence", pages.evidence),
        Route("/-/healthy", _healthy),
        Route("/-/ready", pages.ready),
    ]
    middleware = [Middleware(CheckRequest, web=web), Middleware(GZipMiddleware, compresslevel=GZIP_LEVEL)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={404: _no_page})


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _no_page(_: Request, __: Exception) -> Response:
    return PlainTextResponse("no such page: /, /metrics, /evidence, /-/healthy, /-/ready\n", HTTPStatus.NOT_FOUND)


def _no_fresh_sample() -> Response:
    return PlainTextResponse("no recent sample of this host\n", HTTPStatus.SERVICE_UNAVAILABLE)


class _Pages:
    """The pages. Starlette runs a method without `async` in a thread."""

    def __init__(self, registry: CollectorRegistry, latest: Callable[[], Snapshot | None], *, host: str) -> None:
        self._registry = registry
        self._latest = latest
        self._host = host

    def metrics(self, _: Request) -> Response:
        """Metrics in the Prometheus text format."""
        return Response(exposition.render(self._registry.collect()), headers={"Content-Type": exposition.TEXT})

    def front(self, _: Request) -> Response:
        """The state of each source, for people."""
        return HTMLResponse(self._render_front())

    def _render_front(self) -> str:
        snapshot = self._latest()
        age_s = None if snapshot is None else snapshot.taken.age_s(clock.stamp())
        sample = "No sample yet." if age_s is None else f"The last sample is {age_s:.1f} s old."
        rows = ((each.source, _describe(each, snapshot)) for each in (() if snapshot is None else snapshot.sources))

        def shown(text: str) -> str:
            return html.escape(printable(text))

        return _PAGE.format(
            host=shown(self._host),
            version=html.escape(__version__),
            sample=sample,
            fresh=SNAPSHOT_FRESH_S,
            sources="".join(f"<tr><td>{shown(name)}<td>{shown(says)}\n" for name, says in rows),
        )

    async def evidence(self, request: Request) -> Response:
        """Facts about one worker or server, for a client on this host."""
        if request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
            return PlainTextResponse("/evidence answers clients on this host only\n", HTTPStatus.FORBIDDEN)
        asked = request.query_params
        named = [(what, each) for what in ("worker", "container", "tenant") for each in asked.getlist(what) if each]
        if len(named) != 1:
            says = "name one worker: /evidence?worker=NAME, or one server: ?container=NAME, or a tenant: ?tenant=NAME\n"
            return PlainTextResponse(says, HTTPStatus.BAD_REQUEST)
        ((what, name),) = named
        now = clock.stamp()
        snapshot = self._fresh_snapshot(now)
        if snapshot is None or (snapshot.workers if what == "worker" else snapshot.servers) is None:
            return _no_fresh_sample()
        found: facts.ContainerFacts | facts.OnDemandFacts | None
        if what == "worker":
            found = evidence.worker_evidence(name, snapshot, now=now)
        elif what == "tenant":
            found = evidence.on_demand_evidence(name, snapshot, now=now)
        else:
            found = evidence.server_evidence(name, snapshot, now=now)
        if found is None:
            kind = "server" if what == "container" else what
            return PlainTextResponse(f"no such {kind} on this host\n", HTTPStatus.NOT_FOUND)
        return Response(facts.render(found), media_type="application/json")

    async def ready(self, _: Request) -> Response:
        """Whether there is a fresh snapshot."""
        return _no_fresh_sample() if self._fresh_snapshot(clock.stamp()) is None else PlainTextResponse("ok\n")

    def _fresh_snapshot(self, now: Stamp) -> Snapshot | None:
        snapshot = self._latest()
        age_s = None if snapshot is None else snapshot.taken.age_s(now)
        return snapshot if age_s is not None and age_s <= SNAPSHOT_FRESH_S else None


def _describe(source: SourceHealth, snapshot: Snapshot | None) -> str:
    """Describe a source's last reading, with unread metrics and invalid files."""
    if not source.success:
        return f"failed: {source.message}"
    took = f"in {source.duration_s * 1000:.1f} ms"
    files = None if snapshot is None else {"workers": snapshot.workers, "tasks": snapshot.tasks}.get(source.source)
    if files is not None and files.first_errors:
        return f"{took}, invalid files: {'; '.join(files.first_errors.values())}"
    gpus = () if snapshot is None or snapshot.gpus is None else snapshot.gpus.gpus
    refused = [
        f"{gpu.uuid}: {gpu.unknown or ', '.join(gpu.unread_metrics)}"
        for gpu in gpus
        if gpu.unread_metrics and source.source == (NVIDIA_SOURCE if gpu.node is None else DRM_SOURCE)
    ]
    return f"{took}, unknown: {'; '.join(refused)}" if refused else f"ok, {took}"
