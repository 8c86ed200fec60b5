"""One supervised command: its start, its signals, its end, and the end of all that it started."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gpuwarden import procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.procfs import ProcessId

POLL_S: Final = 0.05
KILL_WAIT_S: Final = 5.0
SUPERVISOR: Final = "GPUWARDEN_SUPERVISOR"
"""Names the supervisor to all that a command starts."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_TERMINAL_SIGNALS: Final = (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP)

_libc: Final = ctypes.CDLL(None, use_errno=True)


class CommandError(GpuwardenError):
    """The command cannot be started. `exit_code` is a shell's: 127 not found, 126 not executable."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class End:
    """How a command ended: its exit code, or the signal that ended it."""

    code: int
    signal: int | None

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 and the signal."""
        return self.code if self.signal is None else 128 + self.signal

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else f"killed by {signal.Signals(self.signal).name}"


class Child:
    """A running command in its own process group. It is killed if this process dies.

    Args:
        argv: the command.
        environment: its whole environment.
        terminal: a terminal whose foreground it gets.
        stdout: a file descriptor.
        stderr: a file descriptor.
        on_start: called in the new process before the command.

    Raises:
        CommandError: it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        terminal: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        on_start: Callable[[ProcessId], None] = lambda _: None,
    ) -> None:
        own = ProcessId.of(os.getpid())

        def prepare() -> None:
            # In the new process, after the fork. This program has one thread, so nothing can be locked.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own.pid:
                os._exit(1)  # killed before the prctl
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # a pool blocks it
            on_start(ProcessId.of(os.getpid()))
            if terminal is not None:
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                with suppress(OSError):
                    os.tcsetpgrp(terminal, os.getpid())
            for number in _TERMINAL_SIGNALS:
                signal.signal(number, signal.SIG_DFL)

        try:
            self._process = subprocess.Popen(
                argv,
                env={**environment, SUPERVISOR: str(own)},
                process_group=0,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=prepare,  # noqa: PLW1509 - one thread
            )
        except FileNotFoundError as error:
            raise CommandError(127, f"{argv[0]}: command not found") from error
        except PermissionError:
            raise CommandError(126, f"{argv[0]}: not executable") from None
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise CommandError(126, f"{argv[0]}: cannot be started: {error}") from None
        self.started_s = time.monotonic()
        self.id = ProcessId.of(self._process.pid)

    def wait(self) -> End | int | None:
        """How it ended, or the signal that stopped or continued it; `None` otherwise. Never waits."""
        try:
            pid, status = os.waitpid(self.id.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return End(code=255, signal=None)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            return os.WSTOPSIG(status)
        if os.WIFCONTINUED(status):
            return signal.SIGCONT
        self._process.returncode = 0  # `Popen` must not wait for it again
        if os.WIFSIGNALED(status):
            return End(code=128 + os.WTERMSIG(status), signal=os.WTERMSIG(status))
        return End(code=os.WEXITSTATUS(status), signal=None)

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.id.pid, number)


def become_subreaper() -> None:
    """Adopt what children leave behind (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_by(supervisor: ProcessId, leader: ProcessId | None) -> list[ProcessId]:
    """The living processes of a command whose supervisor was killed, also those that left its group."""
    found = set(procfs.started_with(f"{SUPERVISOR}={supervisor}"))
    return sorted(found if leader is None else found.union(procfs.family(leader)))


def end_descendants(*, grace_s: float) -> list[int]:
    """End all children, own and adopted; see `end_all`."""
    return end_all(_left, grace_s=grace_s)


def end_all(listed: Callable[[], list[ProcessId]], *, grace_s: float) -> list[int]:
    """End the listed processes: SIGTERM, then SIGKILL after `grace_s`. Returns the pids that remain."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
        deadline_s = time.monotonic() + wait_s
        sent: set[ProcessId] = set()
        while left := listed():
            for process in left:
                if process not in sent:
                    procfs.signal_process(process, number)
                    sent.add(process)
            if time.monotonic() >= deadline_s:
                break
            time.sleep(POLL_S)
        else:
            return []
    return [process.pid for process in listed()]


def reap_adopted(known: Collection[int]) -> None:
    """Reap ended processes that this one adopted, up to an end of a `known` child."""
    with suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in known:
            os.waitpid(found.si_pid, os.WNOHANG)


def _left() -> list[ProcessId]:
    reap_adopted(())
    return procfs.descendants(os.getpid())
