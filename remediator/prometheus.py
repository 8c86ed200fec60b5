"""Asks Prometheus about one target, every replica at once, within a bound of time and bytes.

For a second opinion, and for the curves around the trip; what the answers mean is `remediator.opinion`'s and
`remediator.curves`'s.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from gpuwarden.errors import GpuwardenError
from remediator import answers, curves, opinion
from remediator.answers import Asking
from remediator.curves import Curve, Said, Sought
from remediator.opinion import Answer, Opinion, Verdict
from remediator.plan import Episode

ANSWER_S: Final = 5.0
"""How long one Prometheus may take for all that it is asked about one target, seconds."""

ANSWER_MAX_BYTES: Final = 16 * 2**20
"""The largest answer that is read, bytes."""

CURVES_MAX_BYTES: Final = 2**20
"""The largest answer with curves of one kind that is read, bytes; of 64 GPUs it has about 200 KiB."""

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
        self._loop = answers.Loop("prometheus")

    def close(self) -> None:
        """Let go of the thread."""
        self._loop.close()

    def ask(self, episode: Episode) -> Opinion:
        """What each of them says of an episode's target now."""
        return self._loop.run(self._ask_all(episode))

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
                        "query": left[0].expression(fresh_s=self._fresh_s),
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

    async def _ask_all(self, episode: Episode) -> Opinion:
        return Opinion(answers=await asyncio.gather(*(self._ask_one(url, episode) for url in self._urls)))

    async def _ask_one(self, url: str, episode: Episode) -> Answer:
        try:
            async with answers.asking(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as asking:
                verdict, because = await self._judged(asking, url, episode)
        except GpuwardenError as error:
            verdict, because = Verdict.SILENT, str(error)
        return Answer(source=answers.shown(url), verdict=verdict, because=because)

    async def _judged(self, asking: Asking, url: str, episode: Episode) -> tuple[Verdict, str]:
        rules = opinion.expressions(await asking.get(f"{url}/api/v1/rules", _RULES), episode)
        values = [
            (rule, opinion.value_of(await _value(asking, url, expression), episode)) for rule, expression in rules
        ]
        age_s = opinion.age_of(await _value(asking, url, opinion.AGES[episode.subject]), episode)
        return opinion.judge(values, age_s, fresh_s=self._fresh_s)


async def _value(asking: Asking, url: str, expression: str) -> bytes:
    return await asking.post(f"{url}/api/v1/query", {"query": expression, "timeout": f"{ANSWER_S:g}s"})
