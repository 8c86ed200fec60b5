"""The application of a gateway: OpenAPI, limits on a hostile caller, and the operations of workers."""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gpuwarden.gateway import metrics
from gpuwarden.gateway.operations import OPERATIONS, Operation, Register, Sync
from gpuwarden.gateway.upstream import NOT_HELD, Answer, LogLimit, Upstream, failed
from gpuwarden.gateway.wire import BODY_MAX_BYTES, PREFIX, REQUEST_ID, VERSION

log: Final = structlog.get_logger("gateway")

T = TypeVar("T", bound=BaseModel)

BODY_TIMEOUT_S: Final = 10.0
"""Time to send a body, seconds."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a caller may do: requests a second on average and at once, open requests, and bytes of their bodies."""

    rate: float
    burst: float
    open: int
    open_bytes: int


SLOT_BOUNDS: Final = Bounds(rate=200, burst=1000, open=192, open_bytes=4 * BODY_MAX_BYTES)
HOST_BOUNDS: Final = Bounds(rate=2000, burst=5000, open=1000, open_bytes=128 * BODY_MAX_BYTES)

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
        self.requests = metrics.REQUESTS.counter(registry)
        self.refused = metrics.REFUSED.counter(registry)
        self.orders = metrics.ORDERS.counter(registry)


