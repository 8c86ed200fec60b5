"""The series of a host's report, and the page that Prometheus scrapes. No clock, no network."""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Annotated, Any, Final

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field

from gpuwarden.gateway.app import RefusedError
from gpuwarden.gateway.metrics import HOST_LOST, HOST_SILENT
from gpuwarden.queue.hosts.reports import HostReport, Kind
from gpuwarden.queue.hosts.silence import SeenHost
from gpuwarden.queue.hosts.task_orders import TaskOutcome

PAGE_MAX_BYTES: Final = 4 * 1024 * 1024
"""Largest page: five times that of a host with 100 containers."""

SERIES_MAX: Final = 20_000
"""Most series of one host."""

LINE_MAX: Final = 4096
"""Longest line of a page, characters. The parser's time is quadratic in it."""

GPUS_MAX: Final = 256
TASKS_MAX: Final = 256

JOB: Final = "gpuwarden-exporter"
"""Label `job` of the series of a host, as if it were scraped."""

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

_SERIES: Final = re.compile(r"gpuwarden_(?!remediator_|queue_|gateway_|report_)[a-z0-9_]+", re.ASCII)
"""Series of an exporter. Those of other programs are not about one host."""

_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
"""The parser takes any quoted name of a label, which could end the line and begin another host's."""

_NOT_FINITE: Final = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


