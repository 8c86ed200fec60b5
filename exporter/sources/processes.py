"""Workers that run in no container: their process tree stands in for one."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from exporter.evidence.process_ownership import ProcessOrigin
from exporter.model.container import Container
from exporter.model.worker import CpuUse
from gpuwarden import clock, procfs

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
"""4096 on x86-64, up to 65536 on ARM servers: the unit of /proc/PID/statm (proc_pid_statm(5))."""


PROCESSES_MAX: Final = 2048
"""Processes of one container whose work is read once a second; that of more is unknown."""


def container(pid: int, worker: str, *, proc: Path = procfs.PROC) -> Container:
    """A worker's own process tree, as a container named after the worker.

    GPUs are those of its NVIDIA_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES; with neither set, a process sees every GPU.

    Raises:
        OSError: the process is gone, or is not ours to look at.
    """
    ticks = procfs.start_ticks(pid, proc=proc)
    return Container(
        kind="process",
        id=f"process:{pid}:{ticks}",
        name=worker,
        incarnation=f"process:{pid}:{ticks}@{clock.boot_id()}",
        pid=pid,
        gpu_request=gpu_request(pid, proc=proc),
    )


def gpu_request(pid: int, *, proc: Path = procfs.PROC) -> tuple[str, ...] | None:
    """The GPUs that a process outside of any engine was given, as `Container.gpu_request` has them.

    Raises:
        OSError: the process is gone, or is not ours to look at.
    """
    environment = _environment(pid, proc)
    devices = _variable(environment, b"NVIDIA_VISIBLE_DEVICES")
    if devices is None:
        devices = _variable(environment, b"CUDA_VISIBLE_DEVICES")
    if devices is not None and devices.strip() == "-1":
        devices = "none"  # how CUDA is told to see no GPU
    return ("all",) if devices is None else visible_devices(devices)


def gpus_of_container(pid: int, *, proc: Path = procfs.PROC) -> tuple[str, ...] | None:
    """The GPUs that the NVIDIA container runtime gave to the container of a process: none where it is told nothing.

    Raises:
        OSError: the process is gone, or is not ours to look at.
    """
    devices = _variable(_environment(pid, proc), b"NVIDIA_VISIBLE_DEVICES")
    return None if devices is None else visible_devices(devices)


def _environment(pid: int, proc: Path) -> bytes:
    return b"\0" + procfs.read(f"{proc}/{pid}/environ")


def _variable(environment: bytes, name: bytes) -> str | None:
    """The value of a variable, of one that is there twice the last; the others are not looked at."""
    _, there, rest = environment.rpartition(b"\0" + name + b"=")
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if there else None


def cpu_use(pid: int, *, proc: Path = procfs.PROC) -> CpuUse:
    """The CPU time a process has used, all its threads together, those that ended too; its state (proc_pid_stat(5)).

    Raises:
        OSError: the process is gone, or is not ours to look at.
        ValueError: what the kernel answers is no such line.
    """
    fields = procfs.stat(pid, proc=proc)  # field N of the manual is the one at N - 3
    if len(fields) < 20:
        raise ValueError(f"process {pid} has {len(fields)} fields after its name, not 20 or more")
    return CpuUse(
        start_ticks=int(fields[19]),
        used_ticks=int(fields[11]) + int(fields[12]),
        uninterruptible=fields[0] == "D",
    )


def tree(pid: int, *, proc: Path = procfs.PROC) -> frozenset[int]:
    """A process and all below it."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent in found:
            continue
        found.add(parent)
        threads = f"{proc}/{parent}/task"
        try:
            numbers = os.listdir(threads)  # noqa: PTH208 - hundreds of times a second, as is what follows
        except OSError:
            continue
        for number in numbers:
            try:
                waiting.extend(map(int, procfs.read(f"{threads}/{number}/children").split()))
            except OSError:
                continue
    return frozenset(found)


def has_ended(pid: int, *, proc: Path = procfs.PROC) -> bool:
    """Whether nothing runs under a pid any more: it is gone, or a zombie."""
    try:
        return procfs.has_ended(procfs.stat(pid, proc=proc))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def born(pids: Iterable[int], *, proc: Path = procfs.PROC) -> dict[int, ProcessOrigin]:
    """Whose child each of these processes is, and since when; what is gone, or not ours to look at, is left out."""
    found: dict[int, ProcessOrigin] = {}
    for pid in pids:
        try:
            fields = procfs.stat(pid, proc=proc)  # field N of proc_pid_stat(5) is the one at N - 3
            found[pid] = ProcessOrigin(parent=int(fields[1]), start_ticks=int(fields[19]))
        except (OSError, ValueError, IndexError):
            continue
    return found


def resident_bytes(pids: Iterable[int], *, proc: Path = procfs.PROC) -> int:
    """What these processes hold in RAM, bytes; pages they share are counted once for each.

    Raises:
        OSError: none of them can be read.
    """
    sizes = []
    for pid in pids:
        try:
            sizes.append(int(procfs.read(f"{proc}/{pid}/statm").split()[1]) * PAGE_BYTES)
        except OSError:
            continue
    if not sizes:
        raise OSError("none of the worker's processes can be read")
    return sum(sizes)


def visible_devices(value: str) -> tuple[str, ...] | None:
    """NVIDIA_VISIBLE_DEVICES as the NVIDIA container runtime reads it: a list, `all`, or `none`, `void` and empty."""
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    return None if not names or names in (("none",), ("void",)) else names
