"""Metrics of Pending pods. A thread lists them, and a scrape shows the newest list.

Series are absent while the list is unknown: unknown is never zero. Every `serve` of a cluster publishes the same pods:
do not sum them.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gpuwarden.errors import GpuwardenError
from remediator.metrics.series import Catalogue, Series
from remediator.pending_pods import PENDING_S, PUBLISHED_MAX, PendingPod

log: Final = structlog.get_logger("remediator")

LIST_S: Final = 15.0
"""Time between two lists, seconds."""

AGE_MAX_S: Final = 60.0
"""A list older than this is unknown, seconds."""

CLOSE_S: Final = 1.0

_UNKNOWN: Final = f"the Kubernetes API has not answered for {AGE_MAX_S:g} s"

SERIES: Final = Catalogue(
    Series("gpuwarden_pending_pods_up", "1 while the Pending pods are known, else 0."),
    Series(
        "gpuwarden_pending_pods",
        "Pods that are Pending because no node has enough of the resource free.",
        absent=_UNKNOWN,
    ),
    Series(
        "gpuwarden_pod_pending_seconds",
        f"Time since the scheduler first failed to place the pod. At most {PUBLISHED_MAX}, the longest first.",
        labels=("pod_namespace", "pod_name"),
        absent=f"{_UNKNOWN}, or no pod waits for the resource",
    ),
    Series(
        "gpuwarden_pod_pending_wanted_bytes",
        "GPU memory that the same pod wants.",
        labels=("pod_namespace", "pod_name"),
        absent="as `gpuwarden_pod_pending_seconds`, or the limit of the pod is invalid",
    ),
    Series(
        "gpuwarden_pod_pending_threshold_seconds",
        "An alert fires if a pod waits for this long: the setting pod_pending_s.",
    ),
)


class PendingPodsCollector(Collector):
    """The Pending pods of the cluster.

    Args:
        list_pods: lists them.
        pending_s: threshold of the rule, seconds.
    """

    def __init__(self, list_pods: Callable[[], Sequence[PendingPod]], *, pending_s: float = PENDING_S) -> None:
        self._list = list_pods
        self._pending_s = pending_s
        self._newest: tuple[float, Sequence[PendingPod]] | None = None
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pending pods", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. It may wait for the API."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self.look()
            self._closing.wait(LIST_S)

    def look(self) -> None:
        """List the pods once."""
        asked_s = time.monotonic()
        try:
            self._newest = asked_s, self._list()
        except GpuwardenError as error:
            if not self._failed:  # once, not at every list
                log.warning("pending pods unknown", reason=str(error))
            self._failed = True
        except Exception:  # the thread survives a defect
            log.exception("unexpected error")
        else:
            if self._failed:
                log.info("pending pods known again")
            self._failed = False

    def describe(self) -> list[Metric]:
        """Nothing: there is no list yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect every family."""
        yield SERIES.gauge("gpuwarden_pod_pending_threshold_seconds", self._pending_s)
        newest = self._newest
        known = newest is not None and time.monotonic() - newest[0] <= AGE_MAX_S
        yield SERIES.gauge("gpuwarden_pending_pods_up", float(known))
        if newest is None or not known:
            return
        pods, now = newest[1], time.time()
        yield SERIES.gauge("gpuwarden_pending_pods", len(pods))
        waited = SERIES.gauge("gpuwarden_pod_pending_seconds")
        wanted = SERIES.gauge("gpuwarden_pod_pending_wanted_bytes")
        for pod in pods[:PUBLISHED_MAX]:
            waited.add_metric((pod.namespace, pod.name), max(0.0, now - pod.since))
            if pod.wanted_mib is not None:
                wanted.add_metric((pod.namespace, pod.name), pod.wanted_mib * 2**20)
        yield from (waited, wanted)
