"""The page of `gpuwarden top`. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuwarden.cli.columns import Column, Line, Row, cut, shares, shortened, table
from gpuwarden.format import count_of, format_age, format_time
from remediator.commands.watched_gpus import Tenant, WatchedGpu
from remediator.ledger.reports import HeldEpisode

UNKNOWN: Final = "unknown"
BAR: Final = 10
"""Characters of a bar of memory."""

TENANTS_MAX: Final = 8
"""Most tenants below a GPU."""

AIRY_ROWS: Final = 32
"""A page of fewer rows has no empty lines."""

_ALONE: Final = ", metrics of this host only, from its exporter"

_BAD: Final = "bold red"
_WARN: Final = "yellow"


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A host. `None` is unknown."""

    host: str
    executor: str
    mode: str
    gpus: int | None
    workers: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A worker. Before the first step beat `step_beat_age_s` is `None`; `progress` says whether it is known."""

    host: str
    worker: str
    state: str
    queue: str | None
    job: int | None
    progress: bool
    phase: str | None = None
    steps: int | None = None
    steps_planned: int | None = None
    step_beat_age_s: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job that is neither queued nor ended."""

    job: int
    state: str
    task: str
    queue: str
    host: str | None
    worker: str | None
    age_s: float
    progress: bool
    phase: str | None = None
    steps: int | None = None
    steps_planned: int | None = None
    step_beat_age_s: float | None = None
    note: str = ""


@dataclass(kw_only=True)
class View:
    """What the page shows. `unknown` has the reason by section, such as `gpus`. Times are Unix seconds."""

    at: float
    problems: list[str] = field(default_factory=list)
    source: str = ""
    """Where the metrics come from."""
    hosts: list[HostView] = field(default_factory=list)
    gpus: list[WatchedGpu] = field(default_factory=list)
    workers: list[WorkerView] = field(default_factory=list)
    jobs: list[JobView] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)
    """Jobs by state, without ended ones."""
    episodes: list[HeldEpisode] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


def page(view: View, *, width: int | None, rows: int | None) -> Iterator[Line]:
    """The lines, at most `rows` of at most `width` characters; `None` means any number."""
    problems = [Line(cut(each, width), _BAD) for each in view.problems]
    sections = [
        ("hosts", _hosts(view, width), _counted(len(view.hosts)) + _ALONE * (view.source == "exporter")),
        ("gpus", _gpus(view, width), _counted(len(view.gpus))),
        ("workers", _workers(view, width), _states([each.state for each in view.workers])),
        ("jobs", _jobs(view, width), ", ".join(f"{count} {state}" for state, count in view.counts.items()) or "none"),
        ("episodes", _episodes(view, width), f"{len(view.episodes)} open"),
    ]
    airy = rows is None or rows >= AIRY_ROWS
    heights = [sum(map(len, blocks)) for _, blocks, _ in sections]
    room = sum(heights) if rows is None else rows - len(problems) - len(sections) - 4 * airy
    given, spare = shares(heights, max(0, room)), 0
    yield from problems
    for number, ((name, blocks, says), share) in enumerate(zip(sections, given, strict=True)):
        title = "GPUs" if name == "gpus" else name
        if airy and number:
            yield Line("")
        if name in view.unknown:
            yield Line(cut(f"{title}: {UNKNOWN}: {view.unknown[name]}", width), "bold yellow")
        else:
            yield Line(cut(f"{title}: {says}", width), "bold")
        lines = shortened(blocks, share + spare)
        spare += share - len(lines)
        yield from lines


def _counted(number: int) -> str:
    return str(number) if number else "none"


def _states(states: Sequence[str]) -> str:
    return ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(sorted(states))) or "none"


def _hosts(view: View, width: int | None) -> list[list[Line]]:
    columns = (Column("HOST"), Column("EXECUTOR"), Column("GPUS", 2, right=True), Column("WORKERS", 1, right=True),
               Column("REMEDIES"))  # fmt: skip
    rows = [
        Row(
            cells=(each.host, each.executor, _number(each.gpus), _number(each.workers), each.mode),
            style="" if each.executor == "alive" else _WARN,
        )
        for each in view.hosts
    ]
    return table(columns, rows, width)


def _gpus(view: View, width: int | None) -> list[list[Line]]:
    columns = (Column("HOST"), Column("GPU"), Column("NAME", 3), Column("BUSY", 1, right=True), Column("MEMORY"),
               Column("BUDGETS", 2), Column("UUID", 4))  # fmt: skip
    return table(columns, [_gpu(each) for each in view.gpus], width)


