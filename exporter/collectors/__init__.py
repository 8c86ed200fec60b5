"""The series, one file a subsystem: `families(snapshot)` is pure and says what each series means.

To add a metric: one function in one file here, its file listed in `COLLECTORS`, a test in tests/exporter.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors import containers, gpus, jobs, servers, tasks, workers
from exporter.model.snapshot import Snapshot

COLLECTORS: Final[Mapping[str, Callable[[Snapshot], Iterable[Metric]]]] = {
    "workers": workers.families,
    "jobs": jobs.families,
    "tasks": tasks.families,
    "containers": containers.families,
    "servers": servers.families,
    "gpus": gpus.families,
}
