"""Progress of running jobs, from their workers' files on this host."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from gpuwarden.job import State
from gpuwarden.queue import Job
from gpuwarden.state_file import JOB_SUFFIX, JobFile, StateFileError, parse_job

Reports: TypeAlias = Mapping[tuple[int, int, str], JobFile]
"""By job, attempt and incarnation, so that a file of an ended attempt is ignored."""


def reports(directory: Path) -> Reports:
    """All valid job files of this host."""
    found: dict[tuple[int, int, str], JobFile] = {}
    for path in directory.glob(f"*/*{JOB_SUFFIX}"):
        with suppress(OSError, UnicodeDecodeError, StateFileError):
            report = parse_job(path.read_text(encoding="utf-8"))
            found[report.job_id, report.attempt, report.incarnation] = report
    return found


def report_of(job: Job, found: Reports) -> JobFile | None:
    """The job file of a running job; `None` if it is not on this host."""
    if job.state is not State.RUNNING or job.claimed_by is None:
        return None
    return found.get((job.job_id, job.attempt, job.claimed_by))


def short(report: JobFile) -> str:
    """Phase and steps, for a column."""
    total = "" if report.steps_total is None else f"/{report.steps_total}"
    return f"{report.phase} {report.step}{total}"


def whole(report: JobFile) -> str:
    """Phase, steps and step time, for a sentence."""
    total = "" if report.steps_total is None else f" of {report.steps_total}"
    mean = "" if report.step_mean_s is None else f", {report.step_mean_s:.3g} s a step"
    return f"phase {report.phase}, step {report.step}{total}{mean}"


def figures(report: JobFile | None) -> dict[str, Any] | None:
    """Progress for JSON output."""
    names = ("phase", "step", "steps_total", "step_mean_s", "step_max_s", "items_done", "items_failed")
    return None if report is None else {name: getattr(report, name) for name in names}