def _gpu(gpu: WatchedGpu) -> Row:
    used, size = gpu.memory_used_bytes, gpu.memory_size_bytes
    budgets = sum(each.budget_bytes or 0.0 for each in gpu.tenants)
    over = [each for each in gpu.tenants if each.over_bytes]
    style = _BAD if gpu.lost else _WARN if over else ""
    below = [_tenant(each) for each in gpu.tenants[:TENANTS_MAX]]
    if len(gpu.tenants) > TENANTS_MAX:
        below.append(Line(f"    … and {count_of(len(gpu.tenants) - TENANTS_MAX, 'more tenant')}", "dim"))
    if gpu.other_bytes is None:
        below.append(Line("    other processes: unknown", "dim"))
    elif gpu.other_bytes >= 2**20:
        below.append(Line(f"    other processes: {gib(gpu.other_bytes)} GiB"))
    cells = (
        gpu.host, gpu.index or "-", gpu.name,
        "LOST" if gpu.lost else UNKNOWN if gpu.busy_ratio is None else f"{gpu.busy_ratio:.0%}",
        UNKNOWN if used is None or not size else f"{_bar(used / size)} {gib(used)} of {gib(size)} GiB",
        f"{gib(budgets)} GiB" if budgets else "none", gpu.gpu,
    )  # fmt: skip
    return Row(cells=cells, style=style, below=below)


def _tenant(tenant: Tenant) -> Line:
    says = f"    {tenant.container}: {gib(tenant.memory_bytes)}"
    if tenant.budget_bytes is None:
        return Line(f"{says} GiB, no budget")
    says += f" of {gib(tenant.budget_bytes)} GiB"
    return Line(f"{says}, OVER by {gib(tenant.over_bytes)} GiB", _BAD) if tenant.over_bytes else Line(says)


def gib(size: float) -> str:
    """Bytes as GiB with one digit."""
    return f"{size / 2**30:.1f}"


def _bar(ratio: float) -> str:
    full = round(min(1.0, max(0.0, ratio)) * BAR)
    return "█" * full + "░" * (BAR - full)


def _workers(view: View, width: int | None) -> list[list[Line]]:
    columns = (Column("HOST"), Column("WORKER"), Column("STATE"), Column("QUEUE", 5), Column("JOB", right=True),
               Column("PHASE", 2), Column("STEP", 3, right=True), Column("BEAT", right=True),
               Column("NOTE", 1))  # fmt: skip
    rows = [
        Row(
            cells=(
                each.host, each.worker, each.state, each.queue or "-", _number(each.job, "-"),
                each.phase or "-", _steps(each), "-" if each.job is None else _beat(each), each.note,
            ),
            style=_BAD if each.state == "dead" else _WARN if each.state in ("locked", UNKNOWN) else "",
        )
        for each in view.workers
    ]  # fmt: skip
    return table(columns, rows, width)


def _jobs(view: View, width: int | None) -> list[list[Line]]:
    columns = (Column("JOB", right=True), Column("STATE"), Column("TASK"), Column("QUEUE", 5), Column("HOST", 4),
               Column("WORKER"), Column("PHASE", 2), Column("STEP", 3, right=True), Column("BEAT", right=True),
               Column("AGE", right=True), Column("NOTE", 1))  # fmt: skip
    rows = [
        Row(
            cells=(
                str(each.job), each.state, each.task, each.queue, each.host or "-", each.worker or "-",
                each.phase or "-", _steps(each), _beat(each) if each.state == "running" else "-",
                format_age(each.age_s), each.note,
            ),
            style="" if each.state == "running" else _WARN,
        )
        for each in view.jobs
    ]  # fmt: skip
    return table(columns, rows, width)


def _steps(each: WorkerView | JobView) -> str:
    if each.steps is None:
        return "-"
    return f"{each.steps}" if each.steps_planned is None else f"{each.steps}/{each.steps_planned}"


def _beat(each: WorkerView | JobView) -> str:
    if not each.progress:
        return UNKNOWN
    return "none yet" if each.step_beat_age_s is None else format_age(each.step_beat_age_s)


def _episodes(view: View, width: int | None) -> list[list[Line]]:
    columns = (Column("EPISODE", right=True), Column("HOST"), Column("WORKER"), Column("REMEDY", 2), Column("STATE"),
               Column("FOR", right=True), Column("OPENED", 3), Column("MESSAGE", 1))  # fmt: skip
    rows = [
        Row(
            cells=(
                str(each.episode_id), each.host, each.worker, each.remedy, each.reason or "running",
                format_age(view.at - each.since), format_time(each.opened_at), each.message,
            )
        )
        for each in view.episodes
    ]  # fmt: skip
    return table(columns, rows, width)


def _number(value: int | None, none: str = UNKNOWN) -> str:
    return none if value is None else str(value)
