"""Asks Prometheus for a second opinion about one target, every replica at once, within a bound of time and bytes.

What the answers mean is `remediator.opinion`'s.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import httpx

from gpuwarden.errors import GpuwardenError
from remediator import opinion
from remediator.opinion import Answer, Opinion, Verdict
from remediator.plan import Episode

ANSWER_S: Final = 5.0
"""How long one Prometheus may take for all that it is asked about one target, seconds."""

ANSWER_MAX_BYTES: Final = 16 * 2**20
"""The largest answer that is read, bytes."""

_RULES: Final = {"type": "alert", "exclude_alerts": "true"}
"""What an older Prometheus does not know of these it ignores."""


class Prometheus:
    """A client of one Prometheus, or of several that evaluate the same rules. Safe to share between threads.

    Args:
        urls: where they answer.
        fresh_s: older samples say nothing, seconds.
    """

    def __init__(self, urls: Sequence[str], *, fresh_s: float) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._fresh_s = fresh_s
        # A loop of its own, because the end of one made for a single call would wait for a name server that hangs.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, episode: Episode) -> Opinion:
        """What each of them says of an episode's target now."""
        return asyncio.run_coroutine_threadsafe(self._ask_all(episode), self._loop).result()

    async def _ask_all(self, episode: Episode) -> Opinion:
        return Opinion(answers=await asyncio.gather(*(self._ask_one(url, episode) for url in self._urls)))

    async def _ask_one(self, url: str, episode: Episode) -> Answer:
        source = str(httpx.URL(url).copy_with(userinfo=b""))  # as it is told: without its password
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                # Nothing compressed: what is read is bounded.
                httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, headers={"Accept-Encoding": "identity"}) as client,
            ):
                verdict, because = await self._judged(client, url, episode)
        except TimeoutError:
            verdict, because = Verdict.SILENT, f"no answer within {ANSWER_S:g} s"
        except (httpx.HTTPError, GpuwardenError) as error:
            verdict, because = Verdict.SILENT, str(error)[:300] or type(error).__name__
        return Answer(source=source, verdict=verdict, because=because)

    async def _judged(self, client: httpx.AsyncClient, url: str, episode: Episode) -> tuple[Verdict, str]:
        rules = opinion.expressions(await _read(client, "GET", f"{url}/api/v1/rules", _RULES), episode)
        values = [
            (rule, opinion.value_of(await self._value(client, url, expression), episode)) for rule, expression in rules
        ]
        age_s = opinion.age_of(await self._value(client, url, opinion.AGES[episode.subject]), episode)
        return opinion.judge(values, age_s, fresh_s=self._fresh_s)

    async def _value(self, client: httpx.AsyncClient, url: str, expression: str) -> bytes:
        asked = {"query": expression, "timeout": f"{ANSWER_S:g}s"}
        return await _read(client, "POST", f"{url}/api/v1/query", asked)


async def _read(client: httpx.AsyncClient, method: str, url: str, asked: Mapping[str, str]) -> bytes:
    """One answer whole.

    Raises:
        OpinionError: it is an error, or too large.
    """
    body = bytearray()
    where = {"params": asked} if method == "GET" else {"data": asked}  # an expression may be longer than an address
    async with client.stream(method, url, **where) as answer:  # type: ignore[arg-type]
        async for part in answer.aiter_raw():
            body += part
            if len(body) > ANSWER_MAX_BYTES:
                raise opinion.OpinionError(f"its answer is larger than {ANSWER_MAX_BYTES} bytes")
    if answer.status_code != httpx.codes.OK:
        raise opinion.OpinionError(f"it says {answer.status_code}: {body[:200].decode(errors='replace').strip()}")
    return bytes(body)
