"""Keep the seats of this host's Kubernetes node (C1), in a thread: a hanging API delays nothing else."""

import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import structlog

from gpuwarden.errors import GpuwardenError
from gpuwarden.kube.api import KubeError
from remediator.clients.exporter import ExporterClient
from remediator.clients.nodes import Nodes
from remediator.seats import Node, Plan, Rules, plan

log: Final = structlog.get_logger("executor")

CHECK_S: Final = 60.0
"""Time between two checks of a node that does not change, seconds."""

RETRY_S: Final = 1.0
"""First wait after a failure, seconds. It doubles up to `CHECK_S`."""

WAIT_MAX_S: Final = 300.0
"""Longest wait that the API may ask for, seconds."""

CLOSE_S: Final = 1.0


class SeatKeeper:
    """Advertises the GPU memory of one node, and again when the node shows another amount."""

    def __init__(
        self, node: str, *, nodes: Nodes, exporter: ExporterClient, rules: Rules, may_act: Callable[[], bool]
    ) -> None:
        self._node = node
        self._nodes = nodes
        self._exporter = exporter
        self._rules = rules
        self._may_act = may_act
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="seats", daemon=True)
        self._failures_in_a_row = 0
        self.failures = 0
        """Failures since the start."""

        self._logged: tuple[str, Mapping[str, object]] = "", {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop. The seats stay: an executor that is updated must not take them away."""
        self._closing.set()
        self._thread.join(timeout=CLOSE_S)  # it may wait for the API

    def _run(self) -> None:
        while not self._closing.is_set():
            wait_s = 0.0
            try:
                self.check_and_watch()
            except KubeError as error:
                self._count_failure()
                wait_s = min(max(self._backoff_s(), error.retry_after_s or 0.0), WAIT_MAX_S)
                self._log_once("seats not checked", reason=str(error))
            except Exception:  # the thread survives a defect
                self._count_failure()
                wait_s = self._backoff_s()
                log.exception("unexpected error")
            self._closing.wait(wait_s)

    def check_and_watch(self) -> None:
        """Check the node, then wait until it changes or the next check is due.

        Raises:
            KubeError: the Kubernetes API fails.
        """
        try:
            node = self._nodes.read(self._node)
        except KubeError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            node, found = Node(name=self._node), Plan(reason=str(error))
        else:
            found = self._find(node)
            node = self._apply(node, found)
        if found.mib is None:
            self._log_once("seats not set", advertised_mib=node.capacity_mib, reason=found.reason)
            self._count_failure()
            wait_s = self._backoff_s()
        else:
            self._failures_in_a_row, wait_s = 0, CHECK_S
        self._nodes.wait_for_change(node, wait_s=round(wait_s))

    def _find(self, node: Node) -> Plan:
        """What the node should advertise."""
        try:
            gpus = self._exporter.gpu_sizes()
        except GpuwardenError as error:
            return Plan(reason=str(error))
        found = self._plan(node, gpus, cached=True)
        if found.mib is not None and found.mib < (node.capacity_mib or 0):
            return self._plan(node, gpus, cached=False)  # a cache may lack a pod that a lower value would end
        return found

    def _plan(self, node: Node, gpus: Mapping[str, int | None], *, cached: bool) -> Plan:
        budgets = self._nodes.list_budgets(self._node, cached=cached).get(self._node, [])
        return plan(node, gpus, budgets, rules=self._rules)

    def _apply(self, node: Node, found: Plan) -> Node:
        """Advertise what was found, if this executor acts. Returns the node as it is now."""
        because = {"reason": found.reason} if found.reason else {}
        if found.mib is None:
            return node
        if found.mib != node.capacity_mib and not self._may_act():
            event, hint = "dry run: would advertise seats", "set --seats on"
            self._log_once(event, mib=found.mib, advertised_mib=node.capacity_mib, hint=hint, **because)
            return node
        if found.mib != node.capacity_mib:
            log.info("seats patched", node=self._node, mib=found.mib, before_mib=node.capacity_mib)
            node = self._nodes.advertise(self._node, found.mib, version=node.version)
        self._log_once("seats advertised", mib=found.mib, **because)
        return node

    def _count_failure(self) -> None:
        self.failures += 1
        self._failures_in_a_row += 1

    def _backoff_s(self) -> float:
        return min(CHECK_S, RETRY_S * 2.0 ** min(self._failures_in_a_row - 1, 10))

    def _log_once(self, event: str, **fields: object) -> None:
        """Log what differs from the last line."""
        if (event, fields) != self._logged:
            self._logged = event, fields
            write = log.info if event == "seats advertised" else log.warning
            write(event, node=self._node, **fields)
