"""Bounded HTTP requests to Prometheus and Alertmanager.

One time limit covers all, from the DNS lookup to the last byte. Answers are limited in bytes and uncompressed.
Redirects and proxies are not followed. Error messages hide the password in a URL.
"""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final, TypeVar

import httpx

from gpuwarden.errors import GpuwardenError

WORD_MAX_BYTES: Final = 200

_T = TypeVar("_T")


class AnswerError(GpuwardenError):
    """A request failed; the message says why."""


class LimitedClient:
    """Sends requests within the limits of `limited_client`."""

    def __init__(self, client: httpx.AsyncClient, *, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes

    async def get(self, url: str, asked: Mapping[str, str]) -> bytes:
        """Send a GET. Raises AnswerError on an error status or a large answer."""
        return await self._whole(self._client.build_request("GET", url, params=dict(asked)))

    async def post(self, url: str, asked: Mapping[str, str]) -> bytes:
        """Send a form. Raises as `get` does."""
        return await self._whole(self._client.build_request("POST", url, data=dict(asked)))

    async def _whole(self, request: httpx.Request) -> bytes:
        answer = await self._client.send(request, stream=True)
        try:
            is_error = answer.status_code != httpx.codes.OK
            body = bytearray()
            async for part in answer.aiter_raw():
                body += part
                if len(body) > (WORD_MAX_BYTES if is_error else self._max_bytes):
                    break
        finally:
            await answer.aclose()
        if is_error:
            raise AnswerError(f"it returned {answer.status_code}: {_word(body)}".removesuffix(": "))
        if len(body) > self._max_bytes:
            raise AnswerError(f"its answer is larger than {self._max_bytes} bytes")
        return bytes(body)


@asynccontextmanager
async def limited_client(*, within_s: float, max_bytes: int) -> AsyncIterator[LimitedClient]:
    """A client with a time limit for all its requests and a size limit for each answer.

    Raises:
        AnswerError: the server is unreachable or too slow.
    """
    client = httpx.AsyncClient(
        timeout=within_s, trust_env=False, verify=authorities(), headers={"Accept-Encoding": "identity"}
    )
    try:
        async with asyncio.timeout(within_s), client:
            yield LimitedClient(client, max_bytes=max_bytes)
    except (TimeoutError, httpx.TimeoutException):
        raise AnswerError(f"no answer within {within_s:g} s") from None
    except httpx.HTTPError as error:
        raise AnswerError(str(error)[:300] or type(error).__name__) from None


class LoopThread:
    """An event loop in its own thread. A loop per call would wait for a hung name server."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, what: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and return its result."""
        return self.start(what).result()

    def start(self, what: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@cache
def authorities() -> ssl.SSLContext:
    """The trusted authorities, cached."""
    return httpx.create_ssl_context(trust_env=False)


def shown(url: str) -> str:
    """Remove user and password from a URL."""
    return str(httpx.URL(url).copy_with(userinfo=b""))


def _word(body: bytearray) -> str:

    text = body[:WORD_MAX_BYTES].decode(errors="replace")
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
