"""For how long a container's processes were kept off a GPU: each tells of itself alone, and they come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter import evictions
from exporter.evictions import Evictions
from exporter.readings import GpuShare

Look = dict[int, float | None] | None
"""What each process tells, seconds, by pid; `None` is a GPU of which no driver tells it."""


def share(look: Look, gpu: str = "GPU-0") -> GpuShare:
    return GpuShare(gpu=gpu, utilization_ratio=None, memory_bytes=None, evicted_s=look)


def counted(*looks: Look) -> list[float | None]:
    """What is told of one GPU after each look."""
    history = Evictions()
    return [history.observe([share(look)]).get("GPU-0") for look in looks]


@pytest.mark.parametrize(
    ("looks", "told_s"),
    [
        pytest.param([{}, {}], [0.0, 0.0], id="a measured nothing, with no process there"),
        pytest.param([{}, {1: 0.0}, {1: 2.5}, {1: 4.0}], [0.0, 0.0, 2.5, 4.0], id="it grows with its process"),
        pytest.param([{1: 60.0}, {1: 61.0}], [0.0, 1.0], id="what was told before the first look is not counted"),
        pytest.param([{}, {1: 3.0}], [0.0, 3.0], id="what comes later has had all of it since"),
        pytest.param([{}, {1: 1.0, 2: 2.0}, {1: 4.0, 2: 2.5}], [0.0, 3.0, 6.5], id="of several the sum"),
        pytest.param([{}, {1: 3.0}, {}, {2: 1.0}, {}], [0.0, 3.0, 3.0, 4.0, 4.0], id="it stays when its process ends"),
        pytest.param([{}, {1: 3.0}, {1: 0.5}], [0.0, 3.0, 3.5], id="less than before is another with that pid"),
        pytest.param([{}, {1: 3.0}, {}, {1: 5.0}], [0.0, 3.0, 3.0, 5.0], id="off the list for a look"),
        pytest.param([None, None], [None, None], id="a driver that does not tell"),
        pytest.param([{1: None}, {1: None}], [None, None], id="a kernel that does not tell"),
        pytest.param([{1: None, 2: 1.0}, {1: 60.0, 2: 2.0}, {1: 61.0, 2: 2.0}], [None, 0.0, 1.0], id="told late"),
        pytest.param([{}, {1: 1.0, 2: None}, {1: 2.0}], [0.0, None, 2.0], id="unknown while one has not told"),
        pytest.param([{}, {1: 3.0}, {1: None}, {1: 4.0}], [0.0, 3.0, 3.0, 4.0], id="one that told before has ended"),
        pytest.param([{1: 1.0}, None, {1: 2.0}], [0.0, 0.0, 1.0], id="not listed meanwhile"),
    ],
)
def test_what_is_counted_after_each_look(looks: list[Look], told_s: list[float | None]) -> None:
    assert counted(*looks) == told_s


def test_each_gpu_is_counted_alone() -> None:
    history = Evictions()
    history.observe([share({1: 5.0}), share({1: 7.0}, "GPU-1")])

    assert history.observe([share({1: 6.0}), share({1: None, 2: None}, "GPU-1")]) == {"GPU-0": 1.0}
    assert history.observe([share({1: 6.0}), share({1: 9.0}, "GPU-1")]) == {"GPU-0": 1.0, "GPU-1": 2.0}


@given(st.lists(st.dictionaries(st.integers(1, 3), st.none() | st.integers(0, 9).map(float), max_size=3), max_size=20))
def test_the_counter_never_falls(looks: list[dict[int, float | None]]) -> None:
    told = [each for each in counted(*looks) if each is not None]

    assert told == sorted(told)


def test_no_more_processes_are_remembered_than_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "PIDS_MAX", 2)

    # The third takes the place of the first, which then counts as one that has come since.
    assert counted({}, {1: 1.0}, {2: 1.0}, {1: 1.0}, {3: 1.0}, {1: 1.0}) == [0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert counted({}, {1: 1.0}, {2: 1.0}, {3: 1.0}, {1: 1.0}) == [0.0, 1.0, 2.0, 3.0, 4.0]
