"""The queue: waiting jobs, workers and outcomes.

Published by the remediators of the queue. Hosts that share a queue each publish all of it, so select one host and never
sum.
"""

from typing import Final

from dashboards.expressions import HOST, aggregate, or_none
from dashboards.panels import Panel, Query

_QUEUE: Final = ("host", "queue")
_UP: Final = f"({aggregate('min', ('host',), 'gpuwarden_queue_up', where=HOST)} == 1)"


def _quantile(quantile: float) -> str:
    buckets = f"gpuwarden_queue_wait_seconds_bucket{{{HOST}}}[$__rate_interval]"
    return f"histogram_quantile({quantile:g}, max by (host, queue, le) (rate({buckets})))"


PANELS: Final = (
    Panel(
        title="Jobs by queue",
        description="Jobs that have not ended. Queued jobs can be claimed; waiting jobs need other jobs first. If "
        "queued rises while all workers are busy, add workers. If it rises while workers are idle, check "
        "which workers or GPUs the jobs avoid.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    aggregate("max", (*_QUEUE, "state"), "gpuwarden_queue_jobs", where=HOST), _UP, "queue", "state"
                ),
                legend="{{host}} {{queue}} {{state}}",
            ),
        ),
    ),
    Panel(
        title="Oldest claimable job",
        description="Time that the oldest claimable job has waited for a worker. Empty if no job waits.",
        unit="s",
        queries=(
            Query(
                expr=aggregate("max", _QUEUE, "gpuwarden_queue_oldest_job_age_seconds", where=HOST),
                legend="{{host}} {{queue}}",
            ),
        ),
    ),
    Panel(
        title="Workers by queue",
        description="Busy: seen within 30 s and holding a model. A killed worker leaves this number at once. Idle: "
        "workers without a job to claim.",
        unit="short",
        queries=(
            Query(
                expr=aggregate("max", _QUEUE, "gpuwarden_queue_workers_busy", where=HOST),
                legend="{{host}} {{queue}} busy",
            ),
            Query(
                expr=aggregate("max", _QUEUE, "gpuwarden_queue_workers", where=f'state="idle", {HOST}'),
                legend="{{host}} {{queue}} idle",
            ),
        ),
    ),
    Panel(
        title="Jobs ended",
        description="Jobs that ended per second, by outcome. `gpuwarden job list` shows why a job failed.",
        unit="cps",
        queries=(
            Query(
                expr=or_none(
                    "sum by (host, queue, outcome) (max by (host, queue, job_class, outcome) "
                    f"(rate(gpuwarden_queue_jobs_ended_total{{{HOST}}}[$__rate_interval])))",
                    _UP,
                    "queue",
                    "outcome",
                ),
                legend="{{host}} {{queue}} {{outcome}}",
            ),
        ),
    ),
    Panel(
        title="Wait for a worker",
        description="Time from claimable to claimed, for the last attempt of ended jobs: median and 95th percentile. "
        "Empty while no job ends.",
        unit="s",
        queries=(
            Query(expr=_quantile(0.5), legend="{{host}} {{queue}} p50"),
            Query(expr=_quantile(0.95), legend="{{host}} {{queue}} p95"),
        ),
    ),
    Panel(
        title="Jobs requeued",
        description="Jobs requeued per second: after a condition was met, and after a lost lease.",
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