_Text = Annotated[str, Field(max_length=200)]
_Message = Annotated[str, Field(max_length=1000)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Id = Annotated[int, Field(ge=0, lt=2**63)]


class _Body(BaseModel):
    """Numbers may be strings. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)


class Gpu(_Body):
    """A GPU. Memory is in MiB, utilization in percent."""

    uuid: _Text
    index: _Text = ""
    name: _Text = ""
    utilization: _Number | None = None
    memory_total: _Number | None = None
    memory_used: _Number | None = None


class Task(_Body):
    """A running task."""

    running_log_id: _Id
    remote_pid: _Id | None = None
    remote_pgid: _Id | None = None


class Report(_Body):
    """What both reports in JSON have. The sender's timestamp is not used."""

    token: _Text = ""
    host: _Text | None = None
    timestamp: Any = None


class GpuReport(Report):
    """The GPUs of a host: `POST /api/v1/report_gpu/`."""

    gpus: list[Gpu] = Field(default=[], max_length=GPUS_MAX)


class TasksReport(Report):
    """The running tasks of a host: `POST /api/v1/report_tasks/`. The answer has the tasks to end."""

    tasks: list[Task] = Field(default=[], max_length=TASKS_MAX)


class EndedTask(_Body):
    """What a host did on an order to end a task."""

    running_log_id: _Id
    outcome: TaskOutcome
    message: _Message = ""


class EndedTasksReport(Report):
    """What a host did on orders: `POST /api/v1/report_ended_tasks/`. The answer has the tasks to end."""

    ended: list[EndedTask] = Field(default=[], max_length=TASKS_MAX)


def check_host_of(report: Report, host: str) -> None:
    """Refuse a report in JSON that names another host than its token's.

    Raises:
        RefusedError: it does.
    """
    if report.host is not None and report.host != host:
        raise _another(report.host, host)


def json_page(report: Report, host: str) -> bytes:
    """The series of a report in JSON."""
    lines: dict[str, str] = {}  # a GPU or task that is named twice counts once
    if isinstance(report, GpuReport):
        for gpu in report.gpus:
            its = {"gpu": gpu.uuid}
            about = {**its, "index": gpu.index, "name": gpu.name, "source": "report", "attribution": "device"}
            lines[f"info {gpu.uuid}"] = _line("gpuwarden_gpu_info", about, 1.0, host)
            for name, value, unit in (
                ("gpuwarden_gpu_utilization_ratio", gpu.utilization, 0.01),
                ("gpuwarden_gpu_memory_size_bytes", gpu.memory_total, 2.0**20),
                ("gpuwarden_gpu_memory_used_bytes", gpu.memory_used, 2.0**20),
            ):
                if value is not None:
                    lines[f"{name} {gpu.uuid}"] = _line(name, its, value * unit, host)
    elif isinstance(report, TasksReport):
        for task in report.tasks:
            pids = {"pid": _id(task.remote_pid), "pgid": _id(task.remote_pgid)}
            about = {"task": str(task.running_log_id), **pids}
            lines[about["task"]] = _line("gpuwarden_task_info", about, 1.0, host)
    return _packed(lines.values())


def text_page(body: bytes, host: str, *, packed: bool) -> bytes:
    """The series of an exporter's page.

    Raises:
        RefusedError: it is invalid, or another host's.
    """
    lines, whole = _lines(body, packed=packed)
    found, named = {}, ""
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for name, labels, value, *_ in family.samples:
                if labels.get("host", host) != host:
                    raise _another(labels["host"], host)
                if name == "gpuwarden_exporter_info":
                    named = labels.get("nodename", "")
                if not all(map(_LABEL.fullmatch, labels)):
                    raise RefusedError(422, "invalid", f"invalid name of a label in {', '.join(labels)[:80]!a}")
                if _SERIES.fullmatch(name):
                    found[name, *sorted(labels.items())] = _line(name, labels, value, host)
    except (ValueError, KeyError, IndexError) as error:
        raise RefusedError(422, "invalid", f"the page is not Prometheus' text format: {str(error)[:80]!a}") from None
    if not whole or not named:  # an exporter's page ends with its own series
        raise RefusedError(422, "cut", "the page is not whole: it has no gpuwarden_exporter_info with nodename")
    if named != host:
        raise _another(named, host)
    return _packed(found.values())


def _lines(body: bytes, *, packed: bool) -> tuple[list[str], bool]:
    """Our series in a page, and whether its last line has an end."""
    try:
        text = (_unpacked(body) if packed else body).decode()
    except UnicodeDecodeError:
        raise RefusedError(422, "invalid", "the page is not UTF-8") from None
    lines = [line for line in text.split("\n") if line.startswith("gpuwarden_")]
    if len(lines) > SERIES_MAX:
        raise RefusedError(413, "size", f"the page has over {SERIES_MAX} series")
    if any(len(line) > LINE_MAX for line in lines):
        raise RefusedError(413, "size", f"the page has a line of over {LINE_MAX} characters")
    return lines, text.endswith("\n")


def published(reports: Iterable[HostReport], hosts: Iterable[SeenHost], now: float) -> Iterator[bytes]:
    """The page for Prometheus, in parts of a host each. Prometheus keeps the labels `host`, `job` and `instance`.

    The last report of a lost host is left out, because a host that is up is not lost.

    Args:
        reports: in order of their hosts.
        hosts: the hosts that were heard.
        now: Unix seconds.
    """
    hosts = list(hosts)
    lost = {each.host for each in hosts if each.lost_at is not None}
    for seen in hosts:
        its = (HOST_LOST, float(seen.lost_at is not None)), (HOST_SILENT, seen.silent_s(now))
        yield "".join(f"{_line(metric.name, {}, value, seen.host)}\n" for metric, value in its).encode()
    for host, of_host in groupby(reports, lambda each: each.host):
        yield _published(host, list(of_host), is_lost=host in lost)


def _published(host: str, reports: Sequence[HostReport], *, is_lost: bool) -> bytes:
    ages = [_line("gpuwarden_report_age_seconds", {"report": each.kind}, each.age_s, host) for each in reports]
    pages = {} if is_lost else {each.kind: each.page for each in reports if each.page is not None}
    up = _line("up", {}, float(bool(pages)), host)
    kept = [pages[Kind.PAGE]] if Kind.PAGE in pages else pages.values()  # an exporter's page has GPUs and tasks too
    return "".join(f"{line}\n" for line in (*ages, up)).encode() + b"".join(map(gzip.decompress, kept))


def _another(named: str, host: str) -> RefusedError:
    return RefusedError(403, "host", f"the report is of host {named[:80]!a}, and the token is of {host!r}: use its own")


def _id(number: int | None) -> str:
    return "" if number is None else str(number)


def _line(name: str, labels: Mapping[str, str], value: float, host: str) -> str:
    all_labels = {**labels, "host": host, "instance": host, "job": JOB}
    pairs = ",".join(f'{key}="{_escaped(its)}"' for key, its in sorted(all_labels.items()))
    number = repr(float(value))
    return f"{name}{{{pairs}}} {number if isfinite(value) else _NOT_FINITE[number]}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _packed(lines: Iterable[str]) -> bytes:
    text = "".join(f"{line}\n" for line in lines)
    return gzip.compress(text.encode(errors="replace"), compresslevel=1, mtime=0)


def _unpacked(body: bytes) -> bytes:
    """Decompress gzip, up to the largest page."""
    try:
        unpacking = zlib.decompressobj(wbits=31)
        found = unpacking.decompress(body, PAGE_MAX_BYTES + 1)
    except zlib.error as error:
        raise RefusedError(400, "invalid", f"the body is not gzip: {error}") from None
    if len(found) > PAGE_MAX_BYTES:
        raise RefusedError(413, "size", f"the page has over {PAGE_MAX_BYTES} bytes")
    if not unpacking.eof:
        raise RefusedError(400, "cut", "the body is not whole: its gzip has no end")
    return found