@dataclass(kw_only=True)
class Caller:
    """Who calls: the slot of a socket, or a host. `may_be` is whether a worker of this name may use it."""

    name: str
    host: str
    may_be: Callable[[str], bool]
    bounds: Bounds
    queues: frozenset[str] | None = None
    """The only queues that it may use. `None`: all."""
    tokens: float = 0.0
    open: int = 0
    open_bytes: int = 0
    at_s: float = field(default_factory=time.monotonic)
    answers: "OrderedDict[str, tuple[float, asyncio.Future[Answer]]]" = field(default_factory=OrderedDict)
    logged: LogLimit = field(default_factory=partial(LogLimit, REPORT_S))

    def __post_init__(self) -> None:
        self.tokens = self.bounds.burst

    def may_ask(self) -> bool:
        """Whether it is within its bounds."""
        now_s = time.monotonic()
        self.tokens = min(self.bounds.burst, self.tokens + (now_s - self.at_s) * self.bounds.rate)
        self.at_s = now_s
        if self.tokens < 1 or self.open >= self.bounds.open:
            return False
        self.tokens -= 1
        return True

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Open a request. The function counts bytes of its body, which is kept until the answer.

        Raises:
            RefusedError: the caller is over its bounds; the function raises it too.
        """
        its, taken = self.bounds, 0
        if not self.may_ask():
            raise RefusedError(429, "rate", f"more than {its.rate:g} requests a second, or over {its.open} open ones")

        def take(size: int) -> None:
            nonlocal taken
            if self.open_bytes + size > its.open_bytes:
                raise RefusedError(429, "rate", f"over {its.open_bytes} bytes in open requests")
            self.open_bytes += size
            taken += size

        self.open += 1
        try:
            yield take
        finally:
            self.open -= 1
            self.open_bytes -= taken

    async def once(self, key: str, carry_out: Callable[[], Awaitable[Answer]]) -> Answer:
        """Carry a request out once. Its repetition gets the same answer, unless there was none."""
        now_s = time.monotonic()
        while self.answers and (len(self.answers) >= ANSWERS_MAX or self._oldest_s() < now_s - ANSWER_KEPT_S):
            self.answers.popitem(last=False)
        if key not in self.answers:
            self.answers[key] = now_s, asyncio.ensure_future(carry_out())
        answer = await asyncio.shield(self.answers[key][1])
        if answer.status not in (200, 409):  # a refusal or no answer: the repeated request tries again
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


def create_app(
    callers: Callers,
    upstream: Upstream,
    counted: Counted,
    operations: Mapping[str, type[Operation]] = OPERATIONS,
) -> FastAPI:
    """Build the application."""
    app = _Api(
        title="gpuwarden gateway",
        version=str(VERSION),
        description="The queue, for workers. Each operation is a POST with a JSON body.",
        docs_url=None,
        redoc_url=None,
    )
    endpoints = _Endpoints(callers, upstream, counted)
    for path, kind in operations.items():
        schema = {"application/json": {"schema": kind.model_json_schema()}}
        app.operations[PREFIX + path] = endpoint = endpoints.of(kind)
        app.add_api_route(
            PREFIX + path,
            endpoint,
            methods=["POST"],
            name=path,
            description=kind.__doc__,
            openapi_extra={"requestBody": {"required": True, "content": schema}},
        )

    @app.exception_handler(404)
    async def unknown(request: Request, _: Exception) -> Response:
        path = request.url.path[:80]
        reason = f"unknown operation {path!a}: this gateway has version {VERSION}; use the same release"
        return endpoints.refuse(RefusedError(404, "unknown", reason), None)

    return app


class _Api(FastAPI):
    """Calls an operation at once: the router and its middleware would take half of a request's time."""

    def __init__(self, **its: Any) -> None:
        super().__init__(**its)
        self.operations: dict[str, Callable[[Request], Awaitable[Response]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self.operations.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None or scope["method"] != "POST":
            await super().__call__(scope, receive, send)
            return
        response = await operation(Request(scope, receive))
        await response(scope, receive, send)


class _Endpoints:
    """Admits requests and passes them on."""

    def __init__(self, callers: Callers, upstream: Upstream, counted: Counted) -> None:
        self._callers, self._upstream, self._counted = callers, upstream, counted
        self._unknown = LogLimit(REPORT_S)

    def of(self, kind: type[Operation]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            caller = None
            try:
                caller = await self._callers.caller_of(request)
                with caller.request() as take:
                    operation = self._limited(await _admitted(request, kind, caller, take), caller)
                    asking = self._carry_out(operation, caller, request.headers.get(REQUEST_ID, "")[:ID_MAX])
                    found = await (_while_connected(request, asking) if operation.waits else asking)
            except RefusedError as error:
                return self.refuse(error, caller)
            self._counted.requests.labels(kind.path, found.outcome).inc()
            if isinstance(found.content, dict) and found.content.get("refused") == NOT_HELD:
                self._counted.refused.labels(caller.name, NOT_HELD).inc()
            return to_response(found)

        return answer

    def _limited(self, operation: Operation, caller: Caller) -> Operation:
        """Refuse another queue. A `Sync` loses only the heartbeats for one: the leases of other workers stay renewed.

        Raises:
            RefusedError: the caller may not use the queue.
        """
        allowed = caller.queues
        if allowed is None:
            return operation
        if isinstance(operation, Sync):
            for beat in operation.beats:
                if beat.queue not in allowed:
                    self._note_refused(_other_queue(beat.queue, caller), caller)
            return operation.model_copy(update={"beats": [beat for beat in operation.beats if beat.queue in allowed]})
        queue = getattr(operation, "queue", None)
        if queue is not None and queue not in allowed:
            raise _other_queue(queue, caller)
        return operation

    async def _carry_out(self, operation: Operation, caller: Caller, request_id: str) -> Answer:
        async def carry_out() -> Answer:
            return await self._upstream.carry_out(operation, host=caller.host, request_id=request_id)

        if operation.settles and request_id:
            return await caller.once(f"{operation.worker} {operation.path} {request_id}", carry_out)
        found = await carry_out()
        if isinstance(operation, Register) and found.status == 200:
            log.info("worker registered", host=caller.host, worker=operation.worker, queue=operation.queue)
        return found

    def refuse(self, error: RefusedError, caller: Caller | None) -> Response:
        self._note_refused(error, caller)
        return to_response(failed(error.status, error.why, str(error)))

    def _note_refused(self, error: RefusedError, caller: Caller | None) -> None:
        name = "unknown" if caller is None else caller.name
        self._counted.refused.labels(name, error.why).inc()
        if (self._unknown if caller is None else caller.logged).is_due():
            log.warning("request refused", caller=name, reason=str(error))


async def _admitted(request: Request, kind: type[Operation], caller: Caller, take: Callable[[int], None]) -> Operation:
    """The request, if its caller may make it.

    Raises:
        RefusedError: it may not, or the request is invalid.
    """
    operation = parsed(kind, await read_body(request, take=take))
    if not caller.may_be(operation.worker):
        raise RefusedError(
            403,
            "name",
            f"worker {operation.worker!r} may not use this socket: in folder {caller.name!r} a worker is named "
            f"{caller.name!r}, or {caller.name}-0 to {caller.name}-63, if no folder has that name",
        )
    return operation


def _other_queue(queue: str, caller: Caller) -> RefusedError:
    return RefusedError(
        403,
        "queue",
        f"{caller.name!r} may not use queue {queue[:80]!a}: allow it by --queue of `gpuwarden gateway host` for a "
        "folder, or of `gpuwarden host rotate` for a host",
    )


def to_response(answer: Answer) -> Response:
    """An answer as HTTP."""
    headers = {"Retry-After": "1"} if answer.status == 429 else None
    text = json.dumps(answer.content)  # in ASCII: a payload may contain what UTF-8 cannot encode
    return Response(text, answer.status, headers, media_type="application/json")


async def _while_connected(request: Request, asking: Awaitable[Answer]) -> Answer:
    """Ask until the caller hangs up: one that is gone must not be woken."""
    answer, gone = asyncio.ensure_future(asking), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else failed(499, "gone", "the caller hung up")
    finally:
        answer.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def parsed(kind: type[T], body: bytes) -> T:
    """A body in JSON.

    Raises:
        RefusedError: it is invalid.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise RefusedError(422, "invalid", f"{where}: {first['msg']}") from None
    except RecursionError:
        raise RefusedError(422, "invalid", "body: nested too deeply") from None


async def read_body(
    request: Request, max_bytes: int = BODY_MAX_BYTES, take: Callable[[int], None] = lambda _: None
) -> bytes:
    """The body. `take` counts its bytes.

    Raises:
        RefusedError: it is too large, slow or not whole.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise RefusedError(413, "size", f"a body has over {max_bytes} bytes")
                take(len(part))
    except TimeoutError:
        raise RefusedError(408, "slow", f"a body was not sent within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "cut", "the caller closed the connection before its body was whole") from None
    return bytes(body)
