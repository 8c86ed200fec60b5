"""Evidence of each running container, and of each worker that shares one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from exporter.evidence import gpu_attribution, process_ownership, work_history
from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import GpuAttribution
from exporter.evidence.unknown import UnknownCounter
from exporter.evidence.work_history import ContainerWork
from exporter.gpu_watch import GpuView
from exporter.model.container import Container, ContainerEvidence, RamUse
from exporter.model.gpu import GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import WorkerReading
from exporter.sources import processes
from exporter.sources.containers.cgroups import ContainerCgroups
from exporter.sources.containers.directory import HOLDING, Placement, Running
from exporter.sources.process_io import Work

KNOWN_FIRST_PROCESS: Final = HOLDING | {"kubernetes", "systemd"}
"""Kinds of containers whose `pid` is the first process; of others it is any process."""


@dataclass(frozen=True, kw_only=True)
class ContainersSeen:
    """Evidence of containers, and of workers in shared ones (`Snapshot.worker_evidence`)."""

    containers: tuple[ContainerEvidence, ...]
    worker_evidence: Mapping[str, ContainerEvidence]


class ContainerWatch:
    """Keeps the history of each container, by incarnation.

    Args:
        thresholds: the host's limits.
        places: reads cgroups.
        unknown: counts unknown values.
        has_gpu_source: whether this host has a source of GPUs.
    """

    def __init__(
        self, thresholds: Thresholds, *, places: ContainerCgroups, unknown: UnknownCounter, has_gpu_source: bool
    ) -> None:
        self._thresholds = thresholds
        self._places = places
        self._unknown = unknown
        self._has_gpu_source = has_gpu_source
        self._histories: dict[str, ContainerHistory] = {}
        self._worker_histories: dict[_WorkerKey, ContainerHistory] = {}
        self._seen_workers: set[_WorkerKey] = set()
        self._kinds: frozenset[str] = frozenset()  # that were listed before
        self._work = Work()

    def observe(
        self,
        running: Running,
        placement: Placement,
        gpus: GpuView,
        sharing: Mapping[str, Sequence[WorkerReading]],
        *,
        now_s: float,
    ) -> ContainersSeen:
        """Add one sample; `sharing` has the live workers of each container, by its id."""
        # An unlisted container may be listed again later, and still has its GPUs.
        self._histories = {
            incarnation: history
            for incarnation, history in self._histories.items()
            if incarnation in running.containers or history.kind in running.silent
        }
        self._seen_workers = set()
        looked = [
            self._observe(container, placement.readings[each], gpus, now_s, sharing.get(container.id, ()))
            for each, container in running.containers.items()
        ]
        self._kinds |= running.listed_kinds
        # The history of a worker that was not seen separately restarts, as after a gap.
        self._worker_histories = {
            key: each for key, each in self._worker_histories.items() if key in self._seen_workers
        }
        self._work.close_unused(placement.pids)
        return ContainersSeen(
            containers=tuple(each for each, _ in looked),
            worker_evidence={name: own for _, each in looked for name, own in each.items()},
        )

    def _new_history(self, container: Container) -> ContainerHistory:
        found = container.kind not in self._kinds
        return ContainerHistory(self._thresholds, has_gpu_source=self._has_gpu_source, ran_before=found)

    def _observe(
        self,
        container: Container,
        reading: tuple[frozenset[int] | None, RamUse],
        view: GpuView,
        now_s: float,
        sharing: Sequence[WorkerReading],
    ) -> tuple[ContainerEvidence, Mapping[str, ContainerEvidence]]:
        """Evidence of a container, and of each worker that shares it, by name.

        Unlike the container's, the workers' evidence is unknown while the processes are.
        """
        pids, ram = reading
        gpus, lost = view.readings, view.losses.named
        history = self._histories.get(container.incarnation)
        if history is None:
            history = self._new_history(container)
            self._histories[container.incarnation] = history
        use = history.attribute(container, pids, gpus)
        members = () if pids is None or len(sharing) < 2 else self._members(container, pids, gpus, history, sharing)
        # Unknown processes are counted already, as an unknown GPU or RAM.
        work = ContainerWork(processes=None) if pids is None else self._read_work(pids)
        frozen_s = self._places.frozen_s(container) if container.paused else None
        found = history.observe(container, use, ram, work, now_s=now_s, lost=lost, frozen_s=frozen_s)
        if found.gpu_unknown or found.ram_unknown or found.work_unknown:
            self._count_unknown(found)
        if not members:
            return found, _NO_EVIDENCE
        own = {
            each.worker: each.history.observe(
                container, each.use, _ram_of(each.pids), work_history.select_work(work, each.pids), now_s=now_s
            )
            for each in members
        }
        for evidence in own.values():
            if evidence.ram_unknown is not None and found.ram_unknown is None:
                self._unknown.add(container.name, "worker_ram", evidence.ram_unknown.reason)
        return found, own

    def _count_unknown(self, found: ContainerEvidence) -> None:
        for what, unknown in (("gpu", found.gpu_unknown), ("ram", found.ram_unknown), ("work", found.work_unknown)):
            if unknown is not None and unknown.reason != gpu_attribution.NO_GPU:
                self._unknown.add(found.container.name, what, unknown.reason)

    def _members(
        self,
        container: Container,
        pids: frozenset[int],
        gpus: GpuReadings | None,
        history: ContainerHistory,
        sharing: Sequence[WorkerReading],
    ) -> Sequence["_Member"]:
        """The workers that share a container, with their processes."""
        if len(pids) > processes.PROCESSES_MAX:  # counted with their work
            return ()
        workers = {each.worker.worker: each.pid for each in sharing if each.pid is not None}
        first = container.pid if container.kind in KNOWN_FIRST_PROCESS else None
        own = process_ownership.pids_by_worker(pids, processes.read_origins(pids), workers, first=first)
        members = []
        for each in sharing:
            name, pid = each.worker.worker, each.pid
            if pid is None or name not in own:
                continue
            key = _WorkerKey(container.incarnation, name, each.worker.incarnation, pid)
            if key not in self._worker_histories:
                self._worker_histories[key] = self._new_history(container)
            self._seen_workers.add(key)
            use = gpu_attribution.attribute_gpus(
                container, own[name], gpus, self._thresholds, history.gpus, history.seen_present
            )
            members.append(_Member(worker=name, history=self._worker_histories[key], pids=own[name], use=use))
        return members

    def _read_work(self, pids: frozenset[int]) -> ContainerWork:
        if len(pids) > processes.PROCESSES_MAX:
            message = f"{len(pids)} processes are more than {processes.PROCESSES_MAX}"
            return ContainerWork(processes=None, unknown=Unknown(reason="too_many", message=message))
        try:
            found = self._work.read(pids)
        except (OSError, ValueError, KeyError) as error:
            return ContainerWork(processes=None, unknown=Unknown(reason="unreadable", message=str(error)))
        if any(each.io_bytes is None for each in found.values()):
            message = "the kernel does not show the I/O of its processes to this user"
            return ContainerWork(processes=found, unknown=Unknown(reason="io_unreadable", message=message))
        return ContainerWork(processes=found)


class _WorkerKey(NamedTuple):
    """Key of a worker's history: one process in one incarnation of its container."""

    container: str
    worker: str
    incarnation: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One worker of a shared container, with its processes and GPU use."""

    worker: str
    history: ContainerHistory
    pids: frozenset[int]
    use: GpuAttribution


_NO_EVIDENCE: Final[Mapping[str, ContainerEvidence]] = MappingProxyType({})


def _ram_of(pids: frozenset[int]) -> RamUse:
    """RAM of processes without page cache, which only the container accounts."""
    try:
        return RamUse(usage_bytes=processes.resident_bytes(pids))
    except (OSError, ValueError) as error:
        return RamUse(usage_bytes=None, unknown=Unknown(reason="unreadable", message=str(error)))
