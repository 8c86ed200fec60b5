"""Servers: their probe labels, and how long each probe has failed. Pure. Times: CLOCK_BOOTTIME seconds.

    gpuwarden.probe          `docker`, its health check, or `http://localhost:PORT/PATH`
    gpuwarden.restart-after-s  seconds the probe may fail before a restart, 10 to 86400; default 120

`localhost` is the container itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from exporter.model.container import HealthCheck, Probe
from exporter.model.unknown import Unknown

PROBE_LABEL: Final = "gpuwarden.probe"
TIMEOUT_LABEL: Final = "gpuwarden.restart-after-s"

RESTART_AFTER_S: Final = 120.0

RESTART_AFTER_MIN_S: Final = 10.0
"""One lost answer must not cause a restart."""

RESTART_AFTER_MAX_S: Final = 86400.0

_URL = re.compile(r"[!-~]{1,256}")
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)[ \r\n]")


@dataclass(frozen=True, kw_only=True)
class ProbeState:
    """The probe results of one server, in one incarnation of its container.

    Args:
        answered: whether it has ever answered. Before that it may still load.
        failing_since_s: start of the first failed probe.
        last_probe_s: end of the newest probe.
        message: why the newest probe failed.
    """

    answered: bool = False
    failing_since_s: float | None = None
    last_probe_s: float | None = None
    message: str = ""

    def add_probe(
        self, answered: bool, *, began_s: float, ended_s: float, gap_max_s: float, message: str = ""
    ) -> "ProbeState":
        """Return the state after one more probe. A gap ends a failure."""
        if answered:
            return ProbeState(answered=True, last_probe_s=ended_s)
        unbroken = self.last_probe_s is not None and 0 <= began_s - self.last_probe_s <= gap_max_s
        since_s = self.failing_since_s if unbroken and self.failing_since_s is not None else began_s
        return replace(self, failing_since_s=since_s, last_probe_s=ended_s, message=message)

    def reset(self) -> "ProbeState":
        """Return the state after a time without probes."""
        return ProbeState(answered=self.answered)

    def probe_failing_s(self, *, now_s: float, fresh_s: float) -> float | None:
        """Seconds for which probes have failed; `None` without a recent one."""
        if self.last_probe_s is None or now_s - self.last_probe_s > fresh_s:
            return None
        return 0.0 if self.failing_since_s is None else self.last_probe_s - self.failing_since_s


class HealthCheckTracker:
    """Results of Docker's health check, timed when seen. The first ones may be of an earlier incarnation."""

    def __init__(self) -> None:
        self.state = ProbeState()
        self._seen: HealthCheck | None = None

    def observe(self, health: HealthCheck, *, paused: bool, now_s: float) -> ProbeState:
        """Add one sample."""
        before, self._seen = self._seen, health
        if paused:  # a paused container fails its check
            self.state = self.state.reset()
        elif before is not None and health.newest not in ("", before.newest):
            asking = self.state
            if health.failing_streak <= before.failing_streak:  # it passed in between
                asking = asking.reset()
            self.state = asking.add_probe(
                health.passed, began_s=now_s, ended_s=now_s, gap_max_s=health.fresh_s, message="its health check fails"
            )
        if health.status == "healthy" and not self.state.answered:
            self.state = replace(self.state, answered=True)
        return self.state


def parse_probe_labels(labels: Mapping[str, str]) -> Probe | Unknown | None:
    """Parse a container's probe labels; returns why they are invalid, or `None` without one."""
    label = labels.get(PROBE_LABEL)
    if label is None:
        return None
    given = labels.get(TIMEOUT_LABEL)
    restart_after_s = RESTART_AFTER_S if given is None else float(given) if _SECONDS.fullmatch(given) else 0.0
    if not RESTART_AFTER_MIN_S <= restart_after_s <= RESTART_AFTER_MAX_S:
        limits = f"{RESTART_AFTER_MIN_S:.0f} to {RESTART_AFTER_MAX_S:.0f}"
        message = f"{TIMEOUT_LABEL} is {ascii(given)[:40]}; expected seconds, {limits}"
        return Unknown(reason="bad_timeout", message=message)
    if label == "docker":
        return Probe(kind="docker", restart_after_s=restart_after_s)
    return _http(label, restart_after_s)


def _http(label: str, restart_after_s: float) -> Probe | Unknown:
    said = f"{PROBE_LABEL} is {ascii(label)[:80]}"
    bad = Unknown(reason="bad_probe", message=f"{said}; expected docker, or http://localhost:PORT/PATH")
    if not _URL.fullmatch(label):
        return bad
    try:
        url = urlsplit(label)
        port = 80 if url.port is None else url.port
    except ValueError:
        return bad
    if url.scheme != "http" or url.fragment or not port > 0:
        return bad
    if url.hostname != "localhost" or "@" in url.netloc:
        message = f"{said}; its host must be localhost, which means the container itself"
        return Unknown(reason="other_host", message=message)
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return Probe(kind="http", restart_after_s=restart_after_s, port=port, target=target)


def check_status_line(first_line: bytes) -> tuple[bool, str]:
    """Whether a response's first line is an HTTP status below 500; if not, why."""
    found = _STATUS.match(first_line)
    if found is None:
        return False, "the response is not HTTP/1" if first_line else "the connection closed without a response"
    status = int(found[1])
    return status < 500, "" if status < 500 else f"HTTP status {status}"
