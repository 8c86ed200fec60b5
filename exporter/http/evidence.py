"""The answers of `/evidence` about one worker, server or tenant on demand. Pure."""

from dataclasses import fields, replace
from typing import Any, Final

from exporter.evidence import vram_budgets
from exporter.evidence.worker_liveness import count_workers, may_have_unknown_workers
from exporter.model.container import ContainerEvidence, Probe, RamUse
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import WorkerReading, WorkerReadings
from gpuwarden.evidence import ContainerFacts, OnDemandFacts, ServerFacts, WorkerFacts
from gpuwarden.state_file import Stamp


def worker_evidence(worker: str, snapshot: Snapshot, *, now: Stamp) -> WorkerFacts | None:
    """Return the facts about one worker; `None` if the snapshot has no worker of that name."""
    workers = snapshot.workers
    if workers is None:
        return None
    sighting = next((each for each in workers.workers if each.worker.worker == worker), None)
    sample_age_s = snapshot.taken.age_s(now)
    if sighting is None or sample_age_s is None:
        return None
    place = snapshot.container_of(sighting)
    if place is not None and not place.container.listed:
        place = None  # its engine does not answer, so no action may rely on it
    count = None if place is None else _live_workers_in(place, sighting, workers, snapshot)
    return _facts(snapshot, sighting, place and snapshot.evidence_of_job(sighting), count, sample_age_s)


def _facts(
    snapshot: Snapshot,
    sighting: WorkerReading,
    place: ContainerEvidence | None,
    container_workers: int | None,
    sample_age_s: float,
) -> WorkerFacts:
    taken, job, timeouts = snapshot.taken, sighting.job, snapshot.thresholds.timeouts
    pauses = place.pauses if place else ()
    dead = snapshot.dead_processes.get(sighting.worker.worker)
    return WorkerFacts(
        **_container_facts(snapshot, place, sample_age_s),
        worker=sighting.worker.worker,
        alive=sighting.alive,
        worker_incarnation=sighting.worker.incarnation,
        heartbeat_age_s=sighting.worker.heartbeat.age_s(taken),
        worker_pid=sighting.pid,
        worker_uid=sighting.uid,
        process_ended=dead.ended if dead else None,
        cpu_idle_s=snapshot.cpu_still_of(sighting),
        dead_s=snapshot.dead_s.get(sighting.worker.worker),
        dead_after_s=snapshot.thresholds.dead_after_s,
        container_workers=container_workers,
        job_id=job.job_id if job else None,
        attempt=job.attempt if job else None,
        phase=job.phase if job else None,
        phase_age_s=job.phase_started.age_s(taken) if job else None,
        step=job.step if job else None,
        local_rank=job.local_rank if job and job.local_ranks > 1 else None,
        elapsed_s=job.started.age_s(taken) if job else None,
        budget_s=job.budget_s if job else None,
        stall_timeout_s=timeouts.stall_after_s(job) if job else None,
        busy_timeout_s=timeouts.busy_timeout_s(job) if job else None,
        stuck_after_s=timeouts.stuck_after_s(job, pauses) if job else None,
        stuck_idle_s=timeouts.stuck_inactive_s(job, pauses) if job else None,
        gang_stuck_after_s=timeouts.gang_stuck_after_s(job, pauses) if job else None,
        gang_stuck_idle_s=timeouts.gang_stuck_inactive_s(job, pauses) if job else None,
        step_beat_age_s=job.step_beat.age_s(taken) if job and job.step_beat else None,
        health_window_s=timeouts.health_window_s(job, snapshot.thresholds.health_window_s) if job else None,
        health_grace_s=snapshot.health_grace_s(job) if job else None,
        health_acts=job.health_acts if job else None,
    )


