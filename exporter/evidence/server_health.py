"""Servers: what a container's labels ask for, and for how long one that is asked has not answered.

    gpuwarden.probe          `docker`, its own health check, or `http://localhost:PORT/PATH`: asked from its host
    gpuwarden.probe-timeout  silence allowed, seconds, 10 to 86400; 120 when not given

`localhost` is the container itself, whatever its network: a label can make nobody call any other place. What cannot be
used is told with its reason, and accuses nobody.

A silence lasts from the beginning of the first asking without an answer to the end of the newest one: it grows only
when one was asked again and again did not answer. It starts anew after a gap in the asking, and does not exist while
nobody asked lately. Pure: times are arguments, CLOCK_BOOTTIME seconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from exporter.model.container import Health, Probe
from exporter.model.unknown import Unknown

PROBE_LABEL: Final = "gpuwarden.probe"
TIMEOUT_LABEL: Final = "gpuwarden.probe-timeout"

SILENCE_S: Final = 120.0
"""Silence that a server is allowed whose owner does not say, seconds."""

SILENCE_MIN_S: Final = 10.0
"""The least silence that can be allowed, seconds: one lost answer must not be enough to accuse anybody."""

SILENCE_MAX_S: Final = 86400.0
"""The greatest, seconds."""

_URL = re.compile(r"[!-~]{1,256}")
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)[ \r\n]")


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What has come of asking one server, in one incarnation of its container.

    Args:
        answered: whether it has ever answered. Until then it accuses itself of nothing: it may still load.
        silent_since_s: when the first asking began since which none was answered.
        told_s: when the newest asking ended.
        because: why the newest one counts as no answer.
    """

    answered: bool = False
    silent_since_s: float | None = None
    told_s: float | None = None
    because: str = ""

    def then(self, answered: bool, *, began_s: float, ended_s: float, gap_max_s: float, because: str = "") -> "Asking":
        """One asking more. What lies further back than `gap_max_s` proves nothing about the time between."""
        if answered:
            return Asking(answered=True, told_s=ended_s)
        unbroken = self.told_s is not None and 0 <= began_s - self.told_s <= gap_max_s
        since_s = self.silent_since_s if unbroken and self.silent_since_s is not None else began_s
        return replace(self, silent_since_s=since_s, told_s=ended_s, because=because)

    def forgotten(self) -> "Asking":
        """After a time in which it could not be asked: all that is left is whether it ever answered."""
        return Asking(answered=self.answered)

    def unanswered_s(self, *, now_s: float, fresh_s: float) -> float | None:
        """For how long it has been asked without an answer, 0 while it answers; `None` when it was not asked lately.

        An asking may end between the look at the clock and the one at it: that is not the future.
        """
        if self.told_s is None or now_s - self.told_s > fresh_s:
            return None
        return 0.0 if self.silent_since_s is None else self.told_s - self.silent_since_s


class HealthWatch:
    """What Docker's own health check of one container has told, one look at it after another.

    The engine stamps its results by the wall clock, and keeps the last five, some of an earlier incarnation. So they
    are timed by when they were first seen here, and what was there at the first look only tells whether it is healthy.
    """

    def __init__(self) -> None:
        self.asking = Asking()
        self._seen: Health | None = None

    def observe(self, health: Health, *, paused: bool, now_s: float) -> Asking:
        """Take in one look."""
        before, self._seen = self._seen, health
        if paused:  # what fails meanwhile is the asking
            self.asking = self.asking.forgotten()
        elif before is not None and health.newest not in ("", before.newest):
            asking = self.asking
            if health.failing_streak <= before.failing_streak:  # it answered between the two looks
                asking = asking.forgotten()
            self.asking = asking.then(
                health.passed, began_s=now_s, ended_s=now_s, gap_max_s=health.fresh_s, because="its health check fails"
            )
        if health.status == "healthy" and not self.asking.answered:
            self.asking = replace(self.asking, answered=True)
        return self.asking


def asked_for(labels: Mapping[str, str]) -> Probe | Unknown | None:
    """How a container's labels want it to be asked, or why that cannot be; `None` where they want nothing."""
    wanted = labels.get(PROBE_LABEL)
    if wanted is None:
        return None
    silence = labels.get(TIMEOUT_LABEL)
    silence_s = SILENCE_S if silence is None else float(silence) if _SECONDS.fullmatch(silence) else 0.0
    if not SILENCE_MIN_S <= silence_s <= SILENCE_MAX_S:
        because = (
            f"{TIMEOUT_LABEL} is {ascii(silence)[:40]}; wanted: seconds, {SILENCE_MIN_S:.0f} to {SILENCE_MAX_S:.0f}"
        )
        return Unknown(reason="bad_timeout", because=because)
    if wanted == "docker":
        return Probe(kind="docker", silence_s=silence_s)
    return _http(wanted, silence_s)


def _http(wanted: str, silence_s: float) -> Probe | Unknown:
    said = f"{PROBE_LABEL} is {ascii(wanted)[:80]}"
    bad = Unknown(reason="bad_probe", because=f"{said}; wanted: docker, or http://localhost:PORT/PATH")
    if not _URL.fullmatch(wanted):
        return bad
    try:
        url = urlsplit(wanted)
        port = 80 if url.port is None else url.port
    except ValueError:
        return bad
    if url.scheme != "http" or url.fragment or not port > 0:
        return bad
    if url.hostname != "localhost" or "@" in url.netloc:
        because = f"{said}; its host must be localhost, which means the container itself: no other place is called"
        return Unknown(reason="other_host", because=because)
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return Probe(kind="http", silence_s=silence_s, port=port, target=target)


def judge(first_line: bytes) -> tuple[bool, str]:
    """Whether the first line of what a server sent is an answer: any HTTP status below 500; and what it is instead."""
    found = _STATUS.match(first_line)
    if found is None:
        return False, "what it sends is not HTTP/1" if first_line else "it closed the connection without a word"
    status = int(found[1])
    return status < 500, "" if status < 500 else f"it answers {status}"
