"""One scrape: runs and times each collector on the newest snapshot. A failed collector does not affect the others."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from exporter.collectors import COLLECTORS, build_info, thresholds
from exporter.collectors.family import gauge
from exporter.model.snapshot import Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from gpuwarden import __version__, clock
from gpuwarden.state_file import Stamp

SNAPSHOT_FRESH_S: Final = 5.0
"""An older snapshot is not published, seconds."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Result of a source or collector, its duration, and its last success in Unix seconds."""

    name: str
    success: bool
    duration_s: float | None
    succeeded_unix_s: float | None


log: Final = structlog.get_logger("exporter")


class SnapshotCollector(Collector):
    """Publishes the families of all collectors and the result of each."""

    def __init__(
        self,
        latest: Callable[[], Snapshot | None],
        *,
        host: str,
        thresholds: Thresholds,
        now: Callable[[], Stamp] = clock.stamp,
    ) -> None:
        self._latest = latest
        self._host = host
        self._thresholds = thresholds
        self._now = now
        self._succeeded_unix_s: dict[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a description would take a snapshot."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family of this scrape, without those of a stale snapshot."""
        snapshot = self._latest()
        now = self._now()
        age_s = None if snapshot is None else snapshot.taken.age_s(now)
        outcomes: list[_Outcome] = []
        if snapshot is not None and age_s is not None and age_s <= SNAPSHOT_FRESH_S:
            outcomes += [_source_outcome(each) for each in snapshot.sources]
            for name, families in COLLECTORS.items():
                started_s = time.monotonic()
                try:
                    found = list(families(snapshot))
                    success = True
                except Exception:
                    log.exception("collector failed", collector=name)
                    found, success = [], False
                if success:
                    self._succeeded_unix_s[name] = now.unix_s
                outcomes.append(
                    _Outcome(
                        name=name,
                        success=success,
                        duration_s=time.monotonic() - started_s,
                        succeeded_unix_s=self._succeeded_unix_s.get(name),
                    )
                )
                yield from found
        yield from self._own_families(outcomes, snapshot, age_s)

    def _own_families(
        self, outcomes: list[_Outcome], snapshot: Snapshot | None, age_s: float | None
    ) -> Iterator[Metric]:
        fresh = age_s is not None and age_s <= SNAPSHOT_FRESH_S
        sampled_unix_s, took_s = (None, None) if snapshot is None else (snapshot.taken.unix_s, snapshot.took_s)
        sampler = _Outcome(name="sampler", success=fresh, duration_s=took_s, succeeded_unix_s=sampled_unix_s)
        outcomes = [*outcomes, sampler]
        build = build_info.here()
        yield gauge(
            "gpuwarden_exporter_info",
            "The exporter and its host; always 1.",
            ("nodename", "version"),
            [((self._host, __version__), 1.0)],
            source="`$GPUWARDEN_RUNTIME_DIR/host`; this package",
            absent="never",
        )
        yield gauge(
            "gpuwarden_build_info",
            "Version of gpuwarden, its commit if known, and its Python; always 1.",
            ("version", "revision", "python"),
            [((build.version, build.revision, build.python), 1.0)],
            source="this package; `$GPUWARDEN_REVISION`, or pip's `direct_url.json`; its Python",
            absent="never",
        )
        yield gauge(
            "gpuwarden_collector_success",
            "1 if the source or collector succeeded, 0 if it failed and its metrics are absent.",
            ("collector",),
            [((each.name,), float(each.success)) for each in outcomes],
            source="the exporter itself",
            absent="the source is not configured, or the newest sample is stale (except `sampler`)",
        )
        yield gauge(
            "gpuwarden_collector_duration_seconds",
            "Duration of the source or collector: an engine's newest list, a driver's newest call, or the whole "
            "sample (`sampler`).",
            ("collector",),
            [((each.name,), each.duration_s) for each in outcomes],
            source="the exporter itself, CLOCK_MONOTONIC",
            absent="as `gpuwarden_collector_success`; for `sampler` before the first sample",
        )
        yield gauge(
            "gpuwarden_collector_last_success_timestamp_seconds",
            "Last success of the source or collector, Unix time; for a driver, the start of its newest answered call.",
            ("collector",),
            [((each.name,), each.succeeded_unix_s) for each in outcomes],
            source="the exporter itself, CLOCK_REALTIME",
            absent="as `gpuwarden_collector_success`, or it never succeeded",
        )
        yield gauge(
            "gpuwarden_sample_age_seconds",
            "Age of the newest sample of the host.",
            (),
            [((), age_s)],
            source="CLOCK_BOOTTIME at the scrape and at the sample",
            absent="before the first sample",
        )
        yield from thresholds.families(self._thresholds)


def _source_outcome(health: SourceHealth) -> _Outcome:
    return _Outcome(
        name=f"source_{health.source}",
        success=health.success,
        duration_s=health.duration_s,
        succeeded_unix_s=health.succeeded_unix_s,
    )
