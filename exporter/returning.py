"""GPU memory on its way back: of processes that have ended, and that the driver counts as in use still. Pure.

A process leaves the driver's list before its memory is free again, by milliseconds or, where there is much of it, by
seconds. For so long the GPU looks as short as it was, and somebody else as if it were to blame. What has just left
counts for as long as the memory that no listed process holds is greater than it was before, and no longer than a bound:
what is not back by then is taken to stay. Times are CLOCK_BOOTTIME seconds.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from exporter.readings import Gpu, GpuReadings


class ReturnHistory:
    """Every GPU's memory that is on its way back, one look after another."""

    def __init__(self, *, bound_s: float, gap_max_s: float) -> None:
        self._bound_s = bound_s
        self._gap_max_s = gap_max_s
        self._cards: dict[str, _Card] = {}

    def observe(
        self, readings: GpuReadings | None, *, ended: AbstractSet[int] = frozenset(), now_s: float
    ) -> Mapping[str, int]:
        """Take in one look; returns how much is on its way back of each GPU, bytes, by UUID; of one not here unknown.

        `ended` are pids that a driver lists though nothing runs under them any more. Who may have ended before the
        first look, in a gap between two, or with nobody knows how much, may have so for as long as the bound.
        """
        self._cards = {uuid: card for uuid, card in self._cards.items() if 0 <= now_s - card.at_s <= self._gap_max_s}
        return dict(self._looked_at(readings, ended, now_s))

    def _looked_at(
        self, readings: GpuReadings | None, ended: AbstractSet[int], now_s: float
    ) -> Iterator[tuple[str, int]]:
        for gpu in () if readings is None else readings.gpus:
            shares_memory = gpu.mig is not None and gpu.mig.shares_memory
            if gpu.processes is None or gpu.memory_used_bytes is None or shares_memory:
                continue
            card = self._cards.setdefault(gpu.uuid, _Card(at_s=now_s, unknown_until_s=now_s + self._bound_s))
            told = card.look(gpu.memory_used_bytes, _held(gpu, ended), now_s=now_s, until_s=now_s + self._bound_s)
            if told is not None:
                yield gpu.uuid, told


@dataclass(kw_only=True)
class _Card:
    """One GPU: who held what at its last look, how much nobody held then, and what is due, the oldest first."""

    at_s: float
    unknown_until_s: float
    held: Mapping[int, int | None] = field(default_factory=dict)
    nobodys_bytes: int | None = None
    due: deque[tuple[float, int]] = field(default_factory=deque)

    def look(self, used_bytes: int, held: Mapping[int, int | None], *, now_s: float, until_s: float) -> int | None:
        """What is due by this look; `None` is unknown."""
        gone = [size for pid, size in self.held.items() if pid not in held]
        self.at_s, self.held = now_s, held
        sizes = [size for size in held.values() if size is not None]
        if len(sizes) < len(held):  # it cannot be told how much nobody holds
            self.nobodys_bytes = None
            ends_s = [until_s] if gone else [each for each, _ in self.due]
            self.unknown_until_s = max([self.unknown_until_s, *ends_s])
            self.due.clear()
        else:
            self._count(gone, used_bytes - sum(sizes), now_s=now_s, until_s=until_s)
        return None if now_s < self.unknown_until_s else sum(size for _, size in self.due)

    def _count(self, gone: list[int | None], nobodys_bytes: int, *, now_s: float, until_s: float) -> None:
        if self.nobodys_bytes is None:  # nor is it known what nobody held before
            if gone:
                self.unknown_until_s = until_s
            self.nobodys_bytes = nobodys_bytes
            return
        if not self.due and not gone:
            self.nobodys_bytes = nobodys_bytes
        self.due.extend((until_s, size) for size in gone if size)
        while self.due and self.due[0][0] <= now_s:
            self.nobodys_bytes += self.due.popleft()[1]
        self.nobodys_bytes = min(self.nobodys_bytes, nobodys_bytes)
        back = sum(size for _, size in self.due) - (nobodys_bytes - self.nobodys_bytes)
        while self.due and back > 0:
            until, size = self.due.popleft()
            if size > back:
                self.due.appendleft((until, size - back))
            back -= size


def _held(gpu: Gpu, ended: AbstractSet[int]) -> dict[int, int | None]:
    """What each process on its list holds that has not ended; `None` is unknown."""
    found: dict[int, int | None] = {}
    for pid, _, size, *_ in gpu.processes or ():
        if pid not in ended and pid not in gpu.recycled:
            before = found.get(pid, 0)
            found[pid] = None if before is None or size is None else before + size
    return found
