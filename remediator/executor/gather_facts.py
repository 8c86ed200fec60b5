"""Reads what an episode is decided by: the exporter, the engine, the queue, the ledger, and the timers."""

import re
from collections.abc import Mapping
from typing import Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import ContainerFacts, ServerFacts, WorkerFacts
from gpuwarden.procfs import ProcessId
from remediator.actuators import ENGINES, Actuator
from remediator.clients.exporter import Witness, WorkerUnseenError
from remediator.clients.job_queue import Queue
from remediator.executor import signal_worker
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.hosts import HostLiveness
from remediator.executor.limits import RemedyLimits
from remediator.executor.perform import LOSE
from remediator.executor.timers import Timers
from remediator.ledger.ledger import Ledger
from remediator.plan import ContainerState, Episode, Facts, HostFacts, JobFacts, Limits, RunFacts, Stage, Subject

FACTS_S: Final = 30.0
"""Facts that are older, suspended time included, are read again before anything is done on their account, seconds."""


class FactsReader:
    """Reads the facts of an episode.

    What does not answer is named in `unknown` and raises nothing, except the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        host: str,
        witness: Witness,
        queue: Queue,
        actuators: Mapping[str, Actuator],
        limits: RemedyLimits,
        timers: Timers,
        liveness: HostLiveness,
        clock: SuspendAwareClock,
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._witness = witness
        self._queue = queue
        self._actuators = actuators
        self._limits = limits
        self._timers = timers
        self._liveness = liveness
        self._clock = clock

    def of_container(self, episode: Episode) -> Facts:
        """Facts of a worker, a server or a tenant."""
        unknown: list[str] = []
        evidence, worker_ended = self._evidence(episode, unknown)
        server = self._server(episode, unknown)
        container, container_known = self._container(episode, evidence or server, unknown)
        job, job_known = self._job(episode, unknown)
        now_s = self._clock.now_s()
        timers = self._timers.of(episode.episode_id)
        if len(unknown) > worker_ended or timers.quiet_since_s is None:
            timers.quiet_since_s = now_s  # a source did not answer: a worker that is not seen is an answer
        refused_s_ago = None if timers.refused_at_s is None else now_s - timers.refused_at_s
        # Where nothing is stopped yet, what was refused long ago is asked for again: the queue may be well since.
        untouched = episode.free is None or episode.free.stage is Stage.PLANNED
        if job_known and (refused_s_ago is None or (untouched and refused_s_ago > FACTS_S)):
            timers.stuck_since_s = None
        elif timers.stuck_since_s is None:
            timers.stuck_since_s = now_s
        stuck_since_s = now_s if timers.stuck_since_s is None else timers.stuck_since_s
        free_since_s = timers.stage_since_s(episode.free, now_s)
        settle_since_s = timers.stage_since_s(episode.settle, now_s)
        up_since_s = timers.up_since_s(container, now_s)
        warned_since_s = timers.knows_warned_since_s(episode.free, now_s)
        limits = self._limits.limits_of(episode.remedy)
        listener, deaf = _listener(limits, episode, evidence, container)
        return Facts(
            armed=self._armed(episode.remedy),
            limits=limits,
            episode=episode,
            evidence=evidence,
            container=container,
            container_known=container_known,
            job=job,
            job_known=job_known,
            server=server,
            worker_ended=worker_ended,
            free_for_s=now_s - self._clock.since(free_since_s, now_s),
            settle_for_s=now_s - self._clock.since(settle_since_s, now_s),
            quiet_for_s=now_s - self._clock.since(timers.quiet_since_s, now_s),
            runs_for_s=now_s - self._clock.since(up_since_s, now_s),
            queue_stuck_for_s=now_s - self._clock.since(stuck_since_s, now_s),
            refused_s_ago=refused_s_ago,
            stopped_s_ago=None if timers.stopped_at_s is None else now_s - timers.stopped_at_s,
            warned_for_s=now_s - self._clock.since(warned_since_s, now_s),
            listener=listener,
            deaf=deaf,
            unknown="; ".join(unknown),
        )

    def of_run(self, episode: Episode) -> Facts:
        """Facts of a run whose items fail."""
        queue, unknown, run = self._queue, "", None
        try:
            decided, done = self._ledger.run_decisions.state_of(episode)
            run = RunFacts(tally=queue.tally(episode.worker, now=queue.now()), decided=decided, done=done)
        except GpuwardenError as error:
            unknown = str(error)
        return self._without_container(episode, armed=self._armed(episode.remedy), unknown=unknown, run=run)

    def of_host(self, episode: Episode) -> Facts:
        """Facts of a host that is said to be silent.

        A host acts for another only where both are armed for it.
        """
        orders, queue, unknown, host = self._ledger.orders.current(), self._queue, "", None
        now_s = self._clock.now_s()
        try:
            host = HostFacts(
                jobs=queue.jobs_on(episode.host, now=queue.now()),
                shows_life=self._liveness.shows_life(episode.host, now_s),
                silent_for_s=self._liveness.silent_s(episode.host, now_s),
                accused=self._liveness.accused_with(episode),
                alive=self._liveness.alive(now_s),
                taken=self._ledger.journal.has_decided(episode.episode_id, LOSE),
            )
        except GpuwardenError as error:
            unknown = str(error)
        armed = all(orders.armed(host=each, remedy=episode.remedy) for each in (self._host, episode.host))
        return self._without_container(episode, armed=armed, unknown=unknown, host=host)

    def _without_container(
        self,
        episode: Episode,
        *,
        armed: bool,
        unknown: str,
        run: RunFacts | None = None,
        host: HostFacts | None = None,
    ) -> Facts:
        """Facts of what only the queue knows: a run, or a host's jobs."""
        return Facts(
            armed=armed,
            limits=self._limits.limits,
            episode=episode,
            evidence=None,
            container=None,
            container_known=False,
            job=None,
            job_known=(run or host) is not None,
            run=run,
            host=host,
            unknown=unknown,
        )

    def _armed(self, remedy: str) -> bool:
        """Whether a remedy acts on this host, as the ledger has it now: no order waits for a restart."""
        return self._ledger.orders.current().armed(host=self._host, remedy=remedy)

    def _evidence(self, episode: Episode, unknown: list[str]) -> tuple[WorkerFacts | None, bool]:
        if episode.subject is not Subject.WORKER:
            return None, False
        try:
            return self._witness.about(episode.worker, host=self._host), False
        except WorkerUnseenError as error:
            unknown.append(str(error))
            return None, True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _server(self, episode: Episode, unknown: list[str]) -> ServerFacts | None:
        if episode.subject is Subject.WORKER:
            return None
        try:
            return self._witness.about_server(episode.worker, host=self._host)
        except GpuwardenError as error:
            unknown.append(str(error))
            return None

    def _container(
        self, episode: Episode, evidence: ContainerFacts | None, unknown: list[str]
    ) -> tuple[ContainerState | None, bool]:
        """The container promised to, once an intent names it; before that the one the evidence points at.

        A container that the exporter does not list may only be missing from one listing: its engine is asked about the
        container that was accused.
        """
        if episode.free is not None:
            kind, handle = episode.free.data["kind"], episode.free.data["handle"]
            group = episode.free.data.get("cgroup")
        elif evidence is not None and evidence.container_kind and evidence.container_id and evidence.container:
            kind, group = evidence.container_kind, None
            handle = evidence.container if kind == "process" else evidence.container_id
        elif evidence is not None and (accused := _accused(episode)) is not None:
            return self._accused_container(accused, unknown)
        else:
            return None, False
        actuator = self._actuators.get(kind)
        if actuator is None:
            unknown.append(f"this remediator has no hands for containers of kind {kind}")
            return None, False
        try:
            return actuator.look(handle, cgroup=group), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _accused_container(self, handle: str, unknown: list[str]) -> tuple[ContainerState | None, bool]:
        """A container by its id alone, from whichever engine has it; gone is only what every engine says is gone."""
        known = False
        for kind in ENGINES:
            actuator = self._actuators.get(kind)
            if actuator is None:
                continue
            try:
                found = actuator.look(handle)
            except GpuwardenError as error:
                unknown.append(str(error))
                return None, False
            if found is not None:
                return found, True
            known = True
        if not known:
            unknown.append("this remediator has no hands for containers")
        return None, known

    def _job(self, episode: Episode, unknown: list[str]) -> tuple[JobFacts | None, bool]:
        if episode.job_id is None:
            return None, True
        try:
            return self._queue.job(episode.job_id), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False


def _listener(
    limits: Limits, episode: Episode, evidence: WorkerFacts | None, container: ContainerState | None
) -> tuple[ProcessId | None, str]:
    """The process that a warning would reach, or why it would reach none; read only while one may be wanted."""
    free, signal = episode.free, limits.warn_signal
    if signal is None or free is None or free.stage is not Stage.PLANNED or evidence is None or container is None:
        return None, "nothing is known of its process"
    try:
        seen_s_ago = evidence.sample_age_s
        return signal_worker.find(evidence.worker_pid, signal, among=container.pids, seen_s_ago=seen_s_ago), ""
    except signal_worker.WarningError as error:
        return None, str(error)


def _accused(episode: Episode) -> str | None:
    """The full id of the container that an episode without a worker is about, where its alert named one."""
    if episode.subject is Subject.WORKER:
        return None
    found = _FULL_ID.match(episode.incarnation or "")
    return None if found is None else found[1]


_FULL_ID: Final = re.compile(r"([0-9a-z]{64})@")
"""How a container's incarnation begins. An alert's label is data: nothing else of it reaches an engine."""
