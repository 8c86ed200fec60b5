"""The data directory of `gpuwarden up`: its lock, its host key and processes left by a killed run.

In addition to the files of `deploy.standalone.stack` it holds:

- `lock`: locked by the running `up`, with its pid. The kernel releases the lock when the process ends.
- `host`: the host key. It survives a reboot; $GPUWARDEN_RUNTIME_DIR may not.

The mode is 0700, because the directory holds secrets. A directory that other users may enter, or with foreign files, is
refused.
"""

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gpuwarden import clock
from gpuwarden.db.running_up import path_of
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import check_name

SYSTEM_DATA: Final = Path("/var/lib/gpuwarden")
SYSTEM_DIRECTORY: Final = Path("/run/gpuwarden")
_POLL_S: Final = 0.1
_ORPHAN_S: Final = 3.0
"""Time for parts to end after the death of their parent, seconds."""
_TERM_S: Final = 30.0
"""Time for parts to end after SIGTERM, seconds. An executor finishes its current stop."""
_KILL_S: Final = 10.0
"""Time for the kernel to end a process after SIGKILL, seconds."""


_OURS: Final = frozenset(
    {"alertmanager", "alertmanager.yml", "host", "ledger", "log", "parts", "parts.json", "prometheus", "prometheus.yml"}
    | {"queue", "run", "token", "up.json", "lost+found"}
)
"""Files of a data directory that was never locked, for example a restored backup."""


class DataDirError(GpuwardenError):
    """The data directory cannot be used. The message says why and what to do."""


def default_data(env: Mapping[str, str], *, euid: int) -> Path:
    """/var/lib/gpuwarden for root, otherwise the user's state directory (XDG Base Directory Specification)."""
    return SYSTEM_DATA if euid == 0 else path_of(env).parent


def default_directory(data: Path) -> Path:
    """$GPUWARDEN_RUNTIME_DIR of a data directory: the system default if the data directory is the system's."""
    return SYSTEM_DIRECTORY if data == SYSTEM_DATA else data / "run"


def host_key(data: Path, directory: Path, wanted: str | None) -> str:
    """Return and store the host key: the given one, the last one, or the machine's name."""
    kept = [path.read_text(encoding="utf-8").strip() for path in (data / "host", directory / "host") if path.is_file()]
    host = check_name(wanted or next(filter(None, kept), socket.gethostname()), what="host")
    atomic_write(data / "host", host + "\n", mode=0o644, sync=True)
    return host


@contextmanager
def lock_data_dir(data: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the data directory and end processes of a killed run. Raises DataDirError."""
    try:
        _create(data)
        lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataDirError(
            f"{data} cannot be used ({error.strerror}): run as its owner, or choose another --data-dir"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 20, 0).decode().strip() or "unknown"
            raise DataDirError(
                f"another `gpuwarden up` (pid {pid}) runs on {data}. One guards all workers of a host: see `gpuwarden "
                f"status`, arm it with `gpuwarden arm`, or end it first (kill {pid})"
            ) from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        _end_leftovers(data / "parts.json", say=say)
        yield
    finally:
        os.close(lock)


def _create(data: Path) -> None:
    """Create the data directory, or check an existing one."""
    data.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        data.mkdir(mode=0o700)
        return
    if (data / "lock").exists():
        return
    if {path.name for path in data.iterdir()} - _OURS:
        raise DataDirError(f"{data} holds other files: choose another --data-dir")
    if data.stat().st_mode & 0o077:
        raise DataDirError(
            f"other users may enter {data}, which holds secrets: run chmod 700 on it, or choose another --data-dir"
        )


def _end_leftovers(record: Path, *, say: Callable[[str], None]) -> None:
    """Wait for parts of a killed run to end, then signal them."""
    left = _running_leftovers(record)
    if left:
        say(f"waiting for processes of a killed run: {', '.join(f'{name} (pid {pid})' for name, pid in left.items())}")
    for number, timeout_s in ((None, _ORPHAN_S), (signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        for pid in left.values():
            if number is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline_s = time.monotonic() + timeout_s
        while left and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            left = _running_leftovers(record)
    if left:
        raise DataDirError(f"processes of a killed run do not end: {left}; reboot this host")


def _running_leftovers(record: Path) -> dict[str, int]:
    """Recorded processes that still run: of this boot, with the recorded start time."""
    try:
        recorded: dict[str, str] = json.loads(record.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    if recorded.pop("boot_id", None) != clock.boot_id():
        return {}
    found = {name: ProcessId.parse(words) for name, words in recorded.items()}
    return {name: process.pid for name, process in found.items() if process is not None and process.runs()}
