"""`gpuwarden job`: put jobs in the queue, see what becomes of them, and a person's hand on them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpuwarden.job import ATTEMPTS_MAX, FINAL, JobClass, State
from gpuwarden.queue import PRIORITY, Job, JobStore, Submission
from gpuwarden.reporter import state_directory
from gpuwarden.statefile import JOB_SUFFIX, JobFile, StateFileError, parse_job
from gpuwarden.text import plain, who

_Act = Callable[[JobStore, argparse.Namespace], int]


def command(argv: list[str]) -> int:
    """`gpuwarden job`."""
    arguments = _parser().parse_args(argv)
    if arguments.act is _submit:
        arguments.submission = _submission(arguments)  # what will not do is told without a queue
    with closing(JobStore.open(arguments.store)) as store:
        act: _Act = arguments.act
        return act(store, arguments)


def _submission(arguments: argparse.Namespace) -> Submission:
    return Submission(
        queue=arguments.queue,
        job_class=JobClass(arguments.job_class),
        model=arguments.model,
        reports_steps=not arguments.no_steps,
        payload=arguments.payload,
        run_id=arguments.run,
        priority=arguments.priority,
        steps_total=arguments.steps_total,
        budget_s=arguments.budget_s,
        stall_timeout_s=arguments.stall_timeout_s,
        attempts_max=arguments.attempts_max,
    )


def _submit(store: JobStore, arguments: argparse.Namespace) -> int:
    print(store.submit(arguments.submission, now=store.now()))
    return 0


def _list(store: JobStore, arguments: argparse.Namespace) -> int:
    jobs = store.jobs(states=frozenset(State(name) for name in arguments.state or State))
    if not arguments.json and jobs:
        print(f"{'JOB':>6} {'STATE':10} {'ATTEMPT':>7} {'RETRIES':>7} {'PRIORITY':>8}  {'WORKER':16} BECAUSE")
    for job in jobs:
        if arguments.json:
            print(json.dumps(asdict(job)))
        else:
            print(
                f"{job.job_id:>6} {job.state:10} {job.attempt:>7} {job.watchdog_retries:>7} {job.priority:>8}  "
                f"{plain(job.worker or '-'):16} {plain(job.because or '')}"
            )
    return 0


def _show(store: JobStore, arguments: argparse.Namespace) -> int:
    job = store.job(arguments.job)
    report = _report(job, arguments.dir)
    if arguments.json:
        print(json.dumps({**asdict(job), "progress": None if report is None else _progress(report)}))
    else:
        print("\n".join(_page(job, report)))
    return 0


def _page(job: Job, report: JobFile | None) -> Iterator[str]:
    for name, value in (
        ("job", job.job_id),
        ("state", job.state),
        ("because", job.because),
        ("queue", job.queue),
        ("class", job.job_class),
        ("model", job.model),
        ("run", job.run_id),
        ("priority", job.priority),
        ("attempt", f"{job.attempt} of {job.attempts_max} at most"),
        ("retries", f"{job.watchdog_retries} after trips, {job.reclaims} after lost leases"),
        ("budget", f"{job.budget_s:g} s an attempt" if job.budget_s else "none"),
        ("silence", f"{job.stall_timeout_s:g} s allowed" if job.stall_timeout_s else "not policed"),
        ("worker", job.worker and f"{job.worker} on {job.host}"),
        ("payload", json.dumps(job.payload)),
    ):
        if value is not None:
            yield f"{name:9} {plain(str(value))}"
    if report is not None:
        total = "" if report.steps_total is None else f" of {report.steps_total}"
        mean = "" if report.step_mean_s is None else f", {report.step_mean_s:.3g} s a step"
        yield f"{'progress':9} phase {report.phase}, step {report.step}{total}{mean}"
        if report.items_done or report.items_failed:
            yield f"{'items':9} {report.items_done} done, {report.items_failed} failed"
    elif job.state is State.RUNNING:
        yield f"{'progress':9} its worker's files are not on this host, or not in --dir"


def _progress(report: JobFile) -> dict[str, Any]:
    names = ("phase", "step", "steps_total", "step_mean_s", "step_max_s", "items_done", "items_failed")
    return {name: getattr(report, name) for name in names}


def _report(job: Job, directory: Path) -> JobFile | None:
    """What the worker of a running job says of it, where its files are on this host."""
    if job.state is not State.RUNNING or job.worker is None:
        return None
    for path in directory.glob(f"*/{job.worker}{JOB_SUFFIX}"):
        with suppress(OSError, UnicodeDecodeError, StateFileError):
            report = parse_job(path.read_text(encoding="utf-8"))
            if (report.job_id, report.attempt, report.incarnation) == (job.job_id, job.attempt, job.claimed_by):
                return report
    return None


def _cancel(store: JobStore, arguments: argparse.Namespace) -> int:
    because = _told("cancelled", arguments.because)
    if arguments.run is not None:
        ids = store.cancel_run(arguments.run, because=because, now=store.now())
        print(f"{len(ids)} jobs cancelled: {', '.join(map(str, ids)) or 'none was left'}")
        return 0
    if not arguments.job:
        return _refuse("say which jobs, or --run RUN")
    return _each(
        store, arguments.job, lambda job_id: store.cancel(job_id, because=because, now=store.now()), "it is over"
    )


def _requeue(store: JobStore, arguments: argparse.Namespace) -> int:
    """What is over stays over: another job of the same kind is put in the queue."""
    job = store.job(arguments.job)
    if job.state not in FINAL:
        return _refuse(
            f"job {job.job_id} is {job.state}, and not over: cancel it first, or unblock it if it is blocked"
        )
    again = Submission(
        queue=job.queue,
        job_class=job.job_class,
        model=job.model,
        reports_steps=job.stall_timeout_s > 0,
        payload=job.payload,
        run_id=arguments.run,
        priority=job.priority,
        steps_total=job.steps_total,
        budget_s=job.budget_s,
        stall_timeout_s=job.stall_timeout_s,
        attempts_max=job.attempts_max,
    )
    print(store.submit(again, now=store.now()))
    return 0


def _block(store: JobStore, arguments: argparse.Namespace) -> int:
    because = _told("blocked", arguments.because)
    return _each(
        store, arguments.job, lambda job_id: store.block(job_id, because=because), "only one that waits can be"
    )


def _unblock(store: JobStore, arguments: argparse.Namespace) -> int:
    return _each(store, arguments.job, store.unblock, "it is not blocked")


def _each(store: JobStore, jobs: list[int], act: Callable[[int], bool], otherwise: str) -> int:
    """Do something to each; the ones to which it could not be done are told with their state."""
    code = 0
    for job_id in jobs:
        if not act(job_id):
            code = _refuse(f"job {job_id} is {store.job(job_id).state}: {otherwise}")
    return code


def _refuse(because: str) -> int:
    print(f"gpuwarden job: {because}", file=sys.stderr)
    return 1


def _told(act: str, because: str) -> str:
    return f"{act} by {who()}" + (f": {because}" if because else "")


_DESCRIPTION: Final = "Put jobs in the queue, see what becomes of them, and end, hold or repeat them."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuwarden job", description=_DESCRIPTION)
    acts = parser.add_subparsers(required=True, metavar="ACT")

    submit = _act(acts, "submit", _submit, "put a job in a queue; prints its id")
    submit.add_argument("--queue", default="gpu", help="which queue (default: %(default)s)")
    submit.add_argument(
        "--class", dest="job_class", default="gpu", choices=list(JobClass), help="decides the budget (default: gpu)"
    )
    submit.add_argument("--model", help="what it loads, for people")
    submit.add_argument("--payload", type=_object, default={}, help="a JSON object handed to the job body")
    submit.add_argument("--run", help="the run this job belongs to; a failed job fails its run")
    submit.add_argument("--priority", type=int, default=PRIORITY, help="lower is sooner (default: %(default)s)")
    submit.add_argument("--steps-total", type=int, help="how many steps it plans, for people")
    submit.add_argument(
        "--budget-s", type=float, help="wall-clock budget of one attempt, seconds; by class if not given"
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

    listing = _act(acts, "list", _list, "the jobs, oldest first")
    listing.add_argument("--state", action="append", choices=list(State), help="only these states; may be repeated")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")

    show = _act(acts, "show", _show, "one job, and how far it is where it runs on this host")
    show.add_argument("job", type=int, metavar="JOB")
    show.add_argument("--dir", type=Path, default=state_directory(), help="where workers' files are, or $GPUWARDEN_DIR")
    show.add_argument("--json", action="store_true", help="one JSON object")

    cancel = _act(acts, "cancel", _cancel, "end jobs that are not over; who runs one stops within a second")
    cancel.add_argument("job", type=int, metavar="JOB", nargs="*")
    cancel.add_argument("--run", help="every job of a run, and the run")
    _because(cancel)

    requeue = _act(acts, "requeue", _requeue, "do a job that is over once more, as another one; prints its id")
    requeue.add_argument("job", type=int, metavar="JOB")
    requeue.add_argument("--run", help="the run the new one belongs to; none when not given")

    block = _act(acts, "block", _block, "let nobody claim jobs that wait, until they are unblocked")
    block.add_argument("job", type=int, metavar="JOB", nargs="+")
    _because(block)

    unblock = _act(acts, "unblock", _unblock, "let blocked jobs be claimed again")
    unblock.add_argument("job", type=int, metavar="JOB", nargs="+")
    return parser


def _act(acts: Any, name: str, act: _Act, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = acts.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.set_defaults(act=act)
    add_store(parser)
    return parser


def add_store(parser: argparse.ArgumentParser) -> None:
    """The option `--store`: wanted only where the environment does not say."""
    store = os.environ.get("GPUWARDEN_STORE")
    parser.add_argument(
        "--store", default=store, required=store is None, help="the queue's database URL, or $GPUWARDEN_STORE"
    )


def _because(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--because", default="", metavar="TEXT", help="why, for whoever looks later")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is wanted, as in '{\"steps\": 20}'")
    return value
