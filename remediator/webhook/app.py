"""The webhook: authenticate, parse, store, answer 202. It makes no decisions and acts on nothing.

Alertmanager times out after ten seconds, so a call is one transaction. It retries only 5xx.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import structlog
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from gpuwarden import __version__
from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.format import printable
from gpuwarden.http.web_config import BusyError, WebConfig
from remediator import payload as payloads
from remediator.alert import Alert, Refusal, is_watchdog
from remediator.ledger.ledger import Ledger
from remediator.metrics.ledger import SERIES, LedgerCollector, Watchdog
from remediator.remedies.wrangle import Rules
from remediator.webhook import openapi as api
from remediator.webhook import runbooks
from remediator.webhook.intake import Inbox
from remediator.webhook.readiness import Readiness
from remediator.webhook.reconcile import Reconciler
from remediator.webhook.relay import Relay

log: Final = structlog.get_logger("remediator")

UNAUTHENTICATED_S: Final = 60.0
"""Minimum time between log lines about unauthenticated calls, seconds."""

WRITE_TIMEOUT_S: Final = 20.0
"""Timeout of a write, seconds. Alertmanager has timed out by then and repeats the call."""

EXECUTOR_SILENT_S: Final = 60.0
"""An alert fires if an executor has no heartbeat for this long, seconds. It writes one a second."""

INTENT_OVERDUE_S: Final = 900.0
"""An alert fires if an intent is open for this long, seconds. Its default timeouts add up to 330 s."""

BODY_TIMEOUT_S: Final = 10.0
"""Time to send a body, seconds."""


def create_app(
    *,
    ledger: Ledger,
    host: str,
    web: WebConfig,
    body_max_bytes: int,
    alerts_max: int = payloads.ALERTS_MAX,
    alertmanagers: Sequence[str] = (),
    collectors: Sequence[Collector] = (),
    wrangle_activation: int = Rules.activation,
    executor_down_s: float = EXECUTOR_SILENT_S,
    intent_overdue_s: float = INTENT_OVERDUE_S,
) -> FastAPI:
    """Build the application.

    Args:
        ledger: stores alerts.
        host: this host's key. Alerts for a host without an executor in this ledger are recorded and refused.
        web: TLS and authentication.
        body_max_bytes: larger bodies are refused with 413.
        alerts_max: bodies with more alerts are refused with 413.
        alertmanagers: queried for alerts that a call left out.
        collectors: further metrics: of the queue, Pending pods and notifications.
        wrangle_activation: threshold of the rule about failing items.
        executor_down_s: threshold of the rule about silent executors, seconds.
        intent_overdue_s: threshold of the rule about overdue intents, seconds.
    """
    registry = _registry(ledger, host, collectors)
    rejected = Counter(
        "gpuwarden_remediator_webhook_rejected",
        SERIES["gpuwarden_remediator_webhook_rejected_total"].meaning,
        ("reason",),
        registry=registry,
    )
    for reason in ("unauthenticated", "oversized", "too_many", "incomplete", "malformed", "ledger"):
        rejected.labels(reason)
    _publish_thresholds(
        registry,
        {
            "gpuwarden_remediator_wrangle_activation_items": wrangle_activation,
            "gpuwarden_remediator_executor_down_after_seconds": executor_down_s,
            "gpuwarden_remediator_intent_overdue_after_seconds": intent_overdue_s,
        },
    )
    inbox, relay = Inbox(ledger, host=host), Relay(ledger)
    watchdog = Watchdog(ledger)
    registry.register(watchdog)
    reconciler = Reconciler(alertmanagers, inbox, alerts_max=alerts_max, registry=registry)
    app = FastAPI(title="gpuwarden remediator", version=__version__, docs_url=None, redoc_url=None)

    calls = _Calls(rejected, body_max_bytes=body_max_bytes, alerts_max=alerts_max)
    about_calls: dict[str, Any] = {
        "status_code": 202,
        "dependencies": [Depends(_Authentication(web, rejected))],
        "responses": api.responses(alerts_max=alerts_max, body_max_bytes=body_max_bytes, body_timeout_s=BODY_TIMEOUT_S),
        "openapi_extra": api.webhook(alerts_max=alerts_max),
    }

    @app.post("/api/v1/alerts", **about_calls)
    async def receive(request: Request) -> dict[str, int]:
        """Alertmanager's webhook."""
        payload, found, refusals = await calls.read(request)
        if any(each.firing and is_watchdog(each) for each in found):
            watchdog.mark(now=time.time())
            inbox.keep_watchdog()
        counts = await calls.wait_until_stored(inbox.take(found, refusals))
        if left_out := payloads.truncated(payload):
            reconciler.fetch_left_out(left_out, payloads.receiver(payload))
        return counts

    @app.post("/api/v1/notifications", **about_calls)
    async def notify(request: Request) -> dict[str, int]:
        """Alertmanager's webhook for operators: administrators are notified."""
        _, found, refusals = await calls.read(request)
        return await calls.wait_until_stored(relay.take(found, refusals))

    @app.get("/metrics", response_class=PlainTextResponse)
    @app.head("/metrics", include_in_schema=False)
    def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(AnyHTTPException)
    async def refuse(request: Request, error: AnyHTTPException) -> Response:
        error.detail = printable(error.detail)
        return await http_exception_handler(request, error)

    _probes(app, ledger)
    runbooks.add(app)
    _add_security_schemes(app)
    return app


