"""Bars of `gpuwarden job wait` at a terminal: the steps of running jobs, where their number is known."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Self

from gpuwarden.cli.job_table import task_of
from gpuwarden.cli.progress import report_of, reports
from gpuwarden.format import printable
from gpuwarden.job import JobId
from gpuwarden.queue import Job

if TYPE_CHECKING:
    from rich.progress import TaskID

BARS_MAX: Final = 10
"""Most bars."""


def at_terminal() -> bool:
    """Whether standard output is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals wait until the end of the block: one in the middle of a redraw would leave the cursor hidden."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Bars:
    """A bar for each job. Other output goes above.

    Args:
        directory: folder of state files.
    """

    def __init__(self, directory: Path) -> None:
        from rich.console import Console  # noqa: PLC0415 - slow to import
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        self._directory = directory
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(highlight=False),
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._bars: dict[tuple[JobId, int], TaskID] = {}

    def __enter__(self) -> Self:
        """Begin; SIGTERM leaves the terminal as it was."""
        signal.signal(signal.SIGTERM, _end)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Remove the bars."""
        self._progress.stop()

    def update(self, jobs: Iterable[Job]) -> None:
        """Show these jobs and no other."""
        found = list(jobs)
        with undisturbed():
            self._show(found)

    def _show(self, jobs: Iterable[Job]) -> None:
        here, shown = reports(self._directory), set[tuple[JobId, int]]()
        self._progress.start()
        for job in jobs:
            report = report_of(job, here)
            if report is None or not report.steps_total:
                continue
            key = job.job_id, job.attempt
            shown.add(key)
            if key not in self._bars:
                text = f"job {job.job_id} {printable(task_of(job))}"
                self._bars[key] = self._progress.add_task(text, total=report.steps_total)
            self._progress.update(self._bars[key], completed=report.step, total=report.steps_total)
        for key in self._bars.keys() - shown:
            self._progress.remove_task(self._bars.pop(key))
        self._progress.refresh()


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
