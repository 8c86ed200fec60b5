"""Asks Alertmanagers, right before anything is begun, whether what an episode is about is silenced now.

A silence that was made after the notification was delivered is told to nobody. What a silence covers is Alertmanager's
own judgement: its list of alerts has it for each. An episode is silenced where one of them has alerts of it and
silences them all; an alert that Alertmanager does not have any more is no longer its to silence.
"""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from gpuwarden.errors import GpuwardenError
from remediator.safety import Silence

ANSWER_S: Final = 2.0
"""How long one Alertmanager may take to answer, seconds: what is about to begin waits for it."""

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


class _AnswerError(GpuwardenError):
    """An Alertmanager did not answer, or not what can be used."""


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
        host: whose alerts are asked for.
    """

    def __init__(self, urls: Sequence[str], *, host: str) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._host = host
        self._client = httpx.Client(
            timeout=ANSWER_S, trust_env=False, headers={"Accept": "application/json", "Accept-Encoding": "identity"}
        )
        self._answers: dict[str, _Answer] = {}
        self._texts: dict[tuple[str, str], tuple[float, Silence]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def of(self, fingerprints: frozenset[str]) -> Heard:
        """What silences the alerts with these fingerprints, in whichever Alertmanager."""
        silences, unknown = list[Silence](), list[str]()
        with self._lock:
            for url in self._urls:
                answer = self._answer(url)
                if answer.failed:
                    unknown.append(answer.failed)
                has = [answer.silenced_by[each] for each in sorted(fingerprints) if each in answer.silenced_by]
                if has and all(has):
                    silences += [self._told(url, each) for each in sorted({ids[0] for ids in has})]
        return Heard(silences=silences, unknown="; ".join(unknown))

    def _answer(self, url: str) -> _Answer:
        known = self._answers.get(url)
        began_s = time.monotonic()
        if known is None or began_s >= known.until_s:
            try:
                found = _silenced_by(self._get(url, "alerts", {"filter": f"host={_quoted(self._host)}"}))
                known = _Answer(until_s=time.monotonic() + FRESH_S, silenced_by=found)
            except _AnswerError as error:
                failed = f"{_shown(url)} does not tell: {error}"
                # To look up a name that nobody answers for takes as long as the system likes: then it is asked seldom.
                pause_s = max(FAILED_S, PAUSE_OVER_TOOK * (time.monotonic() - began_s))
                known = _Answer(until_s=time.monotonic() + pause_s, silenced_by={}, failed=failed)
            self._answers[url] = known
        return known

    def _told(self, url: str, silence_id: str) -> Silence:
        """Who made a silence and why; that it is there is known, whether this can be told or not."""
        now_s = time.monotonic()
        self._texts = {key: known for key, known in self._texts.items() if known[0] > now_s}
        if (url, silence_id) not in self._texts:
            self._texts[url, silence_id] = (now_s + TOLD_S, self._text(url, silence_id))
        return self._texts[url, silence_id][1]

    def _text(self, url: str, silence_id: str) -> Silence:
        try:
            if not _ID.fullmatch(silence_id):
                return Silence(silence_id=silence_id)
            found = self._get(url, f"silence/{silence_id}", {})
            by, comment = str(found["createdBy"])[:TEXT_MAX], str(found["comment"])[:TEXT_MAX]
            return Silence(silence_id=silence_id, by=by, comment=comment)
        except (_AnswerError, KeyError, TypeError):
            return Silence(silence_id=silence_id)

    def _get(self, url: str, path: str, params: Mapping[str, str]) -> Any:
        body, until_s = bytearray(), time.monotonic() + ANSWER_S
        try:
            with self._client.stream("GET", f"{url}/api/v2/{path}", params=dict(params)) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise _AnswerError(f"it says {answer.status_code}")
                for part in answer.iter_raw():
                    body += part
                    if len(body) > ANSWER_MAX_BYTES:
                        raise _AnswerError(f"its answer has more than {ANSWER_MAX_BYTES} bytes")
                    if time.monotonic() > until_s:
                        raise _AnswerError(f"its answer takes more than {ANSWER_S:g} s")
            return json.loads(body)
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise _AnswerError(str(error)[:300] or type(error).__name__) from None


def _silenced_by(alerts: Any) -> dict[str, Sequence[str]]:
    """By fingerprint, the silences of each alert in an answer of `GET /api/v2/alerts`."""
    try:
        return {str(each["fingerprint"]): [str(found) for found in each["status"]["silencedBy"]] for each in alerts}
    except (KeyError, TypeError):
        raise _AnswerError("its answer is no list of alerts") from None


def _shown(url: str) -> str:
    """An address without its password."""
    return str(httpx.URL(url).copy_with(userinfo=b""))


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
