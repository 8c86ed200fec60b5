"""This host's clocks. CLOCK_BOOTTIME counts suspended time and is never set."""

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
