"""The exporter of a played host, made of the real exporter's pure modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.corpus.driver import Driver
from bench.corpus.life import MIB, SUPERVISOR, Life
from bench.corpus.scenario import Process
from exporter.collectors.registry import SnapshotCollector
from exporter.evidence import container_history, gpu_attribution, process_ownership, work_history
from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import GpuAttribution
from exporter.evidence.gpu_loss import GpuLossTracker
from exporter.evidence.server_health import ProbeState
from exporter.evidence.vram_reclaim import VramReclaimTracker
from exporter.evidence.work_history import ContainerWork
from exporter.evidence.worker_liveness import CpuIdleTracker, DeathTracker
from exporter.model.container import Container, ContainerEvidence, Probe, RamUse, ServerEvidence, VramBudget
from exporter.model.gpu import NVIDIA_SOURCE, GpuReadings
from exporter.model.snapshot import Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.model.worker import CpuUse, WorkerReading, WorkerReadings
from exporter.state import answered_servers
from exporter.state.file import PersistedFileError
from gpuwarden.state_file import Stamp

PROBE_EVERY_S: Final = 10


@dataclass(kw_only=True)
class AnsweredFile:
    """The exporter's persistent file of servers that have answered."""

    content: bytes = b""


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A worker of a shared container, its processes and their GPU use."""

    worker: str
    history: ContainerHistory
    pids: frozenset[int]
    use: GpuAttribution


class Containers:
    """Histories of each container, and of each worker in a shared container."""

    def __init__(self, thresholds: Thresholds, lives: Sequence[Life]) -> None:
        self.by_worker: dict[str, ContainerEvidence] = {}
        self._thresholds = thresholds
        self._lives = lives
        self._containers: dict[str, ContainerHistory] = {}
        self._workers: dict[tuple[str, str, int], ContainerHistory] = {}
        self._sampled_workers: dict[tuple[str, str, int], ContainerHistory] = {}
        self._uses: dict[object, tuple[object, GpuAttribution]] = {}

    def sample(
        self,
        running: Mapping[str, Container],
        gpus: GpuReadings | None,
        lost: Sequence[str],
        second: int,
        now: Stamp,
        *,
        found: bool,
    ) -> dict[str, ContainerEvidence]:
        """Return the evidence of each container by id, and set `by_worker`. `found` marks the first sample."""
        self._containers = {key: known for key, known in self._containers.items() if key in running}
        self.by_worker, self._sampled_workers = {}, {}
        evidence = {each.id: self._observe(each, gpus, lost, second, now, found=found) for each in running.values()}
        self._workers = self._sampled_workers
        return evidence

    def _observe(
        self,
        container: Container,
        gpus: GpuReadings | None,
        lost: Sequence[str],
        second: int,
        now: Stamp,
        *,
        found: bool,
    ) -> ContainerEvidence:
        inside = [each for each in self._lives if each.program.container == container.name and each.runs]
        checks = {pid: work for each in inside for pid, work in each.health_checks(second).items()}
        pids = frozenset(pid for each in inside for pid in each.origins) | checks.keys()
        unread = {what for each in inside for what in each.doing.unread}
        ram = RamUse(usage_bytes=int(sum(each.ram_now_mib(second) for each in inside) * MIB))
        if "ram" in unread:
            ram = RamUse(usage_bytes=None)
        history = self._containers.get(container.incarnation)
        if history is None:
            history = self._containers[container.incarnation] = ContainerHistory(self._thresholds, ran_before=found)
        use = self._attribute(container.incarnation, container, pids, gpus, history)
        members = self._members(container, inside, gpus, history, found=found)
        work = ContainerWork(processes={each.works_in: each.work for each in inside} | checks)
        if "work" in unread:
            work = work_history.NOT_SAMPLED
        for each in members:
            own_ram = sum(life.ram_now_mib(second) for life in inside if life.works_in in each.pids)
            self.by_worker[each.worker] = each.history.observe(
                container, each.use, RamUse(usage_bytes=int(own_ram * MIB)), work_history.select_work(work, each.pids),
                now_s=now.boottime_s,
            )  # fmt: skip
        return history.observe(
            container,
            use,
            ram,
            work,
            now_s=now.boottime_s,
            lost=lost,
            frozen_s=now.boottime_s if container.paused else None,
        )

    def _attribute(
        self,
        whose: object,
        container: Container,
        pids: frozenset[int],
        gpus: GpuReadings | None,
        history: ContainerHistory,
    ) -> GpuAttribution:
        """Attribute GPUs. The last answer is kept: most samples ask the same."""
        asked = (container, pids, gpus, self._thresholds, history.gpus, history.seen_present)
        before, use = self._uses.get(whose, (None, None))
        if use is None or asked != before:
            use = gpu_attribution.attribute_gpus(*asked)
            self._uses[whose] = asked, use
        return use

    def _members(
        self,
        container: Container,
        inside: Sequence[Life],
        gpus: GpuReadings | None,
        history: ContainerHistory,
        *,
        found: bool,
    ) -> list[_Member]:
        """The live workers of a shared container."""
        workers = {each.program.name: each.pid for each in inside if each.files.worker is not None}
        if len(workers) < 2:
            return []
        origins = {pid: each for life in inside for pid, each in life.origins.items()}
        members = []
        owned = process_ownership.pids_by_worker(origins.keys(), origins, workers, first=container.pid)
        for name, pids in owned.items():
            key = (container.incarnation, name, workers[name])
            own = self._sampled_workers[key] = self._workers.get(key) or ContainerHistory(
                self._thresholds, ran_before=found
            )
            use = self._attribute(key, container, pids, gpus, history)
            members.append(_Member(worker=name, history=own, pids=pids, use=use))
        return members


class Servers:
    """The probed servers, and which of them have ever answered."""

    def __init__(self, lives: Sequence[Life], file: AnsweredFile) -> None:
        self._lives = lives
        self._file = file
        self._probes: dict[str, ProbeState] = {}
        self._answered: set[str] | None = None

    def sample(self, running: Mapping[str, Container], second: int, now: Stamp) -> Iterator[ServerEvidence]:
        """Probe the servers that are due, and return the evidence of each."""
        if self._answered is None:  # at the start of the exporter
            self._answered = set(self._read_file(now))
        for life in self._lives:
            key = f"{life.program.container}@{life.lives}"
            if life.program.kind != "server" or key not in running:
                continue
            probe = self._probes.get(key, ProbeState())
            if running[key].paused:
                probe = probe.reset()
            elif second % PROBE_EVERY_S == 0:
                answers = life.doing.answers and life.doing.process is Process.WORKS
                probe = probe.add_probe(answers, began_s=now.boottime_s, ended_s=now.boottime_s, gap_max_s=30.0)
            self._probes[key] = probe
            if probe.answered and key not in self._answered:
                self._answered.add(key)
                self._file.content = answered_servers.render(self._answered, now=now)
            yield ServerEvidence(
                container=running[key],
                probe=Probe(kind="http", restart_after_s=life.program.silence_s, port=80, target="/"),
                workers=0,
                answered=key in self._answered,
                probe_failing_s=probe.probe_failing_s(now_s=now.boottime_s, fresh_s=30.0),
            )

    def _read_file(self, now: Stamp) -> tuple[str, ...]:
        try:
            return answered_servers.parse(self._file.content, now=now)
        except PersistedFileError:
            return ()


class Exporter:
    """One run of the exporter of a host.

    Args:
        host: name of the host.
        lives: programs of the host.
        driver: its GPU driver.
        places: the engine's containers by id, also stopped ones.
        answered: file of servers that have answered.
        now: time of the last sample.
    """

    def __init__(
        self,
        host: str,
        lives: Sequence[Life],
        driver: Driver,
        *,
        places: dict[str, Container],
        answered: AnsweredFile,
        now: Callable[[], Stamp],
    ) -> None:
        self.snapshot: Snapshot | None = None
        """The last sample; `None` before the first."""

        self._host, self._lives, self._driver, self._places = host, lives, driver, places
        self._thresholds = thresholds = Thresholds()
        self.collector = SnapshotCollector(lambda: self.snapshot, host=host, thresholds=thresholds, now=now)
        self._succeeded_unix_s: dict[str, float] = {}
        self._gpus: GpuReadings | None = None
        self._containers = Containers(thresholds, lives)
        self._servers = Servers(lives, answered)
        self._cpu: dict[int, CpuIdleTracker] = {}
        self._deaths: dict[str, DeathTracker] = {}
        self._losses = GpuLossTracker(gap_max_s=thresholds.gap_max_s)
        self._returns = VramReclaimTracker(bound_s=thresholds.vram_return_s, gap_max_s=thresholds.gap_max_s)

    def sample(self, second: int, now: Stamp, *, is_node: bool = False) -> None:
        """Sample the host at this second."""
        losses, gpus = self._losses.observe(self._driver.readings(second), now_s=now.boottime_s)
        if gpus == self._gpus:
            gpus = self._gpus  # which has its tables already
        self._gpus = gpus
        running = {each.incarnation: each for each in self._list_containers()}
        found = self._containers.sample(running, gpus, losses.named, second, now, found=self.snapshot is None)
        sightings, ended, dead_s, cpu_idle_s = [], {}, {}, {}
        for life in self._lives:
            if life.files.worker is None:
                continue
            key = life.program.container
            place = next((each for each in running.values() if each.id == key), self._places.get(key))
            if place is None:
                continue
            # A stopped container is not paused.
            self._places[key] = replace(place, paused=False) if place.paused else place
            sightings.append(
                WorkerReading(
                    worker=life.files.worker, job=life.files.job, alive=life.runs, pid=life.pid if life.runs else None,
                    container_id=key, folder=life.program.name,
                )
            )  # fmt: skip
            if place.incarnation not in running:
                ended[key] = container_history.stopped_container_evidence(replace(place, pid=0))
            if place.paused or (life.runs and "cpu" in life.doing.unread):
                self._cpu.pop(life.pid, None)
            elif life.runs:
                self._deaths.pop(life.program.name, None)
                history = self._cpu.setdefault(life.pid, CpuIdleTracker(self._thresholds))
                use = CpuUse(
                    start_ticks=life.lives, used_ticks=life.ticks, uninterruptible=life.doing.waits_for_storage
                )
                cpu_idle_s[life.pid] = history.observe(use, now_s=now.boottime_s)
            else:
                death = self._deaths.setdefault(life.program.name, DeathTracker(self._thresholds))
                dead_s[life.program.name] = death.observe(
                    place.incarnation, life.files.worker.heartbeat, now_s=now.boottime_s
                )
        self.snapshot = Snapshot(
            host=self._host, taken=now, gpus=gpus, workers=WorkerReadings(workers=tuple(sightings)),
            containers=tuple(found.values()), sources=tuple(self._sources(gpus, now)), thresholds=self._thresholds,
            ended=tuple(ended.values()), dead_s=dead_s, cpu_idle_s=cpu_idle_s,
            servers=tuple(self._servers.sample(running, second, now)),
            gpu_lost_s=losses.seconds, lost_gpus=losses.named, advertised_bytes=0 if is_node else None,
            drivers=self._driver.health(second), worker_evidence=self._containers.by_worker,
            reclaiming_bytes=self._returns.observe(gpus, now_s=now.boottime_s),
        )  # fmt: skip

    def _sources(self, gpus: GpuReadings | None, now: Stamp) -> Iterator[SourceHealth]:
        """Health of each source; only the driver can fail."""
        success = {"workers": True, "docker": True}
        if self._driver.has_gpus:
            success[NVIDIA_SOURCE] = gpus is not None
        for source, succeeded in success.items():
            if succeeded:
                self._succeeded_unix_s[source] = now.unix_s
            yield SourceHealth(
                source=source, success=succeeded, duration_s=0.0, succeeded_unix_s=self._succeeded_unix_s.get(source)
            )

    def _list_containers(self) -> Iterator[Container]:
        """The running containers."""
        listed: set[str] = set()
        for life in self._lives:
            program = life.program
            if not life.container_runs or program.container in listed:
                continue
            listed.add(program.container)
            budget = None if program.budget_mib is None else program.budget_mib * MIB
            shared = sum(each.program.container == program.container for each in self._lives) > 1
            yield Container(
                kind="docker", id=program.container, name=program.container,
                incarnation=f"{program.container}@{life.lives}", pid=SUPERVISOR if shared else life.pid,
                gpu_request=program.gpus or None, image="worker",
                vram_budget=VramBudget(budget_bytes=budget, recyclable=program.managed and not program.protected),
                paused=life.doing.process is Process.PAUSED,
            )  # fmt: skip
