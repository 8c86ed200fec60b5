"""`gpuwarden` with fault points: it records each point that it reaches, and kills itself with SIGKILL at one of them.

A point is appended to the file of notes, one line each, before anything else happens. A point that never comes, such
as `never`, does not disturb the program. Each process is forked from a server that has loaded the executor's modules,
since loading takes longer than most of these processes live. The points:

    before|after ledger: WHAT    a commit to the ledger, named after its journal entries, else after its rows
    before|after queue: WHAT     a commit to the queue, named after its rows
    before|after docker ACT      a stop or a start
    asked docker ACT             the request is sent, and the engine has not answered

A row is named after its table and its state. The second commit of the same name ends in ` (2)`. Commits of heartbeats,
waits and renewed leases are not points: their number depends on time, and nothing depends on them.
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
    """Records the points that are reached, and kills this process at one of them."""

    def __init__(self, at: str, notes: Path) -> None:
        self._at = at
        self._notes = notes
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        """Record a point. Does not return from the chosen one."""
        with self._lock:
            self._times[name] += 1
            point = name if self._times[name] == 1 else f"{name} ({self._times[name]})"
            with self._notes.open("a", encoding="ascii") as notes:
                notes.write(f"{point}\n")
            if point == self._at:
                os.kill(os.getpid(), signal.SIGKILL)


class CrashingProcess:
    """A `gpuwarden` process that dies at a point. It has the methods of `subprocess.Popen` that the tests use.

    Args:
        at: the point at which it dies.
        notes: the file of points that it reaches.
        arguments: command line of `gpuwarden`.
        env: its environment.
        log: the file that its output is appended to.
    """

    def __init__(self, at: str, notes: Path, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self._process = _FORKS.Process(target=_run_with_points, args=(at, notes, list(arguments), dict(env), log))
        with _ONE_AT_A_TIME:
            self._process.start()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; `None` while the process runs."""
        with _ONE_AT_A_TIME:
            return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code once the process has ended. Raises subprocess.TimeoutExpired."""
        began_s = time.monotonic()
        while (ended := self.poll()) is None:
            if timeout_s is not None and time.monotonic() - began_s > timeout_s:
                raise subprocess.TimeoutExpired(str(self._process), timeout_s)
            time.sleep(POLL_S)
        return ended

    def terminate(self) -> None:
        """Send SIGTERM."""
        with _ONE_AT_A_TIME:
            self._process.terminate()


_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "remediator.main", "remediator.executor.main"])
_ONE_AT_A_TIME: Final = threading.Lock()
"""To start a process or read an exit code. Both reap all children, which threads cannot do at the same time."""

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>


def _run_with_points(at: str, notes: Path, arguments: list[str], env: dict[str, str], log: Path) -> None:
    """Install the points, then run `gpuwarden` until it ends or the test does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for each in (1, 2):
        os.dup2(output, each)
    points = Points(at, notes)
    _add_commit_points(points.reach)
    _add_docker_points(points.reach)
    sys.exit(main.main(arguments))


def _add_commit_points(reach: Callable[[str], None]) -> None:
    transaction = threading.local()
    commit: Callable[[DefaultDialect, Any], None] = DefaultDialect.do_commit

    def begin(_connection: Connection) -> None:
        transaction.writes = []

    def executed(_connection: Connection, cursor: Any, _text: str, _values: Any, context: Any, _many: bool) -> None:
        # The driver counts no rows of a statement with results before the results are read.
        changed = cursor.rowcount != 0 or cursor.description is not None
        if (context.isinsert or context.isupdate or context.isdelete) and changed:
            table = context.compiled.statement.table
            transaction.writes += [(table, values) for values in context.compiled_parameters]

    def do_commit(dialect: DefaultDialect, connection: Any) -> None:
        name = _point_name(getattr(transaction, "writes", []))
        if name is None:
            commit(dialect, connection)
        else:
            reach(f"before {name}")
            commit(dialect, connection)
            reach(f"after {name}")

    event.listen(Engine, "begin", begin)
    event.listen(Engine, "after_cursor_execute", executed)
    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]


def _point_name(writes: list[Write]) -> str | None:
    """Name a commit after its writes; `None` if it is not a point."""
    entries = [
        f"{values['act']} {values['step']}" + (f": {values['state']}" if values["state"] else "")
        for table, values in writes
        if table is JOURNAL
    ]
    is_renewal = all(table is EXECUTORS or (table is JOBS and "state" not in values) for table, values in writes)
    if is_renewal or any(line.startswith("decided wait") for line in entries):
        return None
    if entries:
        return f"ledger: {', '.join(entries)}"
    rows = dict.fromkeys(f"{table.name} {values.get('state') or values.get('stage_1', '')}" for table, values in writes)
    database = "ledger" if writes[0][0].metadata is LEDGER.tables else "queue"
    return f"{database}: {', '.join(row.rstrip() for row in rows)}"


def _add_docker_points(reach: Callable[[str], None]) -> None:
    act = threading.local()
    get_response = HTTPConnection.getresponse

    def getresponse(connection: HTTPConnection) -> HTTPResponse:
        if getattr(act, "name", "") and connection._method == "POST":  # type: ignore[attr-defined]
            reach(f"asked docker {act.name}")
        return get_response(connection)

    def wrap(name: str) -> None:
        do = getattr(DockerActuator, name)

        def call_between_points(*arguments: Any, **options: Any) -> None:
            reach(f"before docker {name}")
            act.name = name
            try:
                do(*arguments, **options)
            finally:
                act.name = ""
            reach(f"after docker {name}")

        setattr(DockerActuator, name, call_between_points)

    wrap("stop")
    wrap("start")
    HTTPConnection.getresponse = getresponse  # type: ignore[assignment,method-assign]
