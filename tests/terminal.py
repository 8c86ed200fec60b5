"""Programs in a real pseudo-terminal."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """A program with its output so far and its keyboard."""

    process: subprocess.Popen[bytes]
    said: Callable[[], str]
    press: Callable[[str], object]
    modes: Callable[[], list[Any]]
    """As `termios.tcgetattr`."""


@contextmanager
def at_terminal(
    argv: Sequence[str],
    *,
    rows: int = 24,
    columns: int = 80,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Terminal]:
    """Run a program in a new terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        ["setsid", "--ctty", *argv],  # Ctrl-C of this terminal reaches it
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=own | {"TERM": "xterm"} | dict(env or {}),
        cwd=folder,
    )
    os.close(theirs)
    written = bytearray()

    def said() -> str:
        with suppress(OSError):
            while select.select([ours], [], [], 0)[0]:
                written.extend(os.read(ours, 65536))
        return written.decode()

    try:
        yield Terminal(
            process=process,
            said=said,
            press=lambda keys: os.write(ours, keys.encode()),
            modes=partial(termios.tcgetattr, ours),
        )
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@contextmanager
def terminal(*arguments: str, rows: int = 24) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A command of gpuwarden in a terminal of 80 columns, and its output so far."""
    with at_terminal([sys.executable, "-m", "gpuwarden", *arguments], rows=rows) as found:
        yield found.process, found.said
