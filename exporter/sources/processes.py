"""Workers that run in no container: their process tree stands in for one."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from exporter.readings import Container, CpuUse, ProcessWork
from exporter.sources.containers import visible_devices
from gpuwarden import cgroup, clock

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
"""4096 on x86-64, up to 65536 on ARM servers: the unit of /proc/PID/statm (proc_pid_statm(5))."""


TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
"""100 nearly everywhere: the unit of CPU time in /proc/PID/stat (proc_pid_stat(5))."""

PROCESSES_MAX: Final = 2048
"""Processes of one container whose work is read once a second; that of more is unknown."""

_IO: Final = (b"rchar:", b"wchar:", b"read_bytes:", b"write_bytes:")
"""What counts as I/O of /proc/PID/io (proc_pid_io(5)): the first two pass through system calls and are there with a
warm page cache too; the others reach a disk, also by mmap and io_uring. What does both counts twice."""


def container(pid: int, worker: str, *, proc: Path = cgroup.PROC) -> Container:
    """A worker's own process tree, as a container named after the worker.

    GPUs are those of its NVIDIA_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES; with neither set, a process sees every GPU.

    Raises:
        OSError: the process is gone, or is not ours to look at.
    """
    ticks = cgroup.start_ticks(pid, proc=proc)
    return Container(
        kind="process",
        id=f"process:{pid}:{ticks}",
        name=worker,
        incarnation=f"process:{pid}:{ticks}@{clock.boot_id()}",
        pid=pid,
        gpu_request=gpu_request(pid, proc=proc),
    )


def gpu_request(pid: int, *, proc: Path = cgroup.PROC) -> tuple[str, ...] | None:
    """The GPUs that a process outside of any engine was given, as `Container.gpu_request` has them.

    Raises:
        OSError: the process is gone, or is not ours to look at.
    """
    environment = dict(
        entry.partition("=")[::2]
        for entry in (proc / str(pid) / "environ").read_bytes().decode("utf-8", "replace").split("\0")
        if entry
    )
    devices = environment.get("NVIDIA_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    if devices is not None and devices.strip() == "-1":
        devices = "none"  # how CUDA is told to see no GPU
    return ("all",) if devices is None else visible_devices(devices)


def cpu_use(pid: int, *, proc: Path = cgroup.PROC) -> CpuUse:
    """The CPU time a process has used, all its threads together, those that ended too (proc_pid_stat(5)).

    Raises:
        OSError: the process is gone, or is not ours to look at.
        ValueError: what the kernel answers is no such line.
    """
    field = _stat(pid, proc)
    return CpuUse(start_ticks=field[22], used_ticks=field[14] + field[15])


def work(pids: Iterable[int], *, proc: Path = cgroup.PROC) -> dict[int, ProcessWork]:
    """What each of these processes has done since it started; one that is gone by now is left out.

    Raises:
        OSError: one of them is not ours to look at.
        ValueError: what the kernel answers is no such line.
    """
    found: dict[int, ProcessWork] = {}
    for pid in pids:
        try:
            field = _stat(pid, proc)
            io_bytes = _io_bytes(pid, proc)
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[pid] = ProcessWork(
            start_ticks=field[22],
            io_bytes=io_bytes,
            faults=sum(field[10:14]),
            cpu_s=sum(field[14:18]) / TICKS_PER_S,
        )
    return found


def _stat(pid: int, proc: Path) -> list[int]:
    """The fields 10 to 22 of /proc/PID/stat, each at its own number: faults, CPU time, start (proc_pid_stat(5)).

    Raises:
        OSError: the process is gone.
        ValueError: what the kernel answers is no such line.
    """
    fields = cgroup.stat(pid, proc=proc)
    if len(fields) < 20:
        raise ValueError(f"process {pid} has {len(fields)} fields after its name, not 20 or more")
    return [0] * 10 + [int(field) for field in fields[7:20]]


def _io_bytes(pid: int, proc: Path) -> int | None:
    """What a process has read and written; `None` where the kernel keeps no account of it, or not for us."""
    try:
        with open(f"{proc}/{pid}/io", "rb", buffering=0) as file:  # noqa: PTH123 - hundreds of times a second
            words = file.read().split()
    except PermissionError:
        return None
    except FileNotFoundError:
        if (proc / str(pid) / "stat").exists():
            return None
        raise
    figures = dict(zip(words[::2], words[1::2], strict=True))
    return sum(int(figures[name]) for name in _IO)


def tree(pid: int, *, proc: Path = cgroup.PROC) -> frozenset[int]:
    """A process and all below it."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent in found:
            continue
        found.add(parent)
        for listing in (proc / str(parent) / "task").glob("*/children"):
            try:
                waiting.extend(int(child) for child in listing.read_text(encoding="ascii").split())
            except OSError:
                continue
    return frozenset(found)


def resident_bytes(pids: Iterable[int], *, proc: Path = cgroup.PROC) -> int:
    """What these processes hold in RAM, bytes; pages they share are counted once for each.

    Raises:
        OSError: none of them can be read.
    """
    sizes = []
    for pid in pids:
        try:
            sizes.append(int((proc / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES)
        except OSError:
            continue
    if not sizes:
        raise OSError("none of the worker's processes can be read")
    return sum(sizes)
