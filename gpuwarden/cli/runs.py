"""`gpuwarden runs`: submit runs of jobs from a file, list, show and cancel them.

The file is a JSON object, in UTF-8:

- `run`: the run's name; `--run` overrides it. An existing run grows, unless it failed or was cancelled.
- `jobs`: an object of jobs by name. The names are used in this file only. A job has any of `queue` (default `gpu`),
  `class`, `model`, `payload`, `priority`, `steps_total`, `budget_s`, `stall_timeout_s`, `busy_timeout_s`,
  `attempts_max`, `retries_max`, `ranks`, `notify`, `reports_steps` (default true), as in `gpuwarden job submit`, and
  `needs`: names of jobs that must complete first.

The run is submitted in one transaction.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpuwarden.cli.acts import add_act, add_json, add_notify, add_reason
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, count_of, format_duration, format_time, operator_name, show, show_json, table
from gpuwarden.job import FINAL, ItemState, JobClass, State
from gpuwarden.queue import JobStore, Run, Submission
from gpuwarden.queue.open import created, current, existing

_Act = Callable[[argparse.Namespace], int]

LIST_MAX: Final = 50
"""Default number of listed runs."""

_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "queue": ((str,), "a text"),
    "class": ((str,), "a text"),
    "model": ((str,), "a text"),
    "payload": ((dict,), "an object"),
    "priority": ((int,), "a whole number"),
    "steps_total": ((int,), "a whole number"),
    "attempts_max": ((int,), "a whole number"),
    "retries_max": ((int,), "a whole number"),
    "ranks": ((int,), "a whole number"),
    "budget_s": ((int, float), "a number"),
    "stall_timeout_s": ((int, float), "a number"),
    "busy_timeout_s": ((int, float), "a number"),
    "reports_steps": ((bool,), "true or false"),
    "notify": ((str,), "a text"),
    "needs": ((list,), "a list of names"),
}


class RunFileError(GpuwardenError):
    """A run file is invalid."""


def command(argv: list[str]) -> int:
    """`gpuwarden runs`."""
    arguments = _parser().parse_args(argv)
    act: _Act = arguments.act
    return act(arguments)


def parse(text: str) -> tuple[str | None, dict[str, Submission], dict[str, list[str]]]:
    """Parse a file: the run's name, if any, its jobs, and their needs.

    Raises:
        RunFileError: the file is invalid.
    """
    try:
        whole = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"it is not JSON: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("jobs"), dict) or not whole["jobs"]:
        raise RunFileError('it is not an object with "jobs": {"NAME": {...}, ...}')
    if strange := set(whole) - {"run", "jobs"}:
        raise RunFileError(f"unknown key {min(strange)!r}: use `run` and `jobs`")
    run_id = whole.get("run")
    if run_id is not None and not isinstance(run_id, str):
        raise RunFileError("`run` must be a text")
    submissions: dict[str, Submission] = {}
    needs: dict[str, list[str]] = {}
    for name, its in whole["jobs"].items():
        _check(name, its)
        settings = {key: value for key, value in its.items() if key not in ("needs", "class")}
        try:
            job_class = None if "class" not in its else JobClass(its["class"])
        except ValueError:
            raise RunFileError(
                f"job {name!r}: unknown class {its['class']!r}: use one of {', '.join(JobClass)}"
            ) from None
        try:
            submissions[name] = Submission(**{"queue": "gpu", **settings}, job_class=job_class)
        except GpuwardenError as error:
            raise RunFileError(f"job {name!r}: {error}") from None
        needs[name] = its.get("needs", [])
    return run_id, submissions, needs


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, which would drop a job."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RunFileError(f"duplicate key {name!r}")
        found[name] = value
    return found


def _check(name: str, its: Any) -> None:
    if not isinstance(its, dict):
        raise RunFileError(f"job {name!r} is not an object")
    for key, value in its.items():
        if key not in _KINDS:
            raise RunFileError(f"job {name!r}: unknown key {key!r}: use {', '.join(_KINDS)}")
        kinds, wanted = _KINDS[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise RunFileError(f"job {name!r}: `{key}` must be {wanted}")
    if not all(isinstance(each, str) for each in its.get("needs", [])):
        raise RunFileError(f"job {name!r}: `needs` must be a list of names")


def _submit(arguments: argparse.Namespace) -> int:
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"cannot read {arguments.file} ({why}): give a JSON file in UTF-8, or - for standard input"
        raise RunFileError(message) from None
    try:
        run_id, submissions, needs = parse(text)
    except RunFileError as error:
        raise RunFileError(f"{arguments.file}: {error}") from None
    run_id = arguments.run or run_id
    if run_id is None:
        raise RunFileError(f'{arguments.file} names no run: add "run": "NAME", or give --run NAME')
    wrangled = _machine_wrangles() if arguments.wrangle is None else arguments.wrangle
    with closing(created(arguments.queue_db)) as store:
        ids = store.runs.submit_run(
            run_id, submissions, needs=needs, wrangled=wrangled, notify=arguments.notify, now=store.now()
        )
    if arguments.json:
        show_json({"run": run_id, "jobs": ids})
    else:
        for name, job_id in ids.items():
            show(f"{job_id} {name}")
    return 0


def _machine_wrangles() -> bool | None:
    """The default of `--wrangle`, from `$GPUWARDEN_WRANGLE_RUNS`."""
    value = os.environ.get("GPUWARDEN_WRANGLE_RUNS", "")
    if value not in ("", "0", "1"):
        raise GpuwardenError(f"$GPUWARDEN_WRANGLE_RUNS is {value[:80]!r}: use 1 to wrangle runs of this host, or 0")
    return None if value == "" else value == "1"


def _list(arguments: argparse.Namespace) -> int:
    with closing(existing(arguments.queue_db)) as store:
        now, runs = store.now(), store.queries.newest_runs(limit=arguments.limit, state=arguments.state)
    if arguments.json:
        for run in runs:
            show_json(asdict(run))
    elif runs:
        head = ("RUN", "STATE", "DONE", "SUBMITTED", "FOR", "JOBS")
        show(*table(head, [_row(run, now) for run in runs]))
    if len(runs) == arguments.limit and not arguments.json:
        show(f"gpuwarden runs: these are the newest {len(runs)}; --limit 0 lists all", file=sys.stderr)
    return 0


def _row(run: Run, now: float) -> tuple[str, ...]:
    lasted_s = (now if run.ended_at is None else run.ended_at) - run.submitted_at
    return (
        run.run_id, run.state, _done(run), format_time(run.submitted_at), format_duration(lasted_s), _jobs(run)
    )  # fmt: skip


def _show(arguments: argparse.Namespace) -> int:
    with closing(existing(arguments.queue_db)) as store:
        run = _known(store, arguments.run)
        jobs = list(store.queries.newest(limit=0, run_id=run.run_id))
        items = store.items.of_run(run.run_id)
        if arguments.json:
            needs = {job.job_id: store.runs.needs(job.job_id) if job.needs else [] for job in jobs}
            listed = [{**asdict(job), "needs_jobs": needs[job.job_id]} for job in jobs]
            show_json({**asdict(run), "all": listed, "items": [asdict(item) for item in items]})
            return 0
    ended = "" if run.ended_at is None else f", ended {format_time(run.ended_at)}"
    show(f"run {run.run_id}: {run.state}, submitted {format_time(run.submitted_at)}{ended}")
    if run.forgiven_at is not None:
        show(f"  forgiven {format_time(run.forgiven_at)} by {run.forgiven_by or ''}")
    show(f"  {_done(run)} jobs are over: {_jobs(run)}")
    for job in jobs:
        if job.state in FINAL and job.state is not State.FAILED and not arguments.all:
            continue
        waits = f"needs {job.pending} more" if job.pending else ""
        worker = f"on {job.worker} of {job.host or ''}" if job.worker else ""
        details = "; ".join(each for each in (waits, worker, (job.reason or "")) if each)
        show(f"  {job.job_id:>6} {job.state:10} {job.queue:10} {details}".rstrip())
    if items:
        counts = Counter(item.state for item in items)
        show(f"  {len(items)} items: {', '.join(f'{counts[state]} {state}' for state in ItemState if counts[state])}")
    for item in items:
        if item.state is ItemState.FAILED:
            show(f"  {item.item} failed on {item.worker or ''}: {item.reason or ''}")
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    reason = f"cancelled by {operator_name()}" + (f": {arguments.reason}" if arguments.reason else "")
    with closing(current(arguments.queue_db)) as store:
        run = _known(store, arguments.run)
        if run.state != "running":
            raise GpuwardenError(f"run {run.run_id!r} has ended: it is {run.state}")
        ids = store.admin.cancel_run(run.run_id, reason=reason, now=store.now())
    show(f"{count_of(len(ids), 'job')} cancelled: {', '.join(map(str, ids)) or 'none'}")
    return 0


def _known(store: JobStore, run_id: str) -> Run:
    run = store.runs.get(run_id)
    if run is None:
        raise GpuwardenError(f"the queue has no run {run_id!r}: see `gpuwarden runs list`")
    return run


def _done(run: Run) -> str:
    return f"{sum(run.jobs.get(state, 0) for state in FINAL)} of {sum(run.jobs.values())}"


def _jobs(run: Run) -> str:
    return ", ".join(f"{run.jobs[state]} {state}" for state in State if state in run.jobs) or "none"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpuwarden runs", description="Runs: jobs that are submitted together.")
    acts = parser.add_subparsers(required=True)

    submit = add_act(acts, "submit", _submit, "submit a run from a file in one transaction; prints each job's id")
    submit.add_argument("file", metavar="FILE", help="JSON, see docs/reference/formats.md; - reads standard input")
    submit.add_argument("--run", help="name of the run, instead of the file's")
    add_json(submit, "print one JSON object")
    submit.add_argument(
        "--wrangle",
        action=argparse.BooleanOptionalAction,
        help="find faulty workers and jobs by its items (docs/how-to/faulty-workers.md); "
        "default: $GPUWARDEN_WRANGLE_RUNS (1 or 0), else unchanged",
    )

    add_notify(submit, "run")

    listing = add_act(acts, "list", _list, "list the newest runs, with job counts")
    listing.add_argument("--state", choices=("running", "completed", "failed", "cancelled"), help="only this state")
    listing.add_argument(
        "--limit", type=int, default=LIST_MAX, metavar="N", help="number of runs; 0 lists all (default: %(default)s)"
    )
    add_json(listing)

    show = add_act(acts, "show", _show, "show a run, its unfinished and failed jobs, and its items")
    show.add_argument("run", metavar="RUN", help="name of the run")
    show.add_argument("--all", action="store_true", help="include completed and cancelled jobs")
    add_json(show, "print one JSON object, with every job and item")

    cancel = add_act(acts, "cancel", _cancel, "cancel a run and its unfinished jobs")
    cancel.add_argument("run", metavar="RUN", help="name of the run")
    add_reason(cancel)
    return parser
