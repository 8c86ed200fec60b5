"""Progress of running jobs, from their workers' files on this host."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from gpuwarden.format import format_duration
from gpuwarden.job import MIN_TIMEOUT_S, Phase, State
from gpuwarden.queue import Job
from gpuwarden.state_file import JOB_SUFFIX, JobFile, Stamp, StateFileError, parse_job

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


def silent_s(report: JobFile, now: Stamp) -> float | None:
    """Seconds since the last step beat or the phase began; `None` before the first beat (A3)."""
    if report.step_beat is None:
        return None
    ages_s = [report.step_beat.age_s(now), report.phase_started.age_s(now)]
    return min((each for each in ages_s if each is not None), default=None)


def silence_max_s(report: JobFile) -> float | None:
    """The job's own limit of its silence; `None` without one, or if the host sets it."""
    if report.phase is Phase.IDLE or not report.stall_timeout_s:
        return None
    if report.timeout_s is not None:
        return max(MIN_TIMEOUT_S, report.timeout_s)
    return report.stall_timeout_s if report.phase is Phase.STEP else None


def silence(report: JobFile, now: Stamp) -> str | None:
    """Silence and its limit, such as `2 min 36 s of 120 s`."""
    lasted_s, max_s = silent_s(report, now), silence_max_s(report)
    if lasted_s is None:
        return None
    return format_duration(lasted_s) + ("" if max_s is None else f" of {max_s:g} s")


def whole(report: JobFile) -> str:
    """Phase, steps and step time, for a sentence."""
    total = "" if report.steps_total is None else f" of {report.steps_total}"
    mean = "" if report.step_mean_s is None else f", {report.step_mean_s:.3g} s a step"
    return f"phase {report.phase}, step {report.step}{total}{mean}"


def figures(report: JobFile | None, now: Stamp) -> dict[str, Any] | None:
    """Progress for JSON output."""
    if report is None:
        return None
    names = ("phase", "step", "steps_total", "step_mean_s", "step_max_s", "items_done", "items_failed")
    fields = {name: getattr(report, name) for name in names}
    return {**fields, "silent_s": silent_s(report, now), "silence_max_s": silence_max_s(report)}
