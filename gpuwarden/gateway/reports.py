"""Reports of hosts that cannot be scraped, at the central gateway.

The newest report of each kind is kept in the database, so any of several central gateways publishes all. Its age is by
the database's clock.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from gpuwarden.db.errors import DatabaseError
from gpuwarden.gateway import report_page
from gpuwarden.gateway.app import REPORT_S, Bounds, Caller, Counted, RefusedError, parsed, read_body, to_response
from gpuwarden.gateway.central import Hosts, bearer, check_host
from gpuwarden.gateway.report_page import GpuReport, Report, TasksReport
from gpuwarden.gateway.upstream import Answer, LogLimit, failed
from gpuwarden.gateway.wire import BODY_MAX_BYTES
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import Kind
from gpuwarden.queue.hosts.tokens import Scope

PREFIX: Final = "/api/"
VERSION: Final = "v1"

FRESH_S: Final = 75.0
"""An older report is not published, seconds. Rules allow 75 s between two scrapes."""

BOUNDS: Final = Bounds(rate=1, burst=20, open=3)
"""What one host may send."""

OPEN_MAX: Final = 64
"""Most reports that are read at once, of known and of unknown callers: bounds memory."""

THREADS: Final = 2
"""Most reports that are parsed at once."""

_JSON: Final[dict[Kind, type[Report]]] = {Kind.GPU: GpuReport, Kind.TASKS: TasksReport}

log: Final = structlog.get_logger("gateway")


class _Open:
    """Counts open requests."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Open one.

        Raises:
            RefusedError: too many are open.
        """
        if self._count >= OPEN_MAX:
            raise RefusedError(503, "busy", "too many reports at once: send it again")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class Reports:
    """Receives and publishes reports.

    Args:
        store: the queue with the table of reports.
        hosts: recognises hosts by their tokens.
        counted: counts requests.
    """

    def __init__(self, store: JobStore, hosts: Hosts, counted: Counted) -> None:
        self._store, self._hosts, self._counted = store, hosts, counted
        self._limiter = CapacityLimiter(THREADS)
        self._publishing = CapacityLimiter(1)
        self._open, self._unknown_open = _Open(), _Open()
        self._callers: dict[str, Caller] = {}
        self._seen: set[tuple[str, Kind]] = set()
        self._unknown = LogLimit(REPORT_S)

    def add_to(self, app: FastAPI) -> None:
        """Add the requests of hosts."""
        for kind, path in ((Kind.PAGE, "report"), (Kind.GPU, "report_gpu/"), (Kind.TASKS, "report_tasks/")):
            body = _JSON.get(kind)
            content = (
                {"text/plain": {"schema": {"type": "string"}}}
                if body is None
                else {"application/json": {"schema": body.model_json_schema()}}
            )
            app.add_api_route(
                f"{PREFIX}{VERSION}/{path}",
                self._endpoint(kind),
                methods=["POST"],
                name=path.strip("/"),
                description="An exporter's page, also with gzip." if body is None else body.__doc__,
                openapi_extra={"requestBody": {"required": True, "content": content}},
            )
        app.add_api_route(PREFIX + "{version}/{path:path}", self._other, methods=["POST"], include_in_schema=False)

    async def page(self, _: Request) -> Response:
        """`/reports`: the newest reports, for Prometheus."""
        try:
            page = await to_thread.run_sync(self._published, limiter=self._publishing)
        except DatabaseError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return Response(page, headers={"Content-Type": report_page.TEXT})

    def _published(self) -> bytes:
        now, hosts = self._store.now(), self._store.seen_hosts.rows()
        return report_page.published(self._store.host_reports.newest(fresh_s=FRESH_S, now=now), hosts, now)

    def _endpoint(self, kind: Kind) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            caller = None
            try:
                caller, report = await self._caller(request, kind)
                with self._open.one():
                    make = await self._page_of(request, kind, caller, report)
                    await self._keep(caller.host, kind, make)
            except RefusedError as error:
                return self._refuse(error, caller)
            self._counted.requests.labels(f"report_{kind}", "done").inc()
            return to_response(Answer(status=200, content={"result": True}, outcome="done"))

        return answer

    async def _caller(self, request: Request, kind: Kind) -> tuple[Caller, Report | None]:
        """The host, and its report if the token was in it."""
        report, token = None, bearer(request)
        if kind is not Kind.PAGE and not token:
            with self._unknown_open.one():
                report = parsed(_JSON[kind], await read_body(request))
            token = report.token
        host = await self._hosts.host_of(token, Scope.REPORTS)
        its = Caller(name=host, host=host, may_be=lambda _: True, bounds=BOUNDS)
        return self._callers.setdefault(host, its), report

    async def _page_of(
        self, request: Request, kind: Kind, caller: Caller, report: Report | None
    ) -> Callable[[], bytes]:
        """What makes the page of a report."""
        if not caller.may_ask():
            raise RefusedError(429, "rate", f"more than {BOUNDS.rate:g} report a second")
        host = caller.host
        check_host(request, host)
        if report is not None:
            return partial(report_page.json_page, report, host)
        packed = kind is Kind.PAGE and _is_packed(request)
        caller.open += 1
        try:
            body = await read_body(request, report_page.PAGE_MAX_BYTES if kind is Kind.PAGE else BODY_MAX_BYTES)
        finally:
            caller.open -= 1
        if kind is Kind.PAGE:
            return partial(report_page.text_page, body, host, packed=packed)
        return lambda: report_page.json_page(parsed(_JSON[kind], body), host)

    async def _keep(self, host: str, kind: Kind, make: Callable[[], bytes]) -> None:
        def keep() -> None:
            self._store.host_reports.save(host, kind, make(), now=self._store.now())

        try:
            await to_thread.run_sync(keep, limiter=self._limiter)
        except DatabaseError as error:
            raise RefusedError(503, "queue", str(error)) from None
        if (host, kind) not in self._seen:
            self._seen.add((host, kind))
            log.info("first report", host=host, report=kind.value)

    async def _other(self, version: str, path: str) -> Response:
        reason = f"no report {path[:40]!a} of version {version[:20]!a}: this gateway takes version {VERSION}"
        return self._refuse(RefusedError(404, "version", f"{reason}; use the same release"), None)

    def _refuse(self, error: RefusedError, caller: Caller | None) -> Response:
        name = "unknown" if caller is None else caller.name
        self._counted.refused.labels(name, error.why).inc()
        if (self._unknown if caller is None else caller.logged).is_due():
            log.warning("report refused", caller=name, reason=str(error))
        return to_response(failed(error.status, error.why, str(error)))


def _is_packed(request: Request) -> bool:
    """Whether the page has gzip.

    Raises:
        RefusedError: it has another format.
    """
    kind = request.headers.get("Content-Type", "text/plain").replace(" ", "").lower()
    named = kind.split(";")
    if named[0] != "text/plain" or any(each.startswith("version=") and each != "version=0.0.4" for each in named[1:]):
        raise RefusedError(415, "version", f"content type {kind[:80]!a} is unknown: use text/plain; version=0.0.4")
    coding = request.headers.get("Content-Encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise RefusedError(415, "version", f"content encoding {coding[:40]!a} is unknown: use gzip or none")
    return coding == "gzip"
