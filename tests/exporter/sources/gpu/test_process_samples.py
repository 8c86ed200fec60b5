"""What the driver's lists and samples say about each process: every rule, without a driver."""

import pytest

from exporter.model.gpu import GpuProcess
from exporter.sources.gpu.nvml import process_samples
from exporter.sources.gpu.nvml.process_samples import Cursor, GpuSample, Listed, Sample

pytestmark = pytest.mark.pure

READ = Cursor(seen_us=1000)
"""A cursor that has had its first answer."""


def listed(pid: int = 7, memory_bytes: int | None = 4096, *, mps: bool = False) -> Listed:
    return Listed(pid=pid, memory_bytes=memory_bytes, mps=mps)


def sample(sm: int = 50, *, pid: int = 7, at_us: int = 1001, memory: int = 0, enc: int = 0, dec: int = 0) -> Sample:
    return Sample(
        pid=pid, timestamp_us=at_us, sm_percent=sm, memory_percent=memory, encoder_percent=enc, decoder_percent=dec
    )


def ratio(*found: Sample, entry: Listed | None = None, cursor: Cursor = READ) -> float | None:
    """By what it is idle or not: the most that any engine did for it."""
    (process,) = process_samples.measure({7: entry or listed()}, found, cursor)
    return process.utilization_ratio if process.busiest_ratio is None else process.busiest_ratio


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], 0.0, id="no sample: it did nothing"),
        pytest.param([sample(93)], 0.93, id="one sample"),
        pytest.param([sample(0)], 0.0, id="a sample of nothing"),
        pytest.param([sample(100)], 1.0, id="all of the GPU"),
        pytest.param([sample(2), sample(90, at_us=1002), sample(1, at_us=1003)], 0.9, id="the greatest of several"),
        pytest.param([sample(101)], None, id="more than all of it: unknown"),
        pytest.param([sample(2**32 - 1)], None, id="made up: unknown"),
        pytest.param([sample(400), sample(30)], 0.3, id="a made-up sample beside a real one is dropped"),
        pytest.param([sample(80, pid=8)], 0.0, id="a sample of another process"),
        pytest.param([sample(80, at_us=1000)], 0.0, id="a sample that was read before"),
        pytest.param([sample(0, memory=40)], 0.4, id="only copying"),
        pytest.param([sample(0, enc=70)], 0.7, id="only encoding"),
        pytest.param([sample(10, dec=60)], 0.6, id="decoding most"),
        pytest.param([sample(10, enc=2**32 - 1)], 0.1, id="a GPU without an encoder"),
    ],
)
def test_what_a_process_did_since_the_last_look(found: list[Sample], expected: float | None) -> None:
    assert ratio(*found) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], (0.0, None), id="nothing"),
        pytest.param([sample(30, memory=60, dec=90)], (0.3, 0.9), id="another engine does more"),
        pytest.param([sample(30, memory=30, enc=10)], (0.3, None), id="none does"),
        pytest.param([sample(0, dec=90)], (0.0, 0.9), id="only decoding"),
        pytest.param([sample(70, dec=10), sample(10, dec=90, at_us=1002)], (0.7, 0.9), id="the greatest of each"),
        pytest.param([sample(30, dec=2**32 - 1)], (0.3, None), id="a GPU without a decoder"),
        pytest.param([sample(400, dec=50)], (None, None), id="made up: unknown"),
    ],
)
def test_its_share_is_of_the_gpus_own_time(found: list[Sample], expected: tuple[float | None, float | None]) -> None:
    (process,) = process_samples.measure({7: listed()}, found, READ)

    assert (process.utilization_ratio, process.busiest_ratio) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], 0.0, id="nothing in all of the driver's buffer: it does nothing"),
        pytest.param([sample(90)], None, id="something, who knows when"),
        pytest.param([sample(1)], None, id="a little on average, perhaps a burst"),
        pytest.param([sample(90, pid=8)], 0.0, id="another process"),
    ],
)
def test_the_first_answer_is_of_all_that_the_driver_remembers(found: list[Sample], expected: float | None) -> None:
    assert ratio(*found, cursor=Cursor()) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], None, id="no sample: its work may be booked to the MPS server"),
        pytest.param([sample(40)], 0.4, id="a sample of its own"),
    ],
)
def test_a_client_of_mps_is_never_idle_for_want_of_a_sample(found: list[Sample], expected: float | None) -> None:
    assert ratio(*found, entry=listed(mps=True)) == expected


