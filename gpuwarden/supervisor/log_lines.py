"""Log lines of a pool's supervisor, as `gpuwarden.logs` writes them. structlog would double its memory."""

import sys
import time
from contextlib import suppress
from typing import Final

from gpuwarden.format import json_line, show

LEVELS: Final = ("debug", "info", "warning", "error")


class Log:
    """Writes an event per line on stderr: JSON, or text on a terminal.

    Args:
        level: the lowest level that is written, of `LEVELS`.
    """

    def __init__(self, level: str) -> None:
        self._written = LEVELS[LEVELS.index(level) :]

    def info(self, event: str, **fields: object) -> None:
        """Log an event that is no fault."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a fault."""
        self._write("warning", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        if level not in self._written:
            return
        seconds, fraction = divmod(time.time(), 1)
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(fraction * 1e6):06}Z"
        if sys.stderr.isatty():
            line = f"{at} [{level:9}] {event:30} {' '.join(f'{name}={value}' for name, value in fields.items())}"
        else:
            line = json_line({**fields, "event": event, "level": level, "timestamp": at})
        with suppress(OSError, ValueError):  # a full disk, or stderr is closed
            show(line, file=sys.stderr, flush=True)
