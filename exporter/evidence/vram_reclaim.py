"""GPU memory that ended processes still hold until the driver frees it. Pure: times are CLOCK_BOOTTIME seconds.

A process leaves the driver's list before its memory is free again: by milliseconds or, where there is much of it, by
seconds. Meanwhile the GPU looks short of memory, and another container looks to blame. So what a process held counts as
returning for a bound after it has left, and never more than no listed process holds beyond what none held before.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from exporter.model.gpu import Gpu, GpuReadings

NOT_YET: Final = "not_yet"
"""Why it is unknown: the GPU has not been looked at for as long as the bound, so that more may have left before."""

NOT_MEASURED: Final = "not_measured"
"""Or a process of unknown size has left."""


class ReturnHistory:
    """The returning memory of every GPU, one look after another; `unknown` has the reason where there is none."""

    def __init__(self, *, bound_s: float, gap_max_s: float) -> None:
        self._bound_s = bound_s
        self._gap_max_s = gap_max_s
        self._cards: dict[str, _Card] = {}
        self.unknown: dict[str, str] = {}

    def observe(
        self, readings: GpuReadings | None, *, ended: AbstractSet[int] = frozenset(), now_s: float
    ) -> Mapping[str, int]:
        """Take in one look, and return the bytes by UUID; a GPU that is not in it is unknown.

        `ended` are pids that a driver lists although no process has them any more.
        """
        kept_s = max(self._bound_s, self._gap_max_s)
        self._cards = {uuid: card for uuid, card in self._cards.items() if 0 <= now_s - card.at_s <= kept_s}
        self.unknown = {}
        found: dict[str, int] = {}
        until_s = now_s + self._bound_s
        for gpu in () if readings is None else readings.gpus:
            if gpu.processes is None or gpu.memory_used_bytes is None or (gpu.mig and gpu.mig.shares_memory):
                continue
            card = self._cards.setdefault(gpu.uuid, _Card(unknown_until_s=until_s))
            returning_bytes = card.look(gpu.memory_used_bytes, _held(gpu, ended), now_s=now_s, until_s=until_s)
            if now_s < card.unknown_until_s:
                self.unknown[gpu.uuid] = card.why
            else:
                found[gpu.uuid] = returning_bytes
        return found


@dataclass(kw_only=True)
class _Card:
    """One GPU at its last look: `held` by each listed process, `rest_bytes` by none, `due` of those that left."""

    unknown_until_s: float
    why: str = NOT_YET
    at_s: float = 0.0
    held: Mapping[int, int | None] = field(default_factory=dict)
    rest_bytes: int = 0
    stays_bytes: int = 0
    due: list[tuple[float, int]] = field(default_factory=list)

    def look(self, used_bytes: int, held: Mapping[int, int | None], *, now_s: float, until_s: float) -> int:
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
        # What is not back after the bound is taken to stay; what is back is the oldest.
        self.stays_bytes += max(0, _sum(due) - _sum(self.due) - back_bytes)
        # While it is not known what none holds, it counts as nothing: to count too much as returning only delays.
        self.rest_bytes = 0 if None in held.values() or now_s < self.unknown_until_s else rest_bytes
        self.at_s, self.held = now_s, held
        return min(_sum(self.due), rest_bytes - self.stays_bytes)


def _sum(due: Iterable[tuple[float, int]]) -> int:
    return sum(size for _, size in due)


def _held(gpu: Gpu, ended: AbstractSet[int]) -> dict[int, int | None]:
    """What each listed process holds that has not ended; `None` is unknown. One can be on a list twice."""
    held: dict[int, int | None] = {}
    for pid, _, size, *_ in gpu.processes or ():
        if pid not in ended:
            before = held.get(pid, 0)
            held[pid] = None if before is None or size is None else before + size
    return held
