"""Which GPUs are lost, and since when. Pure. Times: CLOCK_BOOTTIME seconds.

A GPU is lost if its driver says so, or answers and no longer lists it. A MIG instance is lost only with its GPU. Other
partitions that are removed count as lost until a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.model.gpu import DRM_SOURCE, NVIDIA_SOURCE, UNIDENTIFIED, Gpu, GpuFigures, GpuReadings

KNOWN_MAX: Final = 1024
"""Above the number of GPUs in any host."""

NOT_LISTED: Final = "the GPU is lost: its driver does not list it any more"


@dataclass(frozen=True, kw_only=True)
class GpuLossState:
    """Seconds since each GPU was lost, and the present GPUs. Others are unknown."""

    lost_s: Mapping[str, float] = field(default_factory=dict)
    present: frozenset[str] = frozenset()

    @property
    def named(self) -> tuple[str, ...]:
        """The lost GPUs with a known UUID."""
        return tuple(uuid for uuid in self.lost_s if not uuid.startswith(UNIDENTIFIED))

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds since each GPU was lost; 0 for a present one."""
        return {**dict.fromkeys(sorted(self.present), 0.0), **self.lost_s}


class GpuLossTracker:
    """Find lost GPUs, and since when."""

    def __init__(self, *, gap_max_s: float) -> None:
        self._gap_max_s = gap_max_s
        self._gpus: dict[str, Gpu] = {}
        self._seen_s: dict[str, tuple[float, float]] = {}

    def observe(self, readings: GpuReadings | None, *, now_s: float) -> tuple[GpuLossState, GpuReadings | None]:
        """Add one sample; returns the lost GPUs, and readings that include dropped NVIDIA ones.

        A container with every GPU is judged with the dropped ones, unless another GPU has their index.
        """
        if readings is None:
            return GpuLossState(), None
        listed = {gpu.uuid: gpu for gpu in readings.gpus}
        gone = self._gone(listed, readings)
        self._remember(readings.gpus)
        replaced = {gpu.index for gpu in gone}
        lost = [
            *(gpu.uuid for gpu in gone),
            # A lost GPU without a UUID, at the index of a known one, is that one.
            *(gpu.uuid for gpu in readings.gpus if gpu.lost and not (_is_nameless(gpu) and gpu.index in replaced)),
        ]
        before, self._seen_s = self._seen_s, {}
        for uuid, (first_s, last_s) in before.items():
            is_present = uuid in listed and listed[uuid].lost is False
            if not is_present and 0 <= now_s - last_s <= self._gap_max_s:
                self._seen_s[uuid] = first_s, last_s
        for uuid in lost:
            self._seen_s[uuid] = self._seen_s.get(uuid, (now_s, now_s))[0], now_s
        losses = GpuLossState(
            lost_s={uuid: now_s - self._seen_s[uuid][0] for uuid in sorted(lost)},
            present=frozenset(uuid for uuid, gpu in listed.items() if gpu.lost is False),
        )
        kept = _placeholders(gone, readings.gpus)
        known = {gpu.index for gpu in kept if gpu.mig is None}
        others = (gpu for gpu in readings.gpus if not (gpu.lost and _is_nameless(gpu) and gpu.index in known))
        gpus, dropped = (*others, *kept), tuple(gpu.uuid for gpu in gone)
        return losses, replace(readings, gpus=gpus, dropped=dropped)

    def _gone(self, listed: Mapping[str, Gpu], readings: GpuReadings) -> list[Gpu]:
        # A present GPU without a UUID may be any of the missing ones.
        nameless = any(_is_nameless(gpu) and not gpu.lost for gpu in listed.values())
        nodes = {gpu.node for gpu in listed.values()}
        missed = [
            gpu
            for uuid, gpu in self._gpus.items()
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
                del self._gpus[gpu.uuid]  # removed: instances come and go without end
        return gone

    def _remember(self, gpus: tuple[Gpu, ...]) -> None:
        for gpu in gpus:
            if not _is_nameless(gpu):
                self._gpus.pop(gpu.uuid, None)
                self._gpus[gpu.uuid] = gpu
        for uuid in list(self._gpus)[: len(self._gpus) - KNOWN_MAX]:
            del self._gpus[uuid]


def _placeholders(gone: list[Gpu], listed: tuple[Gpu, ...]) -> list[Gpu]:
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
    return NVIDIA_SOURCE if gpu.node is None else DRM_SOURCE
