"""Tasks of other runners: which there are, since when, and whether their processes are there (D1)."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge
from exporter.model.snapshot import Snapshot

_TASK = ("task",)


_NO_TASKS: Final = "no `--task-dir` is given or can be read"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by the runner's own id of the task; absent where no folder of theirs is given, or none is read."""
    readings = snapshot.tasks
    found = () if readings is None else readings.tasks
    yield gauge(
        "gpuwarden_task_info",
        "A task that another runner's file tells of; always 1.",
        ("task", "pid", "pgid"),
        (((str(each.task.task_id), str(each.task.pid), str(each.task.pgid)), 1.0) for each in found),
        source="task file",
        absent=f"its file is gone, or cannot be trusted, or {_NO_TASKS}",
    )
    yield gauge(
        "gpuwarden_task_alive",
        "1 while the task's process is there; 0 for a dead task: its file is left, its process is gone.",
        _TASK,
        (((str(each.task.task_id),), None if each.alive is None else float(each.alive)) for each in found),
        source="`/proc/PID` of the pid in the task file",
        absent="as `gpuwarden_task_info`, or its process cannot be looked at",
    )
    yield gauge(
        "gpuwarden_task_start_timestamp_seconds",
        "When the task started, as its file says, Unix time.",
        _TASK,
        (((str(each.task.task_id),), each.task.started_unix_s) for each in found),
        source="task file",
        absent="as `gpuwarden_task_info`",
    )
    yield gauge(
        "gpuwarden_taskfiles_invalid",
        "Task files and folders of them that cannot be trusted or read now, by reason.",
        ("reason",),
        () if readings is None else (((reason,), float(count)) for reason, count in sorted(readings.errors.items())),
        source="the folders of `--task-dir`",
        absent=f"nothing is wrong with any file, or {_NO_TASKS}",
    )
