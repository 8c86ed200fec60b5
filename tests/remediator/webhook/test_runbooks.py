"""The runbook pages of the remediator: their HTML and their links."""

import asyncio
import posixpath
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from gpuwarden import docs_pages as shipping
from gpuwarden.docs_pages import pages
from remediator.webhook import runbooks
from tests.asking import PLAIN
from tests.remediator.webhook.test_app import serving


class Read(HTMLParser):
    """Links, anchors and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name == "href" and value is not None]
        self.anchors |= {value for name, value in attrs if name == "id" and value is not None}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the running program."""
    with (
        serving(tmp_path_factory.mktemp("webhook")) as (program, _),
        httpx.Client(base_url=program.url, trust_env=False, verify=PLAIN) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def read(served: httpx.Client) -> dict[str, Read]:
    """Each served page by its path."""
    return {f"/docs/{name}": Read(served.get(f"/docs/{name}").text) for name in pages()}


def test_every_link_of_every_page_opens(read: dict[str, Read]) -> None:
    links = [(page, link) for page, its in read.items() for link in its.links if not link.startswith("https://")]

    assert len(links) > 200
    for page, link in links:
        path, _, place = urljoin(page, link).partition("#")
        assert path in read, (page, link)
        assert not place or place in read[path].anchors, (page, link)


def test_link_to_a_file_that_does_not_ship_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("docs") / "x.md"
    file.write_text("<!-- a comment -->\n# A title\n\n[the tests](../tests/test_a.py)\n\n```{toctree}\nx\n```\n")
    monkeypatch.setattr(runbooks, "pages", lambda: {"x.md": file})

    text = runbooks.render.__wrapped__("x.md")

    assert Read(text).links == []
    assert "the tests" in text
    assert "comment" not in text
    assert "toctree" not in text


def test_runbook_has_its_alert_as_heading_and_loads_nothing(served: httpx.Client) -> None:
    answer = served.get("/docs/runbooks/GpuwardenJobStalled.md")

    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert '<h1 id="gpuwardenjobstalled">GpuwardenJobStalled</h1>' in answer.text
    assert "<title>GpuwardenJobStalled</title>" in answer.text
    assert not Read(answer.text).tags & {"script", "link", "img", "iframe"}


def test_tables_and_code_are_rendered(read: dict[str, Read]) -> None:
    assert {"table", "code", "pre"} <= read["/docs/contributing/architecture.md"].tags


def test_html_in_a_page_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("docs") / "x.md"
    file.write_text("# a <b>c</b>\n\n<script>alert(1)</script>\n[d](javascript:alert(1)) [e](//example.com/f)\n")
    monkeypatch.setattr(runbooks, "pages", lambda: {"x<i>.md": file})

    found = Read(runbooks.render.__wrapped__("x<i>.md"))

    assert not found.tags & {"script", "b", "i"}
    assert found.links == []


@pytest.mark.parametrize(
    "path",
    ["", "/", "/nothing.md", "/runbooks", "/runbooks/", "/runbooks/Nothing.md", "/../README.md", "/%2e%2e%2fREADME.md",
     "/runbooks/..%2farming.md", "/demo.svg", "/arming", "/runbooks/a/b.md"],
)  # fmt: skip
def test_unknown_page_is_404(path: str, served: httpx.Client) -> None:
    assert served.get(f"/docs{path}", follow_redirects=True).status_code == 404


@pytest.mark.parametrize("path", ["", "/", "/runbooks", "/runbooks/"])
def test_folder_is_404_without_a_redirect(path: str, served: httpx.Client) -> None:
    answer = served.get(f"/docs{path}", headers={"Host": "inside.example.com"})

    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize("path", ["/docs/runbooks/GpuwardenJobStalled.md", "/docs/reference/metrics.md", "/metrics",
                                  "/-/healthy", "/-/ready"])  # fmt: skip
def test_head_request_returns_only_headers(path: str, served: httpx.Client) -> None:
    whole, head = served.get(path), served.head(path)

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert served.head("/docs/nothing.md").status_code == 404


def asked(app: FastAPI, name: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://remediator") as client:
            return await client.get(f"/docs/{name}")

    return asyncio.run(ask())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The docs folder of an installation with one page."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "a.md").write_text("# There is one\n")
    monkeypatch.setattr(shipping, "FOLDER", folder)
    runbooks.render.cache_clear()
    yield folder
    runbooks.render.cache_clear()


def test_remediator_without_pages_starts_and_logs_it(folder: Path) -> None:
    (folder / "a.md").unlink()
    app = FastAPI()

    with capture_logs() as logged:
        runbooks.add(app)
        answers = [asked(app, "a.md"), asked(app, "runbooks/GpuwardenJobStalled.md")]

    assert [(each["log_level"], each["event"]) for each in logged] == [("warning", "runbooks not available")]
    assert str(folder) in logged[0]["reason"]
    for answer in answers:
        assert answer.status_code == 404
        assert "reinstall gpuwarden" in answer.text
        assert str(folder) not in answer.text


def test_page_lost_after_the_start_is_reported_until_it_is_back(folder: Path) -> None:
    app = FastAPI()
    runbooks.add(app)
    page = (folder / "a.md").read_bytes()
    (folder / "a.md").unlink()

    lost = asked(app, "a.md")
    (folder / "b.md").write_text("another page")
    alone = asked(app, "a.md")
    (folder / "a.md").write_bytes(b"\xff")
    broken = asked(app, "a.md")
    (folder / "a.md").write_bytes(page)

    assert [each.status_code for each in (lost, alone, broken)] == [404, 404, 503]
    assert all("reinstall gpuwarden" in each.text for each in (lost, alone, broken))
    assert "There is one" in asked(app, "a.md").text


@pytest.mark.usefixtures("folder")
def test_page_without_the_markdown_library_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    runbooks.add(app)
    monkeypatch.setitem(sys.modules, "markdown_it", None)

    answer = asked(app, "a.md")

    assert answer.status_code == 503
    assert "reinstall gpuwarden" in answer.text


def test_cache_holds_every_page() -> None:
    assert len(pages()) < runbooks.PAGES_MAX


def test_missing_docs_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setattr(shipping, "FOLDER", empty)

    with pytest.raises(FileNotFoundError, match=re.escape(str(empty)) + r".*reinstall gpuwarden"):
        pages()


def test_pages_are_named_by_their_paths_below_docs() -> None:
    found = pages()

    assert found["runbooks/GpuwardenWatchdog.md"].is_file()
    assert {posixpath.splitext(name)[1] for name in found} == {".md"}
