"""Read the facts for a decision: from the exporter, the engine, the queue, the ledger and the timers."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import ContainerFacts, OnDemandFacts, ServerFacts, WorkerFacts
from gpuwarden.kube import pods
from gpuwarden.kube.pods import Handle
from gpuwarden.procfs import ProcessId
from gpuwarden.queue.hosts.silence import QUIET_S
from remediator.actuators import ENGINES, Actuator, Evicts, NotAllowedError
from remediator.actuators.process import ORPHANS, orphans_handle
from remediator.clients.exporter import ExporterClient, WorkerUnseenError
from remediator.clients.job_queue import Queue
from remediator.executor import signal_worker
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.hosts import HostLiveness
from remediator.executor.limits import RemedyLimits
from remediator.executor.node_taint import NodeTaint
from remediator.executor.perform import LOSE
from remediator.executor.timers import Timers
from remediator.ledger.ledger import Ledger
from remediator.plan import (
    ContainerState,
    Episode,
    Facts,
    HostFacts,
    JobFacts,
    Limits,
    NodeFacts,
    RunFacts,
    Stage,
    Subject,
)
from remediator.remedies.guards import Orders
from remediator.remedies.restart import SEEN_DEAD

FACTS_S: Final = 30.0
"""Older facts are read again before any action, seconds. Suspended time counts."""


class FactsReader:
    """Reads the facts of an episode.

    Sources that fail are listed in `Facts.unknown`. Only an unreachable ledger raises.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        host: str,
        exporter: ExporterClient,
        queue: Queue,
        actuators: Mapping[str, Actuator],
        limits: RemedyLimits,
        timers: Timers,
        liveness: HostLiveness,
        clock: SuspendAwareClock,
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._exporter = exporter
        self._queue = queue
        self._actuators = actuators
        self._limits = limits
        self._timers = timers
        self._liveness = liveness
        self._clock = clock
        self.node_taint: NodeTaint | None = None
        self.orders: Orders | None = None
        """The orders of this round, for episodes without an intent. A begin reads them again."""

    def of_container(self, episode: Episode) -> Facts:
        """Facts of a worker, a server or a container with a VRAM budget."""
        unknown: list[str] = []
        evidence, worker_ended = self._evidence(episode, unknown)
        server = self._server(episode, unknown)
        container, container_known = self._container(episode, evidence or server, unknown)
        successor = None if container else self._successor(episode, unknown)
        job, job_known = self._job(episode, unknown)
        now_s = self._clock.now_s()
        timers = self._timers.of(episode.episode_id)
        if len(unknown) > worker_ended or timers.quiet_since_s is None:
            timers.quiet_since_s = now_s  # a source failed; a missing worker is an answer, not a failure
        refused_s_ago = None if timers.refused_at_s is None else now_s - timers.refused_at_s
        # Before a stop, retry a write that was refused long ago: the queue may work again.
        untouched = episode.free is None or episode.free.stage is Stage.PLANNED
        if job_known and (refused_s_ago is None or (untouched and refused_s_ago > FACTS_S)):
            timers.stuck_since_s = None
        elif timers.stuck_since_s is None:
            timers.stuck_since_s = now_s
        stuck_since_s = now_s if timers.stuck_since_s is None else timers.stuck_since_s
        free_since_s = timers.stage_since_s(episode.free, now_s)
        settle_since_s = timers.stage_since_s(episode.settle, now_s)
        up_since_s = timers.up_since_s(container or successor, now_s)
        warned_since_s = timers.warned_at_s(episode.free, now_s)
        limits = self._limits.limits_of(episode.remedy)
        listener, deaf = _find_signal_target(limits, episode, evidence, container)
        return Facts(
            armed=self._armed(episode),
            limits=limits,
            episode=episode,
            evidence=evidence,
            container=container,
            container_known=container_known,
            job=job,
            job_known=job_known,
            server=server,
            successor=successor,
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
        """Facts of a run with failing items."""
        queue, unknown, run = self._queue, "", None
        try:
            decided, done = self._ledger.run_decisions.state_of(episode)
            run = RunFacts(tally=queue.tally(episode.worker, now=queue.now()), decided=decided, done=done)
        except GpuwardenError as error:
            unknown = str(error)
        return self._without_container(episode, armed=self._armed(episode), unknown=unknown, run=run)

    def of_host(self, episode: Episode) -> Facts:
        """Facts of a silent host. A host acts for another host only if both are armed."""
        orders, queue, unknown, host = self._ledger.orders.current(), self._queue, "", None
        now_s = self._clock.now_s()
        try:
            now = queue.now()
            seen = queue.seen_host(episode.host, now=now)
            is_heard = seen is not None and seen.lost_at is None and seen.silent_s(now) < QUIET_S
            host = HostFacts(
                jobs=queue.jobs_on(episode.host, now=now),
                shows_life=is_heard or self._liveness.is_alive(episode.host, now_s),
                lost=None if seen is None else seen.lost_at is not None,
                silent_for_s=self._liveness.silent_s(episode.host, now_s),
                accused=self._liveness.count_silent_with(episode),
                alive=self._liveness.count_alive(now_s),
                taken=self._ledger.journal.has_decided(episode.episode_id, LOSE),
            )
        except GpuwardenError as error:
            unknown = str(error)
        armed = all(orders.armed(host=each, remedy=episode.remedy) for each in (self._host, episode.host))
        return self._without_container(episode, armed=armed, unknown=unknown, host=host)

    def of_gpu(self, episode: Episode) -> Facts:
        """Facts of a faulty GPU and its Kubernetes node."""
        timers, now_s, unknown, node = self._timers.of(episode.episode_id), self._clock.now_s(), "", None
        try:
            node = None if self.node_taint is None else self.node_taint.facts(episode)
        except GpuwardenError as error:
            unknown = str(error)
        if node is None or node.fault or node.doubt:
            timers.works_since_s = None
        else:
            timers.works_since_s = now_s if timers.works_since_s is None else timers.works_since_s
            node = replace(node, works_for_s=now_s - self._clock.since(timers.works_since_s, now_s))
        return self._without_container(episode, armed=self._armed(episode), unknown=unknown, node=node)

    def of_on_demand(self, episode: Episode) -> Facts:
        """Facts of a tenant on demand. The engine says whether it is on."""
        seen, container, known, unknown, forbidden = None, None, False, "", ""
        try:
            seen = self._exporter.on_demand_evidence(episode.worker, host=self._host)
            actuator = self._actuators.get(seen.kind)
            if actuator is None:
                unknown = f"no actuator for {seen.kind}: see --docker, --podman and --demand-gate-namespaces"
            else:
                container, known = actuator.look(seen.handle), True
        except NotAllowedError as error:
            forbidden = str(error)
        except GpuwardenError as error:
            unknown = str(error)
        timers, facts = (
            self._timers.of(episode.episode_id),
            self._without_container(episode, armed=self._armed(episode), unknown=unknown),
        )
        tried_at_s = timers.stopped_at_s
        return replace(
            facts,
            container=container,
            container_known=known,
            on_demand=seen,
            scaled_on=self._ledger.intents.last_scaling(episode.episode_id),
            forbidden=forbidden,
            quarantined="" if seen is None or seen.on else self._quarantined(seen),
            stopped_s_ago=None if tried_at_s is None else self._clock.now_s() - tried_at_s,
        )

    def _quarantined(self, seen: OnDemandFacts) -> str:
        """Which GPUs of the tenant are in quarantine, or why that is unknown."""
        try:
            found = {card.gpu: self._queue.quarantine_reason(card.gpu, host=self._host) for card in seen.cards}
        except GpuwardenError as error:
            return f"unknown whether its GPU is in quarantine: {error}"
        return "; ".join(f"{gpu} is in quarantine ({why})" for gpu, why in found.items() if why is not None)

    def _without_container(
        self,
        episode: Episode,
        *,
        armed: bool,
        unknown: str,
        run: RunFacts | None = None,
        host: HostFacts | None = None,
        node: NodeFacts | None = None,
    ) -> Facts:
        """Facts of a target that only the queue knows: a run, or the jobs of a host."""
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
            node=node,
            unknown=unknown,
        )

    def _armed(self, episode: Episode) -> bool:
        """Whether the remedy of an episode is armed on this host."""
        orders = self.orders if episode.free is None else None
        return (orders or self._ledger.orders.current()).armed(host=self._host, remedy=episode.remedy)

    def _evidence(self, episode: Episode, unknown: list[str]) -> tuple[WorkerFacts | None, bool]:
        if episode.subject is not Subject.WORKER:
            return None, False
        try:
            return self._exporter.worker_evidence(episode.worker, host=self._host), False
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
            return self._exporter.container_evidence(episode.worker, host=self._host)
        except GpuwardenError as error:
            unknown.append(str(error))
            return None

    def _container(
        self, episode: Episode, evidence: ContainerFacts | None, unknown: list[str]
    ) -> tuple[ContainerState | None, bool]:
        """Read the container of the intent, or without an intent the one in the evidence.

        The exporter may miss a container in one listing. Then the engines are queried for the container of the alert.
        """
        if episode.free is not None:
            kind, handle = episode.free.data["kind"], episode.free.data["handle"]
            group = episode.free.data.get("cgroup")
        elif evidence is not None and evidence.container_kind and evidence.container_id and evidence.container:
            kind, group = evidence.container_kind, None
            handle = _handle(kind, evidence.container, evidence.container_id, evidence.container_incarnation)
            if isinstance(evidence, WorkerFacts) and evidence.alive is False and self._is_unlisted(kind, handle):
                return self._orphans(evidence, unknown)
        elif evidence is not None and (accused := _container_id_in_alert(episode)) is not None:
            return self._find_container(accused, unknown)
        elif evidence is not None and (pod := _pod_in_alert(episode)) is not None:
            kind, handle, group = pods.KIND, str(pod), None
        else:
            return None, False
        actuator = self._actuators.get(kind)
        if actuator is None:
            unknown.append(f"no actuator for containers of kind {kind}")
            return None, False
        try:
            return actuator.look(handle, cgroup=group), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _successor(self, episode: Episode, unknown: list[str]) -> ContainerState | None:
        """Find the pod that replaces an evicted one."""
        free = episode.free
        if free is None or free.stage not in (*SEEN_DEAD, Stage.ABANDONED) or free.data.get("others") is None:
            return None
        actuator = self._actuators.get(free.data["kind"])
        if not isinstance(actuator, Evicts):
            return None
        try:
            return actuator.find_successor(free.data["handle"], others=free.data["others"])
        except GpuwardenError as error:
            unknown.append(str(error))
            return None

    def _is_unlisted(self, kind: str, handle: str) -> bool:
        """Whether this is a process that is not supervised."""
        supervised = self._actuators.get("process")
        try:
            return kind == "process" and (supervised is None or supervised.look(handle) is None)
        except GpuwardenError:
            return False  # read again, and recorded, by the caller

    def _orphans(self, evidence: WorkerFacts, unknown: list[str]) -> tuple[ContainerState | None, bool]:
        """Read what a dead worker in no container left."""
        actuator = self._actuators.get(ORPHANS)
        if actuator is None or evidence.process_ended is None or evidence.worker_uid is None:
            unknown.append("the exporter does not know whether the worker's process has ended")
            return None, False
        if not evidence.process_ended:
            unknown.append("the worker's process runs, although its lock is free")
            return None, False
        handle = orphans_handle(evidence.worker, str(evidence.container_incarnation), evidence.worker_uid)
        try:
            return actuator.look(handle), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _find_container(self, handle: str, unknown: list[str]) -> tuple[ContainerState | None, bool]:
        """Read a container by its id from any engine. It is gone only if no engine has it."""
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
            unknown.append("no actuator for containers")
        return None, known

    def _job(self, episode: Episode, unknown: list[str]) -> tuple[JobFacts | None, bool]:
        if episode.job_id is None:
            return None, True
        try:
            return self._queue.job(episode.job_id), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False


