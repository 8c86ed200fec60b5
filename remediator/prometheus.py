"""Asks every Prometheus at once for the curves around a trip, within a bound of time and bytes."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from gpuwarden.errors import GpuwardenError
from remediator import answers, curves
from remediator.curves import Curve, Said, Sought

ANSWER_S: Final = 5.0
"""How long one Prometheus may take for all that it is asked about one target, seconds."""

CURVES_MAX_BYTES: Final = 2**20
"""The largest answer with curves of one kind that is read, bytes; of 64 GPUs it has about 200 KiB."""


class Prometheus:
    """A client of one Prometheus, or of several that scrape the same hosts. Safe to share between threads.

    Args:
        urls: where they answer.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._loop = answers.Loop("prometheus")

    def close(self) -> None:
        """Let go of the thread."""
        self._loop.close()

    def curves(self, sought: Sought, *, within_s: float) -> Future[Sequence[Said]]:
        """Begin to ask for a target's curves; what each of them has may be waited for later."""
        return self._loop.start(self._curves_of_all(sought, within_s=min(within_s, ANSWER_S)))

    async def _curves_of_all(self, sought: Sought, *, within_s: float) -> Sequence[Said]:
        return await asyncio.gather(*(self._curves_of(url, sought, within_s=within_s) for url in self._urls))

    async def _curves_of(self, url: str, sought: Sought, *, within_s: float) -> Said:
        """What one of them has until it fails, and why not the rest."""
        source, found, why = answers.shown(url), list[Curve](), dict[str, str]()
        left = list(sought.wanted)
        try:
            async with answers.asking(within_s=within_s, max_bytes=CURVES_MAX_BYTES) as asking:
                while left:
                    asked = {
                        "query": left[0].expression,
                        "start": str(sought.window.at),
                        "end": str(sought.window.until),
                        "step": str(sought.window.step_s),
                        "timeout": f"{within_s:g}s",
                    }
                    try:
                        answer = await asking.post(f"{url}/api/v1/query_range", asked)
                        found += curves.read(answer, left[0], sought.window, source=source)
                    except GpuwardenError as error:
                        why[left[0].metric] = str(error)
                    del left[0]
        except GpuwardenError as error:
            why.update({each.metric: str(error) for each in left})
        return Said(source=source, curves=found, why=why)
