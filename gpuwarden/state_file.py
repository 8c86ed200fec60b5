"""State files: contract 1 between workers and the exporter. Pure.

In `$GPUWARDEN_RUNTIME_DIR/<subdirectory>/`, one subdirectory per container, mounted into it only:

    <worker>.worker.json   the worker and its heartbeat       (WorkerFile)
    <worker>.job.json      its attempt, if any                (JobFile)
    <worker>.job.json.N    rank N > 0 of a supervised command (JobFile)
    <worker>.lock          POSIX record lock of the worker

A file is one JSON object of at most `SIZE_MAX_BYTES`, replaced by rename. Unknown fields are ignored. Durations are
seconds. A point in time is:

    {"boottime_s": CLOCK_BOOTTIME, "boot_id": /proc/sys/kernel/random/boot_id, "unix_s": seconds since 1970}

Ages come from `boottime_s`. A shell script uses: read up _ </proc/uptime; read boot </proc/sys/kernel/random/boot_id;
date +%s

Other task runners write a file per task into their folder and remove it at its end (TaskFile, D1):
`<running_log_id>.json` with

    {"running_log_id": 123, "remote_pid": "4567", "remote_pgid": "4567", "timestamp": "1734220000"}

Numbers may be text. Pids are the host's, `timestamp` is the start, Unix seconds.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import JobClass, Phase

FORMAT: Final = 1
SIZE_MAX_BYTES: Final = 65536
SECONDS_MAX: Final = 1e12
"""Limit of durations and times, seconds."""

LONGEST_MAX: Final = 16
"""Most long steps, and long phase visits, in a file."""

TEXT_MAX: Final = 256
"""Most characters of a text field."""
WORKER_SUFFIX: Final = ".worker.json"
JOB_SUFFIX: Final = ".job.json"
LOCAL_RANKS_MAX: Final = 64
TASK_SUFFIX: Final = ".json"
LOCK_SUFFIX: Final = ".lock"

JOB_ID_MAX: Final = 2**53 - 1
"""Largest integer that a sample holds exactly."""

TASK_START_SLACK_S: Final = 5.0
"""How much later than in its task file a process may start, seconds. `date +%s` truncates."""

PID_MAX: Final = 2**22
"""Largest Linux pid (PID_MAX_LIMIT, proc_sys_kernel(5))."""

_NUMBER = re.compile(r"[0-9]{1,19}")
_SECONDS = re.compile(r"[0-9]{1,13}(\.[0-9]{1,9})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class StateFileError(GpuwardenError):
    """An invalid state file. `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One point in time."""

    boottime_s: float
    boot_id: str
    unix_s: float

    def age_s(self, now: "Stamp") -> float | None:
        """Seconds to `now`; `None` across a reboot."""
        if self.boot_id != now.boot_id:
            return None
        return max(0.0, now.boottime_s - self.boottime_s)


@dataclass(frozen=True, kw_only=True)
class WorkerFile:
    """A worker. `heartbeat` is from its process, `loop` from its main loop; `pid` is in `pid_namespace` (an inode)."""

    worker: str
    incarnation: str
    queue: str
    pid: int
    started: Stamp
    heartbeat: Stamp
    loop: Stamp
    start_ticks: int | None = None
    pid_namespace: int | None = None


@dataclass(frozen=True, kw_only=True)
class LongStep:
    """Duration and start of a step or phase visit, CLOCK_BOOTTIME seconds.

    `began_s` is `None` if other phases or a suspend are excluded.
    """

    took_s: float
    began_s: float | None


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One attempt. `step_beat` is `None` until it is monitored (A3). Limits of 0 mean none.

    Args:
        timeout_s: its own limit in this phase, at least 30 s in effect.
        busy_timeout_s: for how long heavy work counts in steps; `None` is the host's.
        gang: unique name of its gang, the same in all attempts.
        longest: its longest steps.
        stays: its longest earlier visits to this phase.
        health_window_s: its own health window; `None` is the host's.
        health_acts: whether that condition ends it.
        after_gpu_use: whether stall and health need a first use of a GPU.
        local_ranks: processes of a command, as of torchrun; `process` is this one.
    """

    job_id: int
    attempt: int
    worker: str
    incarnation: str
    job_class: JobClass
    model: str | None
    budget_s: float
    stall_timeout_s: float
    started: Stamp
    phase: Phase
    phase_started: Stamp
    step_beat: Stamp | None
    step: int
    steps_total: int | None
    step_mean_s: float | None
    step_max_s: float | None
    items_done: int
    items_failed: int
    timeout_s: float | None = None
    busy_timeout_s: float | None = None
    ranks: int = 1
    gang: str | None = None
    rank: int = 0
    longest: tuple[LongStep, ...] = ()
    stays: tuple[LongStep, ...] = ()
    health_window_s: float | None = None
    health_acts: bool = True
    after_gpu_use: bool = False
    local_rank: int = 0
    local_ranks: int = 1
    process: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """One task of another runner. Times are from its clock."""

    task_id: int
    pid: int
    pgid: int | None
    started_unix_s: float

    def predates(self, process_started_unix_s: float) -> bool:
        """Whether a process is younger than the task: its pid was reused."""
        return process_started_unix_s > self.started_unix_s + TASK_START_SLACK_S


def check_name(name: str, *, what: str = "worker") -> str:
    """Return a valid file name and label.

    Raises:
        StateFileError: it is invalid.
    """
    if not _NAME.fullmatch(name):
        raise StateFileError(
            "name",
            f"{what} name {name[:80]!a} is invalid: use 1 to 63 letters, digits, '.', '_' or '-', "
            "the first a letter or digit",
        )
    return name


def is_text(text: str) -> bool:
    """Whether `text` can be a label. A lone surrogate would fail the whole scrape."""
    return 1 <= len(text) <= TEXT_MAX and text.isprintable()


def render(value: WorkerFile | JobFile) -> str:
    """One line of JSON that `parse_worker` or `parse_job` reads."""
    return json.dumps({"format": FORMAT, **asdict(value)}, allow_nan=False) + "\n"


def parse_worker(text: str) -> WorkerFile:
    """Parse a worker file.

    Raises:
        StateFileError: it is invalid.
    """
    fields = _own(text)
    return WorkerFile(
        worker=check_name(fields.text("worker")),
        incarnation=fields.text("incarnation"),
        queue=fields.text("queue"),
        pid=fields.count("pid"),
        started=fields.stamp("started"),
        heartbeat=fields.stamp("heartbeat"),
        loop=fields.stamp("loop"),
        start_ticks=fields.count("start_ticks") if fields.has("start_ticks") else None,
        pid_namespace=fields.count("pid_namespace") if fields.has("pid_namespace") else None,
    )


def parse_job(text: str) -> JobFile:
    """Parse a job file, as `parse_worker`."""
    fields = _own(text)
    return JobFile(
        job_id=fields.count("job_id", most=JOB_ID_MAX),
        attempt=fields.count("attempt"),
        worker=check_name(fields.text("worker")),
        incarnation=fields.text("incarnation"),
        job_class=JobClass(fields.choice("job_class", JobClass)),
        model=fields.text("model") if fields.has("model") else None,
        budget_s=fields.seconds("budget_s"),
        stall_timeout_s=fields.seconds("stall_timeout_s"),
        started=fields.stamp("started"),
        phase=Phase(fields.choice("phase", Phase)),
        phase_started=fields.stamp("phase_started"),
        step_beat=fields.stamp("step_beat") if fields.has("step_beat") else None,
        step=fields.count("step"),
        steps_total=fields.count("steps_total") if fields.has("steps_total") else None,
        step_mean_s=fields.seconds("step_mean_s") if fields.has("step_mean_s") else None,
        step_max_s=fields.seconds("step_max_s") if fields.has("step_max_s") else None,
        items_done=fields.count("items_done"),
        items_failed=fields.count("items_failed"),
        timeout_s=fields.some_seconds("timeout_s") if fields.has("timeout_s") else None,
        busy_timeout_s=fields.seconds("busy_timeout_s") if fields.has("busy_timeout_s") else None,
        ranks=fields.count("ranks") if fields.has("ranks") else 1,
        gang=fields.text("gang") if fields.has("gang") else None,
        rank=fields.count("rank") if fields.has("rank") else 0,
        longest=fields.long_steps("longest") if fields.has("longest") else (),
        stays=fields.long_steps("stays") if fields.has("stays") else (),
        health_window_s=fields.some_seconds("health_window_s") if fields.has("health_window_s") else None,
        health_acts=fields.flag("health_acts", default=True),
        after_gpu_use=fields.flag("after_gpu_use", default=False),
        local_rank=fields.count("local_rank") if fields.has("local_rank") else 0,
        local_ranks=fields.count("local_ranks") if fields.has("local_ranks") else 1,
        process=fields.process("process") if fields.has("process") else None,
    )


def parse_task(text: str) -> TaskFile:
    """Parse another runner's task file, as `parse_worker`."""
    fields = _Fields(_decoded(text))
    return TaskFile(
        task_id=fields.number("running_log_id", least=0, most=2**63 - 1),
        pid=fields.number("remote_pid", least=1, most=PID_MAX),
        pgid=fields.number("remote_pgid", least=1, most=PID_MAX) if fields.given("remote_pgid") else None,
        started_unix_s=fields.seconds_or_text("timestamp"),
    )


def _own(text: str) -> "_Fields":
    """The fields of a file with a format number."""
    found = _decoded(text)
    if isinstance(found, dict) and (type(found.get("format")) is not int or found["format"] != FORMAT):
        raise StateFileError("format", f"format {_shown(found.get('format'))} found, {FORMAT} wanted")
    return _Fields(found)


def _decoded(text: str) -> object:
    if len(text.encode("utf-8", "surrogatepass")) > SIZE_MAX_BYTES:
        raise StateFileError("oversized", f"the file is over {SIZE_MAX_BYTES} bytes")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StateFileError("not_json", f"not whole JSON ({error}): was it replaced by rename?") from None


class _Fields:
    """A decoded object with typed access. Errors name the field."""

    def __init__(self, found: object) -> None:
        if not isinstance(found, dict):
            raise StateFileError("not_object", f"a JSON object was wanted, {type(found).__name__} found")
        self._fields: dict[str, Any] = found

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str) or not is_text(value):
            raise _field_error(name, f"a string of 1 to {TEXT_MAX} printable characters", value)
        return value

    def count(self, name: str, *, most: int = 2**63 - 1) -> int:
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise _field_error(name, "a whole number from 0" + (f" to {most}" if most < 2**63 - 1 else ""), value)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._fields.get(name, default)
        if not isinstance(value, bool):
            raise _field_error(name, "true or false", value)
        return value

    def seconds(self, name: str) -> float:
        value = self._fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < SECONDS_MAX:
            raise _field_error(name, "seconds, a number from 0", value)
        return float(value)

    def some_seconds(self, name: str) -> float:
        value = self._fields.get(name)
        if self.seconds(name) == 0:
            raise _field_error(name, "seconds, a number above 0", value)
        return self.seconds(name)

    def process(self, name: str) -> tuple[int, int]:
        value = self._fields.get(name)
        if isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value):
            return value[0], value[1]
        raise _field_error(name, "a pid and a start time", value)

    def long_steps(self, name: str) -> tuple[LongStep, ...]:
        value = self._fields.get(name)
        if not isinstance(value, list) or len(value) > LONGEST_MAX or not all(isinstance(each, dict) for each in value):
            raise _field_error(name, f"a list of at most {LONGEST_MAX} objects with took_s and began_s", value)
        try:
            return tuple(
                LongStep(
                    took_s=each.seconds("took_s"), began_s=each.seconds("began_s") if each.has("began_s") else None
                )
                for each in map(_Fields, value)
            )
        except StateFileError as error:
            raise StateFileError(error.reason, f"{name}: {error}") from None

    def given(self, name: str) -> bool:
        """Whether it has a value."""
        return self._fields.get(name) not in (None, "")

    def number(self, name: str, *, least: int, most: int) -> int:
        """An integer, or its digits."""
        value = self._fields.get(name)
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _field_error(name, f"a whole number from {least} to {most}, or its digits as text,", value)
        return value

    def seconds_or_text(self, name: str) -> float:
        value = self._fields.get(name)
        if isinstance(value, str) and _SECONDS.fullmatch(value):
            value = float(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < SECONDS_MAX:
            raise _field_error(name, "seconds, a number from 0 or its digits as text,", value)
        return float(value)

    def choice(self, name: str, among: type[JobClass | Phase]) -> str:
        value = self.text(name)
        if value not in list(among):
            raise _field_error(name, "one of " + ", ".join(among), value)
        return value

    def stamp(self, name: str) -> Stamp:
        value = self._fields.get(name)
        if not isinstance(value, dict):
            raise _field_error(name, "an object with boottime_s, boot_id and unix_s", value)
        inner = _Fields(value)
        try:
            return Stamp(
                boottime_s=inner.seconds("boottime_s"), boot_id=inner.text("boot_id"), unix_s=inner.seconds("unix_s")
            )
        except StateFileError as error:
            raise StateFileError(error.reason, f"{name}: {error}") from None


def _field_error(name: str, wanted: str, found: object) -> StateFileError:
    return StateFileError("field", f"field {name!r}: {wanted} was wanted, {_shown(found)} found")


def _shown(found: object) -> str:
    """A short printable value for messages."""
    if found is None:
        return "nothing"
    if isinstance(found, list | dict):
        return "a list" if isinstance(found, list) else "an object"
    return ascii(found)[:80]


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
