"""`/docs/…`: the pages that ship, as HTML, for whoever follows the annotation `runbook_url` of an alert.

They are served below the paths that they have in a checkout, so that what one of them links to opens as well. Of what
is no page that ships, as a test, the link is left out and its text stays. Nothing is loaded from anywhere else.
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
"""So many pages are kept as HTML; more than there are."""

_HEADERS: Final = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "pre,code{font:.9em ui-monospace,monospace;background:#f3f3f3}pre{padding:.7rem;overflow-x:auto}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{border:1px solid #ccc;padding:.3rem .5rem}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre,code{background:#262626}a{color:#8bf}}"
)
_NOT_WHOLE: Final = "the installation is not whole; install gpuwarden anew"
_NO_ANCHOR: Final = re.compile(r"[^\w\- ]")


def add(app: FastAPI) -> None:
    """Have the application serve the pages to anybody: they say nothing of this host.

    Alerts are taken also where no page is there, or none can be shown: that is logged once, and said to who asks.
    """
    try:
        there = frozenset(pages())
    except OSError as error:  # it names a folder of this host, which not everybody is told
        there = frozenset[str]()
        log.warning("no runbook is served", because=str(error))

    # One route for all that is below, since no other of this program's begins so: with one for each folder, a slash at
    # its end would be answered by an address that holds what this host calls itself.
    @app.get("/docs", include_in_schema=False)
    @app.head("/docs", include_in_schema=False)
    @app.get("/docs/{name:path}", include_in_schema=False)
    @app.head("/docs/{name:path}", include_in_schema=False)
    def page(name: str = "") -> HTMLResponse:
        if name not in there:
            lacking = "" if there else f": {_NOT_WHOLE}"
            raise HTTPException(404, f"there is no page docs/{name[:100]} in this version{lacking}")
        try:
            return HTMLResponse(rendered(name), headers=_HEADERS)
        except (OSError, KeyError):
            raise HTTPException(404, f"the page docs/{name} is there no more: {_NOT_WHOLE}") from None
        except (ImportError, ValueError) as error:
            raise HTTPException(
                503, f"the page docs/{name} cannot be shown ({error}); install gpuwarden anew"
            ) from None


@lru_cache(maxsize=PAGES_MAX)
def rendered(name: str) -> str:
    """A page as HTML, by its path below docs/.

    Raises:
        KeyError, OSError: there is none, or it cannot be read.
        ValueError: it is no UTF-8.
        ImportError: what reads Markdown is not installed.
    """
    from markdown_it import MarkdownIt  # noqa: PLC0415 - read by the first who opens a page

    there = pages()
    text = there[name].read_text(encoding="utf-8")
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            token.attrs["id"] = anchor(following.content)
        for part in token.children or ():
            if part.type == "link_open" and not _opens(str(part.attrs.get("href", "")), name, there.keys()):
                part.attrs.pop("href", None)
    title = html.escape(posixpath.basename(name).removesuffix(".md"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body>\n{markdown.renderer.render(tokens, markdown.options, {})}</body>\n</html>\n"
    )


def anchor(heading: str) -> str:
    """What a link calls a heading, by the rule of GitHub: lower case, without punctuation, hyphens for spaces."""
    return _NO_ANCHOR.sub("", heading.lower()).replace(" ", "-")


def _opens(link: str, name: str, there: Collection[str]) -> bool:
    """Whether something is behind a link of a page: on the web, on the page itself, or a page that ships."""
    if link.startswith(("https://", "http://", "#")):
        return True
    path = link.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) in there
