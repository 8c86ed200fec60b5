"""Warn a worker before the stop: one signal to its process, which can write a checkpoint.

Only a process that catches the signal is warned; the signal would end any other. The process is known by pid and start
time, runs in the container to stop, and is older than the reading of its worker lock. The signal goes through a pidfd,
which names one process even if its pid is reused (pidfd_open(2), proc_pid_status(5)).
"""

import signal
from collections.abc import Set as AbstractSet

from gpuwarden import clock, procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.procfs import ProcessId


class WarningError(GpuwardenError):
    """A process cannot be warned; the message says why."""


def find(pid: int | None, name: str, *, among: AbstractSet[int], seen_s_ago: float) -> ProcessId:
    """Find the process that held a worker's lock, if it can be warned.

    Args:
        pid: the process in the exporter's evidence.
        name: name of the signal.
        among: the pids of its container.
        seen_s_ago: age of the evidence, seconds.

    Raises:
        WarningError: the process is unknown, gone, outside the container, or does not catch the signal.
    """
    if pid is None:
        raise WarningError("the exporter knows no process of the worker")
    if pid not in among:
        raise WarningError(f"process {pid} is not in its container")
    try:
        listener = ProcessId.of(pid)
    except OSError:
        raise WarningError(f"process {pid} is gone") from None
    if clock.boottime_s() - listener.start_ticks / procfs.TICKS_PER_S <= seen_s_ago:
        raise WarningError(f"process {pid} started after the lock was read")
    _check_catches(pid, name)
    return listener


def send(listener: ProcessId, name: str) -> None:
    """Send the signal to that process, only while it catches it.

    Raises:
        WarningError: the process is gone, or does not catch the signal now.
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
