"""GPUs from the NVIDIA driver: the real nvidia-ml-py on a fake NVML library."""

import ctypes
import threading
from dataclasses import replace

import pynvml
import pytest

from exporter.model.gpu import Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.sources.gpu.isolated.protocol import HUNG, DriverError, Question
from exporter.sources.gpu.nvml import calls, sensors
from exporter.sources.gpu.nvml.gpus import NvmlGpus
from tests.nvml.driver import NOT_AVAILABLE, Card, Driver, Instance, Sample

pytestmark = pytest.mark.needs_compiler

GIB = 2**30
SIZES = "nvmlDeviceGetMemoryInfo"
RATES = "nvmlDeviceGetUtilizationRates"
COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"
MPS = "nvmlDeviceGetMPSComputeRunningProcesses"
SAMPLES = "nvmlDeviceGetProcessUtilization"
TEMPERATURE = "nvmlDeviceGetTemperature"
ECC = "nvmlDeviceGetTotalEccErrors"
ROWS = "nvmlDeviceGetRemappedRows"
THROTTLE = "nvmlDeviceGetCurrentClocksThrottleReasons"
FIELDS = "nvmlDeviceGetFieldValues"
FATAL = f"{FIELDS} {pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR}"
CORRECTABLE = f"{FIELDS} {pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS}"
NONFATAL = f"{FIELDS} {pynvml.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR}"
BAD_TLP = f"{FIELDS} {pynvml.NVML_FI_DEV_PCIE_COUNT_BAD_TLP}"
UNSUPPORTED = dict.fromkeys(
    ("temperature_celsius", "power_watts", "power_limit_watts", "sm_clock_hertz", "memory_clock_hertz", "throttle",
     "ecc_corrected", "ecc_uncorrected", "ecc_lifetime_corrected", "ecc_lifetime_uncorrected", "pcie_replays",
     "remapped_rows", "pcie_errors"),
    "not_supported",
)  # fmt: skip
SENSORS = (
    f"{TEMPERATURE} 0 61",
    "nvmlDeviceGetPowerUsage 0 310250",
    "nvmlDeviceGetEnforcedPowerLimit 0 700000",
    "nvmlDeviceGetClockInfo 1 1980",
    "nvmlDeviceGetClockInfo 2 2619",
    f"{THROTTLE} 0 {0x4 | 0x40}",
    f"{ECC} 0 3",
    f"{ECC} 1 4",
    f"{ECC} 2 50",
    f"{ECC} 3 6",
    "nvmlDeviceGetPcieReplayCounter 0 9",
    f"{ROWS} 0 2 1 1 0",
    f"{CORRECTABLE} 10",
    f"{NONFATAL} 11",
    f"{FATAL} 12",
    f"{BAD_TLP} 13",
)
"""Every sensor and error counter, each with a different value."""


def sample(pid: int = 7, sm: int | str = 50, *, at_us: int = 2000) -> Sample:
    return Sample(pid=pid, timestamp_us=at_us, sm=sm)


def busy(*, utilization: int = 50, at_us: int = 2000) -> Card:
    """A GPU that process 7 uses."""
    return Card(utilization=utilization, compute={7: GIB}, samples=(sample(sm=utilization, at_us=at_us),))


def only(found: GpuReadings) -> Gpu:
    (gpu,) = found.gpus
    return gpu


def figures(gpu: Gpu) -> dict[int, float | None] | None:
    """The greatest engine use of each process, which decides whether it is idle."""
    return (
        None
        if gpu.processes is None
        else {
            each.pid: each.utilization_ratio if each.busiest_ratio is None else each.busiest_ratio
            for each in gpu.processes
        }
    )


@pytest.fixture
def gpus(driver_here: Driver) -> NvmlGpus:
    """A source after its first read: one idle GPU with process 7."""
    driver_here.answer(Card(compute={7: GIB}))
    source = NvmlGpus()
    source.read()
    return source


# Readings


