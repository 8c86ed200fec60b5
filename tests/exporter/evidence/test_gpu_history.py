"""Counters of each GPU."""

from dataclasses import replace

import pytest

from exporter.evidence.gpu_history import GpuHistory
from exporter.model.gpu import GpuFigures, GpuReadings, GpuTotals
from tests.exporter import builders as build
from tests.exporter.evidence.values import THRESHOLDS

pytestmark = pytest.mark.pure


def counted(*samples: tuple[float, GpuReadings | None]) -> dict[str, GpuTotals]:
    """The counters after these samples: seconds since the previous one, and the readings."""
    history, now_s = GpuHistory(THRESHOLDS), 1000.0
    for gap_s, readings in samples:
        now_s += gap_s
        last = history.observe(readings, now_s=now_s)
    return dict(last)


def at(utilization_ratio: float | None, uuid: str = "GPU-0") -> GpuReadings:
    return build.gpus(build.gpu(0, uuid=uuid, utilization_ratio=utilization_ratio))


@pytest.mark.parametrize(
    ("samples", "busy_s"),
    [
        pytest.param([(0, at(0.9))], 0.0, id="zero at the first sample"),
        pytest.param([(0, at(0.9)), (1, at(0.5)), (2, at(1.0))], 2.5, id="each sample counts for the time before it"),
        pytest.param([(0, at(None))], None, id="absent until measured"),
        pytest.param([(0, at(None)), (1, at(0.5))], 0.0, id="zero at the first measured sample"),
        pytest.param([(0, at(1.0)), (1, at(None)), (1, at(1.0))], 1.0, id="unknown sample adds nothing"),
        pytest.param([(0, at(1.0)), (1, None), (1, at(1.0))], 1.0, id="sample without a source adds nothing"),
        pytest.param([(0, at(1.0)), (6, at(1.0)), (1, at(1.0))], 1.0, id="gap adds nothing"),
        pytest.param([(0, at(1.0)), (-3, at(1.0)), (1, at(1.0))], 1.0, id="clock running backwards adds nothing"),
    ],
)
def test_busy_time_counts_measured_samples(
    samples: list[tuple[float, GpuReadings | None]], busy_s: float | None
) -> None:
    assert counted(*samples)["GPU-0"].busy_s == busy_s


def test_each_gpu_is_counted_separately_while_it_is_present() -> None:
    both = build.gpus(build.gpu(0, utilization_ratio=1.0), build.gpu(1, utilization_ratio=0.5))
    first = build.gpus(build.gpu(0, utilization_ratio=1.0))

    assert {uuid: found.busy_s for uuid, found in counted((0, both), (1, both)).items()} == {"GPU-0": 1.0, "GPU-1": 0.5}
    assert list(counted((0, both), (1, first))) == ["GPU-0"]
    assert counted((0, both), (1, first), (1, both))["GPU-1"].busy_s == 0.0
    assert counted((0, both), (1, None)) == {}
    assert counted((0, both), (1, None), (1, both))["GPU-1"].busy_s == 0.5


def test_counter_stays_only_while_its_own_source_fails() -> None:
    both = build.gpus(build.gpu(0, utilization_ratio=1.0), build.gpu(1, utilization_ratio=1.0))
    first = build.gpus(build.gpu(0, utilization_ratio=1.0))

    assert counted((0, both), (1, both), (1, replace(first, failed=("drm",))), (1, both))["GPU-1"].busy_s == 2.0
    assert counted((0, both), (1, both), (1, first), (1, both))["GPU-1"].busy_s == 0.0


def test_unknown_returning_memory_is_counted_by_reason() -> None:
    history, readings = GpuHistory(THRESHOLDS), build.gpus(build.gpu(0), build.gpu(1))

    history.observe(readings, now_s=1.0, returning_unknown={"GPU-0": "not_yet", "GPU-1": "not_yet"})
    history.observe(readings, now_s=2.0, returning_unknown={"GPU-0": "not_yet"})
    found = history.observe(readings, now_s=3.0, returning_unknown={})

    figure = "memory_reclaiming_bytes", "not_yet"
    assert {uuid: each.unknown for uuid, each in found.items()} == {"GPU-0": {figure: 2}, "GPU-1": {figure: 1}}


def test_unknown_values_of_a_gpu_are_counted_by_reason() -> None:
    refused = build.gpus(build.gpu(0, figures=GpuFigures(unknown={"power_watts": "timeout"})), build.gpu(1))
    other = build.gpus(build.gpu(0, figures=GpuFigures(unknown={"power_watts": "failed"})), build.gpu(1))

    found = counted((0, refused), (1, refused), (1, other))

    assert found["GPU-0"].unknown == {("power_watts", "timeout"): 2, ("power_watts", "failed"): 1}
    assert found["GPU-1"].unknown == {}
