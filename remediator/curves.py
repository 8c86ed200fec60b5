"""The curves of a target around its trip, as Prometheus has them: what it is asked, and what its answers show. Pure.

Unknown is a gap, never a zero and never the figure before it: a sample that is older than allowed is none. What is
asked is narrowed to the one target, by its names as this host's own exporter tells them. They are the words of whoever
named a worker or a container, so they stand in an expression as quoted strings and as nothing else.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel, Field, ValidationError

from gpuwarden.errors import GpuwardenError
from gpuwarden.facts import ContainerFacts
from remediator.plan import Episode, Subject

POINTS_MAX: Final = 121
"""Points of one curve."""

FRESH_S: Final = 130.0
"""Older samples are left out, seconds: two scrape intervals of a minute, and a margin."""

DIGITS: Final = 6
"""Digits of a figure that are kept."""

NAMES: Final[Mapping[str, str]] = {
    "gpuwarden_job_beat_age_seconds": "beat age",
    "gpuwarden_worker_heartbeat_age_seconds": "heartbeat age",
    "gpuwarden_server_unanswered_seconds": "time without an answer",
    "gpuwarden_container_gpu_utilization_ratio": "GPU use",
    "gpuwarden_container_gpu_memory_bytes": "GPU memory",
    "gpuwarden_container_memory_bytes": "RAM",
}
"""What the series of a curve are, in words."""

_OF_ITS_OWN: Final[Mapping[Subject, Sequence[str]]] = {
    Subject.WORKER: ("gpuwarden_job_beat_age_seconds", "gpuwarden_worker_heartbeat_age_seconds"),
    Subject.SERVER: ("gpuwarden_server_unanswered_seconds",),
}
_ON_EACH_GPU: Final = ("gpuwarden_container_gpu_utilization_ratio", "gpuwarden_container_gpu_memory_bytes")
_OF_ITS_CONTAINER: Final = ("gpuwarden_container_memory_bytes",)


class CurvesError(GpuwardenError):
    """There is nothing to ask for, or an answer cannot be used; the message says why."""


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
class Wanted:
    """One kind of curve of a target, on each of `gpus`; `None` is what is no GPU's own."""

    metric: str
    selector: str
    gpus: Sequence[str | None]

    @property
    def expression(self) -> str:
        """What Prometheus is asked: the greatest, where it scrapes a host twice; nothing that is older.

        Of itself it repeats a sample for minutes after it stopped looking.
        """
        return f"max by (gpu) ({self.selector} unless time() - timestamp({self.selector}) > {FRESH_S:g})"


@dataclass(frozen=True, kw_only=True)
class Sought:
    """All that is asked for of one target."""

    window: Window
    wanted: Sequence[Wanted]

    @property
    def names(self) -> Sequence[str]:
        """Each of the curves in words."""
        return [named(each.metric, gpu) for each in self.wanted for gpu in each.gpus]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One figure over time, of one Prometheus; a value that is `None` was unknown then."""

    metric: str
    gpu: str | None
    source: str
    at: int
    step_s: int
    values: Sequence[float | None]

    @property
    def known(self) -> int:
        """How many of its values are."""
        return sum(value is not None for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one Prometheus had, and by metric why it did not tell."""

    source: str
    curves: Sequence[Curve]
    why: Mapping[str, str]


def seek(episode: Episode, place: ContainerFacts | None, *, now: float, around_s: float) -> Sought:
    """What to ask for of an episode's target: its own figures, its container's, and those on each of its GPUs.

    Raises:
        CurvesError: its exporter does not tell by which names its series go.
    """
    if place is None or not place.container:
        raise CurvesError("the host's exporter does not tell which container it is")
    names = {"host": place.host, "container": place.container}
    of_its_own = names | ({"worker": episode.worker} if episode.subject is Subject.WORKER else {})
    wanted = [
        *(_wanted(metric, of_its_own) for metric in _OF_ITS_OWN.get(episode.subject, ())),
        *(_wanted(metric, names, sorted(place.gpus)) for metric in _ON_EACH_GPU if place.gpus),
        *(_wanted(metric, names) for metric in _OF_ITS_CONTAINER),
    ]
    return Sought(window=window(episode.opened_at, now=now, around_s=around_s), wanted=wanted)


def window(trip_at: float, *, now: float, around_s: float) -> Window:
    """From so long before the trip until now, and until as long after it at most: what was held for hours tripped then.

    A clock that was set back since then makes the trip no later than now.
    """
    trip_at = min(trip_at, now)
    until, span_s = min(now, trip_at + around_s), around_s + min(now - trip_at, around_s)
    step_s = max(1, math.ceil(span_s / (POINTS_MAX - 1)))
    points = 1 + math.ceil(span_s / step_s)
    return Window(at=math.floor(until) - (points - 1) * step_s, step_s=step_s, points=points)


def _wanted(metric: str, names: Mapping[str, str], gpus: Sequence[str | None] = (None,)) -> Wanted:
    matchers = ",".join(f"{name}={quoted(value)}" for name, value in names.items())
    return Wanted(metric=metric, selector=f"{metric}{{{matchers}}}", gpus=gpus)


def quoted(text: str) -> str:
    """A text as a string of PromQL, which escapes as Go does (https://prometheus.io/docs/prometheus/latest/querying/basics/).

    Half a surrogate pair, which no label of Prometheus can have, is spelt out.
    """
    return json.dumps(text.encode("utf-8", "backslashreplace").decode(), ensure_ascii=False)


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


def read(answer: bytes, wanted: Wanted, over: Window, *, source: str) -> Iterator[Curve]:
    """The curves in an answer of `/api/v1/query_range` that were asked for and have a value.

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
    for line in found.data.result:
        gpu = line.metric.get("gpu")
        values = _on_grid(line.values, over)
        if gpu in wanted.gpus and any(value is not None for value in values):
            yield Curve(metric=wanted.metric, gpu=gpu, source=source, at=over.at, step_s=over.step_s, values=values)


def _on_grid(found: Sequence[tuple[float, float]], over: Window) -> Sequence[float | None]:
    values: list[float | None] = [None] * over.points
    for at, value in found:
        place = round((at - over.at) / over.step_s) if math.isfinite(at) else -1
        if 0 <= place < over.points and math.isfinite(value):
            values[place] = float(f"{value:.{DIGITS}g}")
    return values


def choose(sought: Sought, said: Sequence[Said]) -> tuple[Sequence[Curve], Sequence[str]]:
    """Of each curve the one that knows most, and a sentence for those that nobody has, with what each said of it."""
    kept: list[Curve] = []
    missing: dict[str, list[str]] = {}
    for wanted in sought.wanted:
        for gpu in wanted.gpus:
            found = [each for of in said for each in of.curves if (each.metric, each.gpu) == (wanted.metric, gpu)]
            if found:
                kept.append(max(found, key=lambda each: each.known))
            else:
                missing.setdefault(_why(wanted.metric, said), []).append(named(wanted.metric, gpu))
    return kept, [lacking(names, because) for because, names in missing.items()]


def _why(metric: str, said: Sequence[Said]) -> str:
    return "; ".join(
        f"{each.source} does not tell: {each.why[metric]}"
        if metric in each.why
        else f"{each.source} has no sample of it then"
        for each in said
    )


def lacking(names: Sequence[str], because: str) -> str:
    """Which curves there are none of, and why, as a sentence."""
    return f"no curve of {', '.join(names)}: {because}"


def named(metric: str, gpu: str | None = None) -> str:
    """One curve in words."""
    return NAMES.get(metric, metric) + (f" of {gpu}" if gpu else "")
