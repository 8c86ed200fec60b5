"""Output of a supervised command: passed on, with its lines matched as steps."""

import fcntl
import os
import pty
import re
import select
import shutil
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final

from gpuwarden.format import format_duration

READ_BYTES: Final = select.PIPE_BUF
"""A pipe that can be written takes this much at once (pipe(7))."""
LINE_MAX: Final = 65536
"""A longer line is matched in parts, bytes."""
BAR_MAX: Final = 40
"""Widest bar, columns."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Which lines are steps, and how many are planned."""

    pattern: re.Pattern[bytes]
    total: int | None = None


class Output:
    """Standard output and error of a command, through pseudo-terminals where these are terminals.

    With a planned number of steps, a terminal has a bar below the last whole line.

    Args:
        steps: which lines are steps.
        on_step: called for each step.
        on_full: called once if the output cannot be written.
    """

    def __init__(self, steps: Steps, *, on_step: Callable[[], None], on_full: Callable[[str], None]) -> None:
        self._steps_of = steps
        self._bar: Bar | None = None
        self._on_step = on_step
        self._on_full: Callable[[str], None] | None = on_full
        self.steps = 0
        """Lines with a match so far."""

        self._to: dict[int, int] = {}
        self._lines: dict[int, bytes] = {}
        self._terminals: list[int] = []
        self.given = self._open(1), self._open(2)
        if steps.total and self._terminals and os.environ.get("TERM", "dumb") not in ("", "dumb"):
            self._bar = Bar(steps.total)

    def awaited(self) -> dict[int, int]:
        """What to wait for: output of the command, or a reader of output that cannot be passed on."""
        return dict((ours, EVENT_READ) if _can_be_written(to) else (to, EVENT_WRITE) for ours, to in self._to.items())

    def started(self) -> None:
        """The command has its ends."""
        for descriptor in self.given:
            os.close(descriptor)

    def resize(self) -> None:
        """Give the pseudo-terminals the size of the terminal."""
        for terminal in self._terminals:
            with suppress(OSError):
                size = fcntl.ioctl(1, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)

    def read(self, descriptor: int) -> None:
        """Pass on what can be read, if that does not wait for a pager or a stopped terminal."""
        to = self._to[descriptor]
        if not _can_be_written(to):
            return
        try:
            data = os.read(descriptor, READ_BYTES)
        except OSError:  # a pseudo-terminal without its other end
            data = b""
        if not data:
            os.close(descriptor)
            del self._to[descriptor]
            return
        self._pass_on(to, data)
        *lines, rest = re.split(rb"[\r\n]", self._lines.get(descriptor, b"") + data)
        if len(rest) > LINE_MAX:
            lines, rest = [*lines, rest], b""
        self._lines[descriptor] = rest
        for line in lines:
            if self._steps_of.pattern.search(line):
                self.steps += 1
                self._on_step()
        if self._bar is not None and os.isatty(to):
            self._write(to, self._bar.after(data, self.steps))

    def clear(self) -> None:
        """Remove the bar: another text follows."""
        if self._bar is not None and (to := next(filter(os.isatty, (1, 2)), None)) is not None:
            self._write(to, self._bar.erased())

    def drain(self) -> None:
        """Pass on the rest after the end, without waiting for other holders of the pipe."""
        for descriptor in list(self._to):
            os.set_blocking(descriptor, False)
            while descriptor in self._to:
                before = self._lines.get(descriptor)
                try:
                    peeked = os.read(descriptor, READ_BYTES)
                except OSError:
                    peeked = b""
                if not peeked:
                    os.close(descriptor)
                    del self._to[descriptor]
                else:
                    self._pass_on(self._to[descriptor], peeked)
                    self._lines[descriptor] = before or b""

    def _pass_on(self, to: int, data: bytes) -> None:
        self._write(to, self._bar.erased() + data if self._bar is not None and os.isatty(to) else data)

    def _write(self, to: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(to, data) :]
        except OSError as error:
            if self._on_full is not None:
                self._on_full(error.strerror or str(error))
                self._on_full = None

    def _open(self, number: int) -> int:
        if os.isatty(number):
            ours, theirs = pty.openpty()
            modes = termios.tcgetattr(theirs)
            modes[1] &= ~termios.OPOST  # the real terminal adds the carriage returns
            termios.tcsetattr(theirs, termios.TCSANOW, modes)
            self._terminals.append(ours)
        else:
            ours, theirs = os.pipe()
        self._to[ours] = number
        return theirs


class Bar:
    """A line with the progress of a command, below its last whole line of output."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_s = time.monotonic()
        self._shown = False

    def erased(self) -> bytes:
        """What removes the bar."""
        shown, self._shown = self._shown, False
        return b"\r\x1b[K" if shown else b""

    def after(self, data: bytes, steps: int) -> bytes:
        """The bar after this output; nothing in the middle of a line, or at the end."""
        if not data.endswith(b"\n") or not 0 < steps < self._total:
            return b""
        self._shown = True
        left_s = (time.monotonic() - self._began_s) / steps * (self._total - steps)
        text = f" {steps}/{self._total}, {format_duration(left_s)} left"
        width = max(0, min(BAR_MAX, shutil.get_terminal_size().columns - len(text) - 1))
        done = width * steps // self._total
        return ("#" * done + "-" * (width - done) + text).encode()


def _can_be_written(descriptor: int) -> bool:
    return bool(select.select([], [descriptor], [], 0)[1])
