"""Whole answers of the other servers of the chain over HTTP, or why there are none: bounded in time and in bytes.

The bound of time is one for all that is asked inside it, from the look-up of a name to the last byte, however it drips.
Nothing compressed is asked for, because what is read is bounded; no redirect is followed and no proxy of the
environment is used. What went wrong is told without the password that an address may hold.
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
"""How much is told of an answer that is an error."""

_T = TypeVar("_T")


class AnswerError(GpuwardenError):
    """There is no answer, or none that can be used; it says why."""


class Asking:
    """Asks, as long as `asking` allows."""

    def __init__(self, client: httpx.AsyncClient, *, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes

    async def get(self, url: str, asked: Mapping[str, str]) -> bytes:
        """The answer to a GET.

        Raises:
            AnswerError: it is an error, or too large.
        """
        return await self._whole(self._client.build_request("GET", url, params=dict(asked)))

    async def post(self, url: str, asked: Mapping[str, str]) -> bytes:
        """The answer to a form, which may be longer than an address.

        Raises:
            AnswerError: it is an error, or too large.
        """
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
            raise AnswerError(f"it says {answer.status_code}: {_word(body)}".removesuffix(": "))
        if len(body) > self._max_bytes:
            raise AnswerError(f"its answer is larger than {self._max_bytes} bytes")
        return bytes(body)


@asynccontextmanager
async def asking(*, within_s: float, max_bytes: int) -> AsyncIterator[Asking]:
    """For one server: all that it is asked inside may take so long, and each answer may be so large.

    Raises:
        AnswerError: it does not answer, or not in time.
    """
    client = httpx.AsyncClient(
        timeout=within_s, trust_env=False, verify=authorities(), headers={"Accept-Encoding": "identity"}
    )
    try:
        async with asyncio.timeout(within_s), client:
            yield Asking(client, max_bytes=max_bytes)
    except (TimeoutError, httpx.TimeoutException):
        raise AnswerError(f"no answer within {within_s:g} s") from None
    except httpx.HTTPError as error:
        raise AnswerError(str(error)[:300] or type(error).__name__) from None


class Loop:
    """An event loop in a thread of its own, for callers in threads. Safe to share between them.

    The end of a loop that is made for a single call would wait for a name server that hangs.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, what: Coroutine[Any, Any, _T]) -> _T:
        """Wait for what it comes to."""
        return self.start(what).result()

    def start(self, what: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin it; what it comes to may be waited for later."""
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def close(self) -> None:
        """Let go of the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@cache
def authorities() -> ssl.SSLContext:
    """Whose certificates are believed: read once, for that takes longer than an answer does (20 ms)."""
    return httpx.create_ssl_context(trust_env=False)


def shown(url: str) -> str:
    """An address as it is told: without its password."""
    return str(httpx.URL(url).copy_with(userinfo=b""))


def _word(body: bytearray) -> str:
    """The beginning of an answer as one line of text that any database takes."""
    said = body[:WORD_MAX_BYTES].decode(errors="replace")
    return " ".join("".join(each if each.isprintable() else " " for each in said).split())
