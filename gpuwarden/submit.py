"""`gpuwarden submit` and `gpuwarden jobs`: put a job in the queue, and see what became of it."""

import argparse
import json
import os
from contextlib import closing
from dataclasses import asdict
from typing import Any

from gpuwarden.job import ATTEMPTS_MAX, JobClass, State
from gpuwarden.queue import PRIORITY, JobStore, Submission


def command(argv: list[str]) -> int:
    """`gpuwarden submit`: prints the new job's id."""
    parser = _parser("submit", "Put a job in a queue; prints its id.")
    parser.add_argument("--queue", default="gpu", help="which queue")
    parser.add_argument("--class", dest="job_class", default="gpu", choices=list(JobClass), help="decides the budget")
    parser.add_argument("--model", help="what it loads, for people")
    parser.add_argument("--payload", type=_object, default={}, help="a JSON object handed to the job body")
    parser.add_argument("--run", help="the run this job belongs to; a failed job fails its run")
    parser.add_argument("--priority", type=int, default=PRIORITY, help="lower is sooner")
    parser.add_argument("--steps-total", type=int, help="how many steps it plans, for people")
    parser.add_argument(
        "--budget-s", type=float, help="wall-clock budget of one attempt, seconds; by class if not given"
    )
    parser.add_argument("--stall-timeout-s", type=float, help="silence allowed once armed, seconds")
    parser.add_argument(
        "--attempts-max", type=int, default=ATTEMPTS_MAX, help="attempts in all, however they end; then it fails"
    )
    parser.add_argument(
        "--no-steps", action="store_true", help="it reports no steps: the stall condition leaves it alone"
    )
    arguments = parser.parse_args(argv)
    submission = Submission(
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
    with closing(JobStore.open(arguments.store)) as store:
        print(store.submit(submission, now=store.now()))
    return 0


def jobs_command(argv: list[str]) -> int:
    """`gpuwarden jobs`: a line a job, or JSON."""
    parser = _parser("jobs", "List the queue's jobs, oldest first.")
    parser.add_argument("--state", action="append", choices=list(State), help="only these states; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    states = frozenset(State(name) for name in arguments.state or State)
    with closing(JobStore.open(arguments.store)) as store:
        jobs = store.jobs(states=states)
    if not arguments.json and jobs:
        print(f"{'JOB':>6} {'STATE':10} {'ATTEMPT':>7} {'RETRIES':>7} {'PRIORITY':>8}  {'WORKER':16} BECAUSE")
    for job in jobs:
        if arguments.json:
            print(json.dumps(asdict(job)))
        else:
            print(
                f"{job.job_id:>6} {job.state:10} {job.attempt:>7} {job.watchdog_retries:>7} {job.priority:>8}  "
                f"{job.worker or '-':16} {job.because or ''}"
            )
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"gpuwarden {name}", description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    store = os.environ.get("GPUWARDEN_STORE")
    parser.add_argument(
        "--store", default=store, required=store is None, help="the queue's database URL, or $GPUWARDEN_STORE"
    )
    return parser


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is wanted, as in '{\"steps\": 20}'")
    return value
