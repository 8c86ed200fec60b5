"""Client of Alertmanager: whether an episode's alerts are silenced now.

An episode is silenced if one Alertmanager lists alerts of it and silences all of them.
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
from remediator.clients.http import AnswerError, LimitedClient
from remediator.remedies.guards import Silence

ANSWER_S: Final = 2.0
"""Timeout of one Alertmanager, seconds. All are queried at the same time."""

ANSWER_MAX_BYTES: Final = 16 * 2**20

FRESH_S: Final = 1.0
"""How long an answer or a failure is cached for other episodes of the host, seconds."""

TEXT_MAX: Final = 300

_ID: Final = re.compile(r"[0-9A-Za-z-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class SilenceResult:
    """The silences of one episode, and which Alertmanagers failed and why."""

    silences: Sequence[Silence] = ()
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """One Alertmanager's answer: the silence of each alert by fingerprint, or why it failed."""

    until_s: float
    silenced_by: Mapping[str, Silence | None]
    failed: str = ""


class Silences:
    """Client of one or more Alertmanagers. Safe to share between threads."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._loop = answers.LoopThread("silences")
        self._answers: dict[tuple[str, str], _Answer] = {}  # by Alertmanager and host
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the thread."""
        self._loop.close()

    def of(self, fingerprints: frozenset[str], *, host: str) -> SilenceResult:
        """Find the silences of alerts of a host, by fingerprint, in any Alertmanager."""
        with self._lock:
            asked = self._loop.run(self._ask_all(host))
        silences = dict[str, Silence]()
        for answer in asked:
            has = [answer.silenced_by[each] for each in sorted(fingerprints) if each in answer.silenced_by]
            found = [each for each in has if each is not None]
            if len(found) == len(has):
                silences |= {each.silence_id: each for each in found}
        return SilenceResult(
            silences=list(silences.values()), unknown="; ".join(each.failed for each in asked if each.failed)
        )

    async def _ask_all(self, host: str) -> Sequence[_Answer]:
        self._answers = {its: known for its, known in self._answers.items() if known.until_s > time.monotonic()}
        missing = [url for url in self._urls if (url, host) not in self._answers]
        for url, answer in zip(missing, await asyncio.gather(*(_ask(url, host) for url in missing)), strict=True):
            self._answers[url, host] = answer
        return [self._answers[url, host] for url in self._urls]


async def _ask(url: str, host: str) -> _Answer:
    """Query one Alertmanager. A silence counts even if its author cannot be read in time."""
    found, failed = dict[str, Silence | None](), ""
    try:
        async with answers.limited_client(within_s=ANSWER_S, max_bytes=ANSWER_MAX_BYTES) as client:
            silenced_by = _silenced_by(await _get(client, url, "alerts", {"filter": f"host={_quoted(host)}"}))
            found = {each: Silence(silence_id=ids[0]) if ids else None for each, ids in silenced_by.items()}
            for silence_id in {each.silence_id for each in found.values() if each is not None}:
                silence = await _text(client, url, silence_id)
                found |= {its: silence for its, each in found.items() if each and each.silence_id == silence_id}
    except AnswerError as error:
        failed = "" if found else f"{answers.shown(url)} failed: {error}"
    return _Answer(until_s=time.monotonic() + FRESH_S, silenced_by=found, failed=failed)


async def _text(client: LimitedClient, url: str, silence_id: str) -> Silence:
    if not _ID.fullmatch(silence_id):
        return Silence(silence_id=silence_id)
    try:
        found = await _get(client, url, f"silence/{silence_id}", {})
        by, comment = str(found["createdBy"])[:TEXT_MAX], str(found["comment"])[:TEXT_MAX]
    except (AnswerError, KeyError, TypeError):
        return Silence(silence_id=silence_id)
    return Silence(silence_id=silence_id, by=by, comment=comment)


async def _get(client: LimitedClient, url: str, path: str, asked: Mapping[str, str]) -> Any:
    try:
        return json.loads(await client.get(f"{url}/api/v2/{path}", asked))
    except (ValueError, RecursionError) as error:
        raise AnswerError(str(error)[:300]) from None


def _silenced_by(alerts: Any) -> dict[str, Sequence[str]]:
    """The silences of each alert by fingerprint, from `GET /api/v2/alerts`."""
    try:
        return {str(each["fingerprint"]): [str(found) for found in each["status"]["silencedBy"]] for each in alerts}
    except (KeyError, TypeError):
        raise AnswerError("its answer is not a list of alerts") from None


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
