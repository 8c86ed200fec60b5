"""Asks Alertmanagers, right before anything is begun, whether what an episode is about is silenced now.

A silence that was made after the notification was delivered is told to nobody. What a silence covers is Alertmanager's
own judgement: its list of alerts has it for each. An episode is silenced where one of them has alerts of it and
silences them all; an alert that Alertmanager does not have any more is no longer its to silence.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from remediator import answers
from remediator.answers import AnswerError, Asking
from remediator.safety import Silence

ANSWER_S: Final = 2.0
"""How long one Alertmanager may take to answer, seconds: what is about to begin waits for it. All are asked at once."""

ANSWER_MAX_BYTES: Final = 16 * 2**20
"""The largest answer that is read, bytes."""

FRESH_S: Final = 1.0
"""For how long an answer serves the other episodes of the host, seconds."""

FAILED_S: Final = 5.0
"""For how long an Alertmanager that did not answer is not asked again, seconds."""

PAUSE_OVER_TOOK: Final = 10.0
"""And not for so many times as long as it took to find that out."""

TOLD_S: Final = 60.0
"""For how long what a silence says of itself is remembered, seconds."""

TEXT_MAX: Final = 300
"""How much is told of who made a silence, and of the comment, characters."""

_ID: Final = re.compile(r"[0-9A-Za-z-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What the Alertmanagers say of one episode: what silences it, and who did not answer and why."""

    silences: Sequence[Silence] = ()
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What one Alertmanager has said: by fingerprint the silences that each alert is under; or why it has not."""

    until_s: float
    silenced_by: Mapping[str, Sequence[str]]
    failed: str = ""


class Silences:
    """A client of the Alertmanagers that tell a host's remediator. Safe to share between threads.

    Args:
        urls: where they answer.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._loop = answers.Loop("silences")
        # Of which Alertmanager about which host's alerts; about none where it does not tell of any.
        self._answers: dict[tuple[str, str | None], _Answer] = {}
        self._texts: dict[tuple[str, str], tuple[float, Silence]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the thread."""
        self._loop.close()

    def of(self, fingerprints: frozenset[str], *, host: str) -> Heard:
        """What silences the alerts with these fingerprints, which are about that host, in whichever Alertmanager."""
        with self._lock:
            return self._loop.run(self._of(fingerprints, host))

    async def _of(self, fingerprints: frozenset[str], host: str) -> Heard:
        silences, unknown = list[Silence](), list[str]()
        self._answers = {its: known for its, known in self._answers.items() if known.until_s > time.monotonic()}
        asked = await asyncio.gather(*(self._answer(url, host) for url in self._urls))
        for url, answer in zip(self._urls, asked, strict=True):
            if answer.failed:
                unknown.append(answer.failed)
            has = [answer.silenced_by[each] for each in sorted(fingerprints) if each in answer.silenced_by]
            if has and all(has):
                silences += await self._told(url, sorted({ids[0] for ids in has}))
        return Heard(silences=silences, unknown="; ".join(unknown))

    async def _answer(self, url: str, host: str) -> _Answer:
        known = self._answers.get((url, None)) or self._answers.get((url, host))
        if known is not None:
            return known
        began_s = time.monotonic()
        try:
            async with answers.asking(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as asking:
                found = _silenced_by(await _get(asking, url, "alerts", {"filter": f"host={_quoted(host)}"}))
        except AnswerError as error:
            failed = f"{answers.shown(url)} does not tell: {error}"
            # Whoever takes long to fail is asked seldom, for what is about to begin waits for it each time.
            pause_s = max(FAILED_S, PAUSE_OVER_TOOK * (time.monotonic() - began_s))
            known = _Answer(until_s=time.monotonic() + pause_s, silenced_by={}, failed=failed)
            self._answers[url, None] = known
        else:
            known = _Answer(until_s=time.monotonic() + FRESH_S, silenced_by=found)
            self._answers[url, host] = known
        return known

    async def _told(self, url: str, silence_ids: Sequence[str]) -> list[Silence]:
        """Who made each silence and why; that it is there is known, whether this can be told in time or not."""
        now_s = time.monotonic()
        self._texts = {key: known for key, known in self._texts.items() if known[0] > now_s}
        wanted = [each for each in silence_ids if (url, each) not in self._texts]
        self._texts |= {(url, each): (now_s + TOLD_S, Silence(silence_id=each)) for each in wanted}
        asked = [each for each in wanted if _ID.fullmatch(each)]
        with suppress(AnswerError):
            async with answers.asking(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as asking:
                for each in asked:
                    self._texts[url, each] = (now_s + TOLD_S, await _text(asking, url, each))
        return [self._texts[url, each][1] for each in silence_ids]


async def _text(asking: Asking, url: str, silence_id: str) -> Silence:
    try:
        found = await _get(asking, url, f"silence/{silence_id}", {})
        by, comment = str(found["createdBy"])[:TEXT_MAX], str(found["comment"])[:TEXT_MAX]
    except (AnswerError, KeyError, TypeError):
        return Silence(silence_id=silence_id)
    return Silence(silence_id=silence_id, by=by, comment=comment)


async def _get(asking: Asking, url: str, path: str, asked: Mapping[str, str]) -> Any:
    try:
        return json.loads(await asking.get(f"{url}/api/v2/{path}", asked))
    except (ValueError, RecursionError) as error:
        raise AnswerError(str(error)[:300]) from None


def _silenced_by(alerts: Any) -> dict[str, Sequence[str]]:
    """By fingerprint, the silences of each alert in an answer of `GET /api/v2/alerts`."""
    try:
        return {str(each["fingerprint"]): [str(found) for found in each["status"]["silencedBy"]] for each in alerts}
    except (KeyError, TypeError):
        raise AnswerError("its answer is no list of alerts") from None


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
