"""The webhook: authenticate, parse, make durable, answer 202. It decides nothing and acts on nothing.

Alertmanager cuts a receiver off after ten seconds and calls again while it still runs, so all that happens here is one
transaction. What it retries is 5xx alone: a database that does not answer is a 503, and nothing is lost.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import structlog
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from gpuwarden import __version__
from gpuwarden.db.engine import DatabaseError, NoAnswerError
from gpuwarden.http.web_config import BusyError, WebConfig
from remediator import alert as alerts
from remediator.ledger.ledger import Ledger
from remediator.metrics.ledger import SERIES, LedgerCollector, Watchdog
from remediator.plan import Limits
from remediator.remedies.wrangle import Rules
from remediator.webhook import openapi as api
from remediator.webhook import runbooks
from remediator.webhook.intake import Inbox
from remediator.webhook.readiness import Readiness
from remediator.webhook.reconcile import Reconciler

log: Final = structlog.get_logger("remediator")

UNAUTHENTICATED_S: Final = 60.0
"""Unauthenticated calls are logged at most this often, seconds: anyone can make them."""

WRITE_TIMEOUT_S: Final = 20.0
"""How long the ledger may take, seconds: Alertmanager has given the call up by then, and sends it again."""

EXECUTOR_SILENT_S: Final = 60.0
"""People are told of an executor that has shown no life for longer, seconds: it does once a second."""

INTENT_OVERDUE_S: Final = 900.0
"""People are told of an intent that has been owed for longer, seconds: its bounds come to 330 s, as they are set."""

BODY_TIMEOUT_S: Final = 10.0
"""How long a caller may take to send its body, seconds; Alertmanager itself gives up a call after as long."""


def create_app(  # noqa: PLR0913 - named arguments, each with its own meaning
    *,
    ledger: Ledger,
    host: str,
    web: WebConfig,
    body_max_bytes: int,
    alerts_max: int = alerts.ALERTS_MAX,
    alertmanagers: Sequence[str] = (),
    queue: Collector | None = None,
    node_lost_after_s: float = Limits.node_lost_after_s,
    wrangle_activation: int = Rules.activation,
    executor_silent_s: float = EXECUTOR_SILENT_S,
    intent_overdue_s: float = INTENT_OVERDUE_S,
) -> FastAPI:
    """The application.

    Args:
        ledger: where alerts are made durable.
        host: this host's key. Alerts for another are recorded and refused, unless its executor works this ledger too.
        web: what Alertmanager must show.
        body_max_bytes: larger bodies are refused with 413.
        alerts_max: bodies with more alerts are refused with 413 too.
        alertmanagers: the Alertmanagers that are asked for the alerts that a call left out.
        queue: the queue's numbers, where it is to be told of too.
        node_lost_after_s: what the rule about silent hosts is told, seconds.
        wrangle_activation: what the rule about items that fail is told, a count.
        executor_silent_s: what the rule about executors that show no life is told, seconds.
        intent_overdue_s: what the rule about intents that come to no end is told, seconds.
    """
    registry = _registry(ledger, host, queue)
    rejected = Counter(
        "gpuwarden_remediator_webhook_rejected",
        SERIES["gpuwarden_remediator_webhook_rejected_total"].meaning,
        ("reason",),
        registry=registry,
    )
    for reason in ("unauthenticated", "oversized", "too_many", "incomplete", "malformed", "ledger"):
        rejected.labels(reason)
    _tell(
        registry,
        {
            "gpuwarden_remediator_node_lost_after_seconds": node_lost_after_s,
            "gpuwarden_remediator_wrangle_activation_items": wrangle_activation,
            "gpuwarden_remediator_executor_silent_after_seconds": executor_silent_s,
            "gpuwarden_remediator_intent_overdue_after_seconds": intent_overdue_s,
        },
    )
    inbox = Inbox(ledger, host=host)
    watchdog = Watchdog()
    registry.register(watchdog)
    reconciler = Reconciler(alertmanagers, inbox, alerts_max=alerts_max, registry=registry)
    app = FastAPI(title="gpuwarden remediator", version=__version__, docs_url=None, redoc_url=None)

    @app.post(
        "/api/v1/alerts",
        status_code=202,
        dependencies=[Depends(_Authentication(web, rejected))],
        responses=api.answers(alerts_max=alerts_max, body_max_bytes=body_max_bytes, body_timeout_s=BODY_TIMEOUT_S),
        openapi_extra=api.webhook(alerts_max=alerts_max),
    )
    async def receive(request: Request) -> dict[str, int]:
        """Alertmanager's webhook."""
        body = await _body(request, body_max_bytes, rejected)
        try:
            payload = json.loads(body)
            found, refusals = alerts.parse(payload, alerts_max=alerts_max)
        except alerts.TooManyAlertsError as error:
            rejected.labels("too_many").inc()
            log.warning("webhook body refused", because=str(error))
            raise HTTPException(413, str(error)) from None
        except (ValueError, RecursionError, alerts.PayloadError) as error:
            rejected.labels("malformed").inc()
            log.warning("webhook body refused", because=str(error)[:300], start=body[:200].decode("utf-8", "replace"))
            raise HTTPException(400, f"not an Alertmanager payload: {str(error)[:300]}") from None
        if any(each.firing and alerts.is_beat(each) for each in found):
            watchdog.beat(now=time.time())
        try:
            accepted, refused = await _durable(inbox.take(found, refusals))
        except DatabaseError as error:
            rejected.labels("ledger").inc()
            log.error("webhook not accepted", because=str(error))  # noqa: TRY400 - the sentence says it all
            raise HTTPException(503, "the ledger cannot be written; send it again") from None
        if left_out := alerts.truncated(payload):
            reconciler.left_out(left_out, alerts.receiver(payload))
        return {"accepted": accepted, "refused": refused}

    @app.get("/metrics", response_class=PlainTextResponse)
    @app.head("/metrics", include_in_schema=False)
    def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    _probes(app, ledger)
    runbooks.add(app)
    _describe(app)
    return app


