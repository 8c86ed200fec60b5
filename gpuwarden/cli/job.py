"""`gpuwarden job`: submit, list, wait for, cancel, block or requeue jobs."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from gpuwarden.cli import job_table
from gpuwarden.cli.acts import add_act, add_json, add_notify, add_reason, runtime_dir
from gpuwarden.cli.bars import BARS_MAX, Bars, at_terminal
from gpuwarden.cli.progress import Reports, figures, report_of, reports, silence, whole
from gpuwarden.cli.watch import watch
from gpuwarden.clock import stamp
from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from
from gpuwarden.format import (
    Parser,
    count_of,
    format_duration,
    format_time,
    format_utc_time,
    json_line,
    operator_name,
    show,
    show_json,
    trace_lines,
)
from gpuwarden.job import ATTEMPTS_MAX, FINAL, STALL_TIMEOUT_S, JobClass, JobId, State
from gpuwarden.queue import PRIORITY, BlockedError, Job, JobStore, Submission
from gpuwarden.queue.open import created, current, existing
from gpuwarden.state_file import JobFile
from gpuwarden.worker import job_logs

LOOK_S: Final = 1.0
"""Interval between checks while waiting, seconds."""

LIST_MAX: Final = 50
"""Default number of listed jobs."""

WAIT_TIMEOUT: Final = 124
"""Exit code of a wait that timed out."""

START_S: Final = 5.0
"""How long the log of a running job may be missing, seconds."""

DASHES: Final = "put -- before the command: gpuwarden job submit [options] -- python train.py"

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden job`."""
    parser = _parser()
    at = argv.index("--") if argv[:1] == ["submit"] and "--" in argv else len(argv)
    if at == len(argv) and argv[:1] == ["submit"] and argv[1:2] and not argv[1].startswith("-"):
        parser.error(DASHES)
    arguments = parser.parse_args(argv[:at])
    if arguments.act is _submit:
        if arguments.words:
            parser.error(DASHES)
        if argv[at:] == ["--"]:
            parser.error("missing the command after --")
        arguments.command = argv[at + 1 :]
        arguments.submission = _submission(arguments)  # invalid values are reported without a queue
    asks = arguments.act in (_list, _show, _wait, _logs)
    opened = existing if asks else created if arguments.act is _submit else current
    with closing(opened(arguments.queue_db)) as store:
        act: _Act = arguments.act
        return act(store, arguments)


def _submission(arguments: argparse.Namespace) -> Submission:
    payload = arguments.payload
    if arguments.command:
        if payload is not None or arguments.ranks != 1:
            raise GpuwardenError("a command takes no --payload and no --ranks: give its arguments after --")
        from gpuwarden.worker.commands import Command  # noqa: PLC0415 - other commands start faster without it

        payload = Command(
            argv=tuple(arguments.command), cwd=os.path.abspath(arguments.cwd or "."), env=tuple(arguments.env)  # noqa: PTH100 - keeps links
        ).payload  # fmt: skip
    elif arguments.env or arguments.cwd:
        raise GpuwardenError("--env and --cwd are for a command: put it after --")
    submission: Submission = made_from(
        arguments,
        Submission,
        payload=payload or {},
        job_class=None if arguments.job_class is None else JobClass(arguments.job_class),
        reports_steps=not arguments.no_steps,
        run_id=arguments.run,
        needs=tuple(arguments.needs),
    )
    if payload is None and arguments.model is None:
        raise GpuwardenError(
            "nothing to do: give a command after --, or the --payload that the worker's handler reads. For a function "
            """of a gpuwarden.Queue it is '{"task": "NAME", "arguments": {}}'; for a handler that reads nothing it """
            "is '{}'"
        )
    return submission


def _submit(store: JobStore, arguments: argparse.Namespace) -> int:
    submission = arguments.submission
    if arguments.command and submission.budget_s is None and not _has_budget(store, submission.queue):
        submission = replace(submission, budget_s=0.0)
    show(store.runs.submit(submission, now=store.now()))
    return 0


