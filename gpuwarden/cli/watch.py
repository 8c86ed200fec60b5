"""`--watch`: show a page again and again, in place at a terminal, until Ctrl-C, SIGTERM or a closed pipe."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from gpuwarden.cli.bars import at_terminal, undisturbed
from gpuwarden.cli.keys import QuitKey
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import format_time, printable, show

if TYPE_CHECKING:
    from rich.text import Text

RETRY_S: Final = 1.0
"""Time between two tries of a page that cannot be read, seconds."""


def watch(
    page: Callable[[int | None], Iterable[str]],
    wait: Callable[[], object],
    *,
    now: Callable[[], float],
    in_place: bool = True,
    ends: str = "Ctrl-C ends",
) -> int:
    """Show pages. Without a terminal, or not `in_place`, each page is printed.

    Args:
        page: makes the lines, at most as many as given. An error of the first page ends the watch.
        wait: waits for the next one.
        now: Unix seconds, for the heading at a terminal.
        in_place: whether a terminal is redrawn.
        ends: how to end it, for the heading.

    Returns:
        The exit code: 128 and the signal, 0 after q, or 1 if the reader has gone.
    """
    ended_by = signal.SIGINT

    def end(number: int, _frame: object) -> None:
        nonlocal ended_by
        ended_by = signal.Signals(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        if in_place and at_terminal():
            _redraw(page, wait, now, ends)
        else:
            _print(page, wait)
    except KeyboardInterrupt:
        return 128 + ended_by
    except QuitKey:
        return 0
    except BrokenPipeError:  # the reader has gone; nothing is left to flush at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _print(page: Callable[[int | None], Iterable[str]], wait: Callable[[], object]) -> None:
    for line in page(None):
        show(line)
    while True:
        sys.stdout.flush()
        try:
            wait()
            for line in page(None):
                show(line)
        except GpuwardenError as error:
            show(f"not readable now: {error}")
            time.sleep(RETRY_S)


def _redraw(
    page: Callable[[int | None], Iterable[str]], wait: Callable[[], object], now: Callable[[], float], ends: str
) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.live import Live  # noqa: PLC0415

    console = Console(highlight=False)
    lines = list(page(console.height - 1))
    live = Live(console=console, screen=True, auto_refresh=False)
    try:
        while True:
            with undisturbed():
                live.start()
                live.update(_text([f"{format_time(now())}, {ends}", *lines]), refresh=True)
            try:
                wait()
                lines = list(page(console.height - 1))
            except GpuwardenError as error:
                lines = [f"not readable now: {error}"]
                time.sleep(RETRY_S)
    finally:
        live.stop()
        console.print(_text(lines), no_wrap=True, overflow="ellipsis")  # the last page stays


def styled(lines: Iterable[str]) -> None:
    """Print lines once, with their styles at a terminal. NO_COLOR leaves the colours out."""
    if not at_terminal():
        show(*lines)
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import

    Console(highlight=False).print(_text(lines), no_wrap=True, overflow="ellipsis")


def _text(lines: Iterable[str]) -> "Text":
    """Lines that are cut at the width of the terminal. A line may have a `style`."""
    from rich.text import Text  # noqa: PLC0415

    text = Text(no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(lines):
        text.append("\n" * (number > 0) + printable(line), style=getattr(line, "style", ""))
    return text
