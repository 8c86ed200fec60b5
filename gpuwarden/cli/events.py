"""`gpuwarden events CONSUMER`: print and acknowledge ended jobs and runs.

A batch is acknowledged once it is written: after a broken pipe or a kill it is printed again.
"""

import argparse
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Final

from gpuwarden.cli.acts import add_json
from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, format_duration, format_time, show, show_json
from gpuwarden.queue import Event, JobStore
from gpuwarden.queue.open import add_store, check_there
from gpuwarden.queue.outbox import BATCH
from gpuwarden.state_file import TEXT_MAX, is_text

LOOK_S: Final = 1.0
"""Interval between checks with `--follow`, seconds: PostgreSQL does not notify of every end."""


def command(argv: list[str]) -> int:
    """`gpuwarden events`. With `--peek` it acknowledges nothing."""
    arguments = _parser().parse_args(argv)
    if not is_text(arguments.consumer):
        raise GpuwardenError(
            f"consumer {arguments.consumer[:80]!a} is invalid: use 1 to {TEXT_MAX} printable characters"
        )
    check_there(arguments.queue_db)
    with closing(JobStore.open(arguments.queue_db, migrate=False)) as store, closing(store.changes()) as changes:
        last: Event | None = None
        noted: set[str] = set()

        def note(error: UnreadableRowError) -> None:
            """Show an unreadable event, once."""
            if error.key not in noted:
                noted.add(error.key)
                show(f"gpuwarden events: {error}", file=sys.stderr)

        while True:
            while events := store.outbox.events(arguments.consumer, limit=BATCH, after=last, unreadable=note):
                for event in events:
                    if arguments.json:
                        show_json(asdict(event))
                    else:
                        show(line(event))
                sys.stdout.flush()
                last = events[-1]
                if not arguments.peek:
                    store.outbox.acknowledge(arguments.consumer, last, now=store.now())
            if not arguments.follow:
                return 0
            changes.wait(LOOK_S)


def line(event: Event) -> str:
    """One event as text."""
    waited = "" if event.waited_s is None else f", waited {format_duration(event.waited_s)}"
    ran = "" if event.ran_s is None else f", ran {format_duration(event.ran_s)}"
    run = "" if event.run_id is None else f" of run {event.run_id}"
    queue = "" if event.queue is None else f", queue {event.queue}"
    its = f"job {event.job_id}{run}{queue}, attempt {event.attempt}{waited}{ran}"
    return f"{format_time(event.written_at)}  {event.kind:13} {its}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden events",
        description="Print the ended jobs and runs that a consumer has not seen yet, and acknowledge them.",
    )
    parser.add_argument("consumer", metavar="CONSUMER", help="any name; each consumer gets every event")
    parser.add_argument("--peek", action="store_true", help="do not acknowledge: the next call prints them again")
    parser.add_argument("--follow", action="store_true", help="wait for further events, until Ctrl-C")
    add_json(parser)
    add_store(parser)
    return parser
