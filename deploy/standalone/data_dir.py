"""The data directory of `gpuwarden up`: who may use it now, and what an earlier run left in it.

Besides what `deploy.standalone.stack` keeps there, it holds:

- `lock`: locked by the `up` that runs, whose pid is in it; the kernel lets go of it however that ends;
- `host`: this host's key, which outlives a reboot; $GPUWARDEN_DIR need not.

The directory is its owner's alone (0700): it holds the token, and what workers and alerts said. One that others may
enter, or that holds something else, is refused and left as it is.
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
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import check_name

SYSTEM_DATA: Final = Path("/var/lib/gpuwarden")
SYSTEM_DIRECTORY: Final = Path("/run/gpuwarden")
_POLL_S: Final = 0.1
_ORPHANED_S: Final = 3.0
"""How long parts that were told to end by their parent's death are left to do so, seconds."""
_TOLD_S: Final = 30.0
"""How long those that run on are left once they are told again: an executor finishes the stop at hand, seconds."""
_KILLED_S: Final = 10.0
"""How long the kernel may take to end what was sent SIGKILL, seconds."""


_OURS: Final = frozenset(
    {"alertmanager", "alertmanager.yml", "host", "ledger", "log", "parts", "parts.json", "prometheus", "prometheus.yml"}
    | {"queue", "run", "token", "lost+found"}
)
"""What a data directory may hold that no run has locked yet: parts of a backup, say."""


class PlaceError(GpuwardenError):
    """The data directory cannot be used. The message says why and what to do."""


def default_data(env: Mapping[str, str], *, euid: int) -> Path:
    """/var/lib/gpuwarden for root, else the user's state directory (XDG Base Directory Specification)."""
    if euid == 0:
        return SYSTEM_DATA
    state = env.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "gpuwarden"


def default_directory(data: Path) -> Path:
    """$GPUWARDEN_DIR of this data directory: where every program looks by default, if this is the system's."""
    return SYSTEM_DIRECTORY if data == SYSTEM_DATA else data / "run"


def host_of(data: Path, directory: Path, wanted: str | None) -> str:
    """The key given, else the one from last time, else one made from this machine's name; remembered in `data`."""
    kept = [path.read_text(encoding="utf-8").strip() for path in (data / "host", directory / "host") if path.is_file()]
    host = check_name(wanted or next(filter(None, kept), socket.gethostname()), what="host")
    atomic_write(data / "host", host + "\n", mode=0o644, sync=True)
    return host


@contextmanager
def taken(data: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Have the data directory to ourselves.

    What a killed run left running is ended first; it was told to end when its parent died, so it is mostly waited for.

    Raises:
        PlaceError: it is no directory for this, another run has it, or something left from the last does not end.
    """
    try:
        _make(data)
        lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PlaceError(
            f"{data} cannot be used ({error.strerror}): run as its owner, or give another --data"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 20, 0).decode().strip() or "unknown"
            raise PlaceError(
                f"another `gpuwarden up` (pid {pid}) runs on {data}: stop it first, or give another --data"
            ) from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        _outlast(data / "parts.json", say=say)
        yield
    finally:
        os.close(lock)


def _make(data: Path) -> None:
    """Make the data directory, or see that the one that is there is for us."""
    data.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        data.mkdir(mode=0o700)
        return
    if (data / "lock").exists():
        return
    if {path.name for path in data.iterdir()} - _OURS:
        raise PlaceError(f"{data} holds something else already, and is left as it is: give another --data")
    if data.stat().st_mode & 0o077:
        raise PlaceError(f"others may enter {data}, which is to hold secrets: chmod 700 it, or give another --data")


def _outlast(record: Path, *, say: Callable[[str], None]) -> None:
    """See to it that the parts a killed run left end."""
    left = _still_running(record)
    if left:
        say(f"waiting for what a killed run left: {', '.join(f'{name} (pid {pid})' for name, pid in left.items())}")
    for number, patience_s in ((None, _ORPHANED_S), (signal.SIGTERM, _TOLD_S), (signal.SIGKILL, _KILLED_S)):
        for pid in left.values():
            if number is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline_s = time.monotonic() + patience_s
        while left and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            left = _still_running(record)
    if left:
        raise PlaceError(f"parts of a killed run do not end: {left}; this machine may have to be started anew")


def _still_running(record: Path) -> dict[str, int]:
    """The recorded processes that run: of this boot, and no other process that was given the pid since."""
    try:
        recorded: dict[str, str] = json.loads(record.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    if recorded.pop("boot_id", None) != clock.boot_id():
        return {}
    found = {name: ProcessId.parse(words) for name, words in recorded.items()}
    return {name: process.pid for name, process in found.items() if process is not None and process.runs()}