def test_samples_that_the_driver_did_not_tell_are_unknown_for_every_process_and_memory_stands() -> None:
    found = process_samples.measure({7: listed(), 8: listed(8, None)}, None, READ)

    assert found == (
        GpuProcess(pid=7, utilization_ratio=None, memory_bytes=4096),
        GpuProcess(pid=8, utilization_ratio=None, memory_bytes=None),
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], {}, id="nobody"),
        pytest.param([listed(7), listed(8)], {7: listed(7), 8: listed(8)}, id="two processes"),
        pytest.param([listed(7, 100), listed(7, 100)], {7: listed(7, 100)}, id="one on two lists: its memory once"),
        pytest.param([listed(7, 100), listed(7, 300)], {7: listed(7, 300)}, id="the greater where they differ"),
        pytest.param([listed(7, None), listed(7, 300)], {7: listed(7, 300)}, id="one list knows its memory"),
        pytest.param([listed(7, 300), listed(7, None)], {7: listed(7, 300)}, id="the other one does"),
        pytest.param([listed(7, None), listed(7, None)], {7: listed(7, None)}, id="neither: unknown"),
        pytest.param([listed(7), listed(7, mps=True)], {7: listed(7, mps=True)}, id="a client of MPS is one"),
        pytest.param([listed(7, mps=True), listed(7)], {7: listed(7, mps=True)}, id="whichever list comes first"),
        pytest.param([listed(7), listed(0)], None, id="pid 0: a list of another shape"),
        pytest.param([listed(2**22 + 1), listed(7)], None, id="a pid past the last"),
        pytest.param([listed(2**22)], {2**22: listed(2**22)}, id="the last pid"),
    ],
)
def test_the_lists_become_one(entries: list[Listed], expected: dict[int, Listed] | None) -> None:
    assert process_samples.merge(entries) == expected


@pytest.mark.parametrize(
    ("before", "found", "after"),
    [
        pytest.param(Cursor(), [], Cursor(seen_us=0), id="nothing at first: all that comes is new"),
        pytest.param(Cursor(), [sample(at_us=5)], Cursor(seen_us=5), id="the first answer is where it begins"),
        pytest.param(READ, [], READ, id="nothing new"),
        pytest.param(READ, [sample(at_us=1005), sample(at_us=1003)], Cursor(seen_us=1005), id="the newest of several"),
        pytest.param(
            READ, [sample(at_us=1005), sample(101, at_us=9999)], Cursor(seen_us=1005), id="made up: not moved"
        ),
        pytest.param(READ, [sample(at_us=9999, pid=8)], READ, id="of no listed process: not moved"),
        pytest.param(READ, [sample(at_us=900)], READ, id="never back"),
        pytest.param(Cursor(), [sample(101)], Cursor(), id="only made up: still the first answer"),
        pytest.param(Cursor(seen_us=1000, silent_looks=9), [sample()], Cursor(seen_us=1001), id="no longer silent"),
    ],
)
def test_the_newest_timestamp_is_carried_forward(before: Cursor, found: list[Sample], after: Cursor) -> None:
    assert process_samples.advance(before, {7: listed()}, found, gpu_ratio=0.9 if found else 0.0) == after


