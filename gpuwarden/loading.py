"""A command is loaded without what only costs it time.

Python does not look for garbage among what the modules bring: it is kept for as long as the process lives. An
executor's start looked through it 222 times, a tenth of its time. For the loading alone: what runs afterwards may be a
job, whose garbage holds a GPU's memory.

And `rich` is not there. structlog and httpx load it wherever it is installed, structlog to colour tracebacks that our
logs have as text, httpx for a command line of its own: a sixth to a fourth of each program's start. Both do without it
where it is not installed. Whoever imports it afterwards, a job for example, finds it.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

UNTIL_COLLECTED: Final = 10_000
"""How many more objects there are before Python looks for garbage among them; 700 of its own accord."""

UNWANTED: Final = "rich"


@contextmanager
def loading(*, ours: bool = True) -> Iterator[None]:
    """While modules are loaded inside; what is not `ours` may need all that is installed."""
    before = gc.get_threshold()
    gc.set_threshold(UNTIL_COLLECTED, *before[1:])
    modules: dict[str, Any] = sys.modules  # None in place of a module: it is not there (Python's import system, 5.3.1)
    hides = ours and UNWANTED not in modules
    if hides:
        modules[UNWANTED] = None
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if hides:
            modules.pop(UNWANTED, None)