def _has_budget(store: JobStore, queue: str) -> bool:
    return any(each.queue == queue and each.budget_s is not None for each in store.queue_settings.all())


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    limit: int = arguments.limit
    if arguments.watch:
        with closing(store.changes()) as changes:
            return watch(
                lambda rows: _listed(store, arguments, min(limit or LIST_MAX, max(1, rows - 1)) if rows else limit),
                lambda: changes.wait(LOOK_S),
                now=store.now,
                in_place=not arguments.json,
            )
    listed = 0
    for number, line in enumerate(_listed(store, arguments, limit)):
        listed = number  # the heading is number 0
        show(line)
    if limit and listed == limit and not arguments.json:
        show(f"gpuwarden job: these are the newest {limit}; --limit 0 lists all", file=sys.stderr)
    return 0


def _listed(store: JobStore, arguments: argparse.Namespace, limit: int) -> Iterator[str]:
    """The heading and a line for each job, or only JSON."""
    states, here = frozenset(State(name) for name in arguments.state or State), reports(arguments.runtime_dir)
    broken = list[UnreadableRowError]()
    its: dict[str, Any] = {"queue": arguments.queue, "run_id": arguments.run, "unreadable": broken.append}
    found = store.queries.newest(limit=limit, states=states, **its)
    if not arguments.json:
        return job_table.lines(found, broken, here, now=store.now(), stamp=stamp())
    return map(json_line, _as_json(found, broken, here))


def _as_json(found: Iterable[Job], broken: list[UnreadableRowError], here: Reports) -> Iterator[dict[str, Any]]:
    for job in chain(found, (None,)):
        yield from ({"job_id": each.key, "unreadable": each.reason} for each in broken)
        broken.clear()
        if job is not None:
            yield {**asdict(job), "progress": figures(report_of(job, here), stamp())}


def _show(store: JobStore, arguments: argparse.Namespace) -> int:
    job = store.job(arguments.job)
    needs = store.runs.needs(job.job_id) if job.needs else []
    report = report_of(job, reports(arguments.runtime_dir))
    if arguments.json:
        show_json({**asdict(job), "needs_jobs": needs, "progress": figures(report, stamp())})
    else:
        show(*_page(job, needs, report))
    return 0


def _page(job: Job, needs: list[JobId], report: JobFile | None) -> Iterator[str]:
    for name, value in (
        ("job", job.job_id),
        ("state", job.state),
        ("reason", job.reason),
        ("queue", job.queue),
        ("class", job.job_class),
        ("model", job.model),
        ("run", job.run_id),
        ("needs", ", ".join(map(str, needs)) + f"; {job.pending} of {job.needs} are not done" if needs else None),
        ("rank", None if job.gang is None else f"{job.rank} of {job.ranks}; rank 0 is job {job.gang}"),
        ("priority", job.priority),
        ("attempt", f"{job.attempt} of {job.attempts_max} at most"),
        ("retries", f"{job.watchdog_retries} by gpuwarden, {job.reclaims} after lost leases" + _own_retries(job)),
        ("budget", f"{job.budget_s:g} s an attempt" if job.budget_s else "none"),
        ("silence", f"{job.stall_timeout_s:g} s allowed" if job.stall_timeout_s else "not policed"),
        ("worker", job.worker and f"{job.worker} on {job.host}"),
        ("submitted", format_time(job.submitted_at)),
        ("queued", job.queued_at and format_time(job.queued_at)),
        ("claimed", job.claimed_at and _after(job.claimed_at, job.queued_at, "waiting")),
        ("ended", job.ended_at and _after(job.ended_at, job.claimed_at, "an attempt of")),
        ("payload", json.dumps(job.payload)),
        ("result", None if job.result is None else json.dumps(job.result)),
    ):
        if value is not None:
            yield f"{name:9} {value!s}"
    if report is not None:
        silent = silence(report, stamp())
        yield f"{'progress':9} {whole(report)}" + ("" if silent is None else f", silent {silent}")
        if report.items_done or report.items_failed:
            yield f"{'items':9} {report.items_done} done, {report.items_failed} failed"
    elif job.state is State.RUNNING:
        yield f"{'progress':9} its worker's files are not on this host, or not in --runtime-dir"
    if job.traceback is not None:
        yield "traceback" if job.state is State.FAILED else "traceback of an earlier attempt"
        yield from (f"    {line}" for line in trace_lines(job.traceback))


