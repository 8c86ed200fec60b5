"""Sample the host once a second and keep the newest snapshot. Read-only.

Each source fails alone: only its values are unknown in that snapshot.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import structlog

from exporter.change_log import ChangeLog
from exporter.container_watch import ContainerWatch
from exporter.evidence import container_history, gpu_use, ranks
from exporter.evidence.unknown import UnknownCounter
from exporter.gpu_watch import GpuWatch
from exporter.host_sources import Engine, HostSources
from exporter.model.container import ServerEvidence
from exporter.model.gpu import DRM_SOURCE, NVIDIA_SOURCE, GpuReadings
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import WorkerReadings
from exporter.source_runner import Driver, SourceRunner
from exporter.sources import workers
from exporter.sources.containers.cgroups import ContainerCgroups, UnlistedContainers
from exporter.sources.containers.directory import ContainerDirectory, Listings, Running, holding, unseen
from exporter.sources.containers.systemd import Units
from exporter.sources.gpu.nvml.presence import NvidiaHost
from exporter.sources.servers.monitor import Servers
from exporter.sources.tasks import Tasks
from exporter.worker_watch import WorkerWatch, sharing
from gpuwarden import clock

log: Final = structlog.get_logger("exporter")


class Sampler:
    """Takes a snapshot every `interval_s`, in a thread."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        host: str,
        directory: Path,
        containers: Mapping[str, Engine],
        gpus: Callable[[], GpuReadings] | None,
        drm: Callable[[], GpuReadings] | None = None,
        thresholds: Thresholds,
        interval_s: float = 1.0,
        servers: Servers | None = None,
        units: Units | None = None,
        tasks: Tasks | None = None,
        drivers: Mapping[str, Driver] | None = None,
        nvidia: NvidiaHost | None = None,
        met: Callable[[Collection[str]], None] | None = None,
        places: ContainerCgroups | None = None,
        unlisted: UnlistedContainers | None = None,
    ) -> None:
        units, places = units or Units(()), places or ContainerCgroups()
        unlisted = unlisted or UnlistedContainers(workers.own_container())
        read_gpus = {name: read for name, read in ((NVIDIA_SOURCE, gpus), (DRM_SOURCE, drm)) if read is not None}
        unknown, runner = UnknownCounter(), SourceRunner(drivers or {})
        self._host = host
        self._thresholds = thresholds
        self._interval_s = interval_s
        self._unknown = unknown
        self._runner = runner
        self._sources = HostSources(
            runner, directory=directory, units=units, gpus=read_gpus, engines=containers, tasks=tasks
        )
        self._gpus = GpuWatch(thresholds, nvidia or NvidiaHost())
        self._directory = ContainerDirectory(units=units, places=places, unlisted=unlisted, met=met, unknown=unknown)
        self._containers = ContainerWatch(thresholds, places=places, unknown=unknown, has_gpu_source=bool(read_gpus))
        self._workers = WorkerWatch(thresholds, units=units, unknown=unknown)
        self._servers = servers
        self._changes = ChangeLog(thresholds)
        self._snapshot: Snapshot | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)

    def latest(self) -> Snapshot | None:
        """The newest snapshot, of any age; `None` before the first."""
        return self._snapshot

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        next_s = time.monotonic()
        while not self._closing.is_set():
            try:
                self.sample()
            except Exception:
                # The thread must survive a defect. Until the next sample the snapshot becomes stale.
                log.exception("sample failed")
            next_s = max(next_s + self._interval_s, time.monotonic())
            self._closing.wait(next_s - time.monotonic())

    def sample(self) -> Snapshot:
        """Take one snapshot, which replaces the last one."""
        began_s = time.monotonic()
        answers = self._sources.read()
        now = clock.stamp()
        now_s = now.boottime_s
        gpus = self._gpus.merge(answers.gpus, now_s=now_s)
        running = self._directory.running(answers.workers, gpus.readings, answers.listings)
        self._forget_unknowns(running, answers.workers)
        placement = self._directory.place(running)
        seen = self._containers.observe(running, placement, gpus, sharing(answers.workers), now_s=now_s)
        found = self._workers.observe(answers.workers, running, answers.listings, now_s=now_s)
        servers = self._observe_servers(running, found.workers, answers.listings, now_s=now_s)
        account = self._gpus.account(gpus, placement, now_s=now_s)
        pods = answers.listings.get("kubernetes")
        gated = [tenant for each in answers.listings.values() if each is not None for tenant in each.on_demand]
        on_demand = self._gpus.demand.observe(
            gated, seen.containers, gpus.readings, account.reclaiming_bytes, host=self._host, now_s=now_s
        )
        snapshot = Snapshot(
            host=self._host,
            taken=now,
            gpus=gpus.readings,
            workers=gpu_use.without_limits_before_use(found.workers, seen.containers),
            containers=seen.containers,
            sources=self._runner.health,
            thresholds=self._thresholds,
            ended=tuple(container_history.stopped_container_evidence(each) for each in found.ended),
            cpu_idle_s=found.cpu_idle_s,
            dead_s=found.dead_s,
            dead_processes=found.dead_processes,
            servers=servers,
            tasks=answers.tasks,
            drivers=self._runner.driver_health,
            reclaiming_bytes=account.reclaiming_bytes,
            gpu_totals=account.totals,
            unplaced=account.unplaced,
            gpu_lost_s=gpus.losses.seconds,
            lost_gpus=gpus.losses.named,
            unseen=tuple(sorted(unseen(answers.listings, running))),
            worker_evidence=seen.worker_evidence,
            unknown=self._unknown.counts,
            advertised_bytes=None if pods is None else pods.advertised_bytes,
            declared_bytes=None if pods is None else pods.declared_bytes,
            on_demand=on_demand,
            took_s=time.monotonic() - began_s,
        )
        snapshot = ranks.judge(snapshot)
        self._changes.log_changes(snapshot)
        self._snapshot = snapshot
        return snapshot

    def _forget_unknowns(self, running: Running, found: WorkerReadings | None) -> None:
        names = {each.name for each in running.containers.values()}
        names.update(() if found is None else (sighting.worker.worker for sighting in found.workers))
        self._unknown.keep(names)

    def _observe_servers(
        self, running: Running, found: WorkerReadings | None, listings: Listings, *, now_s: float
    ) -> tuple[ServerEvidence, ...] | None:
        if self._servers is None or not listings or None in holding(listings):
            return None
        observe = self._servers.observe
        servers = self._runner.read("servers", lambda: observe(running.containers.values(), found, now_s=now_s))
        if self._servers.keeps:
            self._runner.read("answered", self._servers.keep)
        for each in servers or ():
            if each.unknown is not None:
                self._unknown.add(each.container.name, "probe", each.unknown.reason)
        return servers
