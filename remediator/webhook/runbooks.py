"""`/docs/…`: the shipped pages as HTML, for the annotation `runbook_url` of alerts.

Paths are those of a checkout, so that links between pages work. Links to files that do not ship are removed.
"""

import html
import posixpath
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Final

import structlog
from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse

from gpuwarden.docs_pages import pages

log: Final = structlog.get_logger("remediator")

PAGES_MAX: Final = 128

_HEADERS: Final = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "pre,code{font:.9em ui-monospace,monospace;background:#f3f3f3}pre{padding:.7rem;overflow-x:auto}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{border:1px solid #ccc;padding:.3rem .5rem}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre,code{background:#262626}a{color:#8bf}}"
)
_NOT_WHOLE: Final = "the installation is incomplete; reinstall gpuwarden"
_NOT_SHOWN: Final = re.compile(r"^<!--.*?-->\n|^```\{toctree\}\n.*?^```\n", re.MULTILINE | re.DOTALL)
"""Comments and the site's menus."""
_NO_ANCHOR: Final = re.compile(r"[^\w\- ]")


def add(app: FastAPI) -> None:
    """Serve the pages without authentication: they reveal nothing about this host.

    Missing pages are logged once. Alerts are still accepted.
    """
    try:
        names = frozenset(pages())
    except OSError as error:  # the error names a folder, so it is only logged
        names = frozenset[str]()
        log.warning("runbooks not available", reason=str(error))

    # One route: with one per folder, a trailing slash would cause a redirect that reveals this host's name.
    @app.get("/docs", include_in_schema=False)
    @app.head("/docs", include_in_schema=False)
    @app.get("/docs/{name:path}", include_in_schema=False)
    @app.head("/docs/{name:path}", include_in_schema=False)
    def page(name: str = "") -> HTMLResponse:
        if name not in names:
            lacking = "" if names else f": {_NOT_WHOLE}"
            raise HTTPException(404, f"no page docs/{name[:100]} in this version{lacking}")
        try:
            return HTMLResponse(render(name), headers=_HEADERS)
        except (OSError, KeyError):
            raise HTTPException(404, f"page docs/{name} is missing: {_NOT_WHOLE}") from None
        except (ImportError, ValueError) as error:
            raise HTTPException(503, f"page docs/{name} cannot be rendered ({error}); reinstall gpuwarden") from None


@lru_cache(maxsize=PAGES_MAX)
def render(name: str) -> str:
    """Render a page by its path below docs/.

    Raises:
        KeyError, OSError: the page does not exist or cannot be read.
        ValueError: it is not UTF-8.
        ImportError: the Markdown parser is not installed.
    """
    from markdown_it import MarkdownIt  # noqa: PLC0415 - imported at the first page

    names = pages()
    text = names[name].read_text(encoding="utf-8")
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(_NOT_SHOWN.sub("", text))
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            token.attrs["id"] = anchor(following.content)
        for part in token.children or ():
            if part.type == "link_open" and not _link_works(str(part.attrs.get("href", "")), name, names.keys()):
                part.attrs.pop("href", None)
    title = html.escape(posixpath.basename(name).removesuffix(".md"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body>\n{markdown.renderer.render(tokens, markdown.options, {})}</body>\n</html>\n"
    )


def anchor(heading: str) -> str:
    """The anchor of a heading, by GitHub's rule: lower case, no punctuation, hyphens for spaces."""
    return _NO_ANCHOR.sub("", heading.lower()).replace(" ", "-")


def _link_works(link: str, name: str, names: Collection[str]) -> bool:
    """Whether a link points to the web or to a page that ships."""
    if link.startswith(("https://", "http://", "#")):
        return True
    path = link.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) in names
