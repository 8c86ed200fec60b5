"""Of which GPUs figures are unknown without which nobody can tell what is done on them, as the log has it: once each.

Pure: times are arguments, CLOCK_BOOTTIME seconds. A driver that refuses now and then is told of once, and not at every
look; that it is over, once it has refused nothing for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from exporter.model.readings import GpuReadings

OVER_S: Final = 60.0
"""For how long nothing was refused of a GPU of which that is over, seconds."""


@dataclass(frozen=True, kw_only=True)
class Unwatched:
    """A GPU of which something is unknown now that was not: why in a fixed word, by figure, and in the driver's own."""

    gpu: str
    number: str
    figures: Mapping[str, str]
    because: str | None


class UnwatchedHistory:
    """What was told of each GPU, one look after another."""

    def __init__(self) -> None:
        self._seen_s: dict[str, dict[tuple[str, str], float]] = {}

    def observe(self, readings: GpuReadings | None, *, now_s: float) -> tuple[tuple[Unwatched, ...], tuple[str, ...]]:
        """Take in one look; returns what is new, and the GPUs of which all of it is over.

        What a look cannot tell ends nothing: a source that fails, a GPU that is lost or hangs.
        """
        if readings is None:
            return (), ()
        new: list[Unwatched] = []
        for gpu in readings.gpus:
            unknown = gpu.unwatched
            seen = self._seen_s.get(gpu.uuid, {})
            if unknown:
                told = self._seen_s.setdefault(gpu.uuid, seen)
                added = {each: why for each, why in unknown.items() if (each, why) not in told}
                told.update(dict.fromkeys(unknown.items(), now_s))
                if added:
                    new.append(Unwatched(gpu=gpu.uuid, number=gpu.number, figures=added, because=gpu.unknown))
            elif seen and gpu.lost is not False:
                seen.update(dict.fromkeys(seen, now_s))
        for uuid in readings.gone.values():  # lost, and listed no more
            if refused := self._seen_s.get(uuid):
                refused.update(dict.fromkeys(refused, now_s))
        return tuple(new), () if readings.failed else self._over(now_s)

    def _over(self, now_s: float) -> tuple[str, ...]:
        for seen in self._seen_s.values():
            for each in [each for each, last_s in seen.items() if now_s - last_s >= OVER_S]:
                del seen[each]
        over = tuple(uuid for uuid, seen in self._seen_s.items() if not seen)
        for uuid in over:
            del self._seen_s[uuid]
        return over
