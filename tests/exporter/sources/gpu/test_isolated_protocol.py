"""Messages between a driver process and the exporter."""

import io
import pickle
from dataclasses import replace

import pytest

from exporter.model.gpu import Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.sources.gpu.isolated import protocol
from exporter.sources.gpu.isolated.protocol import (
    MESSAGE_BYTES_MAX,
    PROCESSES_MAX,
    UNLISTED_MAX,
    CurrentGpu,
    DriverError,
    Failed,
    Message,
    Question,
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
    "message",
    [
        WHOLE,
        GpuReadings(source="nvml", gpus=()),
        GpuReadings(source="drm", gpus=(), unlisted=(1, 4001)),
        GpuReadings(source="drm", gpus=(), unlisted=None),
        GpuReadings(source="drm", gpus=()),
        Failed(message="Driver Not Loaded"),
        Failed(message="of two\nversions", over=True),
        Failed(message="reloaded", reloaded=True),
        CurrentGpu(place=128),
        CurrentGpu(place=None),
        Xid(gpu="GPU-0", code=79),
        Question(),
        Question(without=frozenset({10, 3})),
        Question(only=0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_unchanged_in_order(message: Message) -> None:
    pipe = io.BytesIO()
    protocol.send(pipe, message)
    protocol.send(pipe, Failed(message="the next"))
    pipe.seek(0)

    assert protocol.receive(pipe) == message
    assert protocol.receive(pipe) == Failed(message="the next")
    with pytest.raises(EOFError):
        protocol.receive(pipe)


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(b"NVRM: hello\n", id="output of a driver"),
        pytest.param(b"\x00\x00", id="half a length"),
        pytest.param(framed(pickle.dumps(WHOLE))[:-9], id="half a message"),
        pytest.param(framed(b""), id="empty"),
        pytest.param(framed(b"N" * 9), id="no pickle"),
        pytest.param(framed(pickle.dumps("hello")), id="a string"),
        pytest.param(framed(b"cexporter.sources.gpu.isolated.protocol\nNothing\n."), id="unknown class"),
        pytest.param(framed(b"cno_such_module\nNothing\n."), id="unknown module"),
    ],
)
def test_invalid_message_is_rejected(written: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        protocol.receive(io.BytesIO(written))


def test_largest_readings_of_64_gpus_fit_in_a_message() -> None:
    content = pickle.dumps(on(PROCESSES_MAX, unlisted=UNLISTED_MAX, gpus=64), protocol=pickle.HIGHEST_PROTOCOL)

    assert len(content) < MESSAGE_BYTES_MAX


@pytest.mark.parametrize("over", [False, True])
def test_error_says_whether_another_process_may_succeed(over: bool) -> None:
    assert protocol.to_failed(DriverError("it is gone", over=over)) == Failed(message="it is gone", over=over)
    assert protocol.to_failed(DriverError("it is gone", reloaded=over)) == Failed(message="it is gone", reloaded=over)


def on(count: int, *, unlisted: int = 0, gpus: int = 1) -> GpuReadings:
    """GPUs with so many processes each. Every value has its greatest length."""

    def gpu(index: int) -> Gpu:
        processes = tuple(
            GpuProcess(pid=4_000_000 + number, utilization_ratio=0.123456789, memory_bytes=140 * GIB)
            for number in range(count)
        )
        return Gpu(uuid="GPU-0", index=index, name="", utilization_ratio=0.5, memory_used_bytes=1, memory_size_bytes=2,
                   processes=processes, node="renderD128")  # fmt: skip

    pids = tuple(range(4_000_000, 4_000_000 + unlisted))
    return GpuReadings(source="drm", gpus=tuple(map(gpu, range(gpus))), unlisted=pids)


def test_gpu_with_too_many_processes_has_no_list_and_a_reason() -> None:
    few, many = on(PROCESSES_MAX), protocol.limit_size(on(PROCESSES_MAX + 1))

    assert protocol.limit_size(few) == few
    assert [(gpu.processes, gpu.unknown, gpu.utilization_ratio) for gpu in many.gpus] == [
        (None, "1025 processes are on it, more than the limit of 1024", 0.5)
    ]


@pytest.mark.parametrize(("count", "listed"), [(0, 0), (UNLISTED_MAX, UNLISTED_MAX), (UNLISTED_MAX + 1, None)])
def test_number_of_unlisted_pids_is_bounded(count: int, listed: int | None) -> None:
    unlisted = protocol.limit_size(on(0, unlisted=count)).unlisted

    assert (None if unlisted is None else len(unlisted)) == listed
    assert protocol.limit_size(GpuReadings(source="drm", gpus=(), unlisted=None)).unlisted is None


@pytest.mark.parametrize(
    ("question", "about"),
    [
        pytest.param(Question(), [128, 129, None], id="all"),
        pytest.param(Question(without=frozenset({128})), [129, None], id="all but one"),
        pytest.param(Question(only=128), [128], id="one"),
    ],
)
def test_question_selects_or_skips_a_gpu(question: Question, about: list[int | None]) -> None:
    assert [place for place in (128, 129, None) if question.is_about(place)] == about


def test_place_of_a_gpu_is_its_index_or_its_render_node() -> None:
    gpu = WHOLE.gpus[1]

    assert (gpu.place, replace(gpu, node="renderD129").place) == (1, 129)
