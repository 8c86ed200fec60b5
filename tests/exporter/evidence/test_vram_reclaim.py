"""GPU memory that is on its way back: what of it counts, for how long, and when nobody can tell."""

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
    """A GPU with so much in use, and what each pid on its list holds."""
    processes = [build.process(pid, memory_bytes=size) for pid, size in held]
    return build.gpu(0, *processes, memory_used_bytes=used, **changes)


@dataclass
class Looks:
    """A history whose first looks are over, so that what it tells is known; a look is a second."""

    history: VramReclaimTracker = field(default_factory=lambda: VramReclaimTracker(bound_s=BOUND_S, gap_max_s=5.0))
    now_s: float = 0.0

    def at(self, *gpus: Gpu, ended: Sequence[int] = (), after_s: float = 1.0) -> int | None:
        self.now_s += after_s
        told = self.history.observe(build.gpus(*gpus), ended=frozenset(ended), now_s=self.now_s)
        return told.get("GPU-0")

    def none(self, readings: GpuReadings | None = None) -> None:
        self.now_s += 1.0
        assert self.history.observe(readings, now_s=self.now_s) == {}


def settled(gpu: Gpu) -> Looks:
    """It has looked at this for as long as the bound."""
    looks = Looks()
    for _ in range(int(BOUND_S)):
        assert looks.at(gpu) is None
    assert looks.at(gpu) == 0
    return looks


TWO: Final = holding(1007, (1, 800), (2, 200))
"""7 of it are held by no listed process, as a driver has some for itself."""


def test_what_one_held_that_has_left_is_on_its_way_back_until_the_driver_counts_it_no_more() -> None:
    looks = settled(TWO)

    assert looks.at(holding(1007, (2, 200))) == 800
    assert looks.at(holding(507, (2, 200))) == 300
    assert looks.at(holding(207, (2, 200))) == 0


def test_what_comes_back_at_once_never_counts_nor_what_somebody_takes_meanwhile() -> None:
    assert settled(TWO).at(holding(207, (2, 200))) == 0
    assert settled(TWO).at(holding(1007, (2, 200), (3, 800))) == 0
    assert settled(TWO).at(holding(1007, (2, 700))) == 300


def test_no_more_counts_than_what_has_left_had_whoever_takes_some_without_being_listed() -> None:
    assert settled(TWO).at(holding(5007, (2, 200))) == 800


def test_what_nobody_held_before_does_not_count() -> None:
    looks = settled(holding(1300, (1, 800), (2, 200)))

    assert looks.at(holding(1300, (2, 200))) == 800
    assert looks.at(holding(600, (2, 200))) == 100


def test_what_nobody_holds_may_become_less_meanwhile() -> None:
    looks = settled(TWO)

    assert looks.at(holding(1007, (2, 200))) == 800
    assert looks.at(holding(200, (2, 200))) == 0
    assert looks.at(holding(200)) == 200
    assert looks.at(holding(100)) == 100


def test_what_is_not_back_within_the_bound_is_taken_to_stay_and_what_leaves_later_counts_beside_it() -> None:
    looks = settled(TWO)
    looks.at(holding(1007, (2, 200)))

    assert [looks.at(holding(1007, (2, 200))) for _ in range(int(BOUND_S))] == [800] * 9 + [0]
    assert looks.at(holding(1007)) == 200
    assert looks.at(holding(807)) == 0


def test_each_that_has_left_has_a_bound_of_its_own_and_the_oldest_comes_back_first() -> None:
    looks = settled(TWO)
    looks.at(holding(1007, (2, 200)))

    assert looks.at(holding(1007), after_s=4.0) == 1000
    assert looks.at(holding(907), after_s=4.0) == 900
    assert looks.at(holding(907), after_s=2.0) == 200
    assert looks.at(holding(907), after_s=4.0) == 0


def test_one_that_is_listed_still_and_has_ended_has_left() -> None:
    looks = settled(TWO)

    assert looks.at(TWO, ended=[1]) == 800
    assert looks.at(holding(1007, (2, 200)), ended=[1]) == 800
    assert looks.at(holding(207, (2, 200))) == 0


def test_one_that_is_on_two_lists_of_a_driver_holds_both() -> None:
    assert settled(holding(1000, (1, 700), (1, 100))).at(holding(1000)) == 800


def test_of_one_that_is_on_two_lists_and_tells_one_size_alone_what_left_is_unknown() -> None:
    both, told = settled(holding(8, (1, 3), (1, 2))), settled(holding(8, (1, 3), (1, 2)))
    both.at(holding(8, (1, 3), (1, None)))

    assert both.at(holding(8)) is None
    assert told.at(holding(8)) == 5


def test_it_is_unknown_for_as_long_as_the_bound_after_the_first_look_and_after_a_gap_as_long() -> None:
    looks = settled(TWO)

    assert looks.at(TWO, after_s=10.0) == 0
    assert looks.at(TWO, after_s=10.5) is None
    assert looks.history.unknown == {"GPU-0": "not_yet"}
    assert [looks.at(TWO, after_s=5.0) for _ in range(2)] == [None, 0]
    assert looks.history.unknown == {}


def test_a_driver_that_is_known_now_and_then_tells_what_has_left_in_a_gap() -> None:
    looks = settled(TWO)

    assert [looks.at(TWO, after_s=6.0) for _ in range(4)] == [0] * 4
    assert looks.at(holding(1007, (2, 200)), after_s=6.0) == 800
    assert looks.at(holding(407, (2, 200)), after_s=6.0) == 200
    assert looks.at(holding(407, (2, 200)), after_s=6.0) == 0


