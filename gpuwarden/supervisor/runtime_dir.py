"""The folder of state files that a program uses without an option. Standard library only."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from gpuwarden.db import running_up
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.reporter import DEFAULT_DIR


class RuntimeDirError(GpuwardenError):
    """No folder for state files can be written."""


def runtime_dir(given: Path | None, *, say: Callable[[str], None], queue_db: str | None = None) -> Path:
    """`given`, else $GPUWARDEN_RUNTIME_DIR, that of the running `gpuwarden up`, /run/gpuwarden, or one of this user.

    With `queue_db`, `up` counts only if this is its queue. `say` gets a warning about a folder of this user.

    Raises:
        RuntimeDirError: none can be written.
    """
    named = os.environ.get(running_up.RUNTIME_DIR_ENV)
    if named is None and queue_db is None:
        named = running_up.of_up(os.environ).get(running_up.RUNTIME_DIR_ENV)
    if given is not None or named:
        return given or Path(str(named))
    if queue_db is not None and (found := running_up.runtime_dir_of(queue_db)) is not None:
        return found
    return DEFAULT_DIR if (DEFAULT_DIR / "host").exists() else _own_directory(say)


def _own_directory(say: Callable[[str], None]) -> Path:
    """A folder of this user, for a host without set-up. Its host key is the hostname."""
    room = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    directory = Path(room) / "gpuwarden"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = directory / "host"
        if not key.exists():
            atomic_write(key, socket.gethostname() + "\n", many_writers=True)  # other workers may start now
    except OSError as error:
        raise RuntimeDirError(
            f"no folder for state files ({error}): set --runtime-dir or $GPUWARDEN_RUNTIME_DIR"
        ) from None
    say(f"host not set up: state files go to {directory}, which an exporter reads only if configured")
    return directory