def test_all_values_of_a_gpu_are_read(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(
        Card(
            uuid="GPU-5a1b",
            name="NVIDIA H200 NVL",
            size_bytes=140 * GIB,
            used_bytes=41 * GIB,
            utilization=93,
            compute={7: 40 * GIB},
            samples=(sample(7, 92),),
        )
    )
    gpus.read()  # the first read of the new UUID
    driver_here.answer(
        Card(
            uuid="GPU-5a1b",
            name="NVIDIA H200 NVL",
            size_bytes=140 * GIB,
            used_bytes=41 * GIB,
            utilization=93,
            compute={7: 40 * GIB},
            samples=(sample(7, 92), sample(7, 91, at_us=3000)),
        )
    )

    assert gpus.read() == GpuReadings(
        source="nvml",
        gpus=(
            Gpu(
                uuid="GPU-5a1b",
                index=0,
                name="NVIDIA H200 NVL",
                utilization_ratio=0.93,
                memory_used_bytes=41 * GIB,
                memory_size_bytes=140 * GIB,
                memory_free_bytes=99 * GIB,
                processes=(GpuProcess(pid=7, utilization_ratio=0.91, memory_bytes=40 * GIB),),
                unknown=None,
                figures=GpuFigures(unknown=UNSUPPORTED),
            ),
        ),
    )


def test_host_without_gpus_is_read(driver_here: Driver) -> None:
    driver_here.answer()

    assert NvmlGpus().read() == GpuReadings(source="nvml", gpus=())


def test_gpus_have_the_order_of_the_driver(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(*(Card(uuid=f"GPU-{n}") for n in "abc"))

    assert [(gpu.index, gpu.uuid) for gpu in gpus.read().gpus] == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c")]


def test_current_gpu_is_announced_and_cleared_even_after_an_error(driver_here: Driver) -> None:
    found: list[int | None] = []
    source = NvmlGpus(announce=found.append)
    driver_here.answer(Card(), Card(uuid="GPU-1"))

    source.read()
    driver_here.answer(Card(), Card(uuid="GPU-1"), but=("error 0 * 1",))
    with pytest.raises(DriverError):
        source.read()

    assert found == [0, 1, None, 0, None]


def test_skipped_gpu_is_not_read_and_reported_as_hung(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(utilization=40), Card(uuid="GPU-1", utilization=40))

    first, second = gpus.read(Question(without=frozenset({1}))).gpus

    assert (first.uuid, first.utilization_ratio) == ("GPU-0", 0.4)
    assert (second.uuid, second.utilization_ratio, second.unknown) == ("unidentified-1", None, HUNG)
    assert [gpu.uuid for gpu in gpus.read(Question(only=1)).gpus] == ["GPU-1"]


def test_process_on_several_lists_is_listed_once(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(compute={7: GIB, 8: GIB}, graphics={8: GIB, 9: 10}, mps={7: GIB, 10: 20}))

    processes = only(gpus.read()).processes

    assert processes is not None
    assert [(each.pid, each.memory_bytes) for each in processes] == [(7, GIB), (8, GIB), (9, 10), (10, 20)]


def test_reserved_memory_is_not_free(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(size_bytes=16 * GIB, used_bytes=2 * GIB, reserved_bytes=GIB))

    found = only(gpus.read())

    assert (found.memory_size_bytes, found.memory_used_bytes, found.memory_free_bytes) == (16 * GIB, 2 * GIB, 13 * GIB)


def test_memory_without_a_value_is_unknown_not_zero(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(compute={7: NOT_AVAILABLE}))

    assert only(gpus.read()).processes == (GpuProcess(pid=7, utilization_ratio=0.0, memory_bytes=None),)


# Samples


def test_every_engine_of_a_sample_is_read(gpus: NvmlGpus, driver_here: Driver) -> None:
    engines = ("sm", "memory", "encoder", "decoder")
    driver_here.answer(
        Card(
            compute=dict.fromkeys(range(1, 5), 0),
            samples=tuple(
                Sample(**{"pid": pid, "timestamp_us": 2000, "sm": 0, engine: 10 * pid})
                for pid, engine in enumerate(engines, start=1)
            ),
        )
    )

    assert figures(only(gpus.read())) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}


def test_mps_client_without_a_sample_is_unknown(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(compute={7: GIB, 8: GIB}, mps={8: GIB}))

    gpu = only(gpus.read())

    assert figures(gpu) == {7: 0.0, 8: None}
    assert gpu.unknown == "the driver's samples do not include every process"


def test_listed_process_without_a_new_sample_is_idle(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(busy())
    first = gpus.read()

    second = gpus.read()

    assert figures(only(first)) == {7: 0.5}
    assert figures(only(second)) == {7: 0.0}
    assert only(second).unknown is None


def test_each_gpu_has_its_own_position_in_its_samples(gpus: NvmlGpus, driver_here: Driver) -> None:
    early = Card(uuid="GPU-0", compute={7: 1}, samples=(sample(7, 10, at_us=2000),))
    late = Card(uuid="GPU-1", compute={8: 1}, samples=(sample(8, 20, at_us=9000),))
    driver_here.answer(early, Card(uuid="GPU-1", compute={8: 1}))
    gpus.read()
    driver_here.answer(early, late)
    gpus.read()

    driver_here.answer(
        Card(uuid="GPU-0", compute={7: 1}, samples=(*early.samples, sample(7, 30, at_us=2001))),
        Card(uuid="GPU-1", compute={8: 1}, samples=(*late.samples, sample(8, 40, at_us=9001))),
    )

    assert [figures(gpu) for gpu in gpus.read().gpus] == [{7: 0.3}, {8: 0.4}]


def test_samples_from_before_the_first_read_are_unknown(driver_here: Driver) -> None:
    driver_here.answer(busy())
    source = NvmlGpus()

    first, second = only(source.read()), only(source.read())

    assert figures(first) == {7: None}
    assert first.unknown == "the driver's samples do not include every process"
    assert figures(second) == {7: 0.0}


def test_samples_over_100_percent_or_of_unlisted_processes_are_dropped(gpus: NvmlGpus, driver_here: Driver) -> None:
    found = sample(7, 30), sample(7, 2147483632), sample(8, 101), sample(0, 0), sample(9, 80)
    driver_here.answer(Card(compute={7: 1, 8: 1}, samples=found))

    assert figures(only(gpus.read())) == {7: 0.3, 8: None}


def test_invalid_timestamp_does_not_hide_later_samples(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(compute={7: 1}, samples=(sample(7, 30), sample(9, 5, at_us=2**63))))
    gpus.read()
    driver_here.answer(Card(compute={7: 1}, samples=(sample(7, 30), sample(7, 40, at_us=2001))))

    assert figures(only(gpus.read())) == {7: 0.4}


def since(at_us: int, *percents: int) -> tuple[tuple[int, int], ...]:
    """Samples of the GPU every 200 ms from then on, as on an H100."""
    return tuple((at_us + 200_000 * number, percent) for number, percent in enumerate(percents, start=1))


def test_short_load_within_one_sample_does_not_count_as_unattributed(driver_here: Driver) -> None:
    # Measured on an H100 with R580, once a second: the rate covers 200 ms, a process sample one second.
    resting = Card(compute={7: GIB}, gpu_samples=since(0, 0, 0, 0, 0, 0))
    driver_here.answer(resting)
    gpus = NvmlGpus()
    gpus.read()
    ends_busy = resting.gpu_samples + since(1_000_000, 0, 67, 95, 95, 95)
    driver_here.answer(
        Card(compute={7: GIB}, utilization=96, gpu_samples=ends_busy, samples=(sample(sm=71, at_us=2_000_010),))
    )
    at_work = only(gpus.read())
    ends_idle = ends_busy + since(2_000_000, 38, 0, 0, 0, 0)
    driver_here.answer(Card(compute={7: GIB}, gpu_samples=ends_idle, samples=(sample(sm=8, at_us=3_000_010),)))
    at_rest = only(gpus.read())

    assert at_work.utilization_ratio == pytest.approx(0.704)
    assert figures(at_work) == {7: 0.71}
    assert at_rest.utilization_ratio == pytest.approx(0.076)
    assert figures(at_rest) == {7: 0.08}


def test_gpu_samples_are_read_again_if_a_process_has_a_newer_one(driver_here: Driver) -> None:
    driver_here.answer(Card(compute={7: GIB}, gpu_samples=since(0, 0)))
    gpus = NvmlGpus()
    gpus.read()
    slow = ("slow 0 nvmlDeviceGetProcessUtilization 300",)
    early = Card(compute={7: GIB}, gpu_samples=since(0, 0, 90), samples=(sample(sm=90, at_us=400_000),))
    late = replace(early, gpu_samples=since(0, 0, 90, 30), samples=(sample(sm=60, at_us=600_000),))
    driver_here.answer(early, but=slow)
    tick = threading.Timer(0.15, lambda: driver_here.answer(late))
    tick.start()
    found = only(gpus.read())
    tick.join()

    assert found.utilization_ratio == 0.6
    assert figures(found) == {7: 0.6}


@pytest.mark.parametrize("why", ["error 0 nvmlDeviceGetSamples 3", "error 0 nvmlDeviceGetSamples 999"])
def test_gpu_without_samples_has_the_utilisation_of_the_last_period(why: str, driver_here: Driver) -> None:
    card = Card(compute={7: GIB}, utilization=60, gpu_samples=since(0, 10, 10))
    driver_here.answer(card, but=(why,))
    gpus = NvmlGpus()
    gpus.read()
    found = only(gpus.read())

    assert (found.utilization_ratio, found.unknown) == (0.6, None)


def test_driver_with_a_clock_set_back_is_read_again_after_10_samples(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(busy(utilization=90, at_us=10**15))
    gpus.read()

    def answered(samples: int) -> bool:
        driver_here.answer(busy(utilization=90, at_us=5000 + samples))
        return figures(only(gpus.read())) == {7: 0.9}

    assert next(samples for samples in range(20) if answered(samples)) == 11


# Values that the driver refuses


@pytest.mark.parametrize(
    ("refused", "lost", "message", "counted"),
    [
        pytest.param(f"{SAMPLES} 3", {"processes"}, "utilisation of processes: Not Supported",
                     {"process_utilization": "not_supported"}, id="no samples"),
        pytest.param(f"{SAMPLES} 999", {"processes"}, "utilisation of processes: Unknown Error",
                     {"process_utilization": "failed"}, id="samples fail"),
        pytest.param(f"{RATES} 3", {"utilization_ratio"}, "utilisation: Not Supported",
                     {"utilization": "not_supported"}, id="no utilisation"),
        pytest.param(f"{RATES} 10", {"utilization_ratio"}, "utilisation: Timeout", {"utilization": "timeout"},
                     id="utilisation times out"),
        pytest.param(f"{SIZES} 3", {"memory_used_bytes", "memory_size_bytes"}, "memory: Not Supported",
                     {"memory": "not_supported"}, id="no memory"),
        pytest.param(f"{SIZES} 999", {"memory_used_bytes", "memory_size_bytes"}, "memory: Unknown Error",
                     {"memory": "failed"}, id="memory fails"),
        pytest.param(
            f"{COMPUTE} 4",
            {"processes"},
            "list of compute processes: Insufficient Permissions: the exporter's user needs to open /dev/nvidiactl and "
            "/dev/nvidia*",
            {"processes": "no_permission"},
            id="no permission",
        ),
        pytest.param(
            f"{COMPUTE} 13",
            {"processes"},
            "list of compute processes: Function Not Found: it needs driver R510 or later",
            {"processes": "not_supported"},
            id="old driver",
        ),
        pytest.param(f"{GRAPHICS} 999", {"processes"}, "list of graphics processes: Unknown Error",
                     {"processes": "failed"}, id="one list"),
        pytest.param(f"{GRAPHICS} 3", set(), None, {}, id="GPU without graphics"),
        pytest.param(f"{MPS} 13", set(), None, {}, id="driver without MPS"),
        pytest.param("nvmlDeviceGetMigMode 999", set(), None, {}, id="MIG mode unreadable"),
    ],
)  # fmt: skip
def test_refused_value_is_unknown_and_others_are_read(
    refused: str,
    lost: set[str],
    message: str | None,
    counted: dict[str, str],
    gpus: NvmlGpus,
    driver_here: Driver,
) -> None:
    driver_here.answer(busy(), but=(f"error 0 {refused}",))

    gpu = only(gpus.read())

    whole = {"utilization_ratio", "memory_used_bytes", "memory_size_bytes"}
    assert {name for name in whole if getattr(gpu, name) is None} == lost - {"processes"}
    assert (figures(gpu) == {7: 0.5}) == ("processes" not in lost)
    assert gpu.unknown == message
    assert gpu.figures.unknown == UNSUPPORTED | counted


def test_impossible_utilisation_is_unknown_with_a_reason(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(utilization=150))

    gpu = only(gpus.read())

    assert (gpu.utilization_ratio, gpu.unknown) == (None, "utilisation: impossible utilisation: 150 %")
    assert gpu.figures.unknown == UNSUPPORTED | {"utilization": "impossible"}


@pytest.mark.parametrize("count", [0, calls.ROOM, calls.ROOM + 1, 5 * calls.ROOM])
def test_list_of_any_length_is_read_completely(count: int, gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(compute=dict.fromkeys(range(1, count + 1), GIB), graphics={9999: 5}))

    assert {each.pid: each.memory_bytes for each in only(gpus.read()).processes or ()} == {
        **dict.fromkeys(range(1, count + 1), GIB),
        9999: 5,
    }


def test_eight_gpus_with_400_processes_each_are_read_completely(gpus: NvmlGpus, driver_here: Driver) -> None:
    cards = [Card(uuid=f"GPU-{index}", compute=dict.fromkeys(range(1, 401), GIB)) for index in range(8)]
    driver_here.answer(*cards)

    found = gpus.read().gpus

    assert [(gpu.uuid, len(gpu.processes or ())) for gpu in found] == [(f"GPU-{index}", 400) for index in range(8)]


def test_kept_list_has_its_content_of_that_time(gpus: NvmlGpus, driver_here: Driver) -> None:
    found = []
    for size in (GIB, 2 * GIB, GIB):
        for kind in ("compute", "mps"):
            driver_here.answer(Card(**{kind: {7: size}}))  # type: ignore[arg-type]
            found += [(each.memory_bytes, each.utilization_ratio) for each in only(gpus.read()).processes or ()]

    assert found == [(size, ratio) for size in (GIB, 2 * GIB, GIB) for ratio in (0.0, None)]


def test_processes_keep_their_memory_while_samples_fail(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(busy(), but=(f"error 0 {SAMPLES} 3",))

    assert only(gpus.read()).processes == (GpuProcess(pid=7, utilization_ratio=None, memory_bytes=GIB),)


def test_samples_are_read_from_the_same_position_after_a_failure(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(busy(), but=(f"error 0 {SAMPLES} 999",))
    gpus.read()
    driver_here.answer(busy())

    assert figures(only(gpus.read())) == {7: 0.5}


@pytest.mark.parametrize(
    ("function", "times", "known"),
    [
        *((SAMPLES, times, known) for times, known in ((1, True), (2, True), (3, False))),
        # Each read asks twice: with the current size, and with the size that the driver requires.
        *((COMPUTE, times, known) for times, known in ((1, True), (5, True), (6, False))),
    ],
)
def test_growing_list_is_bounded(function: str, times: int, known: bool, gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(busy(), but=(f"grow 0 {function} {times}",))

    gpu = only(gpus.read())

    assert (figures(gpu) == {7: 0.5}) == known
    assert (gpu.unknown is None) == known
    assert known or "Insufficient Size" in str(gpu.unknown)


def test_lists_of_an_unknown_layout_are_rejected(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(utilization=50, compute={7: GIB, 0: 4242}))

    gpu = only(gpus.read())

    assert gpu.processes is None
    assert gpu.unknown == "its lists have impossible pids: update the driver"


def test_utilisation_over_100_percent_is_unknown(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(Card(utilization=101))

    assert only(gpus.read()).utilization_ratio is None


def test_gpu_in_mig_mode_has_only_its_memory(driver_here: Driver) -> None:
    driver_here.answer(Card(mig=True, utilization=50, used_bytes=GIB, compute={7: GIB}), but=(f"error 0 {RATES} 3",))

    gpu = only(NvmlGpus().read())

    assert (gpu.utilization_ratio, gpu.processes, gpu.memory_used_bytes) == (None, None, GIB)
    assert gpu.unknown == "it is in MIG mode: only the memory of its instances is measured"


# Instances of a GPU

PARTITIONED = Card(
    mig=True,
    used_bytes=3 * GIB,
    instances=(
        Instance(uuid="MIG-a", gpu_instance=7, used_bytes=GIB, compute={7: GIB // 2, 8: NOT_AVAILABLE}),
        Instance(uuid="MIG-b", gpu_instance=9, number=3, size_bytes=4 * GIB, name="Test GPU MIG 2g.20gb"),
    ),
)


def test_gpu_without_mig_is_asked_again_only_after_it_returns(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card())
    source.read()

    driver_here.answer(PARTITIONED)
    remembered = source.read().gpus
    driver_here.answer(PARTITIONED, but=("error 0 * 15",))
    source.read()
    driver_here.answer(PARTITIONED)

    assert [gpu.uuid for gpu in remembered] == ["GPU-0"]
    assert [gpu.uuid for gpu in source.read().gpus] == ["GPU-0", "MIG-a", "MIG-b"]


def test_failed_mig_query_is_repeated_in_the_next_sample(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(PARTITIONED, but=("error 0 nvmlDeviceGetMigMode 999",))
    source.read()

    driver_here.answer(PARTITIONED)

    assert [gpu.uuid for gpu in source.read().gpus] == ["GPU-0", "MIG-a", "MIG-b"]


def test_instances_have_memory_and_processes_and_no_utilisation(driver_here: Driver) -> None:
    driver_here.answer(PARTITIONED, Card(uuid="GPU-1"))

    whole, first, second, other = NvmlGpus().read().gpus

    assert (whole.uuid, whole.mig, other.uuid, other.number) == ("GPU-0", None, "GPU-1", "1")
    assert (whole.attribution, other.attribution) == ("none", "process")
    assert first == Gpu(
        uuid="MIG-a",
        index=0,
        name="Test GPU MIG 1g.10gb",
        utilization_ratio=None,
        memory_used_bytes=GIB,
        memory_size_bytes=2 * GIB,
        memory_free_bytes=GIB,
        processes=(
            GpuProcess(pid=7, utilization_ratio=None, memory_bytes=GIB // 2),
            GpuProcess(pid=8, utilization_ratio=None, memory_bytes=None),
        ),
        unknown="the utilisation of an instance of a GPU is not read",
        attribution="none",
        mig=MigInstance(parent="GPU-0", number=0, gpu_instance=7, compute_instance=0),
    )
    assert (second.uuid, second.number, second.name, second.processes) == ("MIG-b", "0:3", "Test GPU MIG 2g.20gb", ())
    assert second.names == ("MIG-b", "0:3", "MIG-GPU-0/9/0", "0/gi9")


def test_compute_instances_with_shared_memory_have_their_own_processes(driver_here: Driver) -> None:
    everyone: dict[int, int | str] = {7: f"{GIB} 5 0", 8: f"{GIB} 5 1", 9: f"{GIB} 4 0"}
    parts = (
        Instance(uuid=f"MIG-{n}", gpu_instance=5, compute_instance=n, number=n, used_bytes=2 * GIB, compute=everyone)
        for n in (0, 1)
    )
    driver_here.answer(Card(mig=True, instances=tuple(parts)))

    _, first, second = NvmlGpus().read().gpus

    assert [[each.pid for each in gpu.processes or ()] for gpu in (first, second)] == [[7], [8]]
    assert first.mig
    assert first.mig.shares_memory
    assert second.mig
    assert second.mig.shares_memory


@pytest.mark.parametrize(
    ("refused", "processes", "memory_bytes", "message", "counted"),
    [
        pytest.param(f"{COMPUTE} 999", None, GIB, "list of compute processes: Unknown Error", {"processes": "failed"},
                     id="processes"),
        pytest.param(f"{SIZES} 999", [7, 8], None,
                     "the utilisation of an instance of a GPU is not read; memory: Unknown Error",
                     {"memory": "failed"}, id="memory"),
    ],
)  # fmt: skip
def test_refused_value_of_one_instance_does_not_affect_others(
    refused: str,
    processes: list[int] | None,
    memory_bytes: int | None,
    message: str,
    counted: dict[str, str],
    driver_here: Driver,
) -> None:
    driver_here.answer(PARTITIONED, but=(f"error 100 {refused}",))

    _, first, second = NvmlGpus().read().gpus

    assert (first.processes and [each.pid for each in first.processes]) == processes
    assert first.memory_used_bytes == memory_bytes
    assert first.unknown == message
    assert first.figures.unknown == counted
    assert (second.processes, second.memory_size_bytes, second.figures.unknown) == ((), 4 * GIB, {})


def test_lost_gpu_removes_only_its_own_instances(driver_here: Driver) -> None:
    other = Card(uuid="GPU-1", mig=True, instances=(Instance(uuid="MIG-c", gpu_instance=1),))
    driver_here.answer(PARTITIONED, other)
    source = NvmlGpus()
    source.read()

    driver_here.answer(PARTITIONED, other, but=("error 0 * 15",))

    assert [gpu.uuid for gpu in source.read().gpus] == ["GPU-0", "GPU-1", "MIG-c"]


# Sensors and error counters


def test_sensors_and_error_counters_are_read_in_base_units(driver_here: Driver) -> None:
    driver_here.answer(Card(figures=SENSORS))

    assert only(NvmlGpus().read()).figures == GpuFigures(
        temperature_celsius=61.0,
        power_watts=310.25,
        power_limit_watts=700.0,
        sm_clock_hertz=1.98e9,
        memory_clock_hertz=2.619e9,
        throttled=["sw_power_cap", "hw_thermal_slowdown"],
        ecc_corrected=3,
        ecc_uncorrected=4,
        ecc_lifetime_corrected=50,
        ecc_lifetime_uncorrected=6,
        remapped_rows_corrected=2,
        remapped_rows_uncorrected=1,
        row_remap_pending=True,
        row_remap_failed=False,
        pcie_replays=9,
        pcie_errors={"correctable": 10, "nonfatal": 11, "fatal": 12},
    )


def test_no_throttling_is_a_measured_value(driver_here: Driver) -> None:
    driver_here.answer(Card(figures=(f"{THROTTLE} 0 0",)))

    assert only(NvmlGpus().read()).figures.throttled == []


def test_unknown_throttle_reason_hides_no_other(driver_here: Driver) -> None:
    driver_here.answer(Card(figures=(f"{THROTTLE} 0 {0x8 | 1 << 40}",)))

    assert only(NvmlGpus().read()).figures.throttled == ["hw_slowdown"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [(3, "not_supported"), (13, "not_supported"), (4, "no_permission"), (10, "timeout"), (14, "corrupted_inforom"),
     (21, "no_data"), (2, "failed"), (17, "failed"), (999, "failed")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("function", "gone", "figures"),
    [
        pytest.param(TEMPERATURE, {"temperature_celsius"}, {"temperature_celsius"}, id="temperature"),
        pytest.param("nvmlDeviceGetPowerUsage", {"power_watts"}, {"power_watts"}, id="power"),
        pytest.param(THROTTLE, {"throttled"}, {"throttle"}, id="throttling"),
        pytest.param(
            ROWS,
            {"remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending", "row_remap_failed"},
            {"remapped_rows"},
            id="rows",
        ),
        pytest.param("nvmlDeviceGetPcieReplayCounter", {"pcie_replays"}, {"pcie_replays"}, id="PCI Express"),
        pytest.param(FIELDS, {"pcie_errors"}, {"pcie_errors"}, id="PCI Express errors"),
    ],
)
def test_refused_sensor_is_unknown_with_a_reason_and_others_are_read(
    function: str, gone: set[str], figures: set[str], code: int, reason: str, driver_here: Driver
) -> None:
    driver_here.answer(Card(utilization=30, figures=SENSORS), but=(f"error 0 {function} {code}",))

    gpu = only(NvmlGpus().read())

    assert {name for name, value in vars(gpu.figures).items() if value is None} == gone
    assert gpu.figures.unknown == dict.fromkeys(figures, reason)
    assert (gpu.utilization_ratio, gpu.processes, gpu.unknown) == (0.3, (), None)


@pytest.mark.parametrize(
    ("figure", "found"),
    [
        ("temperature_celsius", f"{TEMPERATURE} 0 -"),
        ("temperature_celsius", f"{TEMPERATURE} 0 251"),
        ("power_watts", "nvmlDeviceGetPowerUsage 0 -"),
        ("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit 0 10000001"),
        ("sm_clock_hertz", "nvmlDeviceGetClockInfo 1 -"),
        ("memory_clock_hertz", "nvmlDeviceGetClockInfo 2 100001"),
        ("throttle", f"{THROTTLE} 0 -"),
        ("ecc_corrected", f"{ECC} 0 -"),
        ("pcie_replays", "nvmlDeviceGetPcieReplayCounter 0 -"),
        ("remapped_rows", f"{ROWS} 0 - 0 0 0"),
        ("remapped_rows", f"{ROWS} 0 0 0 2 0"),
    ],
)
def test_impossible_sensor_value_is_unknown(figure: str, found: str, driver_here: Driver) -> None:
    call = found.rpartition(" ")[0] if not found.startswith(ROWS) else ROWS
    driver_here.answer(Card(figures=(found, *(each for each in SENSORS if not each.startswith(call)))))

    assert only(NvmlGpus().read()).figures.unknown == {figure: "impossible"}


def test_unsupported_sensors_are_tried_again_only_in_a_reloaded_driver(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card())
    source.read()

    driver_here.answer(Card(figures=SENSORS))
    for _ in range(sensors.SLOW_LOOKS + 1):
        remembered = only(source.read()).figures
    driver_here.answer(Card(figures=SENSORS), session=2)
    with pytest.raises(DriverError):
        source.read()
    reloaded = only(source.read()).figures

    assert remembered == GpuFigures(unknown=UNSUPPORTED)
    assert reloaded.unknown == {}


def test_failed_sensor_is_read_again_in_the_next_sample(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card(figures=SENSORS), but=(f"error 0 {TEMPERATURE} 10",))
    source.read()

    driver_here.answer(Card(figures=SENSORS))

    assert only(source.read()).figures.temperature_celsius == 61.0


def test_sensors_are_read_every_fifth_sample_and_published_in_each(driver_here: Driver) -> None:
    source, found = NvmlGpus(), []
    for degrees in range(41, 52):
        driver_here.answer(Card(figures=(f"{TEMPERATURE} 0 {degrees}", *SENSORS)))
        found.append(only(source.read()).figures.temperature_celsius)

    assert found == [41.0] * 5 + [46.0] * 5 + [51.0]


def test_error_counters_are_read_every_tenth_sample_and_published_in_each(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card(figures=(f"{ECC} 0 3",)))
    first = only(source.read()).figures.ecc_corrected
    driver_here.answer(Card(figures=(f"{ECC} 0 4",)))

    assert [first, *(only(source.read()).figures.ecc_corrected for _ in range(10))] == [3] * 10 + [4]


# PCI Express errors


@pytest.mark.parametrize(
    ("figures", "counts", "unknown"),
    [
        pytest.param((f"{FATAL} 0",), {"fatal": 0}, None, id="counter the GPU does not have"),
        pytest.param((f"{FATAL} 3", f"{CORRECTABLE} 0 3 2"), {"fatal": 3}, None, id="counter unknown to the driver"),
        pytest.param((f"{CORRECTABLE} 7 3 4", f"{FATAL} 3"), {"fatal": 3}, "no_permission", id="one not permitted"),
        pytest.param((f"{CORRECTABLE} 7 3 10", f"{FATAL} 3"), {"fatal": 3}, "timeout", id="one counter times out"),
        pytest.param((f"{CORRECTABLE} 7 3 21", f"{FATAL} 3"), {"fatal": 3}, "no_data", id="one counter has no data"),
        pytest.param((f"{CORRECTABLE} 7 3 999", f"{FATAL} 3"), {"fatal": 3}, "failed", id="one counter fails"),
        pytest.param((f"{FATAL} 3 3 4",), None, "no_permission", id="all counters refused"),
        pytest.param((f"{FATAL} -",), None, "impossible", id="impossible value"),
    ],
)
def test_missing_counter_has_a_reason_unless_the_gpu_has_none(
    figures: tuple[str, ...], counts: dict[str, int] | None, unknown: str | None, driver_here: Driver
) -> None:
    driver_here.answer(Card(figures=figures))

    found = only(NvmlGpus().read()).figures

    assert (found.pcie_errors, found.unknown.get("pcie_errors")) == (counts, unknown)


@pytest.mark.parametrize(
    ("stands", "kind", "count"),
    [
        pytest.param(5 + (99 << 32), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 5, id="unsigned int, garbage above it"),
        pytest.param(5, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, 5, id="unsigned long"),
        pytest.param(5, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 5, id="unsigned long long"),
        pytest.param(5, pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, 5, id="signed long long"),
        pytest.param(5 + (99 << 32), pynvml.NVML_VALUE_TYPE_SIGNED_INT, 5, id="int, garbage above it"),
        pytest.param("-", pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, None, id="not available"),
        pytest.param("-", pynvml.NVML_VALUE_TYPE_SIGNED_INT, None, id="negative"),
        pytest.param(2**32 - 1, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, None, id="not available, as a longer type"),
        pytest.param(4617315517961601024, pynvml.NVML_VALUE_TYPE_DOUBLE, None, id="double, 5.0"),
        pytest.param(5, 99, None, id="unknown type"),
    ],
)
def test_counter_is_read_by_its_type(stands: int | str, kind: int, count: int | None, driver_here: Driver) -> None:
    driver_here.answer(Card(figures=(f"{CORRECTABLE} {stands} {kind}", f"{FATAL} 0")))

    found = only(NvmlGpus().read()).figures

    assert found.pcie_errors == ({"fatal": 0} if count is None else {"correctable": count, "fatal": 0})
    assert found.unknown.get("pcie_errors") == ("impossible" if count is None else None)


def test_counter_that_failed_is_published_after_it_succeeds(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card(figures=(f"{CORRECTABLE} 7 3 10", f"{FATAL} 3")))
    first = only(source.read()).figures

    driver_here.answer(Card(figures=(f"{CORRECTABLE} 7", f"{FATAL} 4")))
    later = [only(source.read()).figures for _ in range(sensors.SLOW_LOOKS)]

    assert (first.pcie_errors, first.unknown["pcie_errors"]) == ({"fatal": 3}, "timeout")
    assert {str(each.pcie_errors) for each in later[:-1]} == {"{'fatal': 3}"}
    assert later[-1].pcie_errors == {"fatal": 4, "correctable": 7}
    assert "pcie_errors" not in later[-1].unknown


def test_counter_that_the_gpu_does_not_have_is_not_read_again(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card(figures=(f"{FATAL} 3",)))
    source.read()

    driver_here.answer(Card(figures=(f"{FATAL} 4", f"{CORRECTABLE} 7")))
    later = [only(source.read()).figures.pcie_errors for _ in range(sensors.SLOW_LOOKS)]

    assert later[-1] == {"fatal": 4}


@pytest.mark.parametrize(("code", "message"), [(15, "GPU is lost"), (16, "GPU requires restart")])
def test_gpu_is_lost_if_a_counter_says_so(code: int, message: str, driver_here: Driver) -> None:
    driver_here.answer(
        Card(figures=(f"{FATAL} 3 3 {code}", f"{CORRECTABLE} 3")), Card(uuid="GPU-1", figures=(f"{FATAL} 3",))
    )

    lost, other = NvmlGpus().read().gpus

    assert (lost.lost, lost.unknown, lost.figures.pcie_errors) == (True, message, None)
    assert other.figures.pcie_errors == {"fatal": 3}


def test_gpu_lost_while_its_sensors_are_read_has_no_values(driver_here: Driver) -> None:
    source = NvmlGpus()
    driver_here.answer(Card(figures=SENSORS), Card(uuid="GPU-1", figures=SENSORS))
    for _ in range(sensors.SENSOR_LOOKS):
        source.read()

    driver_here.answer(Card(figures=SENSORS), Card(uuid="GPU-1", figures=SENSORS), but=(f"error 0 {TEMPERATURE} 15",))
    lost, other = source.read().gpus

    assert (lost.figures, lost.utilization_ratio, lost.unknown) == (GpuFigures(), None, "GPU is lost")
    assert other.figures.temperature_celsius == 61.0


# GPUs and drivers that disappear


def test_invalid_name_is_escaped_and_does_not_affect_others(driver_here: Driver) -> None:
    part = Instance(uuid="MIG-1", gpu_instance=1, name="Odd part")
    driver_here.answer(Card(name="Odd GPU", mig=True, instances=(part,)), Card(uuid="GPU-1", name="Test GPU"))
    whole = driver_here.script.with_suffix(".whole")
    whole.write_bytes(driver_here.script.read_bytes().replace(b"Odd", b"Odd\xff"))
    whole.replace(driver_here.script)

    assert [each.name for each in NvmlGpus().read().gpus] == ["Odd\\xff GPU", "Odd\\xff part", "Test GPU"]


@pytest.mark.parametrize(
    ("failing", "lost", "message", "counted"),
    [
        pytest.param("* 15", True, "GPU is lost", {}, id="off the bus"),
        pytest.param("nvmlDeviceGetHandleByIndex 999", None, "Unknown Error", {"gpu": "failed"}, id="no answer"),
        pytest.param(
            "* 4",
            None,
            "Insufficient Permissions: the exporter's user needs to open /dev/nvidiactl and /dev/nvidia*",
            {"gpu": "no_permission"},
            id="no permission",
        ),
        pytest.param(f"{RATES} 15", True, "GPU is lost", {}, id="during a sample"),
        pytest.param(f"{SAMPLES} 16", True, "GPU requires restart", {}, id="needs a reset"),
    ],
)
def test_lost_gpu_keeps_its_name_and_does_not_affect_others(
    failing: str,
    lost: bool | None,
    message: str,
    counted: dict[str, str],
    gpus: NvmlGpus,
    driver_here: Driver,
) -> None:
    both = (Card(uuid="GPU-0", name="First", compute={7: GIB}), Card(uuid="GPU-1", utilization=30))
    driver_here.answer(*both)
    gpus.read()

    driver_here.answer(*both, but=(f"error 0 {failing}",))
    first, second = gpus.read().gpus

    assert first == Gpu(
        uuid="GPU-0",
        index=0,
        name="First",
        utilization_ratio=None,
        memory_used_bytes=None,
        memory_size_bytes=None,
        processes=None,
        unknown=message,
        figures=GpuFigures(unknown=counted),
        lost=lost,
    )
    assert (second.utilization_ratio, second.processes, second.unknown, second.lost) == (0.3, (), None, False)


def test_gpu_lost_from_the_start_is_listed(driver_here: Driver) -> None:
    driver_here.answer(Card(), Card(uuid="GPU-1"), but=("error 1 * 15",))

    lost = NvmlGpus().read().gpus[1]

    assert (lost.uuid, lost.index, lost.unknown) == ("unidentified-1", 1, "GPU is lost")


def test_returned_gpu_restarts_its_samples(gpus: NvmlGpus, driver_here: Driver) -> None:
    driver_here.answer(busy(), but=("error 0 * 15",))
    gpus.read()
    driver_here.answer(busy())

    back, after = only(gpus.read()), only(gpus.read())

    assert (back.utilization_ratio, figures(back)) == (0.5, {7: None})
    assert figures(after) == {7: 0.0}


@pytest.mark.parametrize(
    ("but", "session", "message"),
    [
        pytest.param([], 2, "Uninitialized", id="reloaded"),
        pytest.param(["error - * 9"], 1, "Driver Not Loaded", id="module removed"),
        pytest.param([f"error 0 {RATES} 1"], 1, "Uninitialized", id="during a sample"),
        pytest.param(
            ["error - * 18"],
            1,
            "RM has detected an NVML/RM version mismatch: its library and its kernel module have different versions, "
            "reload the module or reboot",
            id="other version installed",
        ),
        pytest.param(["error - nvmlDeviceGetCount 999"], 1, "Unknown Error", id="every call fails"),
    ],
)
def test_driver_that_disappears_fails_the_sample_and_is_initialised_in_the_next(
    but: list[str], session: int, message: str, gpus: NvmlGpus, driver_here: Driver
) -> None:
    driver_here.answer(busy(), but=tuple(but), session=session)
    with pytest.raises(DriverError) as refused:
        gpus.read()

    driver_here.answer(busy(at_us=500), session=3)
    back = only(gpus.read())
    driver_here.answer(busy(at_us=501), session=3)

    assert str(refused.value) == f"the NVIDIA driver does not answer: {message}"
    assert figures(back) == {7: None}
    assert figures(only(gpus.read())) == {7: 0.5}


def test_missing_driver_is_tried_in_each_sample(driver_here: Driver) -> None:
    driver_here.answer(Card(), but=("error - nvmlInitWithFlags 9",))
    source = NvmlGpus()
    for _ in range(2):
        with pytest.raises(DriverError, match="Driver Not Loaded"):
            source.read()

    driver_here.answer(Card())

    assert only(source.read()).uuid == "GPU-0"


def test_own_layouts_equal_those_of_the_package() -> None:
    for ours, theirs in (
        (calls._PROCESS, pynvml.c_nvmlProcessInfo_v3_t),
        (calls._SAMPLE, pynvml.c_nvmlProcessUtilizationSample_t),
    ):
        whole = theirs(*range(1, 1 + len(theirs._fields_)))

        assert ours.size == ctypes.sizeof(theirs)
        assert ours.unpack(bytes(whole)) == tuple(range(1, 1 + len(theirs._fields_)))
