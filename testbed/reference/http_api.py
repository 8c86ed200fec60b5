"""docs/reference/http-api.md: the remediator's OpenAPI description, and the exporter's pages."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from exporter.http import server
from gpuwarden.http.web_config import WebConfig
from remediator.ledger.ledger import Ledger
from remediator.settings.settings import ServeSettings
from remediator.webhook.app import create_app

EXPORTER: Final = {
    "/": ("web configuration", "HTML page for people: the state of each source", "200"),
    "/metrics": ("web configuration", "the [metrics](metrics.md), for Prometheus", "200"),
    "/evidence?worker=NAME": (
        "web configuration, and loopback only",
        "[facts](formats.md) of a worker as JSON, for the remediator",
        "200; 400 no name; 403 not from this host; 404 unknown; 503 no recent sample",
    ),
    "/evidence?container=NAME": (
        "web configuration, and loopback only",
        "[facts](formats.md) of a container without workers as JSON",
        "as above",
    ),
    "/-/healthy": ("none", "whether the process answers", "200"),
    "/-/ready": ("none", "whether the last sample is recent", "200; 503 no recent sample"),
}
"""The exporter's pages: authentication, content and statuses."""

UNDESCRIBED: Final = {
    "/docs/{name}": "these pages as HTML: [runbooks](../runbooks/index.md) and all others",
    "/openapi.json": "the description that this page is made from",
}
"""The remediator's pages that are not in its description."""

_INTRO: Final = """# HTTP API

<!-- Written by `python -m testbed.reference`; change remediator/webhook or exporter/http, not this page. -->

Both servers listen on loopback by default. `--web-config-file` sets TLS, passwords and bearer tokens:
see [secure](../how-to/secure.md).
"""


def page() -> str:
    """Render the page.

    Raises:
        ValueError: a route is not documented.
    """
    return "\n".join([_INTRO, *_remediator(), *_exporter()])


def description() -> dict[str, Any]:
    """The remediator's OpenAPI description, with default limits."""
    defaults = {name: field.default for name, field in ServeSettings.model_fields.items()}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'ledger.db'}"
        with closing(Ledger.open(url, host="host")) as ledger:
            app = create_app(
                ledger=ledger,
                host="host",
                web=WebConfig(None),
                body_max_bytes=defaults["body_max_bytes"],
                alerts_max=defaults["alerts_max"],
            )
            described = app.openapi()
    routes = {str(getattr(route, "path", "")).replace(":path", "") for route in app.routes}
    if unknown := routes - described["paths"].keys() - UNDESCRIBED.keys() - {"/docs"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: add it to testbed/reference/http_api.py")
    return described


def _remediator() -> Iterator[str]:
    yield from ("## Remediator", "")
    yield from ("`gpuwarden remediator serve`, port 9836. HEAD works wherever GET does.", "")
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            yield from (f"### {method.upper()} {path}", "")
            yield from (f"{' '.join(operation['description'].split())} {_authentication(operation)}", "")
            yield from ("| status | meaning |", "|---|---|")
            yield from (f"| {status} | {_meaning(status, its)} |" for status, its in operation["responses"].items())
            yield ""
    yield from ("### Other pages", "", "No authentication.", "", "| GET | content |", "|---|---|")
    yield from (f"| `{path}` | {content} |" for path, content in UNDESCRIBED.items())
    yield ""


def _authentication(operation: dict[str, Any]) -> str:
    schemes = [name for each in operation.get("security", ()) for name in each]
    if not schemes:
        return "No authentication."
    return f"Authentication: {' or '.join('bearer token' if each == 'token' else each for each in schemes)}."


def _meaning(status: str, response: dict[str, Any]) -> str:
    text = str(response["description"])
    return HTTPStatus(int(status)).phrase if text == "Successful Response" else text


def _exporter() -> Iterator[str]:
    app = server.create_app(CollectorRegistry(), lambda: None, host="", web=WebConfig(None))
    if (routes := {route.path for route in app.routes}) != (listed := {each.partition("?")[0] for each in EXPORTER}):  # type: ignore[attr-defined]
        raise ValueError(f"{', '.join(sorted(routes ^ listed))}: change EXPORTER in testbed/reference/http_api.py")
    yield from ("## Exporter", "")
    yield from ("`gpuwarden exporter`, port 29835. All pages are read-only: GET and HEAD.", "")
    yield from ("| page | authentication | content | statuses |", "|---|---|---|---|")
    for path, (access, content, statuses) in EXPORTER.items():
        yield f"| `{path}` | {access} | {content} | {statuses} |"
    yield from ("", "Every page may also answer:", "", "| status | meaning |", "|---|---|")
    yield "| 401 | no credentials, or wrong ones |"
    yield "| 404 | no such page |"
    yield "| 405 | another method than GET or HEAD |"
    yield "| 503 | too many passwords are being checked: retry |"
    yield ""
