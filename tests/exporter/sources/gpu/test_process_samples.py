"""Process lists and samples of the driver: every rule, without a driver."""

import pytest

from exporter.model.gpu import GpuProcess
from exporter.sources.gpu.nvml import process_samples
from exporter.sources.gpu.nvml.process_samples import Cursor, GpuSample, Listed, Sample

pytestmark = pytest.mark.pure

READ = Cursor(seen_us=1000)
"""A cursor after its first read."""


def listed(pid: int = 7, memory_bytes: int | None = 4096, *, mps: bool = False) -> Listed:
    return Listed(pid=pid, memory_bytes=memory_bytes, mps=mps)


def sample(sm: int = 50, *, pid: int = 7, at_us: int = 1001, memory: int = 0, enc: int = 0, dec: int = 0) -> Sample:
    return Sample(
        pid=pid, timestamp_us=at_us, sm_percent=sm, memory_percent=memory, encoder_percent=enc, decoder_percent=dec
    )


def ratio(*found: Sample, entry: Listed | None = None, cursor: Cursor = READ) -> float | None:
    """The greatest engine use, which decides whether the process is idle."""
    (process,) = process_samples.measure({7: entry or listed()}, found, cursor)
    return process.utilization_ratio if process.busiest_ratio is None else process.busiest_ratio


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], 0.0, id="no sample"),
        pytest.param([sample(93)], 0.93, id="one sample"),
        pytest.param([sample(0)], 0.0, id="a sample of 0"),
        pytest.param([sample(100)], 1.0, id="the whole GPU"),
        pytest.param([sample(2), sample(90, at_us=1002), sample(1, at_us=1003)], 0.9, id="greatest of several"),
        pytest.param([sample(101)], None, id="over 100 %: unknown"),
        pytest.param([sample(2**32 - 1)], None, id="invalid: unknown"),
        pytest.param([sample(400), sample(30)], 0.3, id="an invalid sample is dropped"),
        pytest.param([sample(80, pid=8)], 0.0, id="another process"),
        pytest.param([sample(80, at_us=1000)], 0.0, id="an old sample"),
        pytest.param([sample(0, memory=40)], 0.4, id="only copying"),
        pytest.param([sample(0, enc=70)], 0.7, id="only encoding"),
        pytest.param([sample(10, dec=60)], 0.6, id="decoding most"),
        pytest.param([sample(10, enc=2**32 - 1)], 0.1, id="GPU without an encoder"),
    ],
)
def test_use_of_a_process_since_the_last_read(found: list[Sample], expected: float | None) -> None:
    assert ratio(*found) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], (0.0, None), id="no sample"),
        pytest.param([sample(30, memory=60, dec=90)], (0.3, 0.9), id="another engine does more"),
        pytest.param([sample(30, memory=30, enc=10)], (0.3, None), id="no other engine does more"),
        pytest.param([sample(0, dec=90)], (0.0, 0.9), id="only decoding"),
        pytest.param([sample(70, dec=10), sample(10, dec=90, at_us=1002)], (0.7, 0.9), id="greatest of each"),
        pytest.param([sample(30, dec=2**32 - 1)], (0.3, None), id="GPU without a decoder"),
        pytest.param([sample(400, dec=50)], (None, None), id="invalid: unknown"),
    ],
)
def test_utilisation_is_the_sm_share(found: list[Sample], expected: tuple[float | None, float | None]) -> None:
    (process,) = process_samples.measure({7: listed()}, found, READ)

    assert (process.utilization_ratio, process.busiest_ratio) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], 0.0, id="no sample in the whole buffer"),
        pytest.param([sample(90)], None, id="work at an unknown time"),
        pytest.param([sample(1)], None, id="little on average, perhaps a burst"),
        pytest.param([sample(90, pid=8)], 0.0, id="another process"),
    ],
)
def test_first_read_covers_an_unknown_time(found: list[Sample], expected: float | None) -> None:
    assert ratio(*found, cursor=Cursor()) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([], None, id="no sample: its work may count for the MPS server"),
        pytest.param([sample(40)], 0.4, id="own sample"),
    ],
)
def test_mps_client_without_a_sample_is_not_idle(found: list[Sample], expected: float | None) -> None:
    assert ratio(*found, entry=listed(mps=True)) == expected


def test_missing_samples_make_every_process_unknown_and_keep_memory() -> None:
    found = process_samples.measure({7: listed(), 8: listed(8, None)}, None, READ)

    assert found == (
        GpuProcess(pid=7, utilization_ratio=None, memory_bytes=4096),
        GpuProcess(pid=8, utilization_ratio=None, memory_bytes=None),
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], {}, id="empty"),
        pytest.param([listed(7), listed(8)], {7: listed(7), 8: listed(8)}, id="two processes"),
        pytest.param([listed(7, 100), listed(7, 100)], {7: listed(7, 100)}, id="on two lists: memory once"),
        pytest.param([listed(7, 100), listed(7, 300)], {7: listed(7, 300)}, id="on two lists: greater memory"),
        pytest.param([listed(7, None), listed(7, 300)], {7: listed(7, 300)}, id="memory only on the second list"),
        pytest.param([listed(7, 300), listed(7, None)], {7: listed(7, 300)}, id="memory only on the first list"),
        pytest.param([listed(7, None), listed(7, None)], {7: listed(7, None)}, id="memory unknown on both lists"),
        pytest.param([listed(7), listed(7, mps=True)], {7: listed(7, mps=True)}, id="MPS client"),
        pytest.param([listed(7, mps=True), listed(7)], {7: listed(7, mps=True)}, id="MPS client, other order"),
        pytest.param([listed(7), listed(0)], None, id="pid 0: unknown layout"),
        pytest.param([listed(2**22 + 1), listed(7)], None, id="pid too large"),
        pytest.param([listed(2**22)], {2**22: listed(2**22)}, id="largest pid"),
    ],
)
def test_lists_are_merged(entries: list[Listed], expected: dict[int, Listed] | None) -> None:
    assert process_samples.merge(entries) == expected


