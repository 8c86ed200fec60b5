"""`gpuwarden queue`: what there is in each queue, and what its owner has set for it."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpuwarden.cli.acts import add_act, add_json
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import ago, plain, when, who
from gpuwarden.job import JobClass, State
from gpuwarden.queue import JobStore, QueueSettings
from gpuwarden.queue.open import current, existing

_Act = Callable[[argparse.Namespace], int]

NOTHING: Final = "none"
"""What is said for a setting that is to be as for every queue."""


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """One queue as it is listed. `jobs` has those that are not over, by state; ages are seconds."""

    queue: str
    jobs: Mapping[State, int]
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
    """Every queue that has jobs which are not over, workers, or settings, by name."""
    now = store.now()
    waiting, look = store.counts.waiting(), store.counts.look(now=now)
    settings = {each.queue: each for each in store.queue_settings.all()}
    for queue in sorted({*waiting, *(name for name, _ in look.at_work), *look.crews, *settings}):
        jobs = {state: count for (name, state), count in look.at_work.items() if name == queue}
        oldest_at = None
        if queue in waiting:
            jobs[State.QUEUED] = waiting[queue].jobs
            oldest_at = waiting[queue].oldest_at
        crew = look.crews.get(queue)
        yield QueueRow(
            queue=queue,
            jobs=dict(sorted(jobs.items(), key=lambda each: list(State).index(each[0]))),
            oldest_s=None if oldest_at is None else max(0.0, now - oldest_at),
            workers=0 if crew is None else sum(crew.by_state.values()) - crew.by_state["gone"],
            busy=0 if crew is None else crew.busy,
            settings=settings.get(queue),
        )


def _list(arguments: argparse.Namespace) -> int:
    with closing(existing(arguments.queue_db)) as store:
        found = list(rows(store))
    if not arguments.json and found:
        print(f"{'QUEUE':16} {'QUEUED':>8} {'OLDEST':11} {'WAITING':>8} {'RUNNING':>8} {'BUSY':>9}  OTHER, SETTINGS")
    for each in found:
        if arguments.json:
            print(json.dumps(asdict(each)))
            continue
        jobs = dict(each.jobs)
        queued, waiting, running = (jobs.pop(state, 0) for state in (State.QUEUED, State.WAITING, State.RUNNING))
        notes = [f"{count} {state}" for state, count in jobs.items()]
        if each.settings is not None:
            notes.append(_told(each.settings))
        oldest = "-" if each.oldest_s is None else ago(each.oldest_s)
        print(
            f"{plain(each.queue):16} {queued:>8} {oldest:11} {waiting:>8} {running:>8} "
            f"{f'{each.busy} of {each.workers}':>9}  {', '.join(notes)}".rstrip()
        )
    return 0


def _told(settings: QueueSettings) -> str:
    figures = (
        ("class", settings.job_class),
        ("budget", None if settings.budget_s is None else f"{settings.budget_s:g} s"),
        ("lost hold", None if settings.lost_hold_s is None else f"{settings.lost_hold_s:g} s"),
    )
    told = ", ".join(f"{name} {value}" for name, value in figures if value is not None)
    return f"{told or 'nothing set'} (set {when(settings.set_at)} by {plain(settings.set_by)})"


def _set(arguments: argparse.Namespace) -> int:
    """What is not named stays as it is."""
    named = {name: value for name in _SETTINGS if (value := getattr(arguments, name)) is not None}
    if not named:
        raise GpuwardenError("say what to set: --class, --budget-s or --lost-hold-s")
    with closing(JobStore.open(arguments.queue_db)) as store:
        kept = next((each for each in store.queue_settings.all() if each.queue == arguments.queue), None)
        before: dict[str, Any] = {} if kept is None else asdict(kept)
        its = {name: named.get(name, before.get(name)) for name in _SETTINGS}
        values: dict[str, Any] = {name: None if value == NOTHING else value for name, value in its.items()}
        settings = QueueSettings(queue=arguments.queue, **values, set_at=store.now(), set_by=who())
        store.queue_settings.set_queue(settings)
    print(f"{plain(settings.queue)}: {_told(settings)}")
    return 0


def _unset(arguments: argparse.Namespace) -> int:
    with closing(current(arguments.queue_db)) as store:
        if store.queue_settings.unset_queue(arguments.queue):
            return 0
    raise GpuwardenError(f"nothing is set for queue {arguments.queue!r}: see `gpuwarden queue list`")


_SETTINGS: Final = ("job_class", "budget_s", "lost_hold_s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden queue", description="What there is in each queue, and what is set for it."
    )
    acts = parser.add_subparsers(required=True, metavar="ACT")

    listing = add_act(acts, "list", _list, "every queue: jobs that are not over, the oldest, workers, settings")
    add_json(listing)

    setting = add_act(acts, "set", _set, "set what is to differ in a queue; what is not named stays as it is")
    setting.add_argument("queue", metavar="QUEUE")
    setting.add_argument(
        "--class", dest="job_class", type=_class, metavar="CLASS",
        help=f"what its jobs are from now on: {', '.join(JobClass)}; or {NOTHING}",
    )  # fmt: skip
    setting.add_argument("--budget-s", type=_seconds, help=f"of each attempt that begins from now on; or {NOTHING}")
    setting.add_argument(
        "--lost-hold-s",
        type=_seconds,
        help=f"how long a job of a lost host is held before it is given away, seconds, and its lease at the least, by "
        f"whose end its worker stops itself; or {NOTHING}: until the host is back",
    )

    unsetting = add_act(acts, "unset", _unset, "forget all that is set for a queue")
    unsetting.add_argument("queue", metavar="QUEUE")
    return parser


def _class(text: str) -> JobClass | str:
    if text == NOTHING:
        return NOTHING
    try:
        return JobClass(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no class: {', '.join(JobClass)} are, or {NOTHING}") from None


def _seconds(text: str) -> float | str:
    if text == NOTHING:
        return NOTHING
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seconds nor {NOTHING}") from None
