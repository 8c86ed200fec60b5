"""The host's GPUs over time: lost ones, memory that is being freed, and totals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from exporter.evidence import gpu_attribution
from exporter.evidence.demand_gate import DemandWatch
from exporter.evidence.gpu_history import GpuHistory
from exporter.evidence.gpu_loss import GpuLossState, GpuLossTracker
from exporter.evidence.vram_reclaim import VramReclaimTracker
from exporter.model.container import GpuShare
from exporter.model.gpu import GpuReadings, GpuTotals
from exporter.model.thresholds import Thresholds
from exporter.sources import processes
from exporter.sources.containers.directory import Placement
from exporter.sources.gpu.nvml.presence import NvidiaHost


@dataclass(frozen=True, kw_only=True)
class GpuView:
    """The GPUs of all sources in one sample, and the lost ones."""

    readings: GpuReadings | None
    losses: GpuLossState


@dataclass(frozen=True, kw_only=True)
class GpuAccount:
    """Values that need the processes of all containers; see `Snapshot`."""

    reclaiming_bytes: Mapping[str, int]
    totals: Mapping[str, GpuTotals]
    unplaced: tuple[GpuShare, ...]


class GpuWatch:
    """Keeps the state of every GPU."""

    def __init__(self, thresholds: Thresholds, nvidia: NvidiaHost) -> None:
        self._nvidia = nvidia
        self._nodes: dict[str, str] = {}
        self._gpu_history = GpuHistory(thresholds)
        self.demand = DemandWatch(thresholds)
        self._loss_history = GpuLossTracker(gap_max_s=thresholds.gap_max_s)
        self._return_history = VramReclaimTracker(bound_s=thresholds.vram_return_s, gap_max_s=thresholds.gap_max_s)

    def merge(self, answers: Mapping[str, GpuReadings | None], *, now_s: float) -> GpuView:
        """Add one sample; an answer is `None` if its source failed."""
        losses, found = self._loss_history.observe(self._merge_sources(answers), now_s=now_s)
        return GpuView(readings=found, losses=losses)

    def account(self, view: GpuView, placement: Placement, *, now_s: float) -> GpuAccount:
        """Count the GPUs' work, once the processes of containers are known."""
        gpus = view.readings
        returning = self._return_history.observe(gpus, ended=_find_ended(gpus, placement), now_s=now_s)
        # After returning memory, because this counts its unknown samples.
        unknown = self._return_history.unknown
        totals = self._gpu_history.observe(gpus, now_s=now_s, returning_unknown=unknown)
        return GpuAccount(reclaiming_bytes=returning, totals=totals, unplaced=_unplaced(gpus, placement))

    def _merge_sources(self, answers: Mapping[str, GpuReadings | None]) -> GpuReadings | None:
        """The GPUs of every source that answered; `None` without any."""
        answered = [readings for readings in answers.values() if readings is not None]
        if not answered:
            return None
        gpus = tuple(gpu for readings in answered for gpu in readings.gpus)
        nodes = {gpu.node: gpu.uuid for gpu in gpus if gpu.node is not None}
        self._nodes.update(nodes)
        if any(gpu.node is None for gpu in gpus):
            self._nvidia.note_read()
        return replace(
            answered[0],
            gpus=gpus,
            failed=tuple(source for source, readings in answers.items() if readings is None),
            gone={node: uuid for node, uuid in self._nodes.items() if node not in nodes},
            nvidia_unread=all(gpu.node is not None for gpu in gpus) and self._nvidia.may_have_nvidia(),
            unlisted=None
            if any(readings.unlisted is None for readings in answered)
            else tuple(pid for readings in answered for pid in readings.unlisted or ()),
        )


def _find_ended(gpus: GpuReadings | None, placement: Placement) -> frozenset[int]:
    """Listed processes that ended; those in a container have not."""
    listed = frozenset[int]() if gpus is None else gpus.by_pid.keys() - placement.pids
    return frozenset(pid for pid in listed if processes.has_ended(pid))


def _unplaced(gpus: GpuReadings | None, placement: Placement) -> tuple[GpuShare, ...]:
    """Use of each GPU by processes in no container; empty if some are unknown."""
    if gpus is None or not placement.whole:
        return ()
    return tuple(gpu_attribution.unplaced(gpu, placement.pids) for gpu in gpus.gpus)
