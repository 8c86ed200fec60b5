"""Logs: one event per line on stderr, JSON, or coloured text on a terminal."""

import io
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict

from gpuwarden.format import printable


class _Unfailing(io.TextIOBase):
    """A stream whose writes never fail: a full disk loses lines only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.flush()


def _printable(_: object, __: str, event: EventDict) -> EventDict:
    """Escape unprintable characters in a terminal's log. JSON escapes them itself."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = (
                "\n".join(map(printable, value.expandtabs().split("\n"))) if name == "exception" else printable(value)
            )
    return event


def configure(*, level: str = "info") -> None:
    """Configure structured logs. `level` is debug, info, warning or error."""
    at_terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if at_terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *([_printable] if at_terminal else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _Unfailing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
