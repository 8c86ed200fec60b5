"""The application of a gateway: OpenAPI, limits on a hostile caller, and the operations of workers."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from gpuwarden.format import error_text
from gpuwarden.gateway.operations import OPERATIONS, Operation, Register, Wait
from gpuwarden.gateway.upstream import Answer, Upstream, failed
from gpuwarden.gateway.wire import BODY_MAX_BYTES, PREFIX, REQUEST_ID, VERSION

log: Final = structlog.get_logger("gateway")

BODY_TIMEOUT_S: Final = 10.0
"""Time to send a body, seconds."""

RATE_MAX: Final = 500.0
"""Most requests a second of one caller, on average."""

BURST_MAX: Final = 1000.0
"""Most requests at once."""

ANSWERS_MAX: Final = 256
"""Answers that are kept per caller for repeated requests."""

ANSWER_KEPT_S: Final = 60.0
"""How long an answer is kept, seconds: longer than a client repeats a request."""

ID_MAX: Final = 64
"""Most characters of a request's id."""

REPORT_S: Final = 60.0
"""Least time between log lines about one caller's refused requests, seconds."""


class RefusedError(Exception):
    """A request is refused. `why` is a metric label."""

    def __init__(self, status: int, why: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.why = status, why


class Counted:
    """What a gateway counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "gpuwarden_gateway_requests",
            "Requests of workers, by operation and outcome.",
            ["operation", "outcome"],
            registry=registry,
        )
        self.refused = Counter(
            "gpuwarden_gateway_refused_requests",
            "Refused requests, by caller and reason.",
            ["caller", "reason"],
            registry=registry,
        )


@dataclass(kw_only=True)
class Caller:
    """Who calls: the slot of a socket, or a host. `may_be` is whether a worker of this name may use it."""

    name: str
    host: str
    may_be: Callable[[str], bool]
    tokens: float = BURST_MAX
    at_s: float = field(default_factory=time.monotonic)
    answers: "OrderedDict[str, tuple[float, asyncio.Future[Answer]]]" = field(default_factory=OrderedDict)
    logged_s: float = -REPORT_S

    def may_ask(self) -> bool:
        """Whether it is below its rate."""
        now_s = time.monotonic()
        self.tokens = min(BURST_MAX, self.tokens + (now_s - self.at_s) * RATE_MAX)
        self.at_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    async def once(self, key: str, carry_out: Callable[[], Awaitable[Answer]]) -> Answer:
        """Carry a request out once. Its repetition gets the same answer, unless there was none."""
        now_s = time.monotonic()
        while self.answers and (len(self.answers) >= ANSWERS_MAX or self._oldest_s() < now_s - ANSWER_KEPT_S):
            self.answers.popitem(last=False)
        if key not in self.answers:
            self.answers[key] = now_s, asyncio.ensure_future(carry_out())
        answer = await asyncio.shield(self.answers[key][1])
        if answer.status >= 500:
            self.answers.pop(key, None)
        return answer

    def _oldest_s(self) -> float:
        return next(iter(self.answers.values()))[0]


class Callers(Protocol):
    """Recognises callers."""

    async def caller_of(self, request: Request) -> Caller:
        """The caller.

        Raises:
            RefusedError: it is unknown.
        """


def create_app(callers: Callers, upstream: Upstream, counted: Counted) -> FastAPI:
    """Build the application."""
    app = FastAPI(
        title="gpuwarden gateway",
        version=str(VERSION),
        description="The queue, for workers. Each operation is a POST with a JSON body.",
        docs_url=None,
        redoc_url=None,
    )
    door = _Door(callers, upstream, counted)
    for path, kind in OPERATIONS.items():
        schema = {"application/json": {"schema": kind.model_json_schema()}}
        app.add_api_route(
            PREFIX + path,
            door.endpoint(kind),
            methods=["POST"],
            name=path,
            description=kind.__doc__,
            openapi_extra={"requestBody": {"required": True, "content": schema}},
        )

    @app.exception_handler(404)
    async def unknown(request: Request, _: Exception) -> Response:
        path = request.url.path[:80]
        reason = f"unknown operation {path!a}: this gateway has version {VERSION}; use the same release"
        return door.refuse(RefusedError(404, "unknown", reason), None)

    return app


class _Door:
    """Admits requests and passes them on."""

    def __init__(self, callers: Callers, upstream: Upstream, counted: Counted) -> None:
        self._callers, self._upstream, self._counted = callers, upstream, counted

    def endpoint(self, kind: type[Operation]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            caller = None
            try:
                caller = await self._callers.caller_of(request)
                operation = await _admitted(request, kind, caller)
            except RefusedError as error:
                return self.refuse(error, caller)
            found = await self._carry_out(operation, caller, request.headers.get(REQUEST_ID, "")[:ID_MAX])
            self._counted.requests.labels(kind.path, found.outcome).inc()
            return JSONResponse(found.content, found.status)

        return answer

    async def _carry_out(self, operation: Operation, caller: Caller, request_id: str) -> Answer:
        async def carry_out() -> Answer:
            return await self._upstream.carry_out(operation, host=caller.host, request_id=request_id)

        if isinstance(operation, Wait) or not request_id:
            return await carry_out()
        found = await caller.once(f"{operation.worker} {operation.path} {request_id}", carry_out)
        if isinstance(operation, Register) and found.status == 200:
            log.info("worker registered", host=caller.host, worker=operation.worker, queue=operation.queue)
        return found

    def refuse(self, error: RefusedError, caller: Caller | None) -> Response:
        name = "unknown" if caller is None else caller.name
        self._counted.refused.labels(name, error.why).inc()
        now_s = time.monotonic()
        if caller is None or now_s - caller.logged_s >= REPORT_S:
            if caller is not None:
                caller.logged_s = now_s
            log.warning("request refused", caller=name, reason=str(error))
        found = failed(error.status, error.why, str(error))
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(found.content, found.status, headers)


async def _admitted(request: Request, kind: type[Operation], caller: Caller) -> Operation:
    """The request, if its caller may make it.

    Raises:
        RefusedError: it may not, or the request is invalid.
    """
    if not caller.may_ask():
        raise RefusedError(429, "rate", f"more than {RATE_MAX:g} requests a second")
    operation = _parsed(kind, await _body(request))
    if not caller.may_be(operation.worker):
        raise RefusedError(
            403,
            "name",
            f"worker {operation.worker!r} may not use this socket: in folder {caller.name!r} a worker is named "
            f"{caller.name!r}, or {caller.name}-0, {caller.name}-1 and so on, if no folder has that name",
        )
    return operation


def _parsed(kind: type[Operation], body: bytes) -> Operation:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise RefusedError(422, "invalid", f"{where}: {first['msg']}") from None
    except RecursionError as error:
        raise RefusedError(422, "invalid", error_text(error)) from None


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_MAX_BYTES:
                    raise RefusedError(413, "size", f"a body has over {BODY_MAX_BYTES} bytes")
    except TimeoutError:
        raise RefusedError(408, "slow", f"a body was not sent within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "cut", "the caller closed the connection before its body was whole") from None
    return bytes(body)
