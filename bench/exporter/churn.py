"""Containers that come and go: the names of those that exist, and of those on a page."""

import re
from typing import Final

_NAMED: Final = re.compile(rb'[{,]container="([^"]+)"')


def name(number: int) -> str:
    """Name of a container."""
    return f"tenant-{number}"


def alive(step: int, *, at_a_time: int) -> range:
    """Numbers of the containers after some steps; each step ends the oldest and starts one."""
    return range(step, step + at_a_time)


def named(page: bytes) -> frozenset[str]:
    """Every container on a page; series of dead workers name none."""
    return frozenset(found.decode() for found in _NAMED.findall(page))