def _find_signal_target(
    limits: Limits, episode: Episode, evidence: WorkerFacts | None, container: ContainerState | None
) -> tuple[ProcessId | None, str]:
    """The process to warn, or why there is none. Read only while a warning may be sent."""
    free, signal = episode.free, limits.warn_signal
    if signal is None or free is None or free.stage is not Stage.PLANNED or evidence is None or container is None:
        return None, "process unknown"
    try:
        seen_s_ago = evidence.sample_age_s
        return signal_worker.find(evidence.worker_pid, signal, among=container.pids, seen_s_ago=seen_s_ago), ""
    except signal_worker.WarningError as error:
        return None, str(error)


def _handle(kind: str, name: str, container_id: str, incarnation: str | None) -> str:
    """The handle of a container that the exporter names."""
    if kind == pods.KIND:
        return str(Handle.of(name, incarnation or "") or container_id)
    return name if kind == "process" else container_id


def _pod_in_alert(episode: Episode) -> Handle | None:
    """The pod in the alert of an episode without a worker, if any."""
    return None if episode.subject is Subject.WORKER else Handle.of(episode.worker, episode.incarnation or "")


def _container_id_in_alert(episode: Episode) -> str | None:
    """The full container id in the alert of an episode without a worker, if any."""
    if episode.subject is Subject.WORKER:
        return None
    found = _FULL_ID.match(episode.incarnation or "")
    return None if found is None else found[1]


_FULL_ID: Final = re.compile(r"([0-9a-z]{64})@")
"""Start of a container's incarnation. Only this part of the alert's label is sent to an engine."""
