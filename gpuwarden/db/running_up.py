"""Databases and addresses of this user's running `gpuwarden up`, in up.json. Standard library only.

The file counts only if the caller owns it, no other user writes it, and its process runs.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gpuwarden import clock
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId

QUEUE_ENV: Final = "GPUWARDEN_QUEUE_DB"
LEDGER_ENV: Final = "GPUWARDEN_REMEDIATOR_LEDGER"
RUNTIME_DIR_ENV: Final = "GPUWARDEN_RUNTIME_DIR"

READ_BYTES: Final = 65536


def path_of(env: Mapping[str, str]) -> Path:
    """`gpuwarden/up.json` in $XDG_STATE_HOME."""
    state = env.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "gpuwarden" / "up.json"


def environment() -> Mapping[str, str]:
    """Variables of this process, else of `gpuwarden up`."""
    return {**of_up(os.environ), **{name: value for name, value in os.environ.items() if value}}


def of_up(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of this user's running `gpuwarden up`; empty without one."""
    return _running(env)[1]


def started_with(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which this user started the running `gpuwarden up`; empty if unknown."""
    process = _running(env)[0]
    if process is None:
        return {}
    try:
        lines = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, sign, value in (line.partition("=") for line in lines) if sign and value}


def _running(env: Mapping[str, str]) -> tuple[ProcessId | None, dict[str, str]]:
    """The process of the running `gpuwarden up`, and its variables."""
    try:
        found: dict[str, Any] = json.loads(_read(path_of(env)))
        process = ProcessId.parse(found["process"])
        if process is None or not process.runs() or found["boot_id"] != clock.boot_id():
            return None, {}
        return process, {name: value for name, value in found["variables"].items() if isinstance(value, str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        return None, {}  # a file of another version, or no home folder


def runtime_dir_of(queue_db: str) -> Path | None:
    """The state files of the running `gpuwarden up`, if this is its queue."""
    found = of_up(os.environ)
    return Path(found[RUNTIME_DIR_ENV]) if found.get(QUEUE_ENV) == queue_db and RUNTIME_DIR_ENV in found else None


@contextmanager
def published(variables: Mapping[str, str], env: Mapping[str, str]) -> Iterator[None]:
    """Publish variables for this user's commands during the block."""
    path, process = path_of(env), str(ProcessId.of(os.getpid()))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = json.dumps({"process": process, "boot_id": clock.boot_id(), "variables": dict(variables)}, indent=1)
    atomic_write(path, content + "\n", mode=0o600, many_writers=True)
    try:
        yield
    finally:
        if of_up(env) == dict(variables):  # a later `up` may have replaced it
            path.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is not a file that only its owner writes")
        return os.read(descriptor, READ_BYTES)
    finally:
        os.close(descriptor)
