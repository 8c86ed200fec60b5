"""The taint of this host's Kubernetes node for a faulty GPU: what is known about it, and how it is set and removed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden import clock
from gpuwarden.errors import GpuwardenError
from remediator import plan
from remediator.clients.exporter import ExporterClient
from remediator.clients.job_queue import Queue
from remediator.executor.limits import RemedyLimits
from remediator.executor.timers import Timers
from remediator.ledger.journal import TAINT
from remediator.ledger.ledger import Ledger
from remediator.ledger.recent import FLEET_FRESH_S
from remediator.plan import Episode, NodeFacts, Outcome
from remediator.reasons import Reason

if TYPE_CHECKING:
    from remediator.clients.nodes import Nodes

log: Final = structlog.get_logger("executor")

FATAL: Final = "fatal"
"""State of a taint in the journal whose fault only a reset ends."""

UNTAINT: Final = "untaint"
"""Journal name of the step that removes the taint."""


class NodeTaint:
    """Reads and sets the taint. `node` is the API and the node's name, `None` outside of Kubernetes."""

    def __init__(
        self,
        node: "tuple[Nodes, str] | None",
        *,
        ledger: Ledger,
        exporter: ExporterClient,
        queue: Queue,
        limits: RemedyLimits,
        timers: Timers,
        pause: Callable[[], object],
    ) -> None:
        self._node = node
        self._ledger = ledger
        self._exporter = exporter
        self._queue = queue
        self._limits = limits
        self._timers = timers
        self._pause = pause

    def facts(self, episode: Episode) -> NodeFacts:
        """The facts of the node and of the GPU, without `works_for_s`.

        Raises:
            GpuwardenError: the API, the exporter or the queue does not answer, or this host is no node.
        """
        if self._node is None:
            raise GpuwardenError("this executor runs without --node-name")
        nodes, name = self._node
        gpu = episode.worker
        health = self._exporter.gpu_health(gpu)
        if health.sample_age_s > self._limits.limits.evidence_fresh_s:
            raise GpuwardenError(f"the exporter's newest sample is {health.sample_age_s:.1f} s old")
        quarantine = self._queue.quarantine_reason(gpu, host=episode.host)
        recorded, fleet = self._ledger.journal.taints(), self._fleet()
        its = [each for each in recorded if each.episode_id == episode.episode_id]
        faults = [f"XID {', '.join(health.xids)}"] if health.xids else []
        if health.lost_s >= self._limits.limits.gpu_lost_s:
            faults.append(f"lost for {health.lost_s:.0f} s")
        if quarantine is not None:
            faults.append(f"in quarantine ({quarantine})")
        doubt = "" if health.listed and not health.lost_s else f"the driver does not list {gpu}"
        fatal_at = max((each.at for each in its if each.state == FATAL), default=None)
        if fatal_at is not None and self._ledger.now() - clock.boottime_s() <= fatal_at:
            doubt = f"{gpu} had a fatal XID, and the host has not booted since"
        return NodeFacts(
            fault=f"{gpu}: {', '.join(faults)}" if faults else "",
            fatal=bool(health.xids),
            doubt=doubt,
            tainted=nodes.is_tainted(name),
            begun=bool(its),
            set_here=any(each.act == "did" for each in its),
            others=tuple(sorted({each.worker for each in recorded if each.host == episode.host} - {gpu})),
            tainted_nodes=len(fleet.intersection(each.host for each in recorded) - {episode.host}),
            nodes=len(fleet),
        )

    def _fleet(self) -> set[str]:
        """Hosts with an executor. A node that was replaced never closes its episodes."""
        since = self._ledger.now() - FLEET_FRESH_S
        return {host for host, at in self._ledger.executors.last_beats().items() if at > since}

    def apply(self, episode: Episode, step: plan.Taint | plan.Untaint) -> plan.Wait | plan.Close | None:
        """Set the taint, or remove it and close the episode. A failure is recorded once, and retried.

        Returns what is to be done instead, if orders or other nodes changed since the facts were read.
        """
        if self._node is None:
            raise AssertionError("decided to taint without a node")
        (nodes, name), journal = self._node, self._ledger.journal
        tainted, timers = isinstance(step, plan.Taint), self._timers.of(episode.episode_id)
        word = TAINT if tainted else UNTAINT
        if journal.has_decided(episode.episode_id, word):
            pass
        elif isinstance(step, plan.Taint):
            instead = self._ledger.intents.begin_taint(
                episode,
                step,
                state=FATAL if step.fatal else None,
                fleet=self._fleet(),
                safety_limits=self._limits.safety_limits,
                now=self._ledger.now(),
            )
            if instead is not None:
                return instead
        else:
            journal.record(episode.episode_id, "decided", word, step.message, now=self._ledger.now())
        try:
            nodes.set_taint(name, tainted=tainted)
        except GpuwardenError as error:
            log.warning("action failed", episode=episode.episode_id, step=word, reason=str(error))
            if word not in timers.refusals:
                journal.record(episode.episode_id, "failed", word, str(error), now=self._ledger.now())
                timers.refusals.add(word)
            self._pause()
            return None
        log.warning("node tainted" if tainted else "taint removed", node=name, reason=step.message)
        journal.record(episode.episode_id, "did", word, f"node {name}", now=self._ledger.now())
        if not tainted:
            done = Outcome.FIXED, Reason.DONE, step.message
            self._ledger.episodes.close(episode.episode_id, *done, now=self._ledger.now())
        return None
