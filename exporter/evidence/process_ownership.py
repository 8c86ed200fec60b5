"""Assign the processes of a shared container to its workers. Pure.

A worker owns its process and its descendants. A process without one certain owner counts for every worker: any worker
may have inherited an orphan (prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOrigin:
    """The parent of a process, and its start, clock ticks since boot."""

    parent: int
    start_ticks: int


def pids_by_worker(
    pids: AbstractSet[int], born: Mapping[int, ProcessOrigin], workers: Mapping[str, int], *, first: int | None
) -> Mapping[str, frozenset[int]]:
    """Assign the container's processes `pids` to each worker in it; `first` is its first process."""
    found = {name: pid for name, pid in workers.items() if pid in pids}
    holders = frozenset(found.values())
    above = _descent(pids, born, holders)
    if not all(pid in above for pid in holders):  # unknown who inherits orphans
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
    pids: AbstractSet[int], born: Mapping[int, ProcessOrigin], holders: AbstractSet[int]
) -> Mapping[int, tuple[int, ...]]:
    """The workers among each process and its ancestors, the nearest first. Visits each process once."""
    found: dict[int, tuple[int, ...] | None] = {}
    for start in pids:
        line: list[int] = []
        pid = start
        above: tuple[int, ...] | None = ()
        while True:
            if pid in found:
                above = found[pid]
                break
            its = born.get(pid)
            if its is None:
                above = None
                break
            found[pid] = None  # a process that is its own ancestor was misread
            line.append(pid)
            if its.parent not in pids:
                break
            elder = born.get(its.parent)
            if elder is not None and elder.start_ticks > its.start_ticks:  # its pid was reused
                above = None
                break
            pid = its.parent
        for each in reversed(line):
            if above is not None and each in holders:
                above = (each, *above)
            found[each] = above
    return {pid: above for pid, above in found.items() if above is not None}
