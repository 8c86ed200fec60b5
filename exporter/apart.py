"""Whose the processes of a container are in which several workers live. Pure: what the kernel told in, pids out.

A worker has its own process and all below it. What cannot be put to exactly one for sure counts against every worker of
the container: whoever computes by it is then never taken for idle, and at worst nobody is accused. That is
- what has no worker among those that it descends from: the container's own first process, what was started into it from
  outside, and an orphan, which the kernel gives to another parent than the one that had it (prctl(2),
  PR_SET_CHILD_SUBREAPER);
- what is below a worker that gets the orphans of others: the container's first process, and one that another worker
  descends from;
- what descends from a process of which nothing could be read, or that started later than its child: its pid is
  somebody else's by now.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Born:
    """Who a process is the child of, and when it was started, clock ticks since boot."""

    parent: int
    start_ticks: int


def own(
    pids: AbstractSet[int], born: Mapping[int, Born], workers: Mapping[str, int], *, first: int
) -> Mapping[str, frozenset[int]]:
    """What counts as each worker's, of a container's processes: its own, and those that could be anyone's.

    Args:
        pids: the processes of the container.
        born: what was read of them; one that is not here could not be read.
        workers: the process of each worker. One that is none of the container's any more is left out of the answer.
        first: the process that the container began with.
    """
    found = {name: pid for name, pid in workers.items() if pid in pids}
    lines = {pid: tuple(_line(pid, pids, born)) for pid in pids}
    holders = frozenset(found.values())
    if not all(lines[pid] for pid in holders):  # who gets whose orphans is not known either
        return dict.fromkeys(found, frozenset(pids))
    heirs = {first, *(above for pid in holders for above in lines[pid][1:])}
    shared: set[int] = set()
    whose: dict[int, set[int]] = {pid: set() for pid in holders}
    for pid, line in lines.items():
        its = [each for each in line if each in holders]
        if not its or (its[0] != pid and its[0] in heirs):
            shared.add(pid)
        else:
            for each in its:
                whose[each].add(pid)
    return {name: frozenset(whose[pid] | shared) for name, pid in found.items()}


def _line(pid: int, pids: AbstractSet[int], born: Mapping[int, Born]) -> Iterator[int]:
    """A process and those of the container that it descends from, the nearest first; nothing where that is in doubt."""
    line: list[int] = []
    at = born.get(pid)
    while at is not None and pid not in line:
        line.append(pid)
        if at.parent not in pids:
            yield from line
            return
        pid, child = at.parent, at
        at = born.get(pid)
        if at is not None and at.start_ticks > child.start_ticks:
            return
