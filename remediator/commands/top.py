"""`gpuwarden top`: hosts, GPUs, workers, jobs and open episodes, redrawn in place. Read only.

Metrics come from Prometheus, for all hosts, else from this host's exporter. What cannot be read is unknown.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, Final

from gpuwarden.cli.acts import runtime_dir
from gpuwarden.cli.bars import at_terminal
from gpuwarden.cli.columns import Line
from gpuwarden.cli.job_table import task_of
from gpuwarden.cli.keys import keys
from gpuwarden.cli.progress import Reports, report_of, reports, silent_s
from gpuwarden.cli.queue import rows as queue_rows
from gpuwarden.cli.watch import styled, watch
from gpuwarden.cli.worker import state_of
from gpuwarden.clock import stamp
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, show_json
from gpuwarden.job import FINAL, State
from gpuwarden.queue import Job, JobStore, WorkerRow
from gpuwarden.queue.open import existing
from remediator.commands import watched_gpus
from remediator.commands.addresses import NONE, add_sources
from remediator.commands.status import WATCH_S, Armed, Report, look, series
from remediator.commands.top_page import HostView, JobView, View, WorkerView, page
from remediator.commands.watched import NAMES, WatchedWorker, read_watched

SERIES: Final = ("exporter_info", *NAMES, *watched_gpus.NAMES)

JOBS_MAX: Final = 200
"""Most jobs that are read, the newest."""

QUIET_S: Final = 60.0
"""A job without a step beat for longer is listed first, seconds."""

ROWS_MAX: Final = 100
"""Most lines of a page that is not redrawn."""

_AT_WORK: Final = frozenset(State) - FINAL - {State.QUEUED, State.WAITING}


def command(argv: list[str]) -> int:
    """`gpuwarden top`."""
    wanted = _parser().parse_args(argv)
    if wanted.json:
        show_json(asdict(look_at(wanted, now=time.time())))
        return 0
    if wanted.once or not at_terminal():
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        styled(page(look_at(wanted, now=time.time()), width=width, rows=ROWS_MAX))
        return 0

    def redrawn(rows: int | None) -> list[Line]:
        width = shutil.get_terminal_size().columns
        return list(page(look_at(wanted, now=time.time()), width=width, rows=rows))

    with keys() as wait:
        return watch(redrawn, lambda: wait(WATCH_S), now=time.time, ends="q or Ctrl-C ends")


def look_at(wanted: argparse.Namespace, *, now: float) -> View:
    """Read all sources. One that does not answer makes its sections unknown."""
    report = look(wanted, now=now)
    view = View(at=report.at, episodes=report.episodes)
    view.problems = [f"{part.name}: {part.says}" for part in report.parts if part.ok is False]
    if bad := [part.says for part in report.parts if part.name == "ledger" and not part.ok]:
        view.unknown["episodes"] = bad[0]
    found, view.source, problem = _metrics(wanted)
    if problem:
        view.unknown |= dict.fromkeys(("gpus", "workers"), problem)
    view.gpus = watched_gpus.read_gpus(found)
    watched = {(host, each.worker): each for host, each in _watched(found)}
    rows: Sequence[WorkerRow] = ()
    if wanted.queue_db in (None, NONE):
        view.unknown["jobs"] = "no queue found: set --queue-db or $GPUWARDEN_QUEUE_DB"
    else:
        try:
            with closing(existing(wanted.queue_db)) as store:
                rows = [each for each in store.admin.workers(now=store.now()) if each.alive or each.locked_at]
                view.jobs = list(_jobs(store, watched))
                view.counts = _counts(store)
        except GpuwardenError as error:
            view.unknown["jobs"] = str(error)
    view.workers = sorted(_workers(watched, rows), key=lambda each: (_rank(each.state), each.host, each.worker))
    view.hosts = list(_hosts(report, found, view))
    if not view.hosts and {"gpus", "episodes"} <= {*view.unknown}:
        view.unknown["hosts"] = "neither metrics nor a ledger can be read"
    if wanted.host is not None:
        _only(view, wanted.host)
    return view


def _only(view: View, host: str) -> None:
    view.hosts = [each for each in view.hosts if each.host == host]
    view.gpus = [each for each in view.gpus if each.host == host]
    view.workers = [each for each in view.workers if each.host == host]
    view.jobs = [each for each in view.jobs if each.host == host]


def _metrics(wanted: argparse.Namespace) -> tuple[Sequence[Mapping[str, Any]], str, str]:
    """Samples, where they come from, and why there are none."""
    problems = list[str]()
    for name in ("prometheus", "exporter"):
        found, problem = series(wanted, name, SERIES)
        if found:
            return found, name, ""
        problems.append(f"{name}: {problem}")
    return (), "", "; ".join(problems)


def _watched(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, WatchedWorker]]:
    hosts = {each["metric"].get("host", "") for each in found}
    return [(each.host, worker) for each in read_watched(hosts, found) for worker in each.workers]


def _rank(state: str) -> int:
    """What needs a look comes first: a long list is cut."""
    order = ("dead", "locked", "unknown", "draining")
    return order.index(state) if state in order else len(order)


def _workers(watched: Mapping[tuple[str, str], WatchedWorker], rows: Sequence[WorkerRow]) -> list[WorkerView]:
    known = {(each.host, each.worker): each for each in rows}
    return [_worker(at, watched.get(at), known.get(at)) for at in {**watched, **known}]


def _worker(at: tuple[str, str], seen: WatchedWorker | None, row: WorkerRow | None) -> WorkerView:
    """The queue says what is locked or drains, the exporter the rest."""
    state, job = ("unknown", None) if seen is None else (seen.state, seen.job)
    if row is not None and state != "dead" and (seen is None or row.locked_at is not None or row.draining):
        state = "running" if state_of(row) == "busy" else state_of(row)
    if row is not None and seen is None:
        job = row.job_id
    return WorkerView(
        host=at[0],
        worker=at[1],
        state=state,
        queue=None if row is None else row.queue,
        job=job,
        note=(row.locked_reason or "") if row is not None and row.locked_at is not None else "",
        **_progress(seen),
    )


def _progress(seen: WatchedWorker | None) -> dict[str, Any]:
    if seen is None:
        return {"progress": False}
    names = ("phase", "steps", "steps_planned", "step_beat_age_s")
    return {"progress": True, **{name: getattr(seen, name) for name in names}}


def _jobs(store: JobStore, watched: Mapping[tuple[str, str], WatchedWorker]) -> list[JobView]:
    now, here = store.now(), reports(runtime_dir())
    unreadable: Any = lambda _: None  # noqa: E731 - `job list` says which
    found = store.queries.newest(limit=JOBS_MAX, states=_AT_WORK, unreadable=unreadable)
    jobs = [_job(each, watched.get((each.host or "", each.worker or "")), here, now) for each in found]
    return sorted(jobs, key=_calls)


def _calls(job: JobView) -> tuple[bool, float, int]:
    """Jobs that do not run come first, then those without a step beat for a minute."""
    age_s = job.step_beat_age_s or 0.0
    return job.state == State.RUNNING, -age_s if age_s >= QUIET_S else 0.0, job.job


def _job(job: Job, seen: WatchedWorker | None, here: Reports, now: float) -> JobView:
    its: dict[str, Any] = {"progress": False}
    if (report := report_of(job, here)) is not None:
        its = {"progress": True, "phase": report.phase, "steps": report.step, "steps_planned": report.steps_total}
        its["step_beat_age_s"] = silent_s(report, stamp())
    elif job.state is State.RUNNING and seen is not None and seen.job == job.job_id:
        its = _progress(seen)
    return JobView(
        job=job.job_id,
        state=job.state,
        task=task_of(job),
        queue=job.queue,
        host=job.host,
        worker=job.worker,
        age_s=now - (job.claimed_at or job.submitted_at),
        note=job.reason or "",
        **its,
    )


def _counts(store: JobStore) -> dict[str, int]:
    counts = dict.fromkeys((str(each) for each in State if each not in FINAL), 0)
    for row in queue_rows(store):
        for state, count in row.jobs.items():
            counts[state] = counts.get(state, 0) + count
    return {state: count for state, count in counts.items() if count}


def _hosts(report: Report, found: Sequence[Mapping[str, Any]], view: View) -> list[HostView]:
    executors = {
        part.name.removeprefix("executor "): "alive" if part.ok else part.says.partition(",")[0]
        for part in report.parts
        if part.name.startswith("executor ")
    }
    seen = {each["metric"].get("host", "") for each in found}
    queued = {each.host for each in view.workers}
    ledger = "unknown" if "episodes" in view.unknown else "none"
    return [
        HostView(
            host=host,
            executor=executors.get(host, ledger),
            mode=_mode([each for each in report.armed if each.host == host]),
            gpus=sum(each.host == host for each in view.gpus) if host in seen else None,
            workers=sum(each.host == host for each in view.workers) if host in seen | queued else None,
        )
        for host in sorted(seen | queued | {*executors})
    ]


def _mode(armed: Collection[Armed]) -> str:
    if not armed:
        return "unknown"
    on, asks = [each.remedy for each in armed if each.armed], any(each.approval for each in armed)
    if not on:
        return "dry run"
    return ("all" if len(on) == len(armed) else ", ".join(on)) + " armed" + (", with approval" if asks else "")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden top",
        description=f"Show hosts, GPUs, workers, jobs and open episodes, again every {WATCH_S:g} s until q or Ctrl-C. "
        "Metrics come from Prometheus, else from this host's exporter. What cannot be read is shown as unknown.",
    )
    add_sources(parser, ledger_required=False)
    parser.add_argument("--once", action="store_true", help="print one page; without a terminal this is the default")
    parser.add_argument("--json", action="store_true", help="print one JSON object; times are Unix seconds")
    return parser
