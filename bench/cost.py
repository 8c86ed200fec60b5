"""CPU time and memory of a process."""

from exporter.sources import processes
from gpuwarden import procfs


def cpu_s(pid: int) -> float:
    """CPU time of a process, seconds."""
    return processes.cpu_use(pid).used_ticks / procfs.TICKS_PER_S


def resident_mib(pid: int) -> float:
    """Resident memory of a process, MiB."""
    return processes.resident_bytes([pid]) / 2**20
