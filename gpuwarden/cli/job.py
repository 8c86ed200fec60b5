"""`gpuwarden job`: put jobs in the queue, see what becomes of them, and a person's hand on them."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpuwarden.cli.acts import add_act, add_because, add_json
from gpuwarden.cli.progress import figures, report_of, reports, short, whole
from gpuwarden.fields import made_from
from gpuwarden.format import ago, plain, stamp, when, who
from gpuwarden.job import ATTEMPTS_MAX, FINAL, JobClass, JobId, State
from gpuwarden.queue import PRIORITY, BlockedError, Job, JobStore, Submission
from gpuwarden.queue.open import current, existing
from gpuwarden.reporter import state_directory
from gpuwarden.state_file import JobFile
from gpuwarden.worker import job_logs

LOOK_S: Final = 1.0
"""Who waits for jobs also looks by itself this often, seconds."""

LIST_MAX: Final = 50
"""How many jobs are listed where nobody says."""

WAIT_TIMEOUT: Final = 2
"""The exit code of a wait that was over before its jobs."""

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden job`."""
    arguments = _parser().parse_args(argv)
    if arguments.act is _submit:
        arguments.submission = _submission(arguments)  # what will not do is told without a queue
    asks = arguments.act in (_list, _show, _wait, _logs)
    opened = existing if asks else JobStore.open if arguments.act is _submit else current
    with closing(opened(arguments.queue_db)) as store:
        act: _Act = arguments.act
        return act(store, arguments)


def _submission(arguments: argparse.Namespace) -> Submission:
    return made_from(
        arguments,
        Submission,
        job_class=None if arguments.job_class is None else JobClass(arguments.job_class),
        reports_steps=not arguments.no_steps,
        run_id=arguments.run,
        needs=tuple(arguments.needs),
    )


def _submit(store: JobStore, arguments: argparse.Namespace) -> int:
    print(store.runs.submit(arguments.submission, now=store.now()))
    return 0


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    if not arguments.watch:
        return _list_once(store, arguments)
    with closing(store.changes()) as changes:
        while True:
            print("\x1b[H\x1b[J" if sys.stdout.isatty() else "", end="")
            _list_once(store, arguments)
            sys.stdout.flush()
            changes.wait(LOOK_S)


def _list_once(store: JobStore, arguments: argparse.Namespace) -> int:
    states = frozenset(State(name) for name in arguments.state or State)
    found = store.queries.newest(limit=arguments.limit, states=states, queue=arguments.queue, run_id=arguments.run)
    here, shown = reports(arguments.runtime_dir), 0
    for job in found:
        report = report_of(job, here)
        if arguments.json:
            print(json.dumps({**asdict(job), "progress": figures(report)}))
        else:
            if not shown:
                print(
                    f"{'JOB':>6} {'STATE':10} {'QUEUE':10} {'ATTEMPT':>7} {'RETRIES':>7} {'PRIORITY':>8}  "
                    f"{'WORKER':16} {'PROGRESS':14} BECAUSE"
                )
            progress = "-" if report is None else short(report)
            print(
                f"{job.job_id:>6} {job.state:10} {plain(job.queue):10} {job.attempt:>7} {job.watchdog_retries:>7} "
                f"{job.priority:>8}  {plain(job.worker or '-'):16} {progress:14} {plain(job.because or '')}".rstrip()
            )
        shown += 1
    if shown == arguments.limit and not arguments.json and not arguments.watch:
        print(f"gpuwarden job: these are the newest {shown}; --limit 0 lists all", file=sys.stderr)
    return 0


def _show(store: JobStore, arguments: argparse.Namespace) -> int:
    job = store.job(arguments.job)
    needs = store.runs.needs(job.job_id) if job.needs else []
    report = report_of(job, reports(arguments.runtime_dir))
    if arguments.json:
        print(json.dumps({**asdict(job), "needs_jobs": needs, "progress": figures(report)}))
    else:
        print("\n".join(_page(job, needs, report)))
    return 0


def _page(job: Job, needs: list[JobId], report: JobFile | None) -> Iterator[str]:
    for name, value in (
        ("job", job.job_id),
        ("state", job.state),
        ("because", job.because),
        ("queue", job.queue),
        ("class", job.job_class),
        ("model", job.model),
        ("run", job.run_id),
        ("needs", ", ".join(map(str, needs)) + f"; {job.pending} of {job.needs} are not done" if needs else None),
        ("rank", None if job.gang is None else f"{job.rank} of {job.ranks}; rank 0 is job {job.gang}"),
        ("priority", job.priority),
        ("attempt", f"{job.attempt} of {job.attempts_max} at most"),
        ("retries", f"{job.watchdog_retries} after trips, {job.reclaims} after lost leases"),
        ("budget", f"{job.budget_s:g} s an attempt" if job.budget_s else "none"),
        ("silence", f"{job.stall_timeout_s:g} s allowed" if job.stall_timeout_s else "not policed"),
        ("worker", job.worker and f"{job.worker} on {job.host}"),
        ("submitted", when(job.submitted_at)),
        ("queued", job.queued_at and when(job.queued_at)),
        ("claimed", job.claimed_at and _after(job.claimed_at, job.queued_at, "waiting")),
        ("ended", job.ended_at and _after(job.ended_at, job.claimed_at, "an attempt of")),
        ("payload", json.dumps(job.payload)),
        ("result", None if job.result is None else json.dumps(job.result)),
    ):
        if value is not None:
            yield f"{name:9} {plain(str(value))}"
    if report is not None:
        yield f"{'progress':9} {whole(report)}"
        if report.items_done or report.items_failed:
            yield f"{'items':9} {report.items_done} done, {report.items_failed} failed"
    elif job.state is State.RUNNING:
        yield f"{'progress':9} its worker's files are not on this host, or not in --runtime-dir"


