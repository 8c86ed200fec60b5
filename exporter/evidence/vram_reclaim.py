"""GPU memory of ended processes that the driver has not freed yet. Pure. Times: CLOCK_BOOTTIME seconds.

A driver drops a process from its list up to seconds before it frees the memory. Until then the GPU looks full.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from exporter.model.gpu import Gpu, GpuReadings

NOT_YET: Final = "not_yet"
"""Reason: the GPU has not been sampled for the whole bound."""

NOT_MEASURED: Final = "not_measured"
"""Reason: a process of unknown size ended."""


class VramReclaimTracker:
    """The returning memory of every GPU; `unknown` has the reasons."""

    def __init__(self, *, bound_s: float, gap_max_s: float) -> None:
        self._bound_s = bound_s
        self._gap_max_s = gap_max_s
        self._cards: dict[str, _GpuMemory] = {}
        self.unknown: dict[str, str] = {}

    def observe(
        self, readings: GpuReadings | None, *, ended: AbstractSet[int] = frozenset(), now_s: float
    ) -> Mapping[str, int]:
        """Add one sample; returns bytes by UUID, if known. `ended` are listed pids of ended processes."""
        kept_s = max(self._bound_s, self._gap_max_s)
        self._cards = {uuid: card for uuid, card in self._cards.items() if 0 <= now_s - card.at_s <= kept_s}
        self.unknown = {}
        found: dict[str, int] = {}
        until_s = now_s + self._bound_s
        for gpu in () if readings is None else readings.gpus:
            if gpu.processes is None or gpu.memory_used_bytes is None or (gpu.mig and gpu.mig.shares_memory):
                continue
            card = self._cards.setdefault(gpu.uuid, _GpuMemory(unknown_until_s=until_s))
            reclaiming_bytes = card.update(
                gpu.memory_used_bytes, _memory_by_pid(gpu, ended), now_s=now_s, until_s=until_s
            )
            if now_s < card.unknown_until_s:
                self.unknown[gpu.uuid] = card.why
            else:
                found[gpu.uuid] = reclaiming_bytes
        return found


@dataclass(kw_only=True)
class _GpuMemory:
    """One GPU at its last sample: bytes by process, of no process (`rest`), and of ended ones (`due`)."""

    unknown_until_s: float
    why: str = NOT_YET
    at_s: float = 0.0
    held: Mapping[int, int | None] = field(default_factory=dict)
    rest_bytes: int = 0
    stays_bytes: int = 0
    due: list[tuple[float, int]] = field(default_factory=list)

    def update(self, used_bytes: int, held: Mapping[int, int | None], *, now_s: float, until_s: float) -> int:
        left = [size for pid, size in self.held.items() if pid not in held]
        if None in left:
            self.unknown_until_s, self.why = until_s, NOT_MEASURED
        if not self.due:
            self.stays_bytes = self.rest_bytes
        due = [*self.due, *((until_s, size) for size in left if size)]
        rest_bytes = max(0, used_bytes - sum(filter(None, held.values())))
        self.stays_bytes = min(self.stays_bytes, rest_bytes)
        back_bytes = max(0, _sum(due) - (rest_bytes - self.stays_bytes))
        self.due = [each for each in due if each[0] > now_s]
        # Memory not freed within the bound stays.
        self.stays_bytes += max(0, _sum(due) - _sum(self.due) - back_bytes)
        # Unknown counts as 0: too much returning memory only delays a recycling.
        self.rest_bytes = 0 if None in held.values() or now_s < self.unknown_until_s else rest_bytes
        self.at_s, self.held = now_s, held
        return min(_sum(self.due), rest_bytes - self.stays_bytes)


def _sum(due: Iterable[tuple[float, int]]) -> int:
    return sum(size for _, size in due)


def _memory_by_pid(gpu: Gpu, ended: AbstractSet[int]) -> dict[int, int | None]:
    """Bytes of each listed process; a pid can be listed twice."""
    held: dict[int, int | None] = {}
    for pid, _, size, *_ in gpu.processes or ():
        if pid not in ended:
            before = held.get(pid, 0)
            held[pid] = None if before is None or size is None else before + size
    return held
