"""Client of Prometheus: the metric history of a target around the time of its alert.

Each server gets one query. Names enter it only as quoted strings. An unknown value is a gap, never zero.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel, Field, ValidationError

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import ContainerFacts
from remediator.clients import http as answers
from remediator.plan import Episode, Subject

POINTS_MAX: Final = 121

DIGITS: Final = 6
"""Significant digits of a value."""

ANSWER_S: Final = 5.0
"""Timeout of one server, seconds."""

ANSWER_MAX_BYTES: Final = 2 * 2**20
"""Maximum size of an answer. With 64 GPUs it has about 400 KiB."""

NAMES: Final[Mapping[str, str]] = {
    "gpuwarden_job_step_beat_age_seconds": "beat age",
    "gpuwarden_worker_heartbeat_age_seconds": "heartbeat age",
    "gpuwarden_server_probe_failing_seconds": "time without an answer",
    "gpuwarden_container_gpu_utilization_ratio": "GPU use",
    "gpuwarden_container_gpu_memory_bytes": "GPU memory",
    "gpuwarden_container_memory_bytes": "RAM",
}

_OF_ITS_OWN: Final[Mapping[Subject, Sequence[str]]] = {
    Subject.WORKER: ("gpuwarden_job_step_beat_age_seconds", "gpuwarden_worker_heartbeat_age_seconds"),
    Subject.SERVER: ("gpuwarden_server_probe_failing_seconds",),
}


class CurvesError(GpuwardenError):
    """An answer is unusable; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Evaluation times of a query: start (ledger time, Unix seconds), step and number."""

    at: int
    step_s: int
    points: int

    @property
    def until(self) -> int:
        """The last time."""
        return self.at + (self.points - 1) * self.step_s


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One series over time. `gpu` is `None` for a series without that label; a value is `None` if unknown.

    `source` is the URL of its Prometheus, without a password.
    """

    metric: str
    gpu: str | None
    source: str
    at: int
    step_s: int
    values: Sequence[float | None]


Found = tuple[Sequence[Curve], Sequence[str]]
"""Curves, and reasons for missing ones."""


class Curves:
    """Client of one or more Prometheus servers. Safe to share between threads.

    Args:
        urls: base URLs; all scrape the same hosts.
        around_s: time range before and after the alert, seconds.
    """

    def __init__(self, urls: Sequence[str], *, around_s: float) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._around_s = around_s
        self._loop = answers.LoopThread("curves")

    def close(self) -> None:
        """End the thread."""
        self._loop.close()

    def begin(self, episode: Episode, place: ContainerFacts | None, *, now: float, within_s: float) -> Future[Found]:
        """Start the query of a target's curves."""
        over = window(episode.opened_at, now=now, around_s=self._around_s)
        return self._loop.start(self._of_all(episode, place, over, within_s=min(within_s, ANSWER_S)))

    async def _of_all(self, episode: Episode, place: ContainerFacts | None, over: Window, *, within_s: float) -> Found:
        if place is None or not place.container:
            return [], ["no curves: the exporter does not know the container"]
        names = metrics(episode.subject)
        query = expression(names, host=place.host, container=place.container, episode=episode)
        answers_of_all = await asyncio.gather(*(_of(url, query, over, within_s=within_s) for url in self._urls))
        best = max((found for found, _ in answers_of_all), key=_known)
        lacking = [NAMES[each] for each in names if each not in {curve.metric for curve in best}]
        why = "; ".join(each for _, each in answers_of_all)
        return best, [f"no curve of {', '.join(lacking)}: {why}"] if lacking else []


def metrics(subject: Subject) -> Sequence[str]:
    """The series to query for a kind of target."""
    of_its_container = [metric for metric in NAMES if metric.startswith("gpuwarden_container_")]
    return [*_OF_ITS_OWN.get(subject, ()), *of_its_container]