def _after(at: float, since: float | None, what: str) -> str:
    return when(at) + ("" if since is None or since > at else f", after {what} {ago(at - since)}")


def _wait(store: JobStore, arguments: argparse.Namespace) -> int:
    """0 where all have completed, 1 where one ended otherwise, 2 where the time is over before they are."""
    for job_id in arguments.job:
        store.job(job_id)  # one that is not there would be waited for for ever
    left, code = set(arguments.job), 0
    deadline_s = math.inf if arguments.timeout_s is None else time.monotonic() + arguments.timeout_s
    with closing(store.changes()) as changes:
        while True:
            for job_id, state in sorted(store.queries.states_of(left).items()):
                if state in FINAL:
                    left.discard(job_id)
                    code = max(code, int(state is not State.COMPLETED))
                    print(f"{job_id} {state}", flush=True)
            left_s = deadline_s - time.monotonic()
            if not left:
                return code
            if left_s <= 0:
                print(f"gpuwarden job: not over yet: {', '.join(map(str, sorted(left)))}", file=sys.stderr)
                return WAIT_TIMEOUT
            # Not every end of a job is told on PostgreSQL, where that would make those who write queue up.
            changes.wait(min(left_s, LOOK_S))


def _cancel(store: JobStore, arguments: argparse.Namespace) -> int:
    """What was lost with its host cannot be reached: that it was cancelled is no word of its process (D7)."""
    lost = list(store.queries.newest(states=frozenset({State.HOST_LOST})))
    code = _cancel_them(store, arguments)
    stands = store.queries.states_of(job.job_id for job in lost)
    for job in lost:
        if stands[job.job_id] is State.CANCELLED:
            print(
                f"gpuwarden job: job {job.job_id} is lost with host {plain(job.host or '')}: its process may run "
                "still, and stops within a second of the queue being heard of there again",
                file=sys.stderr,
            )
    return code


def _cancel_them(store: JobStore, arguments: argparse.Namespace) -> int:
    because = _told("cancelled", arguments.reason)
    if arguments.run is not None:
        ids = store.admin.cancel_run(arguments.run, because=because, now=store.now())
        print(f"{len(ids)} jobs cancelled: {', '.join(map(str, ids)) or 'none was left'}")
        return 0
    if not arguments.job:
        return _refuse("say which jobs, or --run RUN")
    return _each(
        store, arguments.job, lambda job_id: store.admin.cancel(job_id, because=because, now=store.now()), "it is over"
    )


def _requeue(store: JobStore, arguments: argparse.Namespace) -> int:
    """What is over stays over: another job of the same kind is put in the queue."""
    job = store.job(arguments.job)
    if job.state not in FINAL:
        return _refuse(
            f"job {job.job_id} is {job.state}, and not over: cancel it first, or unblock it if it is blocked"
        )
    reports_steps = job.stall_timeout_s > 0
    again = made_from(
        job, Submission, reports_steps=reports_steps, run_id=arguments.run, budget_s=job.asked_budget_s, needs=()
    )
    print(store.runs.submit(again, now=store.now()))
    return 0


def _logs(store: JobStore, arguments: argparse.Namespace) -> int:
    if arguments.logs is None:
        return _refuse(
            "say where its worker keeps logs: --logs DIR or $GPUWARDEN_JOB_LOG_DIR, as `gpuwarden worker run` was told"
        )
    job = store.job(arguments.job)
    path = job_logs.newest(arguments.logs, job.job_id, arguments.attempt)

    def goes_on() -> bool:
        now = store.job(job.job_id)
        return now.state in (State.RUNNING, State.HOST_LOST) and path.name == job_logs.name_of(now.job_id, now.attempt)

    for line in job_logs.lines(path, goes_on=goes_on if arguments.follow else None):
        print(line, end="", flush=True)
    return 0


def _block(store: JobStore, arguments: argparse.Namespace) -> int:
    because = _told("blocked", arguments.reason, at=store.now())
    return _each(
        store, arguments.job, lambda job_id: store.admin.block(job_id, because=because), "only one that waits can be"
    )


def _unblock(store: JobStore, arguments: argparse.Namespace) -> int:
    now = store.now()
    because = _told("unblocked", "", at=now)
    return _each(
        store, arguments.job, lambda job_id: store.admin.unblock(job_id, because=because, now=now), "it is not blocked"
    )


def _each(store: JobStore, jobs: list[int], act: Callable[[int], bool], otherwise: str) -> int:
    """Do something to each; the ones to which it could not be done are told with their state."""
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


