"""Whether a worker is dead, and which workers share a container."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.evidence import worker_liveness
from exporter.evidence.worker_liveness import CpuIdleTracker, DeathTracker
from exporter.model.container import Container
from exporter.model.worker import CpuUse, WorkerReading, WorkerReadings
from tests.exporter import builders as build
from tests.exporter.evidence.values import THRESHOLDS

pytestmark = pytest.mark.pure

# A worker that is gone: A14


@pytest.mark.parametrize(
    ("looks", "dead_s"),
    [
        pytest.param([(0, "c@1")], 0.0, id="the first look starts it: when it died nobody saw"),
        pytest.param([(0, "c@1"), (1, "c@1"), (5, "c@1")], 6.0, id="it counts while its container is the same"),
        pytest.param([(0, "c@1"), (1, "c@2")], 0.0, id="a container that was started anew may bring it back"),
        pytest.param([(0, None), (1, None)], 1.0, id="it counts where the container is unknown"),
        pytest.param([(0, None), (1, "c@1")], 0.0, id="and anew once it is known"),
        pytest.param([(0, "c@1"), (1, "c@1"), (5.01, "c@1"), (1, "c@1")], 1.0, id="a gap starts it anew"),
        pytest.param([(0, "c@1"), (-1, "c@1")], 0.0, id="a clock that runs backwards proves nothing"),
    ],
)
def test_a_worker_is_dead_while_its_lock_is_free(looks: list[tuple[float, str | None]], dead_s: float) -> None:
    history, now_s, found_s = DeathTracker(THRESHOLDS), 1000.0, 0.0
    for gap_s, place in looks:
        now_s += gap_s
        found_s = history.observe(place, build.ago(2), now_s=now_s)

    assert found_s == pytest.approx(dead_s)


@pytest.mark.parametrize("boot_id", [build.BOOT, "of a sandbox's own kernel"])
def test_a_worker_whose_lock_is_free_and_whose_heartbeat_moves_is_not_dead(boot_id: str) -> None:
    history = DeathTracker(THRESHOLDS)
    beats = [build.ago(age_s, boot_id=boot_id) for age_s in (9, 9, 4, 4, 4)]

    dead_s = [history.observe("c@1", beat, now_s=1000.0 + number) for number, beat in enumerate(beats)]

    assert dead_s == [0.0, 1.0, 0.0, 1.0, 2.0]


# Whether workers may live in a container beside those that are known to


HOLDS = build.container(folders=("f0",))
OTHER = build.container(id="cd" * 32, folders=("f1",))
BARE = build.container(kind="process", id="process:9:1", pid=9)


def unplaced(folder: str = "f0", **changes: object) -> WorkerReading:
    """A worker that lives somewhere: nobody can tell in what."""
    return build.sighting(**{"folder": folder, "pid": None, "container_id": None, **changes})


@pytest.mark.parametrize(
    ("sighting", "place", "may"),
    [
        pytest.param(unplaced(), HOLDS, True, id="its holder's pid is unknown, and its folder is there"),
        pytest.param(unplaced(alive=None), HOLDS, True, id="its lock cannot be tested, and its folder is there"),
        pytest.param(unplaced(alive=None, container_id=HOLDS.id), HOLDS, True, id="the same where it once was"),
        pytest.param(unplaced("f1"), HOLDS, False, id="its folder is another container's"),
        pytest.param(unplaced("f9"), HOLDS, False, id="nothing has its folder, but this one has one of its own"),
        pytest.param(unplaced("f1"), BARE, False, id="its folder is a container's, and this one is none"),
        pytest.param(unplaced("f9"), BARE, True, id="nothing has its folder, and this one none of its own"),
        pytest.param(unplaced(pid=8), HOLDS, True, id="its process is in no tree that is known"),
        pytest.param(unplaced("f9", pid=9), BARE, False, id="its process is in a tree that is known"),
        pytest.param(unplaced(container_id=OTHER.id), HOLDS, False, id="it lives in another container"),
        pytest.param(unplaced(container_id="ef" * 32), HOLDS, False, id="it lives in one that nobody lists"),
        pytest.param(unplaced(alive=False), HOLDS, False, id="it is dead"),
    ],
)
def test_an_unplaced_worker_may_live_where_its_folder_is(sighting: WorkerReading, place: Container, may: bool) -> None:
    workers = WorkerReadings(workers=(sighting,))

    assert worker_liveness.may_have_unknown_workers(place, workers, [HOLDS, OTHER, BARE]) is may


def test_who_is_left_out_may_live_where_its_folder_is_and_nowhere_else() -> None:
    workers = WorkerReadings(workers=(), unread=frozenset({"f0", "f9"}))

    assert [
        worker_liveness.may_have_unknown_workers(each, workers, [HOLDS, OTHER, BARE]) for each in (HOLDS, OTHER, BARE)
    ] == [
        True,
        False,
        False,
    ]


def test_a_service_has_no_folder_and_may_hold_whoever_cannot_be_read() -> None:
    service = build.container(kind="systemd", folders=())

    found = [
        worker_liveness.may_have_unknown_workers(
            service, WorkerReadings(workers=(), unread=frozenset(unread)), [HOLDS, service]
        )
        for unread in ({"f9"}, {HOLDS.folders[0]}, set[str]())
    ]

    assert found == [True, False, False]


# CPU time, and the worker that uses none: A14, with 30 s of silence


def cpu_still(*samples: tuple[float, int]) -> float:
    """The duration after the last of these samples: seconds since the one before, and CPU time used in all."""
    history, now_s, still_s = CpuIdleTracker(THRESHOLDS), 1000.0, 0.0
    for gap_s, used_ticks in samples:
        now_s += gap_s
        still_s = history.observe(CpuUse(start_ticks=5, used_ticks=used_ticks), now_s=now_s)
    return still_s


@pytest.mark.parametrize(
    ("samples", "still_s"),
    [
        pytest.param([(0, 0)], 0.0, id="the first sample starts it: nothing is known of the time before"),
        pytest.param([(0, 7), (1, 7), (2, 7)], 3.0, id="it counts while no CPU time is used"),
        pytest.param([(0, 7), (1, 7), (1, 8)], 0.0, id="one tick starts it anew"),
        pytest.param([(0, 7), (1, 8), (1, 8)], 1.0, id="it starts at the sample that first showed the last tick"),
        pytest.param([(0, 7), (5, 7)], 5.0, id="a gap of the greatest length is no gap"),
        pytest.param([(0, 7), (1, 7), (5.01, 7), (1, 7)], 1.0, id="a longer gap starts it anew"),
        pytest.param([(0, 7), (1, 7), (600, 7)], 0.0, id="a suspended machine used no CPU time, and proves nothing"),
        pytest.param([(0, 7), (-1, 7)], 0.0, id="a clock that runs backwards proves nothing"),
    ],
)
def test_a_process_is_still_without_cpu_time(samples: list[tuple[float, int]], still_s: float) -> None:
    assert cpu_still(*samples) == still_s


@pytest.mark.parametrize(
    ("stores", "uninterruptible", "still_s"),
    [
        pytest.param(True, True, 0.0, id="who waits in the kernel as its job saves waits for storage"),
        pytest.param(True, False, 2.0, id="who sleeps, or is stopped, does not"),
        pytest.param(False, True, 2.0, id="nor does a job in its steps"),
    ],
)
def test_a_storage_wait_is_no_silence_in_load_and_save(stores: bool, uninterruptible: bool, still_s: float) -> None:
    history, use = CpuIdleTracker(THRESHOLDS), CpuUse(start_ticks=5, used_ticks=7, uninterruptible=uninterruptible)
    for now_s in (1000.0, 1001.0, 1002.0):
        found = history.observe(use, now_s=now_s, stores=stores)

    assert found == still_s
    assert history.observe(replace(use, uninterruptible=False), now_s=1003.0, stores=stores) == still_s + 1.0


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.0, 5.0, 5.25, 600.0]), st.integers(0, 1)), min_size=1))
def test_the_cpu_is_still_back_to_the_last_use_or_gap(steps: list[tuple[float, int]]) -> None:
    used = [sum(each for _, each in steps[: i + 1]) for i in range(len(steps))]
    broken = [i for i in range(1, len(steps)) if steps[i][0] > THRESHOLDS.gap_max_s or steps[i][1]]
    first = max(broken, default=0)

    assert cpu_still(*((gap_s, each) for (gap_s, _), each in zip(steps, used, strict=True))) == sum(
        gap_s for gap_s, _ in steps[first + 1 :]
    )


def silent(heartbeat_age_s: float, **changes: object) -> WorkerReading:
    return build.sighting(worker=build.worker_file(heartbeat=build.ago(heartbeat_age_s)), **changes)


@pytest.mark.parametrize(
    ("sighting", "still_s", "dead"),
    [
        pytest.param(silent(30.0), 30.0, True, id="no heartbeat and no CPU time for all that is allowed"),
        pytest.param(silent(29.9), 900.0, False, id="the heartbeat is not old enough"),
        pytest.param(silent(900.0), 29.9, False, id="CPU time was used, or unseen, not long enough ago"),
        pytest.param(silent(900.0), 0.0, False, id="it computes: a native call starves the heartbeat"),
        pytest.param(silent(0.0), 900.0, False, id="it waits, and beats"),
        pytest.param(silent(900.0), None, False, id="CPU time unknown is not still"),
        pytest.param(silent(900.0, job=None), 900.0, False, id="it owns no job"),
        pytest.param(silent(900.0, alive=False), 900.0, False, id="its process is gone"),
        pytest.param(silent(900.0, alive=None), 900.0, False, id="its lock cannot be tested"),
        pytest.param(
            build.sighting(worker=build.worker_file(heartbeat=build.ago(900.0, boot_id="before"))),
            900.0,
            False,
            id="its heartbeat is of before the reboot",
        ),
    ],
)
def test_death_needs_no_heartbeat_and_no_cpu_time(sighting: WorkerReading, still_s: float | None, dead: bool) -> None:
    assert worker_liveness.is_dead(sighting, still_s, now=build.ago(0), dead_after_s=30.0) is dead
