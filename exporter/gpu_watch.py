"""The host's GPUs, one look after another: what is lost, what is on its way back, what each has done."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from exporter.evidence import gpu_attribution
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
    """The GPUs of all sources at one look, and which of them are lost."""

    readings: GpuReadings | None
    losses: GpuLossState


@dataclass(frozen=True, kw_only=True)
class GpuAccount:
    """What is known of the GPUs once the processes are placed; `Snapshot` says what each is."""

    returning_bytes: Mapping[str, int]
    totals: Mapping[str, GpuTotals]
    unplaced: tuple[GpuShare, ...]


class GpuWatch:
    """What has been seen of every GPU of this host."""

    def __init__(self, thresholds: Thresholds, nvidia: NvidiaHost) -> None:
        self._nvidia = nvidia
        self._nodes: dict[str, str] = {}
        self._gpu_history = GpuHistory(thresholds)
        self._loss_history = GpuLossTracker(gap_max_s=thresholds.gap_max_s)
        self._return_history = VramReclaimTracker(bound_s=thresholds.vram_return_s, gap_max_s=thresholds.gap_max_s)

    def merge(self, answers: Mapping[str, GpuReadings | None], *, now_s: float) -> GpuView:
        """Take in what each source has answered, `None` where it has not."""
        losses, found = self._loss_history.observe(self._merged(answers), now_s=now_s)
        return GpuView(readings=found, losses=losses)

    def account(self, view: GpuView, placement: Placement, *, now_s: float) -> GpuAccount:
        """Count what the GPUs did, by a look at which the processes of containers are placed."""
        gpus = view.readings
        returning = self._return_history.observe(gpus, ended=_ended(gpus, placement), now_s=now_s)
        # After what is returning, for it counts the looks at which that was unknown.
        unknown = self._return_history.unknown
        totals = self._gpu_history.observe(gpus, now_s=now_s, returning_unknown=unknown)
        return GpuAccount(returning_bytes=returning, totals=totals, unplaced=_unplaced(gpus, placement))

    def _merged(self, answers: Mapping[str, GpuReadings | None]) -> GpuReadings | None:
        """The GPUs of every source that answered; `None` where none did."""
        told = [readings for readings in answers.values() if readings is not None]
        if not told:
            return None
        gpus = tuple(gpu for readings in told for gpu in readings.gpus)
        nodes = {gpu.node: gpu.uuid for gpu in gpus if gpu.node is not None}
        self._nodes.update(nodes)
        if any(gpu.node is None for gpu in gpus):
            self._nvidia.note_read()
        return replace(
            told[0],
            gpus=gpus,
            failed=tuple(source for source, readings in answers.items() if readings is None),
            gone={node: uuid for node, uuid in self._nodes.items() if node not in nodes},
            nvidia_unread=all(gpu.node is not None for gpu in gpus) and self._nvidia.may_have_nvidia(),
            unlisted=None
            if any(readings.unlisted is None for readings in told)
            else tuple(pid for readings in told for pid in readings.unlisted or ()),
        )


def _ended(gpus: GpuReadings | None, placement: Placement) -> frozenset[int]:
    """Of the processes on the GPUs' lists those that have ended; one that is in a container has not."""
    listed = frozenset[int]() if gpus is None else gpus.by_pid.keys() - placement.pids
    return frozenset(pid for pid in listed if processes.has_ended(pid))


def _unplaced(gpus: GpuReadings | None, placement: Placement) -> tuple[GpuShare, ...]:
    """What processes in no container have of each GPU; nothing where any container's processes are not known."""
    if gpus is None or not placement.whole:
        return ()
    return tuple(gpu_attribution.unplaced(gpu, placement.pids) for gpu in gpus.gpus)
