"""Single keys of a terminal, without Enter."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class QuitKey(Exception):  # noqa: N818 - it is no error
    """The user pressed q."""


@contextmanager
def keys() -> Iterator[Callable[[float], None]]:
    """Yield a function that waits for some seconds and raises `QuitKey` on q. The terminal is restored at the end."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)  # Ctrl-C still sends its signal
        yield _wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _wait(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if not select.select([sys.stdin], [], [], left_s)[0]:
            return
        pressed = os.read(sys.stdin.fileno(), 64)
        if not pressed:  # the terminal has gone
            time.sleep(left_s)
            return
        if b"q" in pressed.lower():
            raise QuitKey
