"""`gpuwarden queue`: list queues and change their settings."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpuwarden.cli.acts import add_act, add_json
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, format_duration, format_time, operator_name, show, show_json, table
from gpuwarden.job import JobClass, State
from gpuwarden.queue import JobStore, QueueSettings
from gpuwarden.queue.open import created, current, existing
from gpuwarden.queue.retention import KEPT_DAYS

_Act = Callable[[argparse.Namespace], int]

ENDS: Final = (State.COMPLETED, State.FAILED, State.CANCELLED)

NOTHING: Final = "none"
"""The value that removes a setting."""


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """One queue as it is listed. `jobs` has unfinished jobs by state, `ended` the others; ages are seconds."""

    queue: str
    jobs: Mapping[State, int]
    ended: Mapping[State, int]
    oldest_s: float | None
    workers: int
    busy: int
    settings: QueueSettings | None


def command(argv: list[str]) -> int:
    """`gpuwarden queue`."""
    arguments = _parser().parse_args(argv)
    act: _Act = arguments.act
    return act(arguments)


def rows(store: JobStore) -> Iterator[QueueRow]:
    """Queues with jobs, workers or settings, by name."""
    now = store.now()
    waiting, snapshot, ended = store.counts.waiting(), store.counts.snapshot(now=now), store.counts.ended()
    settings = {each.queue: each for each in store.queue_settings.all()}
    with_jobs = (name for name, _ in (*snapshot.at_work, *ended))
    for queue in sorted({*waiting, *with_jobs, *snapshot.workers, *settings}):
        jobs = {state: count for (name, state), count in snapshot.at_work.items() if name == queue}
        oldest_at = None
        if queue in waiting:
            jobs[State.QUEUED] = waiting[queue].jobs
            oldest_at = waiting[queue].oldest_at
        workers = snapshot.workers.get(queue)
        yield QueueRow(
            queue=queue,
            jobs=dict(sorted(jobs.items(), key=lambda each: list(State).index(each[0]))),
            ended={state: ended.get((queue, state), 0) for state in ENDS},
            oldest_s=None if oldest_at is None else max(0.0, now - oldest_at),
            workers=0 if workers is None else sum(workers.by_state.values()) - workers.by_state["gone"],
            busy=0 if workers is None else workers.busy,
            settings=settings.get(queue),
        )


def _list(arguments: argparse.Namespace) -> int:
    with closing(existing(arguments.queue_db)) as store:
        found = list(rows(store))
    if arguments.json:
        for each in found:
            show_json(asdict(each))
        return 0
    lines = list[tuple[str, ...]]()
    for each in found:
        jobs = dict(each.jobs)
        queued, waiting, running = (jobs.pop(state, 0) for state in (State.QUEUED, State.WAITING, State.RUNNING))
        notes = [f"{count} {state}" for state, count in jobs.items()]
        if each.settings is not None:
            notes.append(_describe(each.settings))
        oldest = "-" if each.oldest_s is None else format_duration(each.oldest_s)
        busy = f"{each.busy} of {each.workers}"
        counts = (str(waiting), str(running), *map(str, each.ended.values()))
        lines.append((each.queue, str(queued), oldest, *counts, busy, ", ".join(notes)))
    if lines:
        ends = (state.upper() for state in ENDS)
        show(*table(("QUEUE", "QUEUED", "OLDEST", "WAITING", "RUNNING", *ends, "BUSY", "OTHER, SETTINGS"), lines))
    return 0


def _describe(settings: QueueSettings) -> str:
    figures = (
        ("class", settings.job_class),
        ("budget", None if settings.budget_s is None else f"{settings.budget_s:g} s"),
        ("lost hold", None if settings.lost_hold_s is None else f"{settings.lost_hold_s:g} s"),
        ("retention", None if settings.retention_days is None else f"{settings.retention_days} d"),
    )
    text = ", ".join(f"{name} {value}" for name, value in figures if value is not None)
    return f"{text or 'nothing set'} (set {format_time(settings.set_at)} by {settings.set_by})"


def _set(arguments: argparse.Namespace) -> int:
    """Change the given settings and keep the others."""
    named = {name: value for name in _SETTINGS if (value := getattr(arguments, name)) is not None}
    if not named:
        raise GpuwardenError("missing --class, --budget-s, --lost-hold-s or --retention-days")
    with closing(created(arguments.queue_db)) as store:
        kept = next((each for each in store.queue_settings.all() if each.queue == arguments.queue), None)
        before: dict[str, Any] = {} if kept is None else asdict(kept)
        its = {name: named.get(name, before.get(name)) for name in _SETTINGS}
        values: dict[str, Any] = {name: None if value == NOTHING else value for name, value in its.items()}
        settings = QueueSettings(queue=arguments.queue, **values, set_at=store.now(), set_by=operator_name())
        store.queue_settings.set_queue(settings)
    show(f"{settings.queue}: {_describe(settings)}")
    return 0


def _unset(arguments: argparse.Namespace) -> int:
    with closing(current(arguments.queue_db)) as store:
        if store.queue_settings.unset_queue(arguments.queue):
            return 0
    raise GpuwardenError(f"queue {arguments.queue!r} has no settings: see `gpuwarden queue list`")


_SETTINGS: Final = ("job_class", "budget_s", "lost_hold_s", "retention_days")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpuwarden queue", description="List queues and change their settings.")
    acts = parser.add_subparsers(required=True)

    listing = add_act(acts, "list", _list, "list queues with their jobs, workers and settings")
    add_json(listing)

    setting = add_act(acts, "set", _set, "change settings of a queue; others are kept")
    setting.add_argument("queue", metavar="QUEUE", help="name of the queue")
    setting.add_argument(
        "--class", dest="job_class", type=_class, metavar="CLASS",
        help=f"class of new jobs: {', '.join(JobClass)}; or {NOTHING}",
    )  # fmt: skip
    setting.add_argument("--budget-s", type=_seconds, help=f"time budget of new attempts, seconds; or {NOTHING}")
    setting.add_argument(
        "--lost-hold-s",
        type=_seconds,
        help=f"requeue the jobs of a lost host after this many seconds, never before their lease ends; "
        f"{NOTHING} waits until the host is back",
    )
    setting.add_argument(
        "--retention-days",
        type=_days,
        help=f"the executor deletes finished jobs, with their events and items, after this many days; 0 keeps all; "
        f"{NOTHING} is the default of {KEPT_DAYS}",
    )

    unsetting = add_act(acts, "unset", _unset, "delete the settings of a queue")
    unsetting.add_argument("queue", metavar="QUEUE", help="name of the queue")
    return parser


def _class(text: str) -> JobClass | str:
    if text == NOTHING:
        return NOTHING
    try:
        return JobClass(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"unknown class {text!r}: use one of {', '.join(JobClass)}, or {NOTHING}"
        ) from None


def _days(text: str) -> int | str:
    if text == NOTHING or text.isdecimal():
        return text if text == NOTHING else int(text)
    raise argparse.ArgumentTypeError(f"invalid {text!r}: use a whole number of days, 0 or more, or {NOTHING}")


def _seconds(text: str) -> float | str:
    if text == NOTHING:
        return NOTHING
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid {text!r}: use a number of seconds, or {NOTHING}") from None
