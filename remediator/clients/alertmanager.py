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
from dataclasses import dataclass
from typing import Any, Final

from remediator.clients import http as answers
from remediator.clients.http import AnswerError, Asking
from remediator.remedies.guards import Silence

ANSWER_S: Final = 2.0
"""How long one Alertmanager may take to answer, seconds: what is about to begin waits for it. All are asked at once."""

ANSWER_MAX_BYTES: Final = 16 * 2**20
"""The largest answer that is read, bytes."""

FRESH_S: Final = 1.0
"""How long an answer, or its lack, is kept for the other episodes of the host, seconds."""

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
    """What one Alertmanager says: by fingerprint the silence that an alert is under, if any; or why it says nothing."""

    until_s: float
    silenced_by: Mapping[str, Silence | None]
    failed: str = ""


class Silences:
    """A client of the Alertmanagers that tell a host's remediator. Safe to share between threads.

    Args:
        urls: where they answer.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._loop = answers.Loop("silences")
        self._answers: dict[tuple[str, str], _Answer] = {}  # by Alertmanager and host
        self._lock = threading.Lock()

    def close(self) -> None:
        """End its thread."""
        self._loop.close()

    def of(self, fingerprints: frozenset[str], *, host: str) -> Heard:
        """What silences the alerts with these fingerprints, which are about that host, in whichever Alertmanager."""
        with self._lock:
            asked = self._loop.run(self._ask_all(host))
        silences = dict[str, Silence]()
        for answer in asked:
            has = [answer.silenced_by[each] for each in sorted(fingerprints) if each in answer.silenced_by]
            found = [each for each in has if each is not None]
            if len(found) == len(has):
                silences |= {each.silence_id: each for each in found}
        return Heard(silences=list(silences.values()), unknown="; ".join(each.failed for each in asked if each.failed))

    async def _ask_all(self, host: str) -> Sequence[_Answer]:
        self._answers = {its: known for its, known in self._answers.items() if known.until_s > time.monotonic()}
        missing = [url for url in self._urls if (url, host) not in self._answers]
        for url, answer in zip(missing, await asyncio.gather(*(_ask(url, host) for url in missing)), strict=True):
            self._answers[url, host] = answer
        return [self._answers[url, host] for url in self._urls]


async def _ask(url: str, host: str) -> _Answer:
    """That an alert is silenced counts, whether the Alertmanager says in time who made the silence or not."""
    found, failed = dict[str, Silence | None](), ""
    try:
        async with answers.asking(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as asking:
            silenced_by = _silenced_by(await _get(asking, url, "alerts", {"filter": f"host={_quoted(host)}"}))
            found = {each: Silence(silence_id=ids[0]) if ids else None for each, ids in silenced_by.items()}
            for silence_id in {each.silence_id for each in found.values() if each is not None}:
                silence = await _text(asking, url, silence_id)
                found |= {its: silence for its, each in found.items() if each and each.silence_id == silence_id}
    except AnswerError as error:
        failed = "" if found else f"{answers.shown(url)} does not tell: {error}"
    return _Answer(until_s=time.monotonic() + FRESH_S, silenced_by=found, failed=failed)


async def _text(asking: Asking, url: str, silence_id: str) -> Silence:
    if not _ID.fullmatch(silence_id):
        return Silence(silence_id=silence_id)
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