class _Authentication:
    """Lets in a call with a token or a password that the web configuration accepts."""

    def __init__(self, web: WebConfig, rejected: Counter) -> None:
        self._web, self._rejected = web, rejected
        self._next_word_s = 0.0

    async def __call__(self, request: Request) -> None:
        try:
            if await self._web.admits(request.headers.get("Authorization", "")):
                return
        except BusyError as error:
            raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from None
        self._rejected.labels("unauthenticated").inc()
        if time.monotonic() >= self._next_word_s:
            self._next_word_s = time.monotonic() + UNAUTHENTICATED_S
            log.warning(
                "webhook call rejected: no valid token or password",
                hint="check http_config of the Alertmanager receiver against --web-config-file",
            )
        raise HTTPException(
            401, "a bearer token or a password is wanted", headers={"WWW-Authenticate": self._web.challenge}
        )


async def _durable(taken: Future[tuple[int, int]]) -> tuple[int, int]:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            return await asyncio.wrap_future(taken)
    except TimeoutError:
        raise NoAnswerError(f"the ledger has not answered within {WRITE_TIMEOUT_S:g} s") from None
    except asyncio.CancelledError:  # told to end: the call is answered all the same
        raise NoAnswerError("the program ends and does not wait for the ledger") from None


def _tell(registry: CollectorRegistry, bounds: Mapping[str, float]) -> None:
    """The thresholds of rules, as they were set."""
    for name, bound in bounds.items():
        Gauge(name, SERIES[name].meaning, registry=registry).set(bound)


def _describe(app: FastAPI) -> None:
    """Who is let in is no framework's to check here, and so no framework's to tell."""
    told = app.openapi

    def openapi() -> dict[str, Any]:
        description = told()
        description.setdefault("components", {})["securitySchemes"] = api.SECURITY_SCHEMES
        return description

    app.openapi = openapi  # type: ignore[method-assign]


def _probes(app: FastAPI, ledger: Ledger) -> None:
    readiness = Readiness(ledger)

    @app.get("/-/healthy", response_class=PlainTextResponse)
    @app.head("/-/healthy", include_in_schema=False)
    async def healthy() -> Response:
        """200 while the process serves, whatever the ledger does: to be started again would mend nothing else."""
        return Response("healthy\n", media_type="text/plain")

    @app.get("/-/ready", response_class=PlainTextResponse, responses=api.NOT_READY)
    @app.head("/-/ready", include_in_schema=False)
    async def ready() -> Response:
        """200 while an alert could be made durable; else 503, with the reason."""
        because = await readiness.lacks()
        if because is not None:
            return Response(f"{because}\n", status_code=503, media_type="text/plain")
        return Response("ready\n", media_type="text/plain")


def _registry(ledger: Ledger, host: str, queue: Collector | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, host))
    if queue is not None:
        registry.register(queue)
    return registry


async def _body(request: Request, limit: int, rejected: Counter) -> bytes:
    """The whole body, unless it is over the limit (whatever it claims its length to be) or does not come."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    rejected.labels("oversized").inc()
                    log.warning("webhook body refused", because=f"over {limit} bytes")
                    raise HTTPException(413, f"the body is over {limit} bytes; set max_alerts in Alertmanager")
    except (TimeoutError, ClientDisconnect):
        rejected.labels("incomplete").inc()
        log.warning("webhook body refused", because=f"not whole within {BODY_TIMEOUT_S:g} s")
        raise HTTPException(408, f"the whole body is wanted within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)
