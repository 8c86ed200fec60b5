"""This host's clocks. CLOCK_BOOTTIME counts suspended time and is never set."""

import os
import time
from functools import cache
from pathlib import Path

from gpuwarden.state_file import Stamp


@cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def boottime_s() -> float:
    """Seconds since this boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stamp() -> Stamp:
    """The current time on all clocks."""
    return Stamp(boottime_s=boottime_s(), boot_id=boot_id(), unix_s=time.time())


def started_unix_s(start_ticks: int) -> float:
    """Start of a process of this boot, by today's wall clock."""
    return time.time() - boottime_s() + start_ticks / os.sysconf("SC_CLK_TCK")