def _own_retries(job: Job) -> str:
    if not job.retries_max:
        return ""
    due = f", next at {format_time(job.retry_at)}" if job.state is State.QUEUED and job.retry_at else ""
    return f", {job.retries} of {job.retries_max} after exceptions{due}"


def _after(at: float, since: float | None, what: str) -> str:
    return format_time(at) + ("" if since is None or since > at else f", after {what} {format_duration(at - since)}")


def _wait(store: JobStore, arguments: argparse.Namespace) -> int:
    """0 if all completed, 1 if one ended otherwise, 124 at the timeout."""
    for job_id in arguments.job:
        store.job(job_id)  # fails for an unknown job, which would never end
    left, code = set(arguments.job), 0
    deadline_s = math.inf if arguments.timeout_s is None else time.monotonic() + arguments.timeout_s
    bars = Bars(arguments.runtime_dir) if at_terminal() else None
    with closing(store.changes()) as changes, bars or nullcontext():
        while True:
            states = store.queries.states_of(left)
            for job_id, state in sorted(states.items()):
                if state in FINAL:
                    left.discard(job_id)
                    code = max(code, int(state is not State.COMPLETED))
                    show(f"{job_id} {state}", flush=True)
            if bars is not None:
                running = sorted(job_id for job_id, state in states.items() if state is State.RUNNING)
                bars.update(store.job(job_id) for job_id in running[:BARS_MAX])
            left_s = deadline_s - time.monotonic()
            if not left:
                return code
            if left_s <= 0:
                show(f"gpuwarden job: timeout: not ended yet: {', '.join(map(str, sorted(left)))}", file=sys.stderr)
                return WAIT_TIMEOUT
            # PostgreSQL does not notify of every end, as notifications serialize commits.
            changes.wait(min(left_s, LOOK_S))


def _cancel(store: JobStore, arguments: argparse.Namespace) -> int:
    """Warn about jobs of lost hosts: their processes may still run (D7)."""
    lost = list(store.queries.newest(states=frozenset({State.HOST_LOST})))
    code = _cancel_them(store, arguments)
    stands = store.queries.states_of(job.job_id for job in lost)
    for job in lost:
        if stands[job.job_id] is State.CANCELLED:
            show(
                f"gpuwarden job: job {job.job_id} is lost with host {job.host or ''}: its process may "
                "still run and stops within a second once it reaches the queue",
                file=sys.stderr,
            )
    return code


def _cancel_them(store: JobStore, arguments: argparse.Namespace) -> int:
    reason = _describe("cancelled", arguments.reason)
    if arguments.run is not None:
        ids = store.admin.cancel_run(arguments.run, reason=reason, now=store.now())
        show(f"{count_of(len(ids), 'job')} cancelled: {', '.join(map(str, ids)) or 'none'}")
        return 0
    if not arguments.job:
        return _refuse("missing JOB or --run RUN")
    return _each(
        store, arguments.job, lambda job_id: store.admin.cancel(job_id, reason=reason, now=store.now()), "it is over"
    )


def _requeue(store: JobStore, arguments: argparse.Namespace) -> int:
    """Submit a copy of an ended job."""
    job = store.job(arguments.job)
    if job.state not in FINAL:
        return _refuse(f"job {job.job_id} is {job.state}: only an ended job can be requeued; cancel the job first")
    reports_steps = job.stall_timeout_s > 0
    again = made_from(
        job, Submission, reports_steps=reports_steps, run_id=arguments.run, budget_s=job.submitted_budget_s, needs=(),
        notify=store.outbox.address_of(job.job_id),
    )  # fmt: skip
    show(store.runs.submit(again, now=store.now()))
    return 0


def _logs(store: JobStore, arguments: argparse.Namespace) -> int:
    path = _log(store, arguments)

    def goes_on() -> bool:
        now = store.job(arguments.job)
        return now.state in (State.RUNNING, State.HOST_LOST) and path.name == job_logs.name_of(now.job_id, now.attempt)

    for line in job_logs.lines(path, goes_on=goes_on if arguments.follow else None):
        show(line.removesuffix("\n").expandtabs(), end="\n" if line.endswith("\n") else "", flush=True)
    return 0


