"""Output of a supervised command: passed on, with its lines matched as steps."""

import fcntl
import os
import pty
import re
import select
import termios
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import Final

READ_BYTES: Final = select.PIPE_BUF
"""A pipe that can be written takes this much at once (pipe(7))."""
LINE_MAX: Final = 65536
"""A longer line is matched in parts, bytes."""


class Output:
    """Standard output and error of a command, through pseudo-terminals where these are terminals.

    Args:
        pattern: a line with a match is a step.
        on_step: called for each step.
        on_full: called once if the output cannot be written.
    """

    def __init__(
        self, pattern: re.Pattern[bytes], *, on_step: Callable[[], None], on_full: Callable[[str], None]
    ) -> None:
        self._pattern = pattern
        self._on_step = on_step
        self._on_full: Callable[[str], None] | None = on_full
        self.steps = 0
        """Lines with a match so far."""

        self._to: dict[int, int] = {}
        self._lines: dict[int, bytes] = {}
        self._terminals: list[int] = []
        self.given = self._open(1), self._open(2)

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
        if not _can_be_written(self._to[descriptor]):
            return
        try:
            data = os.read(descriptor, READ_BYTES)
        except OSError:  # a pseudo-terminal without its other end
            data = b""
        if not data:
            os.close(descriptor)
            del self._to[descriptor]
            return
        self._pass_on(self._to[descriptor], data)
        *lines, rest = re.split(rb"[\r\n]", self._lines.get(descriptor, b"") + data)
        if len(rest) > LINE_MAX:
            lines, rest = [*lines, rest], b""
        self._lines[descriptor] = rest
        for line in lines:
            if self._pattern.search(line):
                self.steps += 1
                self._on_step()

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


def _can_be_written(descriptor: int) -> bool:
    return bool(select.select([], [descriptor], [], 0)[1])
