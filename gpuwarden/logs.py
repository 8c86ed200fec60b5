"""How gpuwarden's programs log: one event a line on standard error, JSON for machines, coloured text at a terminal."""

import logging
import sys

import structlog


def configure(*, level: str = "info") -> None:
    """Set up structured logging for this process.

    Args:
        level: the least severe level written: debug, info, warning or error.
    """
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
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
