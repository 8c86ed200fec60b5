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
    ("samples", "dead_s"),
    [
        pytest.param([(0, "c@1")], 0.0, id="the first sample starts it"),
        pytest.param([(0, "c@1"), (1, "c@1"), (5, "c@1")], 6.0, id="it counts while its container is the same"),
        pytest.param([(0, "c@1"), (1, "c@2")], 0.0, id="a restarted container may bring it back"),
        pytest.param([(0, None), (1, None)], 1.0, id="container unknown"),
        pytest.param([(0, None), (1, "c@1")], 0.0, id="container known again restarts it"),
        pytest.param([(0, "c@1"), (1, "c@1"), (5.01, "c@1"), (1, "c@1")], 1.0, id="a gap restarts it"),
        pytest.param([(0, "c@1"), (-1, "c@1")], 0.0, id="clock runs backwards"),
    ],
)
def test_worker_is_dead_while_its_lock_is_free(samples: list[tuple[float, str | None]], dead_s: float) -> None:
    history, now_s, found_s = DeathTracker(THRESHOLDS), 1000.0, 0.0
    for gap_s, place in samples:
        now_s += gap_s
        found_s = history.observe(place, build.ago(2), now_s=now_s)

    assert found_s == pytest.approx(dead_s)


@pytest.mark.parametrize("boot_id", [build.BOOT, "sandbox kernel"])
def test_worker_with_a_free_lock_and_a_new_heartbeat_is_not_dead(boot_id: str) -> None:
    history = DeathTracker(THRESHOLDS)
    beats = [build.ago(age_s, boot_id=boot_id) for age_s in (9, 9, 4, 4, 4)]

    dead_s = [history.observe("c@1", beat, now_s=1000.0 + number) for number, beat in enumerate(beats)]

    assert dead_s == [0.0, 1.0, 0.0, 1.0, 2.0]


# Whether unknown workers may live in a container


HOLDS = build.container(folders=("f0",))
OTHER = build.container(id="cd" * 32, folders=("f1",))
BARE = build.container(kind="process", id="process:9:1", pid=9)


def unplaced(folder: str = "f0", **changes: object) -> WorkerReading:
    """A worker in an unknown container."""
    return build.sighting(**{"folder": folder, "pid": None, "container_id": None, **changes})


@pytest.mark.parametrize(
    ("sighting", "place", "may"),
    [
        pytest.param(unplaced(), HOLDS, True, id="pid unknown, its folder is mounted"),
        pytest.param(unplaced(alive=None), HOLDS, True, id="lock untested, its folder is mounted"),
        pytest.param(
            unplaced(alive=None, container_id=HOLDS.id), HOLDS, True, id="lock untested, in its earlier container"
        ),
        pytest.param(unplaced("f1"), HOLDS, False, id="its folder is mounted by another container"),
        pytest.param(unplaced("f9"), HOLDS, False, id="its folder is mounted nowhere, this container mounts one"),
        pytest.param(unplaced("f1"), BARE, False, id="its folder is mounted by a container, this is none"),
        pytest.param(unplaced("f9"), BARE, True, id="its folder is mounted nowhere, this mounts none"),
        pytest.param(unplaced(pid=8), HOLDS, True, id="its process is in no known tree"),
        pytest.param(unplaced("f9", pid=9), BARE, False, id="its process is in a known tree"),
        pytest.param(unplaced(container_id=OTHER.id), HOLDS, False, id="in another container"),
        pytest.param(unplaced(container_id="ef" * 32), HOLDS, False, id="in an unlisted container"),
        pytest.param(unplaced(alive=False), HOLDS, False, id="dead"),
    ],
)
def test_unplaced_worker_may_live_where_its_folder_is(sighting: WorkerReading, place: Container, may: bool) -> None:
    workers = WorkerReadings(workers=(sighting,))

    assert worker_liveness.may_have_unknown_workers(place, workers, [HOLDS, OTHER, BARE]) is may


def test_unread_worker_may_live_only_where_its_folder_is() -> None:
    workers = WorkerReadings(workers=(), unread=frozenset({"f0", "f9"}))

    assert [
        worker_liveness.may_have_unknown_workers(each, workers, [HOLDS, OTHER, BARE]) for each in (HOLDS, OTHER, BARE)
    ] == [
        True,
        False,
        False,
    ]


def test_service_may_hold_any_unread_worker() -> None:
    service = build.container(kind="systemd", folders=())

    found = [
        worker_liveness.may_have_unknown_workers(
            service, WorkerReadings(workers=(), unread=frozenset(unread)), [HOLDS, service]
        )
        for unread in ({"f9"}, {HOLDS.folders[0]}, set[str]())
    ]

    assert found == [True, False, False]