@pytest.mark.parametrize(
    ("before", "found", "after"),
    [
        pytest.param(Cursor(), [], Cursor(seen_us=0), id="empty first read: all later samples are new"),
        pytest.param(Cursor(), [sample(at_us=5)], Cursor(seen_us=5), id="first read"),
        pytest.param(READ, [], READ, id="nothing new"),
        pytest.param(READ, [sample(at_us=1005), sample(at_us=1003)], Cursor(seen_us=1005), id="newest of several"),
        pytest.param(
            READ, [sample(at_us=1005), sample(101, at_us=9999)], Cursor(seen_us=1005), id="invalid: unchanged"
        ),
        pytest.param(READ, [sample(at_us=9999, pid=8)], READ, id="unlisted process: unchanged"),
        pytest.param(READ, [sample(at_us=900)], READ, id="never back"),
        pytest.param(Cursor(), [sample(101)], Cursor(), id="only invalid: still the first read"),
        pytest.param(Cursor(seen_us=1000, silent_looks=9), [sample()], Cursor(seen_us=1001), id="silence ends"),
    ],
)
def test_cursor_advances_to_the_newest_timestamp(before: Cursor, found: list[Sample], after: Cursor) -> None:
    assert process_samples.advance(before, {7: listed()}, found, gpu_ratio=0.9 if found else 0.0) == after


@pytest.mark.parametrize(
    ("gpu_ratio", "looks", "expected"),
    [
        pytest.param(0.9, 9, Cursor(seen_us=1000, silent_looks=9), id="not yet"),
        pytest.param(0.9, 10, Cursor(), id="clock of the driver set back: restart"),
        pytest.param(0.5, 10, Cursor(), id="half busy"),
        pytest.param(0.49, 100, READ, id="less busy: graphics or copies"),
        pytest.param(0.0, 100, READ, id="idle for a long time"),
        pytest.param(None, 100, READ, id="unknown"),
    ],
)
def test_busy_gpu_without_samples_restarts_the_cursor(gpu_ratio: float | None, looks: int, expected: Cursor) -> None:
    cursor = READ

    for _ in range(looks):
        cursor = process_samples.advance(cursor, {7: listed()}, [], gpu_ratio=gpu_ratio)

    assert cursor == expected


SEEN_US = 1_000_000


@pytest.mark.parametrize(
    ("cursor", "gpu_samples", "ratio", "newest_us"),
    [
        pytest.param(Cursor(seen_us=SEEN_US), [], None, None, id="no samples"),
        pytest.param(
            Cursor(seen_us=SEEN_US),
            [(SEEN_US + 200_000, 0), (SEEN_US + 400_000, 50), (SEEN_US + 600_000, 100)],
            0.5,
            SEEN_US + 600_000,
            id="mean of all",
        ),
        pytest.param(
            Cursor(seen_us=SEEN_US), [(SEEN_US, 100), (SEEN_US + 1, 20)], 0.2, SEEN_US + 1, id="only new ones"
        ),
        pytest.param(Cursor(seen_us=SEEN_US), [(SEEN_US, 100)], None, None, id="nothing new"),
        pytest.param(
            Cursor(seen_us=SEEN_US),
            [(SEEN_US + 1, 20), (SEEN_US + 2, 101)],
            0.2,
            SEEN_US + 1,
            id="over 100 %: dropped",
        ),
        pytest.param(Cursor(), [(SEEN_US, 20)], None, SEEN_US, id="first read covers an unknown time"),
        pytest.param(Cursor(seen_us=0), [(SEEN_US, 20)], 0.2, SEEN_US, id="after an empty first read"),
    ],
)
def test_gpu_utilisation_is_the_mean_of_the_new_samples(
    cursor: Cursor, gpu_samples: list[tuple[int, int]], ratio: float | None, newest_us: int | None
) -> None:
    whole = [GpuSample(at_us, percent) for at_us, percent in gpu_samples]

    assert process_samples.mean_ratio(whole, cursor) == ratio
    assert process_samples.newest_us(whole, cursor) == newest_us


@pytest.mark.parametrize(
    ("distance_us", "newer", "seen_us"),
    [
        pytest.param(0, False, SEEN_US, id="same sample"),
        pytest.param(50_000, False, SEEN_US + 50_000, id="slightly later: same sample"),
        pytest.param(50_001, True, SEEN_US, id="next sample, for the next read"),
        pytest.param(-200_000, False, SEEN_US, id="older: idle since"),
    ],
)
def test_gpu_and_process_samples_stay_aligned(distance_us: int, newer: bool, seen_us: int) -> None:
    found = [sample(at_us=SEEN_US + distance_us)]

    after = process_samples.advance(READ, {7: listed()}, found, gpu_ratio=0.9, gpu_us=SEEN_US)

    assert process_samples.are_newer(found, SEEN_US) is newer
    assert after == Cursor(seen_us=seen_us)


def test_gpu_without_samples_is_never_late() -> None:
    assert not process_samples.are_newer([sample()], None)


def test_cursor_of_an_idle_gpu_advances_by_its_gpu_samples() -> None:
    silent = Cursor(seen_us=1000, silent_looks=9)

    assert process_samples.advance(silent, {7: listed()}, [], gpu_ratio=0.9, gpu_us=2000) == Cursor(seen_us=2000)
