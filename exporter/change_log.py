"""Log changes between snapshots: invalid files, jobs that may stall (A4), dead workers (A14)."""

from collections.abc import Mapping
from typing import Final

import structlog

from exporter.evidence import activity, vram_budgets, worker_liveness
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import WorkerReadings

log: Final = structlog.get_logger("exporter")

_EVENTS: Final = {
    "workers": ("invalid state files", "all state files valid"),
    "tasks": ("invalid task files", "all task files valid"),
}
"""Log events by kind of file."""


class ChangeLog:
    """The logged state of the last snapshot."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._invalid: dict[str, dict[str, int]] = {}
        self._suspected: dict[str, str] = {}
        self._dead: set[str] = set()
        self._bad_budgets: dict[str, str] = {}

    def log_changes(self, snapshot: Snapshot) -> None:
        """Log changes since the last snapshot."""
        if snapshot.tasks is not None:
            self._log_invalid("tasks", dict(snapshot.tasks.errors), snapshot.tasks.first_errors)
        self._log_bad_budgets(snapshot)
        if snapshot.workers is None:
            return
        invalid = dict(snapshot.workers.errors)
        if snapshot.workers.duplicates:
            invalid["duplicate"] = snapshot.workers.duplicates
        self._log_invalid("workers", invalid, snapshot.workers.first_errors)
        self._log_suspected(snapshot.workers, snapshot)
        self._log_dead(snapshot.workers, snapshot)

    def _log_invalid(self, whose: str, invalid: dict[str, int], first_errors: Mapping[str, str]) -> None:
        if invalid != self._invalid.get(whose, {}):
            bad, good = _EVENTS[whose]
            if invalid:
                log.warning(bad, invalid=invalid, first_errors=dict(first_errors))
            else:
                log.info(good)
            self._invalid[whose] = invalid

    def _log_bad_budgets(self, snapshot: Snapshot) -> None:
        found = {
            each.place.container.name: each.budget.invalid.message
            for each in vram_budgets.tenants(snapshot)
            if each.budget.invalid is not None
        }
        for container, message in found.items():
            if self._bad_budgets.get(container) != message:
                log.warning("VRAM budget not used", container=container, reason=message)
        self._bad_budgets = found

    def _log_suspected(self, found: WorkerReadings, snapshot: Snapshot) -> None:
        suspected: dict[str, str] = {}
        for sighting in found.workers:
            job = sighting.job
            if job is not None:
                place = snapshot.evidence_of_job(sighting)
                message = activity.not_stalled_reason(job, place, self._thresholds.timeouts, now=snapshot.taken)
                if message is not None:
                    suspected[sighting.worker.worker] = message
                    if sighting.worker.worker not in self._suspected:
                        log.info("job silent, not reported as stalled", worker=sighting.worker.worker,
                                 job_id=job.job_id, attempt=job.attempt, reason=message)  # fmt: skip
        for worker in self._suspected.keys() - suspected.keys():
            log.info("job active again", worker=worker)
        self._suspected = suspected

    def _log_dead(self, found: WorkerReadings, snapshot: Snapshot) -> None:
        dead: set[str] = set()
        dead_after_s = self._thresholds.dead_after_s
        for sighting in found.workers:
            job, still_s = sighting.job, snapshot.cpu_still_of(sighting)
            if job and worker_liveness.is_dead(sighting, still_s, now=snapshot.taken, dead_after_s=dead_after_s):
                dead.add(sighting.worker.worker)
                if sighting.worker.worker not in self._dead:
                    log.error("worker dead: no heartbeat, no CPU time", worker=sighting.worker.worker,
                              job_id=job.job_id, attempt=job.attempt, pid=sighting.pid, cpu_idle_s=still_s,
                              heartbeat_age_s=sighting.worker.heartbeat.age_s(snapshot.taken))  # fmt: skip
            elif job and (dead_s := snapshot.dead_s.get(sighting.worker.worker, 0.0)) >= dead_after_s:
                dead.add(sighting.worker.worker)
                if sighting.worker.worker not in self._dead:
                    place = snapshot.container_of(sighting)
                    log.error("worker dead: process ended", worker=sighting.worker.worker,
                              job_id=job.job_id, attempt=job.attempt, dead_s=dead_s,
                              container=place.container.name if place else None)  # fmt: skip
        for worker in self._dead - dead:
            log.info("worker alive again", worker=worker)
        self._dead = dead
