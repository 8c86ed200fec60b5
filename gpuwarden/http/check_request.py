"""Read-only pages behind a web configuration."""

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuwarden.http.web_config import BusyError, WebConfig

PUBLIC_PATHS: Final = ("/-/healthy", "/-/ready")
"""Pages without credentials: probes of Kubernetes and Docker have no password."""


class CheckRequest:
    """Middleware: accept GET and HEAD requests with valid credentials."""

    def __init__(self, app: ASGIApp, *, web: WebConfig) -> None:
        self._app = app
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        refusal = await self._refusal(Request(scope))
        # Starlette reads the codings of a request in lower case alone.
        headers = [(name, value.lower() if name == b"accept-encoding" else value) for name, value in scope["headers"]]
        scope = {**scope, "headers": headers}
        await (refusal or self._app)(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            says = "only GET and HEAD are supported\n"
            return PlainTextResponse(says, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        if request.url.path in PUBLIC_PATHS:
            return None
        try:
            refusal = await self._web.refusal(request.headers.get("Authorization", ""))
        except BusyError as error:
            return PlainTextResponse(f"{error}\n", HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "1"})
        if not refusal:
            return None
        says = f"{refusal}; see --web-config-file\n"
        return PlainTextResponse(says, HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": self._web.challenge})
