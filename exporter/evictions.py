"""For how long the kernel kept a container's processes off a GPU, added up while processes come and go. Pure.

Each process tells of itself alone, and for as long as it lives. So what it told at the look before is taken off what it
tells now. What a process had told when the first of its container were seen is not counted, so that an exporter that
starts anew counts nothing twice. One that comes later has had all of it since.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from exporter.readings import GpuShare

PIDS_MAX: Final = 4096
"""Processes that are remembered of one container on one GPU: those that were told of longest ago are forgotten."""


_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class Evictions:
    """What has been counted of one container incarnation, by GPU, one look after another."""

    def __init__(self) -> None:
        self._total_s: dict[str, float] = {}
        self._told_s: dict[str, dict[int, float]] = {}

    def observe(self, shares: Sequence[GpuShare]) -> Mapping[str, float]:
        """Take in one look; returns the seconds so far, by GPU, less the GPUs of which they are unknown now.

        It is unknown while a process is on a GPU that has not told its time there yet. One that does not tell any more
        has ended, and what it told last stands.
        """
        told = [share for share in shares if share.evicted_s is not None]
        if not told:  # as of all of NVIDIA's
            return self._total_s.copy() if self._total_s else _NOTHING
        unknown = {share.gpu for share in told if not self._count(share)}
        return {gpu: total_s for gpu, total_s in self._total_s.items() if gpu not in unknown}

    def _count(self, share: GpuShare) -> bool:
        """Add what came since the look before; whether every process has told its time."""
        evicted_s, told_s = share.evicted_s or {}, self._told_s.get(share.gpu, {})
        whole = all(now_s is not None or pid in told_s for pid, now_s in evicted_s.items())
        first = share.gpu not in self._total_s
        if first and not whole:
            return False
        for pid, now_s in evicted_s.items():
            if now_s is None:
                continue
            # Taken out and put back, so that those that were told of longest ago come first.
            before_s = told_s.pop(pid, now_s if first else 0.0)
            # Less than before is another process with that pid.
            added_s = now_s - before_s if now_s >= before_s else now_s
            # From 0 at the first look: a counter that is born later hides its first increase from `increase()`.
            self._total_s[share.gpu] = self._total_s.get(share.gpu, 0.0) + added_s
            told_s[pid] = now_s
        self._total_s.setdefault(share.gpu, 0.0)
        for pid in list(told_s)[: max(0, len(told_s) - PIDS_MAX)]:
            del told_s[pid]
        self._told_s[share.gpu] = told_s
        return whole
