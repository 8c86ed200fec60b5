"""GPU memory that ended processes still hold until the driver frees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.evidence.vram_reclaim import VramReclaimTracker
from exporter.model.gpu import Gpu, GpuReadings, MigInstance
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

BOUND_S: Final = 10.0
PARTED: Final = MigInstance(parent="GPU-0", number=0, gpu_instance=1, compute_instance=0, shares_memory=True)


def holding(used: int | None, *held: tuple[int, int | None], **changes: object) -> Gpu:
    """A GPU with so much memory in use; `held` has a pid and its memory each."""
    processes = [build.process(pid, memory_bytes=size) for pid, size in held]
    return build.gpu(0, *processes, memory_used_bytes=used, **changes)


@dataclass
class Samples:
    """A tracker past its first samples; a sample is a second."""

    history: VramReclaimTracker = field(default_factory=lambda: VramReclaimTracker(bound_s=BOUND_S, gap_max_s=5.0))
    now_s: float = 0.0

    def at(self, *gpus: Gpu, ended: Sequence[int] = (), after_s: float = 1.0) -> int | None:
        self.now_s += after_s
        found = self.history.observe(build.gpus(*gpus), ended=frozenset(ended), now_s=self.now_s)
        return found.get("GPU-0")

    def none(self, readings: GpuReadings | None = None) -> None:
        self.now_s += 1.0
        assert self.history.observe(readings, now_s=self.now_s) == {}


def settled(gpu: Gpu) -> Samples:
    """A tracker that has sampled this GPU for the bound."""
    samples = Samples()
    for _ in range(int(BOUND_S)):
        assert samples.at(gpu) is None
    assert samples.at(gpu) == 0
    return samples


TWO: Final = holding(1007, (1, 800), (2, 200))
"""7 bytes belong to no listed process."""


def test_memory_of_an_ended_process_returns_until_the_driver_frees_it() -> None:
    samples = settled(TWO)

    assert samples.at(holding(1007, (2, 200))) == 800
    assert samples.at(holding(507, (2, 200))) == 300
    assert samples.at(holding(207, (2, 200))) == 0


def test_memory_that_is_freed_or_reused_at_once_does_not_count() -> None:
    assert settled(TWO).at(holding(207, (2, 200))) == 0
    assert settled(TWO).at(holding(1007, (2, 200), (3, 800))) == 0
    assert settled(TWO).at(holding(1007, (2, 700))) == 300


def test_returning_memory_is_at_most_what_the_ended_process_held() -> None:
    assert settled(TWO).at(holding(5007, (2, 200))) == 800


def test_memory_held_by_no_process_before_does_not_count() -> None:
    samples = settled(holding(1300, (1, 800), (2, 200)))

    assert samples.at(holding(1300, (2, 200))) == 800
    assert samples.at(holding(600, (2, 200))) == 100


def test_unattributed_memory_may_shrink() -> None:
    samples = settled(TWO)

    assert samples.at(holding(1007, (2, 200))) == 800
    assert samples.at(holding(200, (2, 200))) == 0
    assert samples.at(holding(200)) == 200
    assert samples.at(holding(100)) == 100


def test_memory_not_freed_within_the_bound_stays_and_later_ends_count_separately() -> None:
    samples = settled(TWO)
    samples.at(holding(1007, (2, 200)))

    assert [samples.at(holding(1007, (2, 200))) for _ in range(int(BOUND_S))] == [800] * 9 + [0]
    assert samples.at(holding(1007)) == 200
    assert samples.at(holding(807)) == 0


def test_each_ended_process_has_its_bound_and_the_oldest_returns_first() -> None:
    samples = settled(TWO)
    samples.at(holding(1007, (2, 200)))

    assert samples.at(holding(1007), after_s=4.0) == 1000
    assert samples.at(holding(907), after_s=4.0) == 900
    assert samples.at(holding(907), after_s=2.0) == 200
    assert samples.at(holding(907), after_s=4.0) == 0


def test_listed_process_that_has_ended_counts() -> None:
    samples = settled(TWO)

    assert samples.at(TWO, ended=[1]) == 800
    assert samples.at(holding(1007, (2, 200)), ended=[1]) == 800
    assert samples.at(holding(207, (2, 200))) == 0


def test_process_on_two_lists_holds_both() -> None:
    assert settled(holding(1000, (1, 700), (1, 100))).at(holding(1000)) == 800


def test_process_on_two_lists_with_one_unknown_size_is_unknown() -> None:
    both, found = settled(holding(8, (1, 3), (1, 2))), settled(holding(8, (1, 3), (1, 2)))
    both.at(holding(8, (1, 3), (1, None)))

    assert both.at(holding(8)) is None
    assert found.at(holding(8)) == 5


def test_it_is_unknown_for_the_bound_after_the_first_sample_and_after_a_long_gap() -> None:
    samples = settled(TWO)

    assert samples.at(TWO, after_s=10.0) == 0
    assert samples.at(TWO, after_s=10.5) is None
    assert samples.history.unknown == {"GPU-0": "not_yet"}
    assert [samples.at(TWO, after_s=5.0) for _ in range(2)] == [None, 0]
    assert samples.history.unknown == {}


def test_slow_driver_counts_memory_returned_in_a_gap() -> None:
    samples = settled(TWO)

    assert [samples.at(TWO, after_s=6.0) for _ in range(4)] == [0] * 4
    assert samples.at(holding(1007, (2, 200)), after_s=6.0) == 800
    assert samples.at(holding(407, (2, 200)), after_s=6.0) == 200
    assert samples.at(holding(407, (2, 200)), after_s=6.0) == 0


def test_slow_driver_is_known_after_the_bound() -> None:
    samples = Samples()

    assert [samples.at(TWO, after_s=6.0) for _ in range(4)] == [None, None, 0, 0]


@pytest.mark.parametrize("every", [5, 9, 12])
def test_unknown_size_does_not_hide_memory_of_repeatedly_ending_processes(every: int) -> None:
    samples, found = Samples(), []
    for second in range(100):
        probe = [(1000 + second // every, 300)] if second % every < 2 else []
        found.append(samples.at(holding(1000 + 300 * len(probe), (1, None), (2, 200), *probe)))

    assert found[: int(BOUND_S)] == [None] * 10
    assert None not in found[10:]
    assert max(each or 0 for each in found) == 300 * -(-10 // every)


def test_memory_returned_before_it_is_known_counts_later() -> None:
    samples = Samples()
    samples.at(TWO)

    assert samples.at(holding(1007, (2, 200)), after_s=5.0) is None
    assert samples.at(holding(1007, (2, 200)), after_s=5.0) == 800


NO_ATTRIBUTION: Final[dict[str, tuple[Gpu, ...]]] = {
    "the GPU": (),
    "its processes": (build.gpu(0, memory_used_bytes=1000, processes=None),),
    "memory in use": (holding(None, (2, 200)),),
    "owner of the memory": (holding(1007, (2, 200), mig=PARTED),),
}


@pytest.mark.parametrize("found", NO_ATTRIBUTION.values(), ids=NO_ATTRIBUTION)
def test_sample_without_attribution_is_unknown(found: tuple[Gpu, ...]) -> None:
    samples = settled(TWO)

    assert samples.at(*found) is None
    assert samples.at(holding(1007, (2, 200))) == 800


def test_it_is_unknown_while_no_source_answers() -> None:
    samples = settled(TWO)
    samples.none()

    assert samples.at(holding(1007, (2, 200))) == 800


def test_unknown_size_of_one_process_keeps_the_bound_of_an_ended_one() -> None:
    known = settled(TWO)

    assert known.at(holding(1007, (1, 800), (2, None))) == 0
    assert [known.at(holding(1007, (2, None))) for _ in range(11)] == [800] * 10 + [0]
    assert known.at(holding(1007, (2, 100))) == 0


def test_bound_ends_if_sizes_are_known_again() -> None:
    known = settled(TWO)
    known.at(holding(1007, (2, 200)))

    assert known.at(holding(1007, (2, None)), after_s=5.0) == 800
    assert known.at(holding(1007, (2, 200)), after_s=5.0) == 0


def test_returning_memory_is_at_most_the_unattributed_memory() -> None:
    known = settled(TWO)
    known.at(holding(1007, (1, 800), (2, None), (3, 7)))

    assert known.at(holding(507, (2, None), (3, 7))) == 500


def test_unknown_unattributed_memory_returns_until_it_is_seen_freed() -> None:
    known = settled(TWO)
    known.at(holding(1007, (2, None)))

    assert known.at(holding(1007, (2, 200))) == 800
    assert known.at(holding(607, (2, 200))) == 400


def test_unknown_size_of_an_ended_process_is_unknown_for_the_bound() -> None:
    samples = settled(TWO)

    assert samples.at(holding(1007, (1, None), (2, 200))) == 0
    assert samples.at(holding(1007, (2, 200))) is None
    assert samples.history.unknown == {"GPU-0": "not_measured"}
    assert [samples.at(holding(1007, (2, 200))) for _ in range(10)] == [None] * 9 + [0]


def test_freed_memory_of_unknown_size_is_not_taken_for_that_of_another() -> None:
    samples = settled(holding(1507, (1, 800), (2, 200)))
    samples.at(holding(1507, (1, 800), (2, 200), (3, None)))
    samples.at(holding(1507, (1, 800), (2, 200)))

    assert samples.at(holding(1507, (2, 200)), after_s=5.0) is None
    assert samples.at(holding(1007, (2, 200)), after_s=3.0) is None
    assert samples.at(holding(1007, (2, 200)), after_s=2.0) == 800


def test_returning_memory_keeps_its_bound_while_it_is_unknown() -> None:
    samples = settled(TWO)

    assert samples.at(holding(1007, (2, 200))) == 800
    assert [samples.at(holding(1007, (2, None)), after_s=3.0) for _ in range(4)] == [800] * 3 + [0]


def test_gpus_are_tracked_separately() -> None:
    other = build.gpu(1, build.process(9, memory_bytes=500))
    samples = Samples()
    for _ in range(11):
        samples.at(TWO, other)

    found = samples.history.observe(build.gpus(TWO, build.gpu(1, memory_used_bytes=500)), now_s=samples.now_s + 1)

    assert found == {"GPU-0": 0, "GPU-1": 500}


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(1, 4), st.integers(0, 100) | st.none(), max_size=4),
            st.integers(0, 300),
            st.floats(0.5, 7.0),
        ),
        max_size=40,
    )
)
def test_returning_memory_is_bounded(played: list[tuple[dict[int, int | None], int, float]]) -> None:
    samples, left, before = Samples(), [(0.0, 0)], dict[int, int | None]()
    for held, beyond, after_s in played:
        used = beyond + sum(size or 0 for size in held.values())
        found = samples.at(holding(used, *held.items()), after_s=after_s)
        left += [(samples.now_s, size or 0) for pid, size in before.items() if pid not in held]
        before = held
        assert found is None or 0 <= found <= min(
            beyond, sum(size for at_s, size in left if samples.now_s - at_s < BOUND_S)
        )
