"""Lines between a process that asks a driver and the exporter."""

import json
from dataclasses import replace

import pytest

from exporter.model.readings import Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.sources.gpu.isolated import protocol
from exporter.sources.gpu.isolated.protocol import (
    LINE_BYTES_MAX,
    PROCESSES_MAX,
    UNLISTED_MAX,
    DriverError,
    Failed,
    Question,
    Told,
    Xid,
)

pytestmark = pytest.mark.pure

GIB = 2**30

WHOLE = GpuReadings(
    source="nvml",
    gpus=(
        Gpu(
            uuid="GPU-0",
            index=0,
            name="Test GPU \u2122",
            utilization_ratio=0.93,
            memory_used_bytes=41 * GIB,
            memory_size_bytes=140 * GIB,
            memory_free_bytes=99 * GIB,
            processes=(GpuProcess(pid=7, utilization_ratio=None, memory_bytes=40 * GIB),),
            figures=GpuFigures(temperature_celsius=61.0, throttled=["hw_slowdown"], unknown={"power_watts": "timeout"}),
        ),
        Gpu(
            uuid="GPU-1",
            index=1,
            name="",
            utilization_ratio=None,
            memory_used_bytes=None,
            memory_size_bytes=None,
            processes=None,
            unknown="GPU is lost",
            mig=MigInstance(parent="GPU-0", number=0, gpu_instance=3, compute_instance=0, shares_memory=True),
        ),
    ),
)


@pytest.mark.parametrize(
    "told",
    [
        WHOLE,
        GpuReadings(source="nvml", gpus=()),
        GpuReadings(source="drm", gpus=(), unlisted=(1, 4001)),
        GpuReadings(source="drm", gpus=(), unlisted=None),
        GpuReadings(source="drm", gpus=()),
        Failed(because="Driver Not Loaded"),
        Failed(because="of two\nversions", over=True),
        Failed(because="loaded anew", anew=True),
        Xid(gpu="GPU-0", code=79),
    ],
)
def test_what_is_told_arrives_as_it_was_in_one_line(told: Told) -> None:
    line = protocol.line(told)

    assert protocol.parse(line) == told
    assert line.index(b"\n") == len(line) - 1


def test_of_a_field_that_no_process_has_a_line_says_nothing_of_each() -> None:
    processes = [(7, None, 40 * GIB, None), (8, None, GIB, None)]
    gpu = replace(WHOLE.gpus[0], processes=tuple(map(GpuProcess._make, processes)))

    line = protocol.line(replace(WHOLE, gpus=(gpu,)))

    assert json.loads(line)["gpus"]["gpus"][0]["processes"] == [[7, 8], None, [40 * GIB, GIB], None]
    assert protocol.parse(line) == replace(WHOLE, gpus=(gpu,))


@pytest.mark.parametrize(
    "line", [b"", b"NVRM: hello", b"[]", b"{}", b'{"gpus":{}}', b'{"gpus":{"source":"nvml","gpus":[{}]}}', b'{"a":1}',
             b'{"failed":{"why":"so"}}', protocol.line(WHOLE)[:-9],
             *(protocol.line(WHOLE).replace(b"[[7],", each) for each in (b"[null,", b"[[7,8],", b"[[7],null,"))]
)  # fmt: skip
def test_what_is_no_such_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="no line of the process that asks the driver"):
        protocol.parse(line)


@pytest.mark.parametrize("over", [False, True])
def test_an_error_is_told_with_whether_another_process_may_do_better(over: bool) -> None:
    assert protocol.failed(DriverError("it is gone", over=over)) == Failed(because="it is gone", over=over)
    assert protocol.failed(DriverError("it is gone", anew=over)) == Failed(because="it is gone", anew=over)


def on(count: int, *, unlisted: int = 0, gpus: int = 1) -> GpuReadings:
    """GPUs with so many processes each, of which every figure is as long as it comes."""
    processes = tuple(
        GpuProcess(pid=4_000_000 + number, utilization_ratio=0.123456789, memory_bytes=140 * GIB)
        for number in range(count)
    )
    gpu = Gpu(uuid="GPU-0", index=0, name="", utilization_ratio=0.5, memory_used_bytes=1, memory_size_bytes=2,
              processes=processes, node="renderD128")  # fmt: skip
    return GpuReadings(source="drm", gpus=(gpu,) * gpus, unlisted=tuple(range(4_000_000, 4_000_000 + unlisted)))


def test_a_gpu_with_more_processes_than_are_told_has_none_listed_and_says_so() -> None:
    few, many = on(PROCESSES_MAX), protocol.bounded(on(PROCESSES_MAX + 1))

    assert protocol.bounded(few) == few
    assert [(gpu.processes, gpu.unknown, gpu.utilization_ratio) for gpu in many.gpus] == [
        (None, "1025 processes are on it, more than the 1024 that are listed", 0.5)
    ]


@pytest.mark.parametrize(("count", "told"), [(0, 0), (UNLISTED_MAX, UNLISTED_MAX), (UNLISTED_MAX + 1, None)])
def test_pids_that_cannot_be_listed_are_named_up_to_a_bound(count: int, told: int | None) -> None:
    unlisted = protocol.bounded(on(0, unlisted=count)).unlisted

    assert (None if unlisted is None else len(unlisted)) == told
    assert protocol.bounded(GpuReadings(source="drm", gpus=(), unlisted=None)).unlisted is None


def test_the_most_that_is_told_of_64_gpus_fits_in_a_line() -> None:
    assert len(protocol.line(on(PROCESSES_MAX, unlisted=UNLISTED_MAX, gpus=64))) < LINE_BYTES_MAX


@pytest.mark.parametrize(
    ("question", "line"),
    [
        (Question(), b"look\n"),
        (Question(without=frozenset({10, 3})), b"look without 3 10\n"),
        (Question(only=0), b"look only 0\n"),
    ],
    ids=["all", "all but some", "one"],
)
def test_what_is_asked_arrives_as_it_was_in_one_line(question: Question, line: bytes) -> None:
    assert question.line == line
    assert protocol.question(line.decode()) == question


@pytest.mark.parametrize(
    ("question", "about"),
    [
        pytest.param(Question(), [128, 129, None], id="all"),
        pytest.param(Question(without=frozenset({128})), [129, None], id="all but one"),
        pytest.param(Question(only=128), [128], id="one"),
    ],
)
def test_a_question_is_about_a_gpu_or_leaves_it_out(question: Question, about: list[int | None]) -> None:
    assert [place for place in (128, 129, None) if question.is_about(place)] == about


def test_a_gpu_is_asked_about_by_its_index_or_by_its_render_node() -> None:
    gpu = WHOLE.gpus[1]

    assert (gpu.place, replace(gpu, node="renderD129").place) == (1, 129)
