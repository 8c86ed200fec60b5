"""The table of `gpuwarden job list`. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from gpuwarden.cli.progress import Reports, report_of, short, silence_max_s, silent_s
from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.format import command_name, format_age, printable
from gpuwarden.job import FINAL
from gpuwarden.queue import Job
from gpuwarden.state_file import JobFile, Stamp

HEAD: Final = ("JOB", "STATE", "TASK", "QUEUE", "AGE", "TRY", "WORKER", "PROGRESS", "SILENT", "REASON")
NUMBERS: Final = frozenset({"JOB", "TRY"})
"""Columns that are aligned on the right."""

FIRST: Final = 200
"""Rows that decide the widths. A list of all jobs is not kept."""

CELL_MAX: Final = 20
"""Longest cell that widens its column, characters. A longer one is shown whole."""


def cells(job: Job, report: JobFile | None, *, now: float, stamp: Stamp) -> tuple[str, ...]:
    """One row. Times are Unix seconds."""
    ended_at = job.ended_at if job.state in FINAL else None
    age_s = (now if ended_at is None else ended_at) - job.submitted_at
    return (
        str(job.job_id), job.state, task_of(job), job.queue, format_age(age_s), str(job.attempt), job.worker or "-",
        "-" if report is None else short(report), "-" if report is None else _silence(report, stamp), job.reason or "",
    )  # fmt: skip


def task_of(job: Job) -> str:
    """The function, the command or the model of a job."""
    match job.payload:
        case {"task": str() as task} if task:
            return task
        case {"command": {"argv": [str(), *_] as argv}}:
            return command_name([each for each in argv if isinstance(each, str)])
        case _:
            return job.model or "-"


def lines(
    found: Iterable[Job], broken: list[UnreadableRowError], here: Reports, *, now: float, stamp: Stamp
) -> Iterator[str]:
    """The heading and a line for each job; nothing without jobs. `found` adds rows that cannot be read to `broken`."""
    rest = _rows(found, broken, here, now, stamp)
    first = list(islice(rest, FIRST))
    if not first:
        return
    widths = [len(name) for name in HEAD]
    for row in first:
        if not isinstance(row, str):
            widths = [max(width, min(len(printable(cell)), CELL_MAX)) for width, cell in zip(widths, row, strict=True)]
    yield _line(HEAD, widths)
    for row in chain(first, rest):
        yield row if isinstance(row, str) else _line([printable(cell) for cell in row], widths)


def _rows(
    found: Iterable[Job], broken: list[UnreadableRowError], here: Reports, now: float, stamp: Stamp
) -> Iterator[Sequence[str] | str]:
    for job in chain(found, (None,)):
        yield from (f"{each.key} unreadable: {each.reason}" for each in broken)
        broken.clear()
        if job is not None:
            yield cells(job, report_of(job, here), now=now, stamp=stamp)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    parts = (
        cell.rjust(width) if name in NUMBERS else cell.ljust(width)
        for name, cell, width in zip(HEAD, row, widths, strict=True)
    )
    return " ".join(parts).rstrip()


def _silence(report: JobFile, now: Stamp) -> str:
    """The age of the last step beat, of its limit."""
    lasted_s, max_s = silent_s(report, now), silence_max_s(report)
    if lasted_s is None:
        return "-"
    return format_age(lasted_s) + ("" if max_s is None else f"/{format_age(max_s)}")