def _log(store: JobStore, arguments: argparse.Namespace) -> Path:
    """The log of the attempt. `--follow` waits for the start of the job."""
    folder: Path = arguments.logs or job_logs.default_folder(arguments.queue_db)
    waits_s = START_S
    while True:
        job = None
        with suppress(UnreadableRowError):
            job = store.job(arguments.job)  # fails for an unknown job
        since = 0.0 if job is None else job.submitted_at
        try:
            return job_logs.newest(folder, arguments.job, arguments.attempt, submitted_at=since)
        except job_logs.JobLogError as missing:
            if job is None or job.state in FINAL or waits_s <= 0:
                raise
            if not arguments.follow:
                raise GpuwardenError(f"job {job.job_id} is {job.state}: {missing}; --follow waits for it") from None
        waits_s -= LOOK_S if job.state is State.RUNNING else 0.0
        time.sleep(LOOK_S)


def _block(store: JobStore, arguments: argparse.Namespace) -> int:
    now = store.now()
    reason = _describe("blocked", arguments.reason, at=now)
    return _each(
        store,
        arguments.job,
        lambda job_id: store.admin.block(job_id, reason=reason, now=now),
        "only a queued or waiting job can be blocked",
    )


def _unblock(store: JobStore, arguments: argparse.Namespace) -> int:
    now = store.now()
    reason = _describe("unblocked", "", at=now)
    return _each(
        store,
        arguments.job,
        lambda job_id: store.admin.unblock(job_id, reason=reason, now=now),
        "only a blocked job can be unblocked",
    )


def _each(store: JobStore, jobs: list[int], act: Callable[[int], bool], otherwise: str) -> int:
    """Apply an action to each job and report failures."""
    code = 0
    for job_id in jobs:
        try:
            done = act(job_id)
        except BlockedError as refused:
            code = _refuse(str(refused))
            continue
        if not done:
            code = _refuse(f"job {job_id} is {store.job(job_id).state}: {otherwise}")
    return code


def _refuse(reason: str) -> int:
    show(f"gpuwarden job: {reason}", file=sys.stderr)
    return 1


def _describe(act: str, reason: str, *, at: float | None = None) -> str:
    """The operator and the reason, with the time if the job has no field for it."""
    done = f"{act} by {operator_name()}" + ("" if at is None else f", {format_utc_time(at)}")
    return done + (f": {reason}" if reason else "")


