"""The supervisor of one job's command: starts it, and writes how it ended. It outlives the worker.

`gpuwarden.worker.commands` starts it with an order on standard input and an inherited flock (see `command_record`).
SIGTERM ends the command. So does the end of the worker's lease, if no worker renews it: another host may have the job.
"""

import fcntl
import json
import os
import re
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from gpuwarden import clock
from gpuwarden.procfs import ProcessId
from gpuwarden.reporter import JOB_FILE
from gpuwarden.state_file import JOB_SUFFIX
from gpuwarden.supervisor import command_record
from gpuwarden.supervisor.child import Child, CommandError, End, become_subreaper, end_descendants, reap_adopted
from gpuwarden.supervisor.command_record import CommandEnd, Record
from gpuwarden.supervisor.files import lock_holder
from gpuwarden.supervisor.output import Output, Steps

TICK_S: Final = 1.0
GRACE_S: Final = 10.0
"""Time between SIGTERM and SIGKILL, seconds."""

LATE_S: Final = 10.0
"""How long a living worker may be late, seconds."""

LEFT_GRACE_S: Final = 5.0
OTHER_ATTEMPT_S: Final = 60.0
"""How long it waits until an earlier attempt on this host has ended, seconds."""

_NO_LINE: Final = re.compile(rb"(?!)")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to run.

    Args:
        folder: the worker's.
        name: the worker.
        flock: the inherited descriptor.
        environment: names of the variables that the command gets.
        lease_s: time after which the command ends without a renewal, seconds.
    """

    folder: str
    name: str
    flock: int
    argv: list[str]
    cwd: str
    environment: list[str]
    lease_s: float


class CommandSupervisor:
    """Runs one command to its end."""

    def __init__(self, order: Order, record: Record) -> None:
        self._order = order
        self._folder = Path(order.folder)
        self._record = record
        self._why: str | None = None
        self._kill_at_s = 0.0
        self._renewed = 0, 0.0
        self._late_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._output: Output | None = None

    def run(self) -> None:
        """Run the command, and write its end."""
        wakeup, sender = socket.socketpair()
        for each in (wakeup, sender):
            each.setblocking(False)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wakeup, selectors.EVENT_READ)
        become_subreaper()
        self._write(supervisor=ProcessId.of(os.getpid()))
        try:
            child = self._start()
        except CommandError as error:
            self._write(end=CommandEnd(code=error.exit_code, text=str(error), stopped=self._why is not None))
            return
        self._write(process=child.id)
        end = self._wait(child)
        stopped = self._why is not None
        text = f"{self._why}: {end}" if stopped else str(end)
        self._write(end=CommandEnd(code=end.exit_code, text=text, stopped=stopped))
        if self._output is not None:
            self._output.drain()
        end_descendants(grace_s=LEFT_GRACE_S)

    def _start(self) -> Child:
        order, record = self._order, self._record
        fcntl.lockf(order.flock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel names this process as its holder
        until_s = time.monotonic() + OTHER_ATTEMPT_S
        is_alone = command_record.lock_job(
            self._folder, record.key, give_up=lambda: self._why is not None or time.monotonic() >= until_s
        )
        if self._why is not None:
            raise CommandError(128 + signal.SIGTERM, "stopped before its start")
        if not is_alone:
            raise CommandError(126, f"another attempt of job {record.job_id} still runs on this host")
        try:
            os.chdir(order.cwd)
        except OSError as error:
            raise CommandError(
                126, f"working directory {order.cwd}: {error.strerror}: create it on this host, or give another --cwd"
            ) from None
        environment = {name: os.environ[name] for name in order.environment if name in os.environ}
        environment[JOB_FILE] = str(self._folder / f"{order.name}{JOB_SUFFIX}")
        self._output = Output(Steps(pattern=_NO_LINE), on_step=lambda: None, on_full=lambda _: None)
        try:
            child = Child(_waiting(order.argv), environment, stdout=self._output.given[0], stderr=self._output.given[1])
        finally:
            self._output.started()
        return child

    def _wait(self, child: Child) -> End:
        while True:
            reap_adopted({child.id.pid})
            found = child.wait()
            if isinstance(found, End):
                return found
            self._check_lease()
            self._end_if_wanted(child)
            self._pass_on_output()

    def _pass_on_output(self) -> None:
        """Pass on output until a signal or a tick."""
        awaited = self._output.awaited() if self._output else {}
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, socket.socket) and awaited.get(key.fd) != key.events:
                self._selector.unregister(key.fd)
        for descriptor in awaited.keys() - self._selector.get_map().keys():
            self._selector.register(descriptor, awaited[descriptor])
        for key, _ in self._selector.select(TICK_S):
            if isinstance(key.fileobj, socket.socket):
                with suppress(BlockingIOError):
                    key.fileobj.recv(4096)
            elif self._output is not None and key.events == selectors.EVENT_READ:
                self._output.read(key.fd)

    def _check_lease(self) -> None:
        """End the command before the lease ends, by a clock that counts suspended time.

        After a suspend, a living worker gets time to renew.
        """
        renewed_ns, now_s = command_record.renewed_ns(self._folder, self._order.name), clock.boottime_s()
        if renewed_ns != self._renewed[0]:
            self._renewed = renewed_ns, now_s
        lease_s, self._late_s = self._order.lease_s, self._late_s or now_s
        if now_s - self._renewed[1] < lease_s - min(2 * GRACE_S, lease_s / 2):
            self._late_s = 0.0
        elif now_s - self._late_s >= (LATE_S if self._has_worker() else 0.0):
            self._why = self._why or "no worker renewed its lease"

    def _has_worker(self) -> bool:
        try:
            return lock_holder(self._folder, self._order.name)[0]
        except OSError:
            return False

    def _end_if_wanted(self, child: Child) -> None:
        if self._why is None:
            return
        now_s = time.monotonic()
        if not self._kill_at_s:
            self._kill_at_s = now_s + min(GRACE_S, self._order.lease_s / 4)
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a stopped process would not handle it
        elif now_s >= self._kill_at_s:
            child.signal(signal.SIGKILL)

    def _write(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        command_record.write(self._folder, self._order.name, self._record)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._why = self._why or "stopped"


def _waiting(argv: list[str]) -> list[str]:
    """A leader of a process group is forked by setsid(1), which then ends with code 0 unless it waits."""
    return [argv[0], "--wait", *argv[1:]] if Path(argv[0]).name == "setsid" else argv


def main() -> None:
    """Read the order, and run it."""
    order = Order(**json.load(sys.stdin))
    with open(os.devnull, "rb") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    record = command_record.read(Path(order.folder), order.name)
    if record is not None:
        CommandSupervisor(order, record).run()


if __name__ == "__main__":
    main()