def _refuse(because: str) -> int:
    print(f"gpuwarden job: {because}", file=sys.stderr)
    return 1


def _told(act: str, because: str, *, at: float | None = None) -> str:
    """Who did it and why; and when, where the job keeps no time of it."""
    done = f"{act} by {who()}" + ("" if at is None else f", {stamp(at)}")
    return done + (f": {because}" if because else "")


_DESCRIPTION: Final = "Put jobs in the queue, see what becomes of them, and end, hold or repeat them."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden job", description=_DESCRIPTION)
    acts = parser.add_subparsers(required=True, metavar="ACT")

    submit = add_act(acts, "submit", _submit, "put a job in a queue; prints its id")
    submit.add_argument("--queue", default="gpu", help="which queue (default: %(default)s)")
    submit.add_argument(
        "--class", dest="job_class", choices=list(JobClass), help="decides the budget; what its queue says if not given"
    )
    submit.add_argument("--model", help="what it loads: a worker that has it loaded takes it before others")
    submit.add_argument("--payload", type=_object, default={}, help="a JSON object handed to the job body")
    submit.add_argument("--run", help="the run this job belongs to; a failed job fails its run")
    submit.add_argument(
        "--needs", action="append", default=[], type=int, metavar="JOB",
        help="a job of its run that must have completed before; may be repeated",
    )  # fmt: skip
    submit.add_argument("--ranks", type=int, default=1, help="how many workers it takes at once (default: %(default)s)")
    submit.add_argument("--priority", type=int, default=PRIORITY, help="lower is sooner (default: %(default)s)")
    submit.add_argument("--steps-total", type=int, help="how many steps it plans, for people")
    submit.add_argument(
        "--budget-s", type=float, help="wall-clock budget of one attempt, seconds; by queue or class if not given"
    )
    submit.add_argument("--stall-timeout-s", type=float, help="silence allowed once armed, seconds")
    submit.add_argument(
        "--attempts-max",
        type=int,
        default=ATTEMPTS_MAX,
        help="attempts in all, however they end; then it fails (default: %(default)s)",
    )
    submit.add_argument(
        "--no-steps", action="store_true", help="it reports no steps: the stall condition leaves it alone"
    )

    listing = add_act(acts, "list", _list, "the newest jobs, oldest of them first")
    listing.add_argument("--queue", help="this queue's only")
    listing.add_argument("--run", help="this run's only")
    listing.add_argument(
        "--limit", type=_count, default=LIST_MAX, metavar="N", help="how many; 0 is all (default: %(default)s)"
    )
    listing.add_argument("--watch", action="store_true", help="again at every change, until Ctrl-C")
    _dir(listing)
    listing.add_argument("--state", action="append", choices=list(State), help="only these states; may be repeated")
    add_json(listing)

    show = add_act(acts, "show", _show, "one job, and how far it is where it runs on this host")
    show.add_argument("job", type=int, metavar="JOB")
    _dir(show)
    add_json(show, "one JSON object")

    wait = add_act(acts, "wait", _wait, "wait until jobs are over; 0 completed, 1 failed or cancelled, 2 timeout")
    wait.add_argument("job", type=int, metavar="JOB", nargs="+")
    wait.add_argument("--timeout-s", type=float, help="for how long, seconds; for ever when not given")

    cancel = add_act(acts, "cancel", _cancel, "end jobs that are not over; who runs one stops within a second")
    cancel.add_argument("job", type=int, metavar="JOB", nargs="*")
    cancel.add_argument("--run", help="every job of a run, and the run")
    add_because(cancel)

    requeue = add_act(acts, "requeue", _requeue, "do a job that is over once more, as another one; prints its id")
    requeue.add_argument("job", type=int, metavar="JOB")
    requeue.add_argument("--run", help="the run the new one belongs to; none when not given")

    logs = add_act(acts, "logs", _logs, "what an attempt printed, where it ran on this host and its worker keeps logs")
    logs.add_argument("job", type=int, metavar="JOB")
    logs.add_argument("--attempt", type=int, help="which attempt; the latest that is kept when not given")
    logs.add_argument("--follow", action="store_true", help="go on with what comes, until the attempt is over")
    kept = os.environ.get("GPUWARDEN_JOB_LOG_DIR")
    logs.add_argument("--logs", type=Path, metavar="DIR", default=None if kept is None else Path(kept),
                      help="where its worker keeps them, or $GPUWARDEN_JOB_LOG_DIR")  # fmt: skip

    block = add_act(acts, "block", _block, "let nobody claim jobs that wait, until they are unblocked")
    block.add_argument("job", type=int, metavar="JOB", nargs="+")
    add_because(block)

    unblock = add_act(acts, "unblock", _unblock, "let blocked jobs be claimed again")
    unblock.add_argument("job", type=int, metavar="JOB", nargs="+")
    return parser


def _dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        default=state_directory(),
        help="where workers' files are, or $GPUWARDEN_RUNTIME_DIR",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number: 0, 1 and so on are")
    return int(text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is wanted, as in '{\"steps\": 20}'")
    return value
