"""Print what happens on the stage: poll each program and report changes."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import httpx

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import State
from testbed.stage import Stage

ALERT: Final = "GpuwardenJobStalled"

SUSPECTED_S: Final = 2.0
"""Shorter suspicions are not reported: the GPU of a hung job becomes idle shortly after its last step beat, seconds."""

_SKIPPED_ENTRIES: Final = frozenset({"decided stop", "decided start"})


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event: seconds since the start, its program, and a text."""

    at_s: float
    part: str
    text: str
    tone: str = ""


@dataclass
class Reported:
    """Events that were reported."""

    jobs: dict[int, tuple[State, int]] = field(default_factory=dict)
    armed: set[tuple[int, int]] = field(default_factory=set)
    silent: set[tuple[int, int]] = field(default_factory=set)
    suspected: set[tuple[int, int]] = field(default_factory=set)
    firing: set[tuple[str, str]] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    entries: dict[int, int] = field(default_factory=dict)


class Watcher:
    """Polls a stage."""

    def __init__(self, stage: Stage, titles: dict[int, str]) -> None:
        self._stage = stage
        self._titles = titles
        self._reported = Reported()
        self._began_s = time.monotonic()
        self._began_at = time.time()
        self.facts: dict[str, WorkerFacts] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def new_events(self) -> list[Event]:
        """Events since the last call, in pipeline order."""
        self._stage.chain.check()
        new_events: list[Event] = []
        for look in (self._workers, self._prometheus, self._alertmanager, self._ledger, self._queue):
            new_events.extend(look())
        return sorted(new_events, key=lambda event: event.at_s)

    def title(self, job_id: int | None) -> str:
        """Label of a job."""
        return "no job" if job_id is None else f"job {job_id} ({self._titles.get(job_id, '?')})"

    def _event(self, part: str, text: str, tone: str = "") -> Event:
        return Event(at_s=self.elapsed_s, part=part, text=text, tone=tone)

    def _queue(self) -> Iterator[Event]:
        for job in self._stage.store.jobs():
            now = (job.state, job.attempt)
            if self._reported.jobs.get(job.job_id) != now:
                self._reported.jobs[job.job_id] = now
                title = self.title(job.job_id)
                if job.state is State.RUNNING:
                    yield self._event("queue", f"{title}: attempt {job.attempt} claimed by {job.worker}")
                elif job.state is State.COMPLETED:
                    yield self._event("queue", f"{title}: completed by attempt {job.attempt}", "good")
                elif job.state is State.FAILED:
                    yield self._event("queue", f"{title}: failed: {job.reason}", "bad")
                elif job.state is State.QUEUED and job.attempt:
                    retries = job.watchdog_retries
                    yield self._event("queue", f"{title}: requeued, priority {job.priority}, retry {retries}")

    def _workers(self) -> Iterator[Event]:
        for slot in self._stage.slots:
            with suppress(GpuwardenError):
                facts = self._stage.witness.worker_evidence(slot.worker, host=self._stage.chain.plan.host)
                self.facts[slot.worker] = facts
                yield from self._worker(facts)

    def _worker(self, facts: WorkerFacts) -> Iterator[Event]:
        if facts.job_id is None or facts.attempt is None or facts.step_beat_age_s is None:
            return
        attempt = (facts.job_id, facts.attempt)
        title = self.title(facts.job_id)
        if attempt not in self._reported.armed:
            self._reported.armed.add(attempt)
            yield self._event("exporter", f"{facts.worker}: {title} has loaded and is monitored")
        silence_s = facts.stall_timeout_s or float("inf")
        if facts.alive and facts.step_beat_age_s > silence_s / 2 and attempt not in self._reported.silent:
            self._reported.silent.add(attempt)
            gpu = "unknown" if facts.gpu_idle_s is None else f"idle {facts.gpu_idle_s:.0f} s"
            gpu = "busy" if facts.gpu_idle_s == 0 else gpu
            yield self._event(
                "exporter",
                f"{facts.worker}: no step beat for {facts.step_beat_age_s:.0f} s at step {facts.step}, GPU {gpu}, "
                f"RAM idle {facts.ram_idle_s or 0:.0f} s",
                "watch",
            )
        lasting_s = silence_s + SUSPECTED_S
        busy = facts.gpu_idle_s is not None and facts.gpu_idle_s < silence_s
        if facts.alive and facts.step_beat_age_s >= lasting_s and busy and attempt not in self._reported.suspected:
            self._reported.suspected.add(attempt)
            text = f"{facts.worker}: suspected, no step beat for {facts.step_beat_age_s:.0f} s, GPU busy: no action"
            yield self._event("exporter", text, "watch")

    def _prometheus(self) -> Iterator[Event]:
        with suppress(httpx.HTTPError):
            found = self._stage.chain.query(f'ALERTS{{alertname="{ALERT}",alertstate="firing"}}')
            firing = {(row["metric"]["worker"], row["metric"]["job_id"]) for row in found}
            for worker, job_id in sorted(firing - self._reported.firing):
                yield self._event("prometheus", f"{ALERT} fires for {worker}, {self.title(int(job_id))}", "bad")
            self._reported.firing |= firing

    def _alertmanager(self) -> Iterator[Event]:
        with suppress(httpx.HTTPError):
            url = f"{self._stage.chain.alertmanager_url}/api/v2/alerts"
            for alert in self._stage.chain.http.get(url, params={"filter": 'worker!=""'}).json():
                if alert["fingerprint"] not in self._reported.delivered:
                    self._reported.delivered.add(alert["fingerprint"])
                    yield self._event(
                        "alertmanager", f"received {alert['labels']['alertname']} for {alert['labels']['worker']}"
                    )

    def _ledger(self) -> Iterator[Event]:
        for summary in self._stage.ledger.reports.newest():
            shown = self._reported.entries.get(summary.episode_id, 0)
            watcher = self._stage.ledger.reports.get(summary.episode_id)
            entries = watcher.entries if watcher else ()
            self._reported.entries[summary.episode_id] = len(entries)
            for entry in entries[shown:]:
                if f"{entry.act} {entry.what}" in _SKIPPED_ENTRIES:
                    continue
                text = f"{summary.worker}: {entry.act} {entry.what}: {entry.message}"
                tone = "act" if entry.act == "did" else ("bad" if entry.act == "failed" else "")
                yield Event(at_s=entry.at - self._began_at, part="remediator", text=text, tone=tone)


def follow(
    watcher: Watcher, *, until: Callable[[], bool], timeout_s: float, show: Callable[[list[Event]], None]
) -> bool:
    """Show new events until `until` returns true. Returns false after `timeout_s`."""
    while watcher.elapsed_s < timeout_s:
        show(watcher.new_events())
        if until():
            show(watcher.new_events())
            return True
        time.sleep(0.2)
    return False
