"""`gpuwarden runs`: jobs that belong together, submitted from a file, and what becomes of them as a whole.

The file is a JSON object, in UTF-8:

- `run`: the run's name, unless `--run` says it. A run of that name that is there grows, unless it has failed or was
  cancelled.
- `jobs`: an object; its keys are names that mean something in this file alone, its values objects with any of `queue`
  (`gpu` when not given), `class`, `model`, `payload`, `priority`, `steps_total`, `budget_s`, `stall_timeout_s`,
  `attempts_max`, `ranks`, `reports_steps` (true when not given), as `gpuwarden job submit` has them, and `needs`: the
  names of the jobs that must have completed before.

All of it is submitted in one transaction, or nothing.
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

from gpuwarden.cli.acts import add_act, add_because, add_json
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import ago, plain, when, who
from gpuwarden.job import FINAL, ItemState, JobClass, State
from gpuwarden.queue import JobStore, Run, Submission
from gpuwarden.queue.open import current, existing

_Act = Callable[[argparse.Namespace], int]

LIST_MAX: Final = 50
"""How many runs are listed where nobody says."""

_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "queue": ((str,), "a text"),
    "class": ((str,), "a text"),
    "model": ((str,), "a text"),
    "payload": ((dict,), "an object"),
    "priority": ((int,), "a whole number"),
    "steps_total": ((int,), "a whole number"),
    "attempts_max": ((int,), "a whole number"),
    "ranks": ((int,), "a whole number"),
    "budget_s": ((int, float), "a number"),
    "stall_timeout_s": ((int, float), "a number"),
    "reports_steps": ((bool,), "true or false"),
    "needs": ((list,), "a list of names"),
}


class RunFileError(GpuwardenError):
    """A file does not describe a run."""


def command(argv: list[str]) -> int:
    """`gpuwarden runs`."""
    arguments = _parser().parse_args(argv)
    act: _Act = arguments.act
    return act(arguments)


def parse(text: str) -> tuple[str | None, dict[str, Submission], dict[str, list[str]]]:
    """What a file says: the run's name, where it has one, its jobs, and what each of them needs.

    Raises:
        RunFileError: it is not as this module's head says.
    """
    try:
        whole = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"it is no JSON: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("jobs"), dict) or not whole["jobs"]:
        raise RunFileError('it is no object with "jobs": {"NAME": {...}, ...}')
    if strange := set(whole) - {"run", "jobs"}:
        raise RunFileError(f"{min(strange)!r} is unknown: `run` and `jobs` are known")
    run_id = whole.get("run")
    if run_id is not None and not isinstance(run_id, str):
        raise RunFileError("`run` is to be a text")
    submissions: dict[str, Submission] = {}
    needs: dict[str, list[str]] = {}
    for name, its in whole["jobs"].items():
        _check(name, its)
        told = {key: value for key, value in its.items() if key not in ("needs", "class")}
        try:
            job_class = None if "class" not in its else JobClass(its["class"])
        except ValueError:
            raise RunFileError(f"job {name!r}: {its['class']!r} is no class: {', '.join(JobClass)} are") from None
        try:
            submissions[name] = Submission(**{"queue": "gpu", **told}, job_class=job_class)
        except GpuwardenError as error:
            raise RunFileError(f"job {name!r}: {error}") from None
        needs[name] = its.get("needs", [])
    return run_id, submissions, needs


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that stands twice would lose a job without a word."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RunFileError(f"{name!r} stands twice in one object")
        found[name] = value
    return found


def _check(name: str, its: Any) -> None:
    if not isinstance(its, dict):
        raise RunFileError(f"job {name!r} is no object")
    for key, value in its.items():
        if key not in _KINDS:
            raise RunFileError(f"job {name!r}: {key!r} is unknown: {', '.join(_KINDS)} are known")
        kinds, wanted = _KINDS[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise RunFileError(f"job {name!r}: `{key}` is to be {wanted}")
    if not all(isinstance(each, str) for each in its.get("needs", [])):
        raise RunFileError(f"job {name!r}: `needs` is to be a list of names")


def _submit(arguments: argparse.Namespace) -> int:
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{arguments.file} cannot be read: {error}") from None
    try:
        run_id, submissions, needs = parse(text)
    except RunFileError as error:
        raise RunFileError(f"{arguments.file}: {error}") from None
    run_id = arguments.run or run_id
    if run_id is None:
        raise RunFileError(f'{arguments.file} names no run: give it "run": "NAME", or say --run NAME')
    wrangled = _machine_wrangles() if arguments.wrangle is None else arguments.wrangle
    with closing(JobStore.open(arguments.queue_db)) as store:
        ids = store.runs.submit_run(run_id, submissions, needs=needs, wrangled=wrangled, now=store.now())
    if arguments.json:
        print(json.dumps({"run": run_id, "jobs": ids}))
    else:
        for name, job_id in ids.items():
            print(f"{job_id} {plain(name)}")
    return 0


def _machine_wrangles() -> bool | None:
    """What `$GPUWARDEN_WRANGLE_RUNS` says of the runs that are submitted on this machine."""
    told = os.environ.get("GPUWARDEN_WRANGLE_RUNS", "")
    if told not in ("", "0", "1"):
        raise GpuwardenError(
            f"$GPUWARDEN_WRANGLE_RUNS is {told[:80]!r}: 1 has the runs of this machine judged, 0 has not"
        )
    return None if told == "" else told == "1"


def _list(arguments: argparse.Namespace) -> int:
    with closing(existing(arguments.queue_db)) as store:
        now, runs = store.now(), store.queries.newest_runs(limit=arguments.limit, state=arguments.state)
    if not arguments.json and runs:
        print(f"{'RUN':24} {'STATE':10} {'DONE':>11} {'SUBMITTED':19} {'FOR':12} JOBS")
    for run in runs:
        if arguments.json:
            print(json.dumps(asdict(run)))
            continue
        ended_at = now if run.ended_at is None else run.ended_at
        print(
            f"{plain(run.run_id):24} {run.state:10} {_done(run):>11} {when(run.submitted_at):19} "
            f"{ago(ended_at - run.submitted_at):12} {_jobs(run)}"
        )
    if len(runs) == arguments.limit and not arguments.json:
        print(f"gpuwarden runs: these are the newest {len(runs)}; --limit 0 lists all", file=sys.stderr)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with closing(existing(arguments.queue_db)) as store:
        run = _known(store, arguments.run)
        jobs = list(store.queries.newest(limit=0, run_id=run.run_id))
        items = store.items.of_run(run.run_id)
        if arguments.json:
            needs = {job.job_id: store.runs.needs(job.job_id) if job.needs else [] for job in jobs}
            listed = [{**asdict(job), "needs_jobs": needs[job.job_id]} for job in jobs]
            print(json.dumps({**asdict(run), "all": listed, "items": [asdict(item) for item in items]}))
            return 0
    ended = "" if run.ended_at is None else f", ended {when(run.ended_at)}"
    print(f"run {plain(run.run_id)}: {run.state}, submitted {when(run.submitted_at)}{ended}")
    if run.forgiven_at is not None:
        print(f"  forgiven {when(run.forgiven_at)} by {plain(run.forgiven_by or '')}")
    print(f"  {_done(run)} jobs are over: {_jobs(run)}")
    for job in jobs:
        if job.state in FINAL and job.state is not State.FAILED and not arguments.all:
            continue
        waits = f"needs {job.pending} more" if job.pending else ""
        worker = f"on {plain(job.worker)} of {plain(job.host or '')}" if job.worker else ""
        told = "; ".join(each for each in (waits, worker, plain(job.because or "")) if each)
        print(f"  {job.job_id:>6} {job.state:10} {plain(job.queue):10} {told}".rstrip())
    if items:
        counts = Counter(item.state for item in items)
        print(f"  {len(items)} items: {', '.join(f'{counts[state]} {state}' for state in ItemState if counts[state])}")
    for item in items:
        if item.state is ItemState.FAILED:
            print(f"  {plain(item.item)} failed on {plain(item.worker or '')}: {plain(item.because or '')}")
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    because = f"cancelled by {who()}" + (f": {arguments.reason}" if arguments.reason else "")
    with closing(current(arguments.queue_db)) as store:
        run = _known(store, arguments.run)
        if run.state != "running":
            raise GpuwardenError(f"run {run.run_id!r} has ended: it is {run.state}")
        ids = store.admin.cancel_run(run.run_id, because=because, now=store.now())
    print(f"{len(ids)} jobs cancelled: {', '.join(map(str, ids)) or 'none was left'}")
    return 0


def _known(store: JobStore, run_id: str) -> Run:
    run = store.runs.get(run_id)
    if run is None:
        raise GpuwardenError(f"the queue has no run {run_id!r}: `gpuwarden runs list` names them")
    return run


def _done(run: Run) -> str:
    return f"{sum(run.jobs.get(state, 0) for state in FINAL)} of {sum(run.jobs.values())}"


def _jobs(run: Run) -> str:
    return ", ".join(f"{run.jobs[state]} {state}" for state in State if state in run.jobs) or "none"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden runs", description="Jobs that belong together.")
    acts = parser.add_subparsers(required=True, metavar="ACT")

    submit = add_act(acts, "submit", _submit, "submit a run from a file: all of it, or nothing; prints each job's id")
    submit.add_argument("file", metavar="FILE", help="JSON, as docs/queue-commands.md says; - is the standard input")
    submit.add_argument("--run", help="the run's name, whatever the file says")
    add_json(submit, "one JSON object")
    submit.add_argument(
        "--wrangle",
        action=argparse.BooleanOptionalAction,
        help="have its workers and it judged by how its items go (docs/wrangling.md); as $GPUWARDEN_WRANGLE_RUNS says "
        "(1 or 0) when not given, and as it was, or not, when neither is",
    )

    listing = add_act(acts, "list", _list, "the runs submitted last, with their jobs by state")
    listing.add_argument("--state", choices=("running", "completed", "failed", "cancelled"), help="only these")
    listing.add_argument(
        "--limit", type=int, default=LIST_MAX, metavar="N", help="how many; 0 is all (default: %(default)s)"
    )
    add_json(listing)

    show = add_act(acts, "show", _show, "one run, its jobs that are not over or have failed, and its items")
    show.add_argument("run", metavar="RUN")
    show.add_argument("--all", action="store_true", help="those that have completed or were cancelled too")
    add_json(show, "one JSON object, with every job and item")

    cancel = add_act(acts, "cancel", _cancel, "end a run, and its jobs that are not over")
    cancel.add_argument("run", metavar="RUN")
    add_because(cancel)
    return parser
