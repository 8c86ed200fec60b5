"""The published metrics, one file per subsystem. `families(snapshot)` is pure and has the help texts.

To add a metric: a function in one of these files, and a test in tests/exporter. A new file also goes into `COLLECTORS`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors import containers, gpus, jobs, on_demand, servers, tasks, workers
from exporter.model.snapshot import Snapshot

COLLECTORS: Final[Mapping[str, Callable[[Snapshot], Iterable[Metric]]]] = {
    "workers": workers.families,
    "jobs": jobs.families,
    "tasks": tasks.families,
    "containers": containers.families,
    "servers": servers.families,
    "gpus": gpus.families,
    "on_demand": on_demand.families,
}
