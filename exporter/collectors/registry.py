"""One scrape: run every collector over the newest snapshot, time each, and let none fail another."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from exporter.collectors import COLLECTORS, thresholds
from exporter.collectors.family import gauge
from exporter.model.snapshot import Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from gpuwarden import __version__, build_info, clock
from gpuwarden.state_file import Stamp

SNAPSHOT_FRESH_S: Final = 5.0
"""A snapshot older than this is not published as the present, seconds."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Whether a source or collector did its work, how long it took, and when it last did its work, Unix seconds."""

    name: str
    success: bool
    duration_s: float | None
    succeeded_unix_s: float | None


log: Final = structlog.get_logger("exporter")


class SnapshotCollector(Collector):
    """What Prometheus scrapes: the collectors' families, and how each of them did."""

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
        """Nothing beforehand: asking would take a snapshot."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family of this scrape; those of a stale snapshot are left out."""
        snapshot = self._latest()
        now = self._now()
        age_s = None if snapshot is None else snapshot.taken.age_s(now)
        outcomes: list[_Outcome] = []
        if snapshot is not None and age_s is not None and age_s <= SNAPSHOT_FRESH_S:
            outcomes += [_of_source(each) for each in snapshot.sources]
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
        yield from self._own(outcomes, snapshot, age_s)

    def _own(self, outcomes: list[_Outcome], snapshot: Snapshot | None, age_s: float | None) -> Iterator[Metric]:
        fresh = age_s is not None and age_s <= SNAPSHOT_FRESH_S
        looked_unix_s, took_s = (None, None) if snapshot is None else (snapshot.taken.unix_s, snapshot.took_s)
        sampler = _Outcome(name="sampler", success=fresh, duration_s=took_s, succeeded_unix_s=looked_unix_s)
        outcomes = [*outcomes, sampler]
        its = build_info.here()
        yield gauge(
            "gpuwarden_exporter_info",
            "This exporter and the host it speaks for; always 1.",
            ("nodename", "version"),
            [((self._host, __version__), 1.0)],
            source="`$GPUWARDEN_RUNTIME_DIR/host`; this package",
            absent="never",
        )
        yield gauge(
            "gpuwarden_build_info",
            "Which gpuwarden this is, the commit it was made of where that is known, and its Python; always 1.",
            ("version", "revision", "python"),
            [((its.version, its.revision, its.python), 1.0)],
            source="this package; `$GPUWARDEN_REVISION`, or pip's `direct_url.json`; its Python",
            absent="never",
        )
        yield gauge(
            "gpuwarden_collector_success",
            "1 when the source or collector did its work; 0 when it failed and what only it tells is absent.",
            ("collector",),
            [((each.name,), float(each.success)) for each in outcomes],
            source="the exporter itself",
            absent="the source is not configured, or the newest look is stale (but for `sampler`)",
        )
        yield gauge(
            "gpuwarden_collector_duration_seconds",
            "How long the source or collector took; of an engine its newest list, of a driver the newest answer that "
            "is told, or as long as none has come, of `sampler` the whole look.",
            ("collector",),
            [((each.name,), each.duration_s) for each in outcomes],
            source="the exporter itself, CLOCK_MONOTONIC",
            absent="as `gpuwarden_collector_success`; for `sampler` before the first look",
        )
        yield gauge(
            "gpuwarden_collector_last_success_timestamp_seconds",
            "When the source or collector last did its work, Unix time; of an engine when its newest list was taken, "
            "of a driver when the answer that is told was asked for, of `sampler` the newest look at the host.",
            ("collector",),
            [((each.name,), each.succeeded_unix_s) for each in outcomes],
            source="the exporter itself, CLOCK_REALTIME",
            absent="as `gpuwarden_collector_success`, or it never did its work",
        )
        yield gauge(
            "gpuwarden_sample_age_seconds",
            "Age of the newest look at the host.",
            (),
            [((), age_s)],
            source="CLOCK_BOOTTIME at the scrape and at the look",
            absent="before the first look",
        )
        yield from thresholds.families(self._thresholds)


def _of_source(health: SourceHealth) -> _Outcome:
    return _Outcome(
        name=f"source_{health.source}",
        success=health.success,
        duration_s=health.duration_s,
        succeeded_unix_s=health.succeeded_unix_s,
    )
