"""The curves of a target around its trip, as Prometheus has them.

Each server is asked one question, about the one target by the names that this host's own exporter gives it. A name
stands in the question as a quoted string and as nothing else. An unknown value is a gap, never a zero.
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
"""Points of one curve."""

DIGITS: Final = 6
"""Digits of a value that are kept."""

ANSWER_S: Final = 5.0
"""How long one server may take, seconds."""

ANSWER_MAX_BYTES: Final = 2 * 2**20
"""The largest answer that is read; of 64 GPUs it has about 400 KiB."""

NAMES: Final[Mapping[str, str]] = {
    "gpuwarden_job_beat_age_seconds": "beat age",
    "gpuwarden_worker_heartbeat_age_seconds": "heartbeat age",
    "gpuwarden_server_unanswered_seconds": "time without an answer",
    "gpuwarden_container_gpu_utilization_ratio": "GPU use",
    "gpuwarden_container_gpu_memory_bytes": "GPU memory",
    "gpuwarden_container_memory_bytes": "RAM",
}
"""The series that are asked for, in words."""

_OF_ITS_OWN: Final[Mapping[Subject, Sequence[str]]] = {
    Subject.WORKER: ("gpuwarden_job_beat_age_seconds", "gpuwarden_worker_heartbeat_age_seconds"),
    Subject.SERVER: ("gpuwarden_server_unanswered_seconds",),
}


class CurvesError(GpuwardenError):
    """An answer cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Points in time: the first, Unix seconds by the ledger's clock, how far apart they are, and how many."""

    at: int
    step_s: int
    points: int

    @property
    def until(self) -> int:
        """The last of them."""
        return self.at + (self.points - 1) * self.step_s


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One series over time. `gpu` is `None` for what is no GPU's own, and a value is `None` where it was unknown.

    `source` is the address of the Prometheus that has it, without its password.
    """

    metric: str
    gpu: str | None
    source: str
    at: int
    step_s: int
    values: Sequence[float | None]


Found = tuple[Sequence[Curve], Sequence[str]]
"""Curves, and a sentence each about what is missing."""


class Curves:
    """A client of one Prometheus, or of several that scrape the same hosts. Safe to share between threads.

    Args:
        urls: where they answer.
        around_s: how long before and after the trip a curve reaches, seconds.
    """

    def __init__(self, urls: Sequence[str], *, around_s: float) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._around_s = around_s
        self._loop = answers.Loop("curves")

    def close(self) -> None:
        """End its thread."""
        self._loop.close()

    def begin(self, episode: Episode, place: ContainerFacts | None, *, now: float, within_s: float) -> Future[Found]:
        """Begin to ask for a target's curves; they may be waited for later."""
        over = window(episode.opened_at, now=now, around_s=self._around_s)
        return self._loop.start(self._of_all(episode, place, over, within_s=min(within_s, ANSWER_S)))

    async def _of_all(self, episode: Episode, place: ContainerFacts | None, over: Window, *, within_s: float) -> Found:
        if place is None or not place.container:
            return [], ["no curves: the host's exporter does not publish which container it is"]
        wanted = metrics(episode.subject)
        query = expression(wanted, host=place.host, container=place.container, episode=episode)
        said = await asyncio.gather(*(_of(url, query, over, within_s=within_s) for url in self._urls))
        best = max((found for found, _ in said), key=_known)
        lacking = [NAMES[each] for each in wanted if each not in {curve.metric for curve in best}]
        why = "; ".join(each for _, each in said)
        return best, [f"no curve of {', '.join(lacking)}: {why}"] if lacking else []


def metrics(subject: Subject) -> Sequence[str]:
    """The series that are asked for of a target."""
    of_its_container = [metric for metric in NAMES if metric.startswith("gpuwarden_container_")]
    return [*_OF_ITS_OWN.get(subject, ()), *of_its_container]


def expression(wanted: Sequence[str], *, host: str, container: str, episode: Episode) -> str:
    """What a server is asked: the greatest value, in case that it scrapes a host twice.

    A container's own series have no label `worker`.
    """
    worker = f"{re.escape(episode.worker)}|" if episode.subject is Subject.WORKER else ""
    its = f"__name__=~{quoted('|'.join(wanted))},host={quoted(host)},container={quoted(container)}"
    return f"max by (__name__, gpu) ({{{its},worker=~{quoted(worker)}}})"


def window(trip_at: float, *, now: float, around_s: float) -> Window:
    """From `around_s` before the trip until now, or until as long after it where that is earlier.

    A clock that was set back since then makes the trip no later than now.
    """
    trip_at = min(trip_at, now)
    until, span_s = min(now, trip_at + around_s), around_s + min(now - trip_at, around_s)
    step_s = max(1, math.ceil(span_s / (POINTS_MAX - 1)))
    points = 1 + math.ceil(span_s / step_s)
    return Window(at=math.floor(until) - (points - 1) * step_s, step_s=step_s, points=points)


def quoted(text: str) -> str:
    """A text as a string of PromQL, which escapes as Go does (https://prometheus.io/docs/prometheus/latest/querying/basics/).

    Half a surrogate pair, which no label of Prometheus can have, is spelt out.
    """
    return json.dumps(text.encode("utf-8", "backslashreplace").decode(), ensure_ascii=False)


async def _of(url: str, query: str, over: Window, *, within_s: float) -> tuple[Sequence[Curve], str]:
    """What one server has, and what it says of the rest."""
    source = answers.shown(url)
    asked = {
        "query": query,
        "start": str(over.at),
        "end": str(over.until),
        "step": str(over.step_s),
        "timeout": f"{within_s:g}s",
    }
    try:
        async with answers.asking(within_s=within_s, max_bytes=ANSWER_MAX_BYTES) as asking:
            found = read(await asking.post(f"{url}/api/v1/query_range", asked), over, source=source)
    except GpuwardenError as error:
        return [], f"{source} does not answer: {error}"
    return found, f"{source} has no sample of it"


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
    """The curves in an answer of `/api/v1/query_range` that have a value.

    Raises:
        CurvesError: it cannot be read, or may not be whole.
    """
    try:
        found = _Lines.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(each) for each in first["loc"])
        raise CurvesError(f"its answer cannot be read: {where or 'it'}: {first['msg'][:200]}") from None
    if found.warnings:  # one of several stores behind it may not have answered
        raise CurvesError(f"it warns that its answer may not be whole: {found.warnings[0][:200]}")
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
    """One curve in words."""
    return NAMES.get(metric, metric) + (f" of {gpu}" if gpu else "")