@pytest.mark.parametrize(
    ("gpu_ratio", "looks", "expected"),
    [
        pytest.param(0.9, 9, Cursor(seen_us=1000, silent_looks=9), id="not yet"),
        pytest.param(0.9, 10, Cursor(), id="the driver's clock was set back: begin anew"),
        pytest.param(0.5, 10, Cursor(), id="half busy"),
        pytest.param(0.49, 100, READ, id="less busy: somebody draws, or copies"),
        pytest.param(0.0, 100, READ, id="idle for long"),
        pytest.param(None, 100, READ, id="unknown"),
    ],
)
def test_a_busy_gpu_without_samples_is_read_anew_in_full(gpu_ratio: float | None, looks: int, expected: Cursor) -> None:
    cursor = READ

    for _ in range(looks):
        cursor = process_samples.advance(cursor, {7: listed()}, [], gpu_ratio=gpu_ratio)

    assert cursor == expected


SEEN_US = 1_000_000


@pytest.mark.parametrize(
    ("cursor", "told", "ratio", "newest_us"),
    [
        pytest.param(Cursor(seen_us=SEEN_US), [], None, None, id="no samples"),
        pytest.param(
            Cursor(seen_us=SEEN_US),
            [(SEEN_US + 200_000, 0), (SEEN_US + 400_000, 50), (SEEN_US + 600_000, 100)],
            0.5,
            SEEN_US + 600_000,
            id="the mean of all",
        ),
        pytest.param(
            Cursor(seen_us=SEEN_US), [(SEEN_US, 100), (SEEN_US + 1, 20)], 0.2, SEEN_US + 1, id="of the new ones alone"
        ),
        pytest.param(Cursor(seen_us=SEEN_US), [(SEEN_US, 100)], None, None, id="nothing new"),
        pytest.param(
            Cursor(seen_us=SEEN_US),
            [(SEEN_US + 1, 20), (SEEN_US + 2, 101)],
            0.2,
            SEEN_US + 1,
            id="over 100 %: passed by",
        ),
        pytest.param(Cursor(), [(SEEN_US, 20)], None, SEEN_US, id="the first answer speaks of an unknown time"),
        pytest.param(Cursor(seen_us=0), [(SEEN_US, 20)], 0.2, SEEN_US, id="nothing at first"),
    ],
)
def test_the_gpu_is_as_busy_as_the_mean_of_its_samples_since_the_look_before(
    cursor: Cursor, told: list[tuple[int, int]], ratio: float | None, newest_us: int | None
) -> None:
    whole = [GpuSample(at_us, percent) for at_us, percent in told]

    assert process_samples.mean_ratio(whole, cursor) == ratio
    assert process_samples.newest_us(whole, cursor) == newest_us


@pytest.mark.parametrize(
    ("apart_us", "newer", "seen_us"),
    [
        pytest.param(0, False, SEEN_US, id="of one sample"),
        pytest.param(50_000, False, SEEN_US + 50_000, id="a moment later: of one sample"),
        pytest.param(50_001, True, SEEN_US, id="of the next one, which is read at the next look"),
        pytest.param(-200_000, False, SEEN_US, id="older: it has rested since"),
    ],
)
def test_gpu_and_processes_are_read_on_from_one_sample(apart_us: int, newer: bool, seen_us: int) -> None:
    found = [sample(at_us=SEEN_US + apart_us)]

    after = process_samples.advance(READ, {7: listed()}, found, gpu_ratio=0.9, gpu_us=SEEN_US)

    assert process_samples.are_newer(found, SEEN_US) is newer
    assert after == Cursor(seen_us=seen_us)


def test_a_gpu_without_samples_of_its_own_is_behind_nobody() -> None:
    assert not process_samples.are_newer([sample()], None)


def test_an_idle_gpu_is_read_on_by_its_own_samples() -> None:
    silent = Cursor(seen_us=1000, silent_looks=9)

    assert process_samples.advance(silent, {7: listed()}, [], gpu_ratio=0.9, gpu_us=2000) == Cursor(seen_us=2000)
