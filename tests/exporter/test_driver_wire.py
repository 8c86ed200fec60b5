"""Lines between a process that asks a driver and the exporter."""

import pytest

from exporter.readings import Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.sources import driver_wire
from exporter.sources.driver_wire import DriverError, Failed, Told, Xid

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
        Failed(because="Driver Not Loaded"),
        Failed(because="of two\nversions", over=True),
        Xid(gpu="GPU-0", code=79),
    ],
)
def test_what_is_told_arrives_as_it_was_in_one_line(told: Told) -> None:
    line = driver_wire.line(told)

    assert driver_wire.parse(line) == told
    assert line.index(b"\n") == len(line) - 1


@pytest.mark.parametrize(
    "line", [b"", b"NVRM: hello", b"[]", b"{}", b'{"gpus":{}}', b'{"gpus":{"source":"nvml","gpus":[{}]}}', b'{"a":1}',
             b'{"failed":{"why":"so"}}', driver_wire.line(WHOLE)[:-9]]
)  # fmt: skip
def test_what_is_no_such_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="no line of the process that asks the driver"):
        driver_wire.parse(line)


@pytest.mark.parametrize("over", [False, True])
def test_an_error_is_told_with_whether_another_process_may_do_better(over: bool) -> None:
    assert driver_wire.failed(DriverError("it is gone", over=over)) == Failed(because="it is gone", over=over)
