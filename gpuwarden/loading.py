"""Modules are loaded without looking for garbage among what they bring: it is kept for as long as the process lives.

An executor's start looked through it 222 times, a tenth of its time. For the loading alone: what runs afterwards may be
a job, whose garbage holds a GPU's memory.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

UNTIL_COLLECTED: Final = 10_000
"""How many more objects there are before Python looks for garbage among them; 700 of its own accord."""


@contextmanager
def loading() -> Iterator[None]:
    """While modules are loaded inside."""
    before = gc.get_threshold()
    gc.set_threshold(UNTIL_COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