_DESCRIPTION: Final = "Submit, list, wait for, cancel, block or requeue jobs."


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpuwarden job", description=_DESCRIPTION)
    acts = parser.add_subparsers(required=True)

    submit = add_act(acts, "submit", _submit, "submit a job, or a command; prints its id")
    submit.usage = "gpuwarden job submit [options] [-- CMD...]"
    submit.add_argument("--queue", default="gpu", help="queue (default: %(default)s)")
    submit.add_argument(
        "--class",
        dest="job_class",
        choices=list(JobClass),
        help="job class, which sets the default budget; default: the class of the queue",
    )
    submit.add_argument(
        "--model",
        help="model that the job needs; workers that have loaded this model claim the job first; default: none",
    )
    _add_work(submit)
    submit.add_argument("--run", help="run of the job; a failed job fails its run; default: none")
    submit.add_argument(
        "--needs", action="append", default=[], type=int, metavar="JOB",
        help="job of the same run that must complete first; repeatable",
    )  # fmt: skip
    submit.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="number of workers that run the job together, as a gang (default: %(default)s)",
    )
    submit.add_argument(
        "--priority", type=int, default=PRIORITY, help="a job with a lower number runs sooner (default: %(default)s)"
    )
    submit.add_argument("--steps-total", type=int, help="number of planned steps, for display only; default: unknown")
    submit.add_argument(
        "--budget-s",
        type=float,
        help="maximum time of one attempt, seconds; default: the budget of the queue, else of the class (a command: "
        "else none)",
    )
    submit.add_argument(
        "--stall-timeout-s",
        type=float,
        help="a job without activity for this long counts as stalled, seconds; 0 turns this off "
        f"(default: {STALL_TIMEOUT_S:g}; only for class gpu)",
    )
    submit.add_argument(
        "--busy-timeout-s",
        type=float,
        help="time without a step beat for which heavy I/O or computing counts as activity in the phase step, seconds "
        "(default: the host's --busy-timeout-s)",
    )
    _tries(submit)
    submit.add_argument("--no-steps", action="store_true", help="the job reports no steps, so no stall timeout applies")

    listing = add_act(
        acts,
        "list",
        _list,
        "list the newest jobs, oldest first; AGE is the time from submit to end or now, SILENT "
        "the age of the last step beat, of its limit",
    )
    listing.add_argument("--queue", help="only this queue")
    listing.add_argument("--run", help="only this run")
    listing.add_argument(
        "--limit", type=_count, default=LIST_MAX, metavar="N", help="number of jobs; 0 lists all (default: %(default)s)"
    )
    listing.add_argument("--watch", action="store_true", help="show the list again at every change, until Ctrl-C")
    listing.add_argument("--state", action="append", choices=list(State), help="only this state; repeatable")
    add_json(listing)

    show = add_act(acts, "show", _show, "show a job, with its progress if it runs on this host")
    show.add_argument("job", type=int, metavar="JOB", help="id of the job")
    add_json(show, "print one JSON object")

    wait = add_act(
        acts, "wait", _wait, "wait until jobs have ended; exit code 0 completed, 1 failed or cancelled, 124 timeout"
    )
    wait.add_argument("job", type=int, metavar="JOB", nargs="+", help="ids of jobs")
    wait.add_argument("--timeout-s", type=float, help="timeout, seconds; default: none")
    for each in (listing, show, wait):
        _dir(each)

    cancel = add_act(acts, "cancel", _cancel, "cancel jobs; their workers stop within a second")
    cancel.add_argument("job", type=int, metavar="JOB", nargs="*", help="ids of jobs")
    cancel.add_argument("--run", help="cancel a run and all its jobs")
    add_reason(cancel)

    requeue = add_act(acts, "requeue", _requeue, "submit an ended job again; prints the new id")
    requeue.add_argument("job", type=int, metavar="JOB", help="id of the job")
    requeue.add_argument("--run", help="run of the new job; default: none")

    logs = add_act(acts, "logs", _logs, "print the log of an attempt that ran on this host")
    logs.add_argument("job", type=int, metavar="JOB", help="id of the job")
    logs.add_argument("--attempt", type=int, help="number of the attempt; default: the latest with a log")
    logs.add_argument("--follow", action="store_true", help="wait for the start, and follow until the attempt ends")
    log_dir = os.environ.get("GPUWARDEN_JOB_LOG_DIR")
    logs.add_argument("--logs", type=Path, metavar="DIR", default=None if log_dir is None else Path(log_dir),
                      help="--logs folder of the job's worker; default: $GPUWARDEN_JOB_LOG_DIR, else that of this user "
                           "for the queue")  # fmt: skip

    block = add_act(acts, "block", _block, "block jobs that have not started: no worker claims them")
    block.add_argument("job", type=int, metavar="JOB", nargs="+", help="ids of jobs")
    add_reason(block)

    unblock = add_act(acts, "unblock", _unblock, "unblock jobs: workers may claim them again")
    unblock.add_argument("job", type=int, metavar="JOB", nargs="+", help="ids of jobs")
    return parser


def _tries(submit: argparse.ArgumentParser) -> None:
    add_notify(submit, "job")
    submit.add_argument(
        "--attempts-max",
        type=int,
        default=ATTEMPTS_MAX,
        help="the job fails after this number of attempts (default: %(default)s)",
    )
    submit.add_argument(
        "--retries-max",
        type=int,
        default=0,
        help="retries after an exception of the job, with a wait that doubles from 5 s to 300 s (default: %(default)s)",
    )


def _add_work(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    submit.add_argument(
        "--payload", type=_object, help="JSON object for the handler; required without --model or a command"
    )
    submit.add_argument(
        "--cwd", metavar="DIR", help="working directory of the command on the worker's host; default: this one"
    )
    submit.add_argument(
        "--env", action="append", default=[], metavar="NAME",
        help="variable of the worker that the command needs; PATH, HOME and such need no option. Repeatable. The queue "
        "does not store its value",
    )  # fmt: skip


def _dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        default=runtime_dir(),
        help="folder of state files; default: $GPUWARDEN_RUNTIME_DIR, else that of this user's running `gpuwarden up`",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid number {text!r}: use a whole number, 0 or more")
    return int(text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, such as '{\"steps\": 20}'")
    return value
