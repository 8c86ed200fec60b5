"""Who holds an intent: one executor process, named so that its successor on the host can tell whether it is over.

The name is `HOST BOOT_ID PID_NAMESPACE PID START_TICKS`. It says the most where holder and reader are processes of one
boot and one pid namespace; anywhere else only the intent's lease tells that a holder is gone.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpuwarden import clock, procfs

FIELDS = 5


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One executor process."""

    host: str
    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int

    @classmethod
    def this_process(cls, host: str) -> Self:
        """The process that asks."""
        pid = os.getpid()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return cls(host=host, boot_id=clock.boot_id(), pid_namespace=namespace, pid=pid,
                   start_ticks=procfs.start_ticks(pid))  # fmt: skip

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a name; `None` for one that is not ours to understand."""
        parts = name.rsplit(" ", FIELDS - 1)
        if len(parts) != FIELDS or not all(part.isdigit() for part in parts[2:]):
            return None
        host, boot_id, namespace, pid, ticks = parts
        return cls(host=host, boot_id=boot_id, pid_namespace=int(namespace), pid=int(pid), start_ticks=int(ticks))

    def __str__(self) -> str:
        return f"{self.host} {self.boot_id} {self.pid_namespace} {self.pid} {self.start_ticks}"

    def is_over(self, *, seen_by: "Holder") -> bool:
        """Whether `seen_by`, this process, knows that the holder is gone; false when it cannot know."""
        if (self.host, self.boot_id, self.pid_namespace) != (seen_by.host, seen_by.boot_id, seen_by.pid_namespace):
            return False
        try:
            return procfs.start_ticks(self.pid) != self.start_ticks
        except (FileNotFoundError, ProcessLookupError):
            return not _exists(self.pid)
        except OSError:
            return False


def _exists(pid: int) -> bool:
    """Whether there is such a process, also where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
