"""`gpuwarden` with fault points: it notes each one that it reaches, and kills itself with SIGKILL at one of them.

A point is added to the file of notes, a line each, before anything else happens at it. A point that never comes,
`never` for one, leaves the program undisturbed. Each is a process of its own, forked from one that has loaded what an
executor needs and done nothing else: to load it takes longer than all that most of them live to do. The points:

    before|after ledger: WHAT    a commit that changed the ledger, called after the account it gave, else after the rows
    before|after queue: WHAT     a commit that changed the queue, called after the rows
    before|after docker ACT      a stop or a start
    asked docker ACT             the engine was asked for it, and has not answered

Rows are called after their table, and the state they were put in or found in. The second commit of one name ends in
` (2)`. That it lives, what it waits for, that a lease goes on: these an executor writes down as often as time has it,
and nothing hangs on it. Those commits are no points.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.engine.default import DefaultDialect

from gpuwarden.cli import main
from gpuwarden.queue.schema import JOBS
from remediator.actuators.docker import DockerActuator
from remediator.ledger.schema import EXECUTORS, JOURNAL, LEDGER
from tests.waiting import POLL_S

NEVER: Final = "never"

Write = tuple[Table, Mapping[str, Any]]
"""A table that a statement changed, and what the statement was given."""


class Points:
    """Notes the points as they are reached, and ends this process at one of them."""

    def __init__(self, at: str, notes: Path) -> None:
        self._at = at
        self._notes = notes
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        """Be at a point; from the one that was chosen it does not return."""
        with self._lock:
            self._times[name] += 1
            point = name if self._times[name] == 1 else f"{name} ({self._times[name]})"
            with self._notes.open("a", encoding="ascii") as notes:
                notes.write(f"{point}\n")
            if point == self._at:
                os.kill(os.getpid(), signal.SIGKILL)


class Doomed:
    """One of them, with what is asked of a `subprocess.Popen`.

    Args:
        at: the point at which it dies.
        notes: where it notes the points that it reaches.
        arguments: gpuwarden's own.
        env: its environment.
        log: what its output is added to.
    """

    def __init__(self, at: str, notes: Path, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self._process = _FORKS.Process(target=_be, args=(at, notes, list(arguments), dict(env), log))
        with _ONE_AT_A_TIME:
            self._process.start()

    def poll(self) -> int | None:
        """How it ended, a signal's number as a negative one; `None` while it lives."""
        with _ONE_AT_A_TIME:
            return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """How it ended, once it has. Raises subprocess.TimeoutExpired."""
        began_s = time.monotonic()
        while (ended := self.poll()) is None:
            if timeout_s is not None and time.monotonic() - began_s > timeout_s:
                raise subprocess.TimeoutExpired(str(self._process), timeout_s)
            time.sleep(POLL_S)
        return ended

    def terminate(self) -> None:
        """Tell it to end."""
        with _ONE_AT_A_TIME:
            self._process.terminate()


_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "remediator.main", "remediator.executor.main"])
_ONE_AT_A_TIME: Final = threading.Lock()
"""To start one, and to ask how one ended: either looks after all that there are, which threads cannot at once."""

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>


def _be(at: str, notes: Path, arguments: list[str], env: dict[str, str], log: Path) -> None:
    """Set the points, then be `gpuwarden`, for as long as there is a test."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for each in (1, 2):
        os.dup2(output, each)
    points = Points(at, notes)
    _at_commits(points.reach)
    _at_acts(points.reach)
    sys.exit(main.main(arguments))


def _at_commits(reach: Callable[[str], None]) -> None:
    transaction = threading.local()
    commit: Callable[[DefaultDialect, Any], None] = DefaultDialect.do_commit

    def begin(_connection: Connection) -> None:
        transaction.writes = []

    def executed(_connection: Connection, cursor: Any, _text: str, _values: Any, context: Any, _many: bool) -> None:
        # Of a statement that returns rows the driver counts none before they are read.
        changed = cursor.rowcount != 0 or cursor.description is not None
        if (context.isinsert or context.isupdate or context.isdelete) and changed:
            table = context.compiled.statement.table
            transaction.writes += [(table, values) for values in context.compiled_parameters]

    def do_commit(dialect: DefaultDialect, connection: Any) -> None:
        name = _name(getattr(transaction, "writes", []))
        if name is None:
            commit(dialect, connection)
        else:
            reach(f"before {name}")
            commit(dialect, connection)
            reach(f"after {name}")

    event.listen(Engine, "begin", begin)
    event.listen(Engine, "after_cursor_execute", executed)
    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]


def _name(writes: list[Write]) -> str | None:
    """What a transaction did, in a few words; `None` for one that is no point."""
    told = [
        f"{values['act']} {values['step']}" + (f": {values['state']}" if values["state"] else "")
        for table, values in writes
        if table is JOURNAL
    ]
    renewed = all(table is EXECUTORS or (table is JOBS and "state" not in values) for table, values in writes)
    if renewed or any(line.startswith("decided wait") for line in told):
        return None
    if told:
        return f"ledger: {', '.join(told)}"
    rows = dict.fromkeys(f"{table.name} {values.get('state') or values.get('stage_1', '')}" for table, values in writes)
    database = "ledger" if writes[0][0].metadata is LEDGER.tables else "queue"
    return f"{database}: {', '.join(row.rstrip() for row in rows)}"


def _at_acts(reach: Callable[[str], None]) -> None:
    act = threading.local()
    answer = HTTPConnection.getresponse

    def getresponse(connection: HTTPConnection) -> HTTPResponse:
        if getattr(act, "name", "") and connection._method == "POST":  # type: ignore[attr-defined]
            reach(f"asked docker {act.name}")
        return answer(connection)

    def around(name: str) -> None:
        do = getattr(DockerActuator, name)

        def done(*arguments: Any, **options: Any) -> None:
            reach(f"before docker {name}")
            act.name = name
            try:
                do(*arguments, **options)
            finally:
                act.name = ""
            reach(f"after docker {name}")

        setattr(DockerActuator, name, done)

    around("stop")
    around("start")
    HTTPConnection.getresponse = getresponse  # type: ignore[assignment,method-assign]
