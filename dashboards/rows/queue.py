"""The queue: what waits and for how long, who works on it, and what becomes of it.

Told by the remediators that are given the queue. Hosts may share one, and each then shows the whole of it: choose one
host, and never sum them.
"""

from typing import Final

from dashboards.expressions import HOST, each, or_none
from dashboards.panels import Panel, Query

_QUEUE: Final = ("host", "queue")
_UP: Final = f"({each('min', ('host',), 'gpuwarden_queue_up', where=HOST)} == 1)"


def _quantile(quantile: float) -> str:
    buckets = f"gpuwarden_queue_wait_seconds_bucket{{{HOST}}}[$__rate_interval]"
    return f"histogram_quantile({quantile:g}, max by (host, queue, le) (rate({buckets})))"


PANELS: Final = (
    Panel(
        title="Jobs by queue",
        reads="Jobs that are not over. Queued may be claimed, waiting needs others that are not done; a queued that "
        "climbs beside a full number of busy workers wants more workers, beside idle ones a look at what they avoid.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    each("max", (*_QUEUE, "state"), "gpuwarden_queue_jobs", where=HOST), _UP, "queue", "state"
                ),
                legend="{{host}} {{queue}} {{state}}",
            ),
        ),
    ),
    Panel(
        title="Oldest claimable job",
        reads="For how long the oldest job that a worker may claim has been waiting for one. Nothing is drawn where "
        "none waits.",
        unit="s",
        queries=(
            Query(expr=each("max", _QUEUE, "gpuwarden_queue_oldest_seconds", where=HOST), legend="{{host}} {{queue}}"),
        ),
    ),
    Panel(
        title="Workers by queue",
        reads="Workers that were seen within 30 s and hold a model are busy; one that is killed is so no more at "
        "once. Idle ones have nothing to claim.",
        unit="short",
        queries=(
            Query(
                expr=each("max", _QUEUE, "gpuwarden_queue_workers_busy", where=HOST), legend="{{host}} {{queue}} busy"
            ),
            Query(
                expr=each("max", _QUEUE, "gpuwarden_queue_workers", where=f'state="idle", {HOST}'),
                legend="{{host}} {{queue}} idle",
            ),
        ),
    ),
    Panel(
        title="Jobs ended",
        reads="Jobs and runs that ended in each second, by kind. Failed ones say why in the job list.",
        unit="cps",
        queries=(
            Query(
                expr=or_none(
                    "sum by (host, queue, kind) (max by (host, queue, job_class, kind) "
                    f"(rate(gpuwarden_queue_outcomes_total{{{HOST}}}[$__rate_interval])))",
                    _UP,
                    "queue",
                    "kind",
                ),
                legend="{{host}} {{queue}} {{kind}}",
            ),
        ),
    ),
    Panel(
        title="Wait for a worker",
        reads="From when a job could be claimed until it was, of the last attempt of those that ended: half and 95 "
        "of 100 waited for no longer. Nothing is drawn while none ends.",
        unit="s",
        queries=(
            Query(expr=_quantile(0.5), legend="{{host}} {{queue}} p50"),
            Query(expr=_quantile(0.95), legend="{{host}} {{queue}} p95"),
        ),
    ),
    Panel(
        title="Jobs queued again",
        reads="How often in each second jobs were queued again, after trips and after leases that were lost.",
        unit="cps",
        queries=(
            Query(
                expr=or_none(
                    f"max by (host, queue, cause) (rate(gpuwarden_queue_retries_total{{{HOST}}}[$__rate_interval]))",
                    _UP,
                    "queue",
                    "cause",
                ),
                legend="{{host}} {{queue}} after a {{cause}}",
            ),
        ),
    ),
)
