"""This host's clocks, read together. CLOCK_BOOTTIME counts suspended time and is never set."""

import time
from functools import cache
from pathlib import Path

from gpuwarden.statefile import Stamp


@cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def stamp() -> Stamp:
    """Now, three ways."""
    return Stamp(boottime_s=time.clock_gettime(time.CLOCK_BOOTTIME), boot_id=boot_id(), unix_s=time.time())
