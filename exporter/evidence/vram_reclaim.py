"""GPU memory on its way back: of processes that have ended, and that the driver counts as in use still. Pure.

A process leaves the driver's list before its memory is free again, by milliseconds or, where there is much of it, by
seconds. For so long the GPU looks as short as it was, and somebody else as if it were to blame. What has just left
counts for as long as the memory that no listed process holds is greater than it was before, and no longer than a bound:
what is not back by then is taken to stay. Where nobody knows what no listed process holds, as with one whose size is
not told, what has left counts until its bound: to count too much delays by that, and to count nothing would blame
somebody. Times are CLOCK_BOOTTIME seconds.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from exporter.model.readings import Gpu, GpuProcess, GpuReadings

NOT_YET: Final = "not_yet"
"""Why it is unknown: the GPU has not been looked at for as long as the bound."""

NOT_MEASURED: Final = "not_measured"
"""Or one has left of which nobody knew how much it held, or may have in a gap while it was not known of all."""


class ReturnHistory:
    """Every GPU's memory that is on its way back, one look after another."""

    def __init__(self, *, bound_s: float, gap_max_s: float) -> None:
        self._bound_s = bound_s
        self._gap_max_s = gap_max_s
        self._cards: dict[str, _Card] = {}
        self.unknown: dict[str, str] = {}
        """Why it is unknown, at the last look, of the GPUs whose list and memory are told: by UUID."""

    def observe(
        self, readings: GpuReadings | None, *, ended: AbstractSet[int] = frozenset(), now_s: float
    ) -> Mapping[str, int]:
        """Take in one look; returns how much is on its way back of each GPU, bytes, by UUID; of one not here unknown.

        `ended` are pids that a driver lists though nothing runs under them any more. Who may have ended before the
        first look, or with nobody knows how much, may have so for as long as the bound. Who came and went in a gap
        between two looks left no more than what nobody holds since.
        """
        self._cards = {uuid: card for uuid, card in self._cards.items() if 0 <= now_s - card.at_s <= self._kept_s}
        self.unknown = {}
        return dict(self._looked_at(readings, ended, now_s))

    @property
    def _kept_s(self) -> float:
        return max(self._bound_s, self._gap_max_s)

    def _looked_at(
        self, readings: GpuReadings | None, ended: AbstractSet[int], now_s: float
    ) -> Iterator[tuple[str, int]]:
        for gpu in () if readings is None else readings.gpus:
            shares_memory = gpu.mig is not None and gpu.mig.shares_memory
            if gpu.processes is None or gpu.memory_used_bytes is None or shares_memory:
                continue
            until_s = now_s + self._bound_s
            card = self._cards.setdefault(gpu.uuid, _Card(at_s=now_s, unknown_until_s=until_s))
            after_gap = now_s - card.at_s > self._gap_max_s
            held = _held(gpu, ended)
            told = card.look(gpu.memory_used_bytes, held, now_s=now_s, until_s=until_s, after_gap=after_gap)
            if told is None:
                self.unknown[gpu.uuid] = card.why
            else:
                yield gpu.uuid, told


@dataclass(kw_only=True)
class _Card:
    """One GPU: who held what at its last look, and what is due, the oldest first.

    `rest_bytes` is what nobody held at its last look, and `nobodys_bytes` what of it is not due.
    """

    at_s: float
    unknown_until_s: float
    why: str = NOT_YET
    held: Mapping[int, int | None] = field(default_factory=dict)
    rest_bytes: int | None = None
    nobodys_bytes: int | None = None
    due: deque[tuple[float, int]] = field(default_factory=deque)

    def look(
        self, used_bytes: int, held: Mapping[int, int | None], *, now_s: float, until_s: float, after_gap: bool
    ) -> int | None:
        """What is due by this look; `None` is unknown."""
        gone = [size for pid, size in self.held.items() if pid not in held]
        self.at_s, self.held = now_s, held
        sizes = [*filter(None, held.values())]
        rest_bytes = used_bytes - sum(sizes)
        all_told = None not in held.values()
        before_bytes, self.rest_bytes = self.rest_bytes, rest_bytes if all_told else None
        if None in gone or (after_gap and (before_bytes is None or not all_told)):
            self.unknown_until_s, self.why = until_s, NOT_MEASURED
        left = [size for size in gone if size]
        if after_gap and all_told and before_bytes is not None and (more := rest_bytes - before_bytes - sum(left)) > 0:
            left.append(more)  # of whoever came and went meanwhile, for all that is known
        self.due.extend((until_s, size) for size in left)
        if all_told and now_s >= self.unknown_until_s:
            self._count(rest_bytes, now_s=now_s)
        else:  # it cannot be told how much nobody holds, but no more than this
            self.nobodys_bytes = None
            while self.due and self.due[0][0] <= now_s:
                self.due.popleft()
            self._back(self._due_bytes - max(0, rest_bytes))
        return None if now_s < self.unknown_until_s else self._due_bytes

    @property
    def _due_bytes(self) -> int:
        return sum(size for _, size in self.due)

    def _count(self, rest_bytes: int, *, now_s: float) -> None:
        """Nobody holds the rest, some of which is due."""
        if not self.due:
            self.nobodys_bytes = rest_bytes
        while self.due and self.due[0][0] <= now_s:
            _, size = self.due.popleft()
            if self.nobodys_bytes is not None:
                self.nobodys_bytes += size
        # Where it is not known what nobody held before, all that is due is due still, for all that is known.
        before = max(0, rest_bytes - self._due_bytes) if self.nobodys_bytes is None else self.nobodys_bytes
        self.nobodys_bytes = min(before, rest_bytes)
        self._back(self._due_bytes - (rest_bytes - self.nobodys_bytes))

    def _back(self, back_bytes: int) -> None:
        """So much of what was due is back, the oldest first."""
        while self.due and back_bytes > 0:
            until_s, size = self.due.popleft()
            if size > back_bytes:
                self.due.appendleft((until_s, size - back_bytes))
            back_bytes -= size


def _held(gpu: Gpu, ended: AbstractSet[int]) -> dict[int, int | None]:
    """What each process on its list holds that has not ended; `None` is unknown."""
    listed: Sequence[GpuProcess] = gpu.processes or ()
    if ended:
        listed = [process for process in listed if process[0] not in ended]
    found = {process[0]: process[2] for process in listed}
    if len(found) == len(listed):
        return found
    for pid in found:  # one of them is there twice
        sizes = [process.memory_bytes for process in listed if process.pid == pid]
        found[pid] = None if None in sizes else sum(size or 0 for size in sizes)
    return found
