"""Process trees of workers that run in no container."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from exporter.evidence.process_ownership import ProcessOrigin
from exporter.model.container import Container
from exporter.model.worker import CpuUse, DeadProcess
from gpuwarden import clock, gpu_names, procfs
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import PID_MAX, WorkerFile

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
"""The unit of /proc/PID/statm (proc_pid_statm(5)); up to 65536 on ARM."""


PROCESSES_MAX: Final = 2048
"""Processes of one container that are read once a second; the work of more is unknown."""


def container(pid: int, worker: str, *, command: ProcessId | None = None, proc: Path = procfs.PROC) -> Container:
    """A worker's process tree, as a container named after the worker. It changes with its supervised command.

    Raises:
        OSError: the process ended or is not readable.
    """
    process, runs = ProcessId.of(pid, proc=proc), command is not None and command.runs(proc=proc)
    gpus = gpu_request(command.pid if command is not None and runs else pid, proc=proc)
    return _container(process, worker, clock.boot_id(), pid=pid, started=command, gpu_request=gpus)


def container_of_dead(worker: WorkerFile) -> Container | None:
    """As `container`, of a dead worker; see `of_file`."""
    process = of_file(worker)
    return None if process is None else _container(process, worker.worker, worker.started.boot_id)


def id_of_tree(worker: WorkerFile) -> str | None:
    """The id of the `container` of a worker's process."""
    process = of_file(worker)
    return None if process is None else _name(process)


def of_file(worker: WorkerFile) -> ProcessId | None:
    """The process in a worker's file, if of this pid namespace."""
    own = worker.pid_namespace is not None and worker.pid_namespace == procfs.pid_namespace()
    if not own or worker.start_ticks is None or not 1 < worker.pid <= PID_MAX:
        return None
    return ProcessId(worker.pid, worker.start_ticks)


def _container(
    process: ProcessId,
    worker: str,
    boot_id: str,
    *,
    pid: int = 0,
    started: ProcessId | None = None,
    gpu_request: tuple[str, ...] | None = None,
) -> Container:
    return Container(
        kind="process",
        id=_name(process),
        name=worker,
        incarnation=f"{_name(started or process)}@{boot_id}",
        pid=pid,
        gpu_request=gpu_request,
    )


def dead_process(process: ProcessId, pids: Iterable[int]) -> DeadProcess:
    """The process of a dead worker; `pids` are live workers."""
    try:
        led = sum(process.led(procfs.stat(pid)) for pid in pids)
    except OSError:
        return DeadProcess(ended=process.has_ended(), live_workers=None)
    return DeadProcess(ended=process.has_ended(), live_workers=led)


def _name(process: ProcessId) -> str:
    return f"process:{process.pid}:{process.start_ticks}"


def gpu_request(pid: int, *, proc: Path = procfs.PROC) -> tuple[str, ...] | None:
    """The GPUs of a process outside of every engine, as in `Container.gpu_request`. By default it sees all.

    Raises:
        OSError: the process ended or is not readable.
    """
    return gpu_names.of_process(_environment(pid, proc))


def gpus_of_container(pid: int, *, proc: Path = procfs.PROC) -> tuple[str, ...] | None:
    """The GPUs that a process's container names.

    Raises:
        OSError: the process ended or is not readable.
    """
    environment = _environment(pid, proc)
    mounts: list[str] = []
    if environment.get("NVIDIA_VISIBLE_DEVICES") == gpu_names.MOUNTS:
        lines = procfs.read(f"{proc}/{pid}/mountinfo").decode("utf-8", "replace").splitlines()
        mounts = [line.split()[4] for line in lines]  # proc_pid_mountinfo(5)
    return gpu_names.of_container(environment, mounts)


def _environment(pid: int, proc: Path) -> dict[str, str]:
    text = procfs.read(f"{proc}/{pid}/environ").decode("utf-8", "replace")
    return {name: value for name, found, value in (each.partition("=") for each in text.split("\0")) if found}


def cpu_use(pid: int, *, proc: Path = procfs.PROC) -> CpuUse:
    """The CPU time of all threads of a process, and its state (proc_pid_stat(5)).

    Raises:
        OSError: the process ended or is not readable.
        ValueError: the kernel's line has an unknown format.
    """
    fields = procfs.stat(pid, proc=proc)  # field N of the manual is the one at N - 3
    if len(fields) < 20:
        raise ValueError(f"process {pid}: stat has {len(fields)} fields after the name, expected 20 or more")
    return CpuUse(
        start_ticks=int(fields[19]),
        used_ticks=int(fields[11]) + int(fields[12]),
        uninterruptible=fields[0] == "D",
    )


def process_tree(pid: int, *, proc: Path = procfs.PROC) -> frozenset[int]:
    """A process and its descendants."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent in found:
            continue
        found.add(parent)
        threads = f"{proc}/{parent}/task"
        try:
            numbers = os.listdir(threads)  # noqa: PTH208 - a hot path
        except OSError:
            continue
        for number in numbers:
            try:
                waiting.extend(map(int, procfs.read(f"{threads}/{number}/children").split()))
            except OSError:
                continue
    return frozenset(found)


def has_ended(pid: int, *, proc: Path = procfs.PROC) -> bool:
    """Whether a process ended or is a zombie."""
    try:
        return procfs.has_ended(procfs.stat(pid, proc=proc))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def read_origins(pids: Iterable[int], *, proc: Path = procfs.PROC) -> dict[int, ProcessOrigin]:
    """The parent and start of each readable process."""
    found: dict[int, ProcessOrigin] = {}
    for pid in pids:
        try:
            fields = procfs.stat(pid, proc=proc)  # field N of proc_pid_stat(5) is the one at N - 3
            found[pid] = ProcessOrigin(parent=int(fields[1]), start_ticks=int(fields[19]))
        except (OSError, ValueError, IndexError):
            continue
    return found


def resident_bytes(pids: Iterable[int], *, proc: Path = procfs.PROC) -> int:
    """RAM of these processes, bytes. Shared pages count once for each.

    Raises:
        OSError: all are unreadable.
    """
    sizes = []
    for pid in pids:
        try:
            sizes.append(int(procfs.read(f"{proc}/{pid}/statm").split()[1]) * PAGE_BYTES)
        except OSError:
            continue
    if not sizes:
        raise OSError("no process of the worker can be read")
    return sum(sizes)