def test_and_it_is_known_as_soon_as_ever_of_a_driver_that_was_known_so_from_the_start() -> None:
    looks = Looks()

    assert [looks.at(TWO, after_s=6.0) for _ in range(4)] == [None, None, 0, 0]


@pytest.mark.parametrize("every", [5, 9, 12])
def test_one_of_unknown_size_does_not_hide_what_another_held_that_ends_again_and_again(every: int) -> None:
    looks, told = Looks(), []
    for second in range(100):
        probe = [(1000 + second // every, 300)] if second % every < 2 else []
        told.append(looks.at(holding(1000 + 300 * len(probe), (1, None), (2, 200), *probe)))

    assert told[: int(BOUND_S)] == [None] * 10
    assert None not in told[10:]
    assert max(each or 0 for each in told) == 300 * -(-10 // every)


def test_what_leaves_before_it_is_known_counts_once_it_is() -> None:
    looks = Looks()
    looks.at(TWO)

    assert looks.at(holding(1007, (2, 200)), after_s=5.0) is None
    assert looks.at(holding(1007, (2, 200)), after_s=5.0) == 800


NO_ATTRIBUTION: Final[dict[str, tuple[Gpu, ...]]] = {
    "the GPU": (),
    "its processes": (build.gpu(0, memory_used_bytes=1000, processes=None),),
    "what is in use": (holding(None, (2, 200)),),
    "whose part it is": (holding(1007, (2, 200), mig=PARTED),),
}


@pytest.mark.parametrize("told", NO_ATTRIBUTION.values(), ids=NO_ATTRIBUTION)
def test_it_is_unknown_at_a_look_that_does_not_tell(told: tuple[Gpu, ...]) -> None:
    looks = settled(TWO)

    assert looks.at(*told) is None
    assert looks.at(holding(1007, (2, 200))) == 800


def test_it_is_unknown_while_no_source_answers() -> None:
    looks = settled(TWO)
    looks.none()

    assert looks.at(holding(1007, (2, 200))) == 800


def test_while_it_is_unknown_what_one_holds_what_another_held_that_left_counts_until_its_bound() -> None:
    known = settled(TWO)

    assert known.at(holding(1007, (1, 800), (2, None))) == 0
    assert [known.at(holding(1007, (2, None))) for _ in range(11)] == [800] * 10 + [0]
    assert known.at(holding(1007, (2, 100))) == 0


def test_and_no_longer_where_it_is_known_again_by_then() -> None:
    known = settled(TWO)
    known.at(holding(1007, (2, 200)))

    assert known.at(holding(1007, (2, None)), after_s=5.0) == 800
    assert known.at(holding(1007, (2, 200)), after_s=5.0) == 0


def test_no_more_of_it_counts_then_than_nobody_is_told_to_hold() -> None:
    known = settled(TWO)
    known.at(holding(1007, (1, 800), (2, None), (3, 7)))

    assert known.at(holding(507, (2, None), (3, 7))) == 500


def test_what_left_before_it_was_known_what_nobody_holds_is_all_due_until_it_is_seen_to_come_back() -> None:
    known = settled(TWO)
    known.at(holding(1007, (2, None)))

    assert known.at(holding(1007, (2, 200))) == 800
    assert known.at(holding(607, (2, 200))) == 400


def test_of_one_that_left_with_nobody_knows_how_much_it_is_unknown_for_as_long_as_the_bound() -> None:
    looks = settled(TWO)

    assert looks.at(holding(1007, (1, None), (2, 200))) == 0
    assert looks.at(holding(1007, (2, 200))) is None
    assert looks.history.unknown == {"GPU-0": "not_measured"}
    assert [looks.at(holding(1007, (2, 200))) for _ in range(10)] == [None] * 9 + [0]


def test_what_comes_back_of_one_of_unknown_size_is_not_taken_for_what_another_held() -> None:
    looks = settled(holding(1507, (1, 800), (2, 200)))
    looks.at(holding(1507, (1, 800), (2, 200), (3, None)))
    looks.at(holding(1507, (1, 800), (2, 200)))

    assert looks.at(holding(1507, (2, 200)), after_s=5.0) is None
    assert looks.at(holding(1007, (2, 200)), after_s=3.0) is None
    assert looks.at(holding(1007, (2, 200)), after_s=2.0) == 800


def test_what_was_on_its_way_stays_so_until_it_would_have_been_over_where_it_cannot_be_told_any_more() -> None:
    looks = settled(TWO)

    assert looks.at(holding(1007, (2, 200))) == 800
    assert [looks.at(holding(1007, (2, None)), after_s=3.0) for _ in range(4)] == [800] * 3 + [0]


def test_gpus_are_told_apart() -> None:
    other = build.gpu(1, build.process(9, memory_bytes=500))
    looks = Looks()
    for _ in range(11):
        looks.at(TWO, other)

    told = looks.history.observe(build.gpus(TWO, build.gpu(1, memory_used_bytes=500)), now_s=looks.now_s + 1)

    assert told == {"GPU-0": 0, "GPU-1": 500}


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
    looks, left, before = Looks(), [(0.0, 0)], dict[int, int | None]()
    for held, beyond, after_s in played:
        used = beyond + sum(size or 0 for size in held.values())
        told = looks.at(holding(used, *held.items()), after_s=after_s)
        left += [(looks.now_s, size or 0) for pid, size in before.items() if pid not in held]
        before = held
        assert told is None or 0 <= told <= min(
            beyond, sum(size for at_s, size in left if looks.now_s - at_s < BOUND_S)
        )