# CPU time, and the worker that uses none: A14, with 30 s of silence


def cpu_idle(*samples: tuple[float, int]) -> float:
    """CPU idle time after these samples: seconds since the previous one, and total CPU time."""
    history, now_s, idle_s = CpuIdleTracker(THRESHOLDS), 1000.0, 0.0
    for gap_s, used_ticks in samples:
        now_s += gap_s
        idle_s = history.observe(CpuUse(start_ticks=5, used_ticks=used_ticks), now_s=now_s)
    return idle_s


@pytest.mark.parametrize(
    ("samples", "idle_s"),
    [
        pytest.param([(0, 0)], 0.0, id="the first sample starts it"),
        pytest.param([(0, 7), (1, 7), (2, 7)], 3.0, id="no CPU time used"),
        pytest.param([(0, 7), (1, 7), (1, 8)], 0.0, id="one tick restarts it"),
        pytest.param([(0, 7), (1, 8), (1, 8)], 1.0, id="the sample that shows the last tick starts it"),
        pytest.param([(0, 7), (5, 7)], 5.0, id="longest allowed gap"),
        pytest.param([(0, 7), (1, 7), (5.01, 7), (1, 7)], 1.0, id="a longer gap restarts it"),
        pytest.param([(0, 7), (1, 7), (600, 7)], 0.0, id="machine suspended"),
        pytest.param([(0, 7), (-1, 7)], 0.0, id="clock runs backwards"),
    ],
)
def test_process_without_cpu_time_is_idle(samples: list[tuple[float, int]], idle_s: float) -> None:
    assert cpu_idle(*samples) == idle_s


@pytest.mark.parametrize(
    ("uninterruptible", "idle_s"),
    [
        pytest.param(True, 0.0, id="waits in the kernel"),
        pytest.param(False, 2.0, id="sleeps or is stopped"),
    ],
)
def test_wait_in_the_kernel_is_not_idle(uninterruptible: bool, idle_s: float) -> None:
    history, use = CpuIdleTracker(THRESHOLDS), CpuUse(start_ticks=5, used_ticks=7, uninterruptible=uninterruptible)
    for now_s in (1000.0, 1001.0, 1002.0):
        found = history.observe(use, now_s=now_s)

    assert found == idle_s
    assert history.observe(replace(use, uninterruptible=False), now_s=1003.0) == idle_s + 1.0


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.0, 5.0, 5.25, 600.0]), st.integers(0, 1)), min_size=1))
def test_cpu_idle_time_starts_at_the_last_use_or_gap(steps: list[tuple[float, int]]) -> None:
    used = [sum(each for _, each in steps[: i + 1]) for i in range(len(steps))]
    broken = [i for i in range(1, len(steps)) if steps[i][0] > THRESHOLDS.gap_max_s or steps[i][1]]
    first = max(broken, default=0)

    assert cpu_idle(*((gap_s, each) for (gap_s, _), each in zip(steps, used, strict=True))) == sum(
        gap_s for gap_s, _ in steps[first + 1 :]
    )


def silent(heartbeat_age_s: float, **changes: object) -> WorkerReading:
    return build.sighting(worker=build.worker_file(heartbeat=build.ago(heartbeat_age_s)), **changes)


@pytest.mark.parametrize(
    ("sighting", "idle_s", "dead"),
    [
        pytest.param(silent(30.0), 30.0, True, id="no heartbeat and no CPU time for the timeout"),
        pytest.param(silent(29.9), 900.0, False, id="heartbeat too recent"),
        pytest.param(silent(900.0), 29.9, False, id="CPU time too recent"),
        pytest.param(silent(900.0), 0.0, False, id="computes: a native call blocks the heartbeat"),
        pytest.param(silent(0.0), 900.0, False, id="waits, with heartbeats"),
        pytest.param(silent(900.0), None, False, id="CPU time unknown"),
        pytest.param(silent(900.0, job=None), 900.0, False, id="no job"),
        pytest.param(silent(900.0, alive=False), 900.0, False, id="process gone"),
        pytest.param(silent(900.0, alive=None), 900.0, False, id="lock untested"),
        pytest.param(
            build.sighting(worker=build.worker_file(heartbeat=build.ago(900.0, boot_id="before"))),
            900.0,
            False,
            id="heartbeat before the reboot",
        ),
    ],
)
def test_worker_without_heartbeat_and_cpu_time_is_dead(
    sighting: WorkerReading, idle_s: float | None, dead: bool
) -> None:
    assert worker_liveness.is_dead(sighting, idle_s, now=build.ago(0), dead_after_s=30.0) is dead