class _Authentication:
    """Accepts calls with a token or password of the web configuration."""

    def __init__(self, web: WebConfig, rejected: Counter) -> None:
        self._web, self._rejected = web, rejected
        self._next_log_s = 0.0

    async def __call__(self, request: Request) -> None:
        try:
            refusal = await self._web.refusal(request.headers.get("Authorization", ""))
        except BusyError as error:
            raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from None
        if not refusal:
            return
        self._rejected.labels("unauthenticated").inc()
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + UNAUTHENTICATED_S
            log.warning(
                "webhook call rejected",
                reason=refusal,
                hint="check http_config of the Alertmanager receiver against --web-config-file",
            )
        raise HTTPException(401, refusal, headers={"WWW-Authenticate": self._web.challenge})


class _Calls:
    """Reads the payload of a call, and waits until it is stored. Refused calls are counted."""

    def __init__(self, rejected: Counter, *, body_max_bytes: int, alerts_max: int) -> None:
        self._rejected = rejected
        self._body_max_bytes = body_max_bytes
        self._alerts_max = alerts_max

    async def read(self, request: Request) -> tuple[dict[str, Any], list[Alert], list[Refusal]]:
        """The payload, its valid alerts, and refusals of invalid ones."""
        body = await _body(request, self._body_max_bytes, self._rejected)
        try:
            payload = json.loads(body)
            found, refusals = payloads.parse(payload, alerts_max=self._alerts_max)
        except payloads.TooManyAlertsError as error:
            self._rejected.labels("too_many").inc()
            log.warning("webhook body refused", reason=str(error))
            raise HTTPException(413, str(error)) from None
        except (ValueError, RecursionError, payloads.PayloadError) as error:
            self._rejected.labels("malformed").inc()
            log.warning("webhook body refused", reason=str(error)[:300], start=body[:200].decode("utf-8", "replace"))
            raise HTTPException(400, f"not an Alertmanager payload: {str(error)[:300]}") from None
        return payload, found, refusals

    async def wait_until_stored(self, taken: Future[tuple[int, int]]) -> dict[str, int]:
        """The answer of a call."""
        try:
            accepted, refused = await _wait_until_stored(taken)
        except DatabaseError as error:
            self._rejected.labels("ledger").inc()
            log.error("webhook not accepted", reason=str(error))  # noqa: TRY400 - the error is enough
            raise HTTPException(503, "the ledger cannot be written; retry") from None
        return {"accepted": accepted, "refused": refused}


async def _wait_until_stored(taken: Future[tuple[int, int]]) -> tuple[int, int]:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            return await asyncio.wrap_future(taken)
    except TimeoutError:
        raise NoAnswerError(f"no answer from the ledger within {WRITE_TIMEOUT_S:g} s") from None
    except asyncio.CancelledError:  # shutdown: the call still gets an answer
        raise NoAnswerError("shutting down, the ledger did not answer yet") from None


def _publish_thresholds(registry: CollectorRegistry, bounds: Mapping[str, float]) -> None:
    """Publish the thresholds of alert rules."""
    for name, bound in bounds.items():
        Gauge(name, SERIES[name].meaning, registry=registry).set(bound)


def _add_security_schemes(app: FastAPI) -> None:
    """Add the security schemes, which FastAPI does not know."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        description = generate()
        description.setdefault("components", {})["securitySchemes"] = api.SECURITY_SCHEMES
        return description

    app.openapi = openapi  # type: ignore[method-assign]


def _probes(app: FastAPI, ledger: Ledger) -> None:
    readiness = Readiness(ledger)

    @app.get("/-/healthy", response_class=PlainTextResponse)
    @app.head("/-/healthy", include_in_schema=False)
    async def healthy() -> Response:
        """200 while the process serves, even without a ledger: a restart would not help."""
        return Response("healthy\n", media_type="text/plain")

    @app.get("/-/ready", response_class=PlainTextResponse, responses=api.NOT_READY)
    @app.head("/-/ready", include_in_schema=False)
    async def ready() -> Response:
        """200 while alerts can be stored, else 503 with the reason."""
        reason = await readiness.not_ready_reason()
        if reason is not None:
            return Response(f"{printable(reason)}\n", status_code=503, media_type="text/plain")
        return Response("ready\n", media_type="text/plain")


def _registry(ledger: Ledger, host: str, collectors: Sequence[Collector]) -> CollectorRegistry:
    registry = CollectorRegistry()
    for each in (LedgerCollector(ledger, host), *collectors):
        registry.register(each)
    return registry


async def _body(request: Request, limit: int, rejected: Counter) -> bytes:
    """Read the body, up to a size limit and a timeout. Content-Length is not trusted."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    rejected.labels("oversized").inc()
                    log.warning("webhook body refused", reason=f"over {limit} bytes")
                    raise HTTPException(413, f"body over {limit} bytes; set max_alerts in Alertmanager")
    except (TimeoutError, ClientDisconnect):
        rejected.labels("incomplete").inc()
        log.warning("webhook body refused", reason=f"incomplete after {BODY_TIMEOUT_S:g} s")
        raise HTTPException(408, f"body incomplete after {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)
