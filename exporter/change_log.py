"""Logs what changes from one snapshot to the next: files that turn bad or good, suspicions (A4), deaths (A14)."""

from collections.abc import Mapping
from typing import Final

import structlog

from exporter.evidence import activity, worker_liveness
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import WorkerReadings

log: Final = structlog.get_logger("exporter")

_TRUSTED: Final = {
    "workers": ("state files cannot be trusted", "every state file can be trusted again"),
    "tasks": ("task files cannot be trusted", "every task file can be trusted again"),
}
"""What is logged of the files of each as they turn bad and good again."""


class ChangeLog:
    """What was logged of the newest snapshot."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._invalid: dict[str, dict[str, int]] = {}
        self._suspected: dict[str, str] = {}
        self._dead: set[str] = set()

    def log_changes(self, snapshot: Snapshot) -> None:
        """Log what is not as it was in the snapshot before."""
        if snapshot.tasks is not None:
            self._log_invalid("tasks", dict(snapshot.tasks.errors), snapshot.tasks.first_errors)
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
            bad, good = _TRUSTED[whose]
            if invalid:
                log.warning(bad, invalid=invalid, first_errors=dict(first_errors))
            else:
                log.info(good)
            self._invalid[whose] = invalid

    def _log_suspected(self, found: WorkerReadings, snapshot: Snapshot) -> None:
        suspected: dict[str, str] = {}
        for sighting in found.workers:
            job = sighting.job
            if job is not None:
                place = snapshot.container_of(sighting)
                because = activity.not_stalled_reason(job, place, self._thresholds.timeouts, now=snapshot.taken)
                if because is not None:
                    suspected[sighting.worker.worker] = because
                    if sighting.worker.worker not in self._suspected:
                        log.info("silent but not accused", worker=sighting.worker.worker, job_id=job.job_id,
                                 attempt=job.attempt, because=because)  # fmt: skip
        for worker in self._suspected.keys() - suspected.keys():
            log.info("no longer suspected", worker=worker)
        self._suspected = suspected

    def _log_dead(self, found: WorkerReadings, snapshot: Snapshot) -> None:
        dead: set[str] = set()
        dead_after_s = self._thresholds.dead_after_s
        for sighting in found.workers:
            job, still_s = sighting.job, snapshot.cpu_still_of(sighting)
            if job and worker_liveness.is_dead(sighting, still_s, now=snapshot.taken, dead_after_s=dead_after_s):
                dead.add(sighting.worker.worker)
                if sighting.worker.worker not in self._dead:
                    log.error("worker is dead: no heartbeat and no CPU time", worker=sighting.worker.worker,
                              job_id=job.job_id, attempt=job.attempt, pid=sighting.pid, cpu_still_s=still_s,
                              heartbeat_age_s=sighting.worker.heartbeat.age_s(snapshot.taken))  # fmt: skip
            elif job and (dead_s := snapshot.dead_s.get(sighting.worker.worker, 0.0)) >= dead_after_s:
                dead.add(sighting.worker.worker)
                if sighting.worker.worker not in self._dead:
                    place = snapshot.container_of(sighting)
                    log.error("worker is dead: its process is gone", worker=sighting.worker.worker,
                              job_id=job.job_id, attempt=job.attempt, dead_s=dead_s,
                              container=place.container.name if place else None)  # fmt: skip
        for worker in self._dead - dead:
            log.info("worker is no longer dead", worker=worker)
        self._dead = dead
