"""Tasks of other runners: identity, start, and whether their processes live (D1)."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge
from exporter.model.snapshot import Snapshot

_TASK = ("task",)


_NO_TASKS: Final = "no `--task-dir` is set or readable"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by the runner's task id; none without a readable task folder."""
    readings = snapshot.tasks
    found = () if readings is None else readings.tasks
    yield gauge(
        "gpuwarden_task_info",
        "A task of another runner, from its task file; always 1.",
        ("task", "pid", "pgid"),
        (((str(each.task.task_id), str(each.task.pid), str(each.task.pgid or "")), 1.0) for each in found),
        source="the file in `--task-dir`",
        absent=f"its file is missing or invalid, or {_NO_TASKS}",
    )
    yield gauge(
        "gpuwarden_task_alive",
        "1 while the task's process exists; 0 if only its file remains.",
        _TASK,
        (((str(each.task.task_id),), None if each.alive is None else float(each.alive)) for each in found),
        source="`/proc/PID` of the pid in the task file",
        absent="as `gpuwarden_task_info`, or its process cannot be read",
    )
    yield gauge(
        "gpuwarden_task_start_timestamp_seconds",
        "Start of the task, Unix time.",
        _TASK,
        (((str(each.task.task_id),), each.task.started_unix_s) for each in found),
        source="the file in `--task-dir`",
        absent="as `gpuwarden_task_info`",
    )
    yield gauge(
        "gpuwarden_taskfiles_invalid",
        "Task files and folders that are invalid or unreadable, by reason.",
        ("reason",),
        () if readings is None else (((reason,), float(count)) for reason, count in sorted(readings.errors.items())),
        source="the folders of `--task-dir`",
        absent=f"all files are valid, or {_NO_TASKS}",
    )
