"""Limits on one HTTP answer, against misbehaving servers."""

import asyncio
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from remediator.clients import http as answers
from remediator.clients.http import AnswerError
from tests.remediator.prometheus import Answering

CLOSED_PORT = "http://ann:secret@127.0.0.1:9"


class Replying(Answering):
    """Answers every request with `head` and then what `more` writes."""

    def __init__(self, head: bytes, more: Callable[[BaseHTTPRequestHandler], None] = lambda _: None) -> None:
        super().__init__()
        self._head, self._more = head, more

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(self._head)
        self._more(request)
        request.close_connection = True


def drips(what: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def drip(request: BaseHTTPRequestHandler) -> None:
        while True:
            request.wfile.write(what)
            time.sleep(0.02)

    return drip


def get(url: str, *, within_s: float = 5.0, max_bytes: int = 1000) -> bytes:
    async def ask() -> bytes:
        async with answers.limited_client(within_s=within_s, max_bytes=max_bytes) as asking:
            return await asking.get(url, {"a": 'b"&c'})

    return asyncio.run(ask())


def said(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_answer_of_the_maximum_size_is_returned_and_a_larger_one_is_refused() -> None:
    with Replying(said("200 OK", b"x" * 1000)) as server:
        assert get(server.url) == b"x" * 1000
        assert server.asked == ["/?a=b%22%26c "]

        with pytest.raises(AnswerError, match=r"^its answer is larger than 999 bytes$"):
            get(server.url, max_bytes=999)


def test_unrequested_compression_is_not_unpacked() -> None:
    body = b"\x1f\x8b" + b"\0" * 100
    with Replying(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 102\r\n\r\n" + body) as server:
        assert get(server.url) == body


@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 500 Oh\r\n\r\n", b" "),
    ],
    ids=["status line", "headers", "body", "error body"],
)
def test_timeout_covers_a_slowly_sent_answer(head: bytes, drop: bytes) -> None:
    began_s = time.monotonic()
    with Replying(head, drips(drop)) as server, pytest.raises(AnswerError, match=r"^no answer within 0\.5 s$"):
        get(server.url, within_s=0.5, max_bytes=10**6)

    assert time.monotonic() - began_s < 4


def test_timeout_covers_all_requests_of_a_client() -> None:
    async def ask_all(url: str) -> None:
        async with answers.limited_client(within_s=0.5, max_bytes=1000) as asking:
            while True:
                await asking.post(url, {})

    with (
        Replying(said("200 OK", b"")) as server,
        pytest.raises(AnswerError, match=r"^no answer within 0\.5 s$"),
    ):
        asyncio.run(ask_all(server.url))

    assert len(server.asked) > 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (said("503 Oh", b"  starting\n up\x00\x1b[31m \xff "), "it returned 503: starting up [31m �"),
        (said("404 Oh", b""), "it returned 404"),
        (said("302 Oh", b"elsewhere"), "it returned 302: elsewhere"),
        (said("500 Oh", b"x" * 5000), f"it returned 500: {'x' * 200}"),
        (b"", "Server disconnected without sending a response."),
        (b"nonsense\r\n\r\n", "illegal status line"),
    ],
    ids=["error", "empty error", "redirect", "long error", "no answer", "another protocol"],
)
def test_error_is_one_short_storable_line(answer: bytes, says: str) -> None:
    with Replying(answer) as server, pytest.raises(AnswerError) as found:
        get(server.url)

    assert str(found.value).startswith(says)
    assert len(str(found.value)) <= 300


def test_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(AnswerError) as found:
        get(CLOSED_PORT)

    assert "secret" not in str(found.value)
    assert answers.shown(CLOSED_PORT) == "http://127.0.0.1:9"


def test_hung_dns_lookup_delays_neither_the_answer_nor_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = answers.LoopThread("test")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(8))

    async def ask() -> bytes:
        async with answers.limited_client(within_s=0.2, max_bytes=1000) as asking:
            return await asking.get("http://gpuwarden.invalid", {})

    began_s = time.monotonic()
    with pytest.raises(AnswerError, match=r"^no answer within 0\.2 s$"):
        loop.run(ask())
    loop.close()

    assert time.monotonic() - began_s < 6
