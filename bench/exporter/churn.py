"""Containers that come and go, one a step: which of them there are, and which a page tells of."""

import re
from typing import Final

_NAMED: Final = re.compile(rb'[{,]container="([^"]+)"')


def name(number: int) -> str:
    """What the container of this number is called."""
    return f"tenant-{number}"


def alive(step: int, *, at_a_time: int) -> range:
    """The numbers of those that there are after so many steps: each step ends the oldest and starts another."""
    return range(step, step + at_a_time)


def named(page: bytes) -> frozenset[str]:
    """Every container that some series of a page is about; a dead worker's have none."""
    return frozenset(found.decode() for found in _NAMED.findall(page))
