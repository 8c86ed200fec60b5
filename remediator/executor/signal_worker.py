"""A warning before the stop: one signal to a worker's own process, which can use its last seconds for a checkpoint.

A process asks for it by catching the signal (a handler for SIGUSR1, say): to any other the signal would be the end, or
nothing. It is known by its pid and the time it was started, is in the container that is to be stopped, and has been
there since before it was seen to hold its worker's lock. The signal goes through a pidfd, which names one process even
where its pid is given to another (pidfd_open(2), proc_pid_status(5)).
"""

import signal
from collections.abc import Set as AbstractSet

from gpuwarden import clock, procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.procfs import ProcessId


class WarningError(GpuwardenError):
    """A process cannot be warned, and why."""


def find(pid: int | None, name: str, *, among: AbstractSet[int], seen_s_ago: float) -> ProcessId:
    """The process that held a worker's lock `seen_s_ago` seconds ago, if it can be warned by the signal of that name.

    Raises:
        WarningError: it is not known or gone, not among those of its container, or does not catch the signal.
    """
    if pid is None:
        raise WarningError("the exporter sees no process of it")
    if pid not in among:
        raise WarningError(f"process {pid} is not in its container")
    try:
        listener = ProcessId.of(pid)
    except OSError:
        raise WarningError(f"process {pid} is gone") from None
    if clock.boottime_s() - listener.start_ticks / procfs.TICKS_PER_S <= seen_s_ago:
        raise WarningError(f"process {pid} is younger than what was seen to hold its lock")
    _check_catches(pid, name)
    return listener


def send(listener: ProcessId, name: str) -> None:
    """Send the signal, to that very process and only while it catches it.

    Raises:
        WarningError: it is gone, or does not catch the signal any more.
    """
    try:
        with listener.opened() as descriptor:
            _check_catches(listener.pid, name)
            signal.pidfd_send_signal(descriptor, signal.Signals[name])
    except OSError as error:
        raise WarningError(f"process {listener.pid} cannot be warned: {error.strerror or error}") from None


def _check_catches(pid: int, name: str) -> None:
    try:
        status = (procfs.PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise WarningError(f"process {pid} is gone") from None
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    if not int(caught, 16) >> (signal.Signals[name] - 1) & 1:
        raise WarningError(f"process {pid} does not catch {name}")