def expression(names: Sequence[str], *, host: str, container: str, episode: Episode) -> str:
    """Build the query: the maximum, in case a host is scraped twice.

    Container series have no label `worker`.
    """
    worker = f"{re.escape(episode.worker)}|" if episode.subject is Subject.WORKER else ""
    its = f"__name__=~{quoted('|'.join(names))},host={quoted(host)},container={quoted(container)}"
    return f"max by (__name__, gpu) ({{{its},worker=~{quoted(worker)}}})"


def window(trip_at: float, *, now: float, around_s: float) -> Window:
    """From `around_s` before the alert until `around_s` after it, or until now if that is earlier.

    If the clock was set back, the alert counts as now.
    """
    trip_at = min(trip_at, now)
    until, span_s = min(now, trip_at + around_s), around_s + min(now - trip_at, around_s)
    step_s = max(1, math.ceil(span_s / (POINTS_MAX - 1)))
    points = 1 + math.ceil(span_s / step_s)
    return Window(at=math.floor(until) - (points - 1) * step_s, step_s=step_s, points=points)


def quoted(text: str) -> str:
    """Quote a text as a PromQL string, which escapes as Go does (https://prometheus.io/docs/prometheus/latest/querying/basics/).

    Lone surrogates are escaped.
    """
    return json.dumps(text.encode("utf-8", "backslashreplace").decode(), ensure_ascii=False)


async def _of(url: str, query: str, over: Window, *, within_s: float) -> tuple[Sequence[Curve], str]:
    """Query one server. Returns its curves, and why others are missing."""
    source = answers.shown(url)
    asked = {
        "query": query,
        "start": str(over.at),
        "end": str(over.until),
        "step": str(over.step_s),
        "timeout": f"{within_s:g}",  # seconds; Prometheus refuses "4.5s"
    }
    try:
        async with answers.limited_client(within_s=within_s, max_bytes=ANSWER_MAX_BYTES) as client:
            found = read(await client.post(f"{url}/api/v1/query_range", asked), over, source=source)
    except GpuwardenError as error:
        return [], f"{source} failed: {error}"
    return found, f"{source} has no samples"


class _Line(BaseModel):
    metric: dict[str, str]
    values: list[tuple[float, float]]


class _Matrix(BaseModel):
    kind: Literal["matrix"] = Field(alias="resultType")
    result: list[_Line]


class _Lines(BaseModel):
    status: Literal["success"]
    warnings: list[str] = []
    data: _Matrix


def read(answer: bytes, over: Window, *, source: str) -> Sequence[Curve]:
    """Parse an answer of `/api/v1/query_range`. Raises CurvesError if it may be incomplete."""
    try:
        found = _Lines.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(each) for each in first["loc"])
        raise CurvesError(f"invalid answer: {where or 'it'}: {first['msg'][:200]}") from None
    if found.warnings:  # a store behind it may have failed
        raise CurvesError(f"warning of an incomplete answer: {found.warnings[0][:200]}")
    named = ((line.metric.get("__name__", ""), line.metric.get("gpu"), line.values) for line in found.data.result)
    order = list(NAMES)
    curves = [
        Curve(metric=metric, gpu=gpu, source=source, at=over.at, step_s=over.step_s, values=_on_grid(values, over))
        for metric, gpu, values in named
        if metric in NAMES
    ]
    return sorted(
        (each for each in curves if _known([each])), key=lambda each: (order.index(each.metric), each.gpu or "")
    )


def _known(curves: Sequence[Curve]) -> int:
    return sum(value is not None for each in curves for value in each.values)


def _on_grid(found: Sequence[tuple[float, float]], over: Window) -> Sequence[float | None]:
    values: list[float | None] = [None] * over.points
    for at, value in found:
        place = round((at - over.at) / over.step_s) if math.isfinite(at) else -1
        if 0 <= place < over.points and math.isfinite(value):
            values[place] = float(f"{value:.{DIGITS}g}")
    return values


def named(metric: str, gpu: str | None = None) -> str:
    """Return a curve's display name."""
    return NAMES.get(metric, metric) + (f" of {gpu}" if gpu else "")