def server_evidence(name: str, snapshot: Snapshot, *, now: Stamp) -> ServerFacts | None:
    """Return the facts about a container, running or not; `None` if containers cannot be listed."""
    sample_age_s = snapshot.taken.age_s(now)
    if snapshot.servers is None or sample_age_s is None:
        return None
    place = next((each for each in snapshot.containers if each.container.name == name), None)
    server = next((each for each in snapshot.servers if each.container.name == name), None)
    probe = server.probe if server and isinstance(server.probe, Probe) else None
    workers = None
    if place is not None and snapshot.workers is not None:
        workers = count_workers(place.container, snapshot.workers, (each.container for each in snapshot.containers))
    return ServerFacts(
        **{**_container_facts(snapshot, place, sample_age_s), "container": name},
        probe=probe.kind if probe else None,
        workers=workers,
        answered=server.answered if server else None,
        probe_failing_s=server.probe_failing_s if server else None,
        restart_after_s=probe.restart_after_s if probe else None,
        server_fault_idle_s=snapshot.server_fault_idle_s(server) if server else None,
        probe_unknown=_message(server.unknown if probe else server.probe) if server else None,
        cards=vram_budgets.gpu_memory(snapshot, name),
        unseen=list(snapshot.unseen),
        nameless_gpus=list(place.nameless) if place else None,
    )


def on_demand_evidence(name: str, snapshot: Snapshot, *, now: Stamp) -> OnDemandFacts | None:
    """Return the facts about a tenant on demand; `None` if the snapshot has none of that name."""
    found = next((each for each in snapshot.on_demand if each.tenant == name), None)
    sample_age_s = snapshot.taken.age_s(now)
    return None if found is None or sample_age_s is None else replace(found, sample_age_s=sample_age_s)


def _container_facts(snapshot: Snapshot, place: ContainerEvidence | None, sample_age_s: float) -> dict[str, Any]:
    """The fields of `ContainerFacts`: those with the names of figures, or of limits, pass as they are."""
    container = place.container if place else None
    return {
        **{name: getattr(snapshot.thresholds, name) for name in _LIMITS},
        **{name: getattr(place.ram, name) if place else None for name in _RAM},
        **{name: getattr(place, name) if place else None for name in _EVIDENCE},
        "host": snapshot.host,
        "sample_age_s": sample_age_s,
        "container_kind": container.kind if container else None,
        "container": container.name if container else None,
        "container_id": container.id if container else None,
        "container_incarnation": container.incarnation if container else None,
        "gpus": list(place.gpus) if place else None,
        "gpu_simulated": None if snapshot.gpus is None else snapshot.gpus.source == "simulated",
        "gpu_unknown": _message(place.gpu_unknown) if place else None,
        "ram_unknown": _message(place.ram_unknown) if place else None,
        "container_cpu_idle_s": place.cpu_idle_s if place else None,
        "work_unknown": _message(place.work_unknown) if place else None,
        "gpu_pids": _driver_pids(snapshot),
        "lost_gpus_s": {gpu: snapshot.gpu_lost_s[gpu] for gpu in snapshot.lost_gpus},
    }


_FACTS: Final = frozenset(each.name for each in fields(ContainerFacts))
_EVIDENCE: Final = frozenset(name for name in _FACTS if hasattr(ContainerEvidence, name))
_RAM: Final = _FACTS.intersection(RamUse._fields) - _EVIDENCE
_LIMITS: Final = _FACTS.intersection(each.name for each in fields(Thresholds)) - _EVIDENCE


def _message(unknown: object) -> str | None:
    return unknown.message if isinstance(unknown, Unknown) else None


def _live_workers_in(
    place: ContainerEvidence, sighting: WorkerReading, workers: WorkerReadings, snapshot: Snapshot
) -> int | None:
    """Count the live workers that end with a container; `None` if some may be unknown."""
    if may_have_unknown_workers(place.container, workers, (each.container for each in snapshot.containers)):
        return None
    if sighting.alive is False and place.container.kind == "process":
        dead = snapshot.dead_processes.get(sighting.worker.worker)
        return None if dead is None else dead.live_workers
    unit = place.container.unit
    homes = (snapshot.container_of(each) for each in workers.workers if each.alive is True)
    return sum(home is not None and home.container.unit == unit for home in homes)


def _driver_pids(snapshot: Snapshot) -> dict[str, list[int] | None] | None:
    if snapshot.gpus is None:
        return None
    return {
        gpu.uuid: None if gpu.processes is None else sorted(process.pid for process in gpu.processes)
        for gpu in snapshot.gpus.gpus
    }
