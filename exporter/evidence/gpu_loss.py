"""Which GPUs are lost, and for how long. Pure: times are arguments, CLOCK_BOOTTIME seconds.

Lost is what the driver calls lost, and what it told of before and does not list any more, while it answers. What it
cannot tell just now is unknown, and not lost; so is every GPU of a driver that does not answer. A GPU that has not told
its UUID is lost to people, and to no container: nobody knows who was given it.

An instance (MIG) that is not listed any more is lost with its GPU, or has been unmade: then its GPU answers. A
partition or a virtual function that is unmade counts as lost until the exporter is restarted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.model.gpu import NUMBERED, UNIDENTIFIED, WITH_NODES, Gpu, GpuFigures, GpuReadings

KNOWN_MAX: Final = 1024
"""More GPUs than this were never in one host: those that were told of longest ago are forgotten."""

NOT_LISTED: Final = "the GPU is lost: its driver does not list it any more"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """For how long each lost GPU has been lost, seconds, by UUID; and the GPUs that are `there`. Others are unknown."""

    lost_s: Mapping[str, float] = field(default_factory=dict)
    there: frozenset[str] = frozenset()

    @property
    def named(self) -> tuple[str, ...]:
        """Those that are lost and have a name that a container can be given them by."""
        return tuple(uuid for uuid in self.lost_s if not uuid.startswith(UNIDENTIFIED))

    @property
    def seconds(self) -> Mapping[str, float]:
        """For how long each GPU has been lost, seconds; 0 for one that is there."""
        return {**dict.fromkeys(sorted(self.there), 0.0), **self.lost_s}


class LossHistory:
    """Every GPU that was told of on this host, and since when it is lost, one look after another."""

    def __init__(self, *, gap_max_s: float) -> None:
        self._gap_max_s = gap_max_s
        self._known: dict[str, Gpu] = {}
        self._seen_s: dict[str, tuple[float, float]] = {}

    def observe(self, readings: GpuReadings | None, *, now_s: float) -> tuple[Losses, GpuReadings | None]:
        """Take in one look; returns who is lost, and the readings with those that the driver does not list any more.

        NVIDIA's stay on the list as one does that the driver calls lost: a container that was given every GPU must not
        be judged without them. Not one whose index is another's by now, for what goes by it is that one's. Of GPUs with
        a render node the readings say themselves which are gone. A look that cannot tell breaks no loss off, where
        those around it that can are no further apart than a gap.
        """
        if readings is None:
            return Losses(), None
        listed = {gpu.uuid: gpu for gpu in readings.gpus}
        gone = self._gone(listed, readings)
        self._remember(readings.gpus)
        replaced = {gpu.index for gpu in gone}
        lost = [
            *(gpu.uuid for gpu in gone),
            # One that has not told its UUID anew and stands where a known one stood is that one.
            *(gpu.uuid for gpu in readings.gpus if gpu.lost and not (_is_nameless(gpu) and gpu.index in replaced)),
        ]
        before, self._seen_s = self._seen_s, {}
        for uuid, (first_s, last_s) in before.items():
            told = uuid in listed and listed[uuid].lost is False
            if not told and 0 <= now_s - last_s <= self._gap_max_s:
                self._seen_s[uuid] = first_s, last_s
        for uuid in lost:
            self._seen_s[uuid] = self._seen_s.get(uuid, (now_s, now_s))[0], now_s
        losses = Losses(
            lost_s={uuid: now_s - self._seen_s[uuid][0] for uuid in sorted(lost)},
            there=frozenset(uuid for uuid, gpu in listed.items() if gpu.lost is False),
        )
        kept = _kept(gone, readings.gpus)
        known = {gpu.index for gpu in kept if gpu.mig is None}
        # Beside the one that it is it would be another, of which nothing is known.
        others = (gpu for gpu in readings.gpus if not (gpu.lost and _is_nameless(gpu) and gpu.index in known))
        gpus, dropped = (*others, *kept), tuple(gpu.uuid for gpu in gone)
        return losses, replace(readings, gpus=gpus, dropped=dropped)

    def _gone(self, listed: Mapping[str, Gpu], readings: GpuReadings) -> list[Gpu]:
        """What was told of before, is not listed, and has no excuse."""
        # A GPU that is listed without its name, and is not lost, may be any of those that are missed.
        nameless = any(_is_nameless(gpu) and not gpu.lost for gpu in listed.values())
        nodes = {gpu.node for gpu in listed.values()}
        missed = [
            gpu
            for uuid, gpu in self._known.items()
            if uuid not in listed
            and (gpu.node is None or gpu.node not in nodes)
            and _source(gpu) not in readings.failed
            and not (nameless and gpu.node is None)
        ]
        cards = {gpu.uuid for gpu in missed if gpu.mig is None}
        cards.update(gpu.uuid for gpu in listed.values() if gpu.lost)
        gone: list[Gpu] = []
        for gpu in missed:
            if gpu.mig is None or gpu.mig.parent in cards:
                gone.append(gpu)
            elif gpu.mig.parent in listed and listed[gpu.mig.parent].lost is False:
                del self._known[gpu.uuid]  # unmade: instances come and go under new names for ever
        return gone

    def _remember(self, gpus: tuple[Gpu, ...]) -> None:
        for gpu in gpus:
            if not _is_nameless(gpu):
                self._known.pop(gpu.uuid, None)
                self._known[gpu.uuid] = gpu
        for uuid in list(self._known)[: len(self._known) - KNOWN_MAX]:
            del self._known[uuid]


def _kept(gone: list[Gpu], listed: tuple[Gpu, ...]) -> list[Gpu]:
    """How what is gone stands on the list: without a figure."""
    taken = {gpu.number for gpu in listed if gpu.node is None and not _is_nameless(gpu)}
    return [
        replace(
            gpu, utilization_ratio=None, memory_used_bytes=None, memory_size_bytes=None, memory_free_bytes=None,
            processes=None, unknown=NOT_LISTED, figures=GpuFigures(), xids_watched=False, lost=True,
        )
        for gpu in gone
        if gpu.node is None and gpu.number not in taken
    ]  # fmt: skip


def _is_nameless(gpu: Gpu) -> bool:
    return gpu.uuid.startswith(UNIDENTIFIED)


def _source(gpu: Gpu) -> str:
    return NUMBERED if gpu.node is None else WITH_NODES
