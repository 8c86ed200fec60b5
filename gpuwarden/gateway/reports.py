"""Reports of hosts that cannot be scraped, at the central gateway.

The newest report of each kind is kept in the database, so any of several central gateways publishes all. Its age is by
the database's clock.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from gpuwarden.db.errors import DatabaseError
from gpuwarden.gateway import report_page
from gpuwarden.gateway.app import REPORT_S, Bounds, Caller, Counted, RefusedError, parsed, read_body, to_response
from gpuwarden.gateway.central import Hosts, bearer, check_host
from gpuwarden.gateway.report_page import EndedTasksReport, GpuReport, Report, TasksReport
from gpuwarden.gateway.upstream import Answer, LogLimit, failed
from gpuwarden.gateway.wire import BODY_MAX_BYTES
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import Kind
from gpuwarden.queue.hosts.task_orders import TaskResult
from gpuwarden.queue.hosts.tokens import Scope

PREFIX: Final = "/api/"
VERSION: Final = "v1"

FRESH_S: Final = 75.0
"""An older report is not published, seconds. Rules allow 75 s between two scrapes."""

BOUNDS: Final = Bounds(rate=1, burst=20, open=3, open_bytes=3 * report_page.PAGE_MAX_BYTES)
"""What one host may send."""

OPEN_MAX: Final = 64
"""Most reports that are read at once, of known and of unknown callers: bounds memory."""

THREADS: Final = 2
"""Most reports that are parsed at once."""

_BODIES: Final[dict[str, type[Report] | None]] = {
    "report": None,
    "report_gpu": GpuReport,
    "report_tasks": TasksReport,
    "report_ended_tasks": EndedTasksReport,
}
"""Reports by name, with the body of those in JSON. Paths of those end with a slash."""

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
        for name, body in _BODIES.items():
            content = (
                {"text/plain": {"schema": {"type": "string"}}}
                if body is None
                else {"application/json": {"schema": body.model_json_schema()}}
            )
            app.add_api_route(
                f"{PREFIX}{VERSION}/{name}" + ("/" if body else ""),
                self._endpoint(name, body),
                methods=["POST"],
                name=name,
                description="An exporter's page, also with gzip." if body is None else body.__doc__,
                openapi_extra={"requestBody": {"required": True, "content": content}},
            )
        app.add_api_route(PREFIX + "{version}/{path:path}", self._other, methods=["POST"], include_in_schema=False)

    async def page(self, _: Request) -> Response:
        """`/reports`: the newest reports, for Prometheus. The reports of one host after the other are in memory."""
        parts = self._published()

        async def read() -> bytes:
            return await to_thread.run_sync(next, parts, b"", limiter=self._publishing)

        async def rest(part: bytes) -> AsyncIterator[bytes]:
            while part:
                yield part
                part = await read()  # an error cuts the answer, and the scrape fails

        try:
            first = await read()
        except DatabaseError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return StreamingResponse(rest(first), headers={"Content-Type": report_page.TEXT})

    def _published(self) -> Iterator[bytes]:
        now, hosts = self._store.now(), self._store.seen_hosts.rows()
        yield from report_page.published(self._store.host_reports.newest(fresh_s=FRESH_S, now=now), hosts, now)

    def _endpoint(self, name: str, body: type[Report] | None) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            caller = None
            try:
                caller, report = await self._caller(request, body)
                with self._open.one():
                    found = await self._carry_out(await self._admitted(request, body, caller, report))
            except RefusedError as error:
                return self._refuse(error, caller)
            self._counted.requests.labels(name, "done").inc()
            return to_response(Answer(status=200, content=found, outcome="done"))

        return answer

    async def _caller(self, request: Request, body: type[Report] | None) -> tuple[Caller, Report | None]:
        """The host, and its report if the token was in it."""
        report, token = None, bearer(request)
        if body is not None and not token:
            with self._unknown_open.one():
                report = parsed(body, await read_body(request))
            token = report.token
        host = await self._hosts.host_of(token, Scope.REPORTS)
        its = Caller(name=host, host=host, may_be=lambda _: True, bounds=BOUNDS)
        return self._callers.setdefault(host, its), report

    async def _admitted(
        self, request: Request, body: type[Report] | None, caller: Caller, report: Report | None
    ) -> Callable[[], dict[str, Any]]:
        """What carries a report out, and returns the answer."""
        if not caller.may_ask():
            raise RefusedError(429, "rate", f"more than {BOUNDS.rate:g} report a second")
        host = caller.host
        check_host(request, host)
        if report is not None:
            return lambda: self._take(host, report)
        packed = body is None and _is_packed(request)
        caller.open += 1
        try:
            sent = await read_body(request, report_page.PAGE_MAX_BYTES if body is None else BODY_MAX_BYTES)
        finally:
            caller.open -= 1
        if body is None:
            return lambda: self._save(host, Kind.PAGE, report_page.text_page(sent, host, packed=packed))
        return lambda: self._take(host, parsed(body, sent))

    async def _carry_out(self, carry_out: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return await to_thread.run_sync(carry_out, limiter=self._limiter)
        except DatabaseError as error:
            raise RefusedError(503, "database", str(error)) from None

    def _take(self, host: str, report: Report) -> dict[str, Any]:
        """Take a report in JSON."""
        report_page.check_host_of(report, host)
        if isinstance(report, EndedTasksReport):
            return self._orders(host, report)
        page = report_page.json_page(report, host)
        if isinstance(report, GpuReport):
            return self._save(host, Kind.GPU, page)
        return self._save(host, Kind.TASKS, page) | self._orders(host)

    def _orders(self, host: str, report: EndedTasksReport | None = None) -> dict[str, Any]:
        """Store results of orders. The answer has the tasks that the host shall end."""
        results = [
            TaskResult(task_id=each.running_log_id, outcome=each.outcome, message=each.message)
            for each in (report.ended if report else ())
        ]
        for each in results:
            self._counted.orders.labels(each.outcome).inc()
            log.info("order answered", host=host, task=each.task_id, outcome=each.outcome, message=each.message)
        return {"result": True, "end_tasks": self._store.task_orders.exchange(host, results, now=self._store.now())}

    def _save(self, host: str, kind: Kind, page: bytes) -> dict[str, Any]:
        self._store.host_reports.save(host, kind, page, now=self._store.now())
        if (host, kind) not in self._seen:
            self._seen.add((host, kind))
            log.info("first report", host=host, report=kind.value)
        return {"result": True}

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
