"""Logs: one event per line on stderr, JSON, or coloured text on a terminal."""

import io
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


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
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _Unfailing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
