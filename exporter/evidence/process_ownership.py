"""Whose the processes of a container are in which several workers live. Pure: what the kernel told in, pids out.

A worker has its own process and all below it. What cannot be put to exactly one for sure counts against every worker of
the container: whoever computes by it is then never taken for idle, and at worst nobody is accused. That is
- what has no worker among those that it descends from: the container's own first process, what was started into it from
  outside, and an orphan, which the kernel gives to another parent than the one that had it (prctl(2),
  PR_SET_CHILD_SUBREAPER);
- what is below a worker that gets the orphans of others: the container's first process, and one that another worker
  descends from; where nobody tells which process the container began with, also one that was started from outside;
- what descends from a process of which nothing could be read, or that started later than its child: its pid is
  somebody else's by now.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Born:
    """Who a process is the child of, and when it was started, clock ticks since boot."""

    parent: int
    start_ticks: int


def own(
    pids: AbstractSet[int], born: Mapping[int, Born], workers: Mapping[str, int], *, first: int | None
) -> Mapping[str, frozenset[int]]:
    """What counts as each worker's, of a container's processes: its own, and those that could be anyone's.

    Args:
        pids: the processes of the container.
        born: what was read of them; one that is not here could not be read.
        workers: the process of each worker. One that is none of the container's any more is left out of the answer.
        first: the process that the container began with, `None` where nobody tells.
    """
    found = {name: pid for name, pid in workers.items() if pid in pids}
    holders = frozenset(found.values())
    above = _descent(pids, born, holders)
    if not all(pid in above for pid in holders):  # who gets whose orphans is not known either
        return dict.fromkeys(found, frozenset(pids))
    heirs: set[int] = set()
    for pid in holders:
        at = born[pid].parent
        while at in pids and at not in heirs:
            heirs.add(at)
            at = born[at].parent
    heirs |= {pid for pid in holders if born[pid].parent not in pids} if first is None else {first}
    shared: set[int] = set()
    whose: dict[int, set[int]] = {pid: set() for pid in holders}
    for pid in pids:
        its = above.get(pid, ())
        if not its or (its[0] != pid and its[0] in heirs):
            shared.add(pid)
        else:
            for each in its:
                whose[each].add(pid)
    return {name: frozenset(whose[pid] | shared) for name, pid in found.items()}


def _descent(
    pids: AbstractSet[int], born: Mapping[int, Born], holders: AbstractSet[int]
) -> Mapping[int, tuple[int, ...]]:
    """Of each process whose descent is in no doubt, the workers among itself and those above it, the nearest first.

    Each is looked at once: a chain of thousands must not hold up the look at everybody else.
    """
    told: dict[int, tuple[int, ...] | None] = {}
    for start in pids:
        line: list[int] = []
        pid = start
        above: tuple[int, ...] | None = ()
        while True:
            if pid in told:
                above = told[pid]
                break
            its = born.get(pid)
            if its is None:
                above = None
                break
            told[pid] = None  # as long as it is gone through: whoever descends from itself was read amiss
            line.append(pid)
            if its.parent not in pids:
                break
            elder = born.get(its.parent)
            if elder is not None and elder.start_ticks > its.start_ticks:
                above = None
                break
            pid = its.parent
        for each in reversed(line):
            if above is not None and each in holders:
                above = (each, *above)
            told[each] = above
    return {pid: above for pid, above in told.items() if above is not None}
