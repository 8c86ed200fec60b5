"""The whole exporter on an NVIDIA driver: real processes and containers, linked to a GPU by their pids."""

import csv
import html
import http.client
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.collectors.registry import SNAPSHOT_FRESH_S
from exporter.sources import processes
from exporter.sources.gpu.isolated import supervisor
from gpuwarden import procfs
from tests.exporter.conftest import StartWorker
from tests.nvml.driver import LIBRARY, Card, Driver, Instance, Sample
from tests.waiting import WITHIN_S, eventually

GIB = 2**30
LOOK_S = 0.05
CLOCK_DRIFT_S = 0.05
"""How far the wall clock may differ from the monotonic one in a test, seconds."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """One scrape: the value of a series with these labels; `None` if it is absent or NaN."""

    text: str

    def __call__(self, series: str, /, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                if sample.name == f"gpuwarden_{series}" and labels.items() <= sample.labels.items():
                    return None if math.isnan(sample.value) else sample.value
        return None


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """`gpuwarden exporter`, ready."""

    process: subprocess.Popen[str]
    port: int
    log: list[dict[str, Any]]

    def scrape(self) -> Scrape:
        return Scrape(text=self.page("/metrics"))

    def page(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return html.unescape(connection.getresponse().read().decode())
        finally:
            connection.close()

    def until(
        self,
        holds: Callable[[Scrape], bool],
        *,
        meanwhile: Callable[[], None] = lambda: None,
        within_s: float = WITHIN_S,
    ) -> Scrape:
        """The first scrape that fulfils the condition; `meanwhile` runs before each."""

        def look() -> Scrape | None:
            meanwhile()
            found = self.scrape()
            return found if holds(found) else None

        return eventually(look, within_s=within_s)

    def stop(self) -> list[dict[str, Any]]:
        """Its whole log, after a clean stop."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, rest
        return self.log + [json.loads(line) for line in rest.splitlines()]


def command(house: Path, *arguments: object) -> list[str]:
    given = ["--runtime-dir", house, "--port", 0, "--sample-interval-s", LOOK_S, *arguments]
    return [sys.executable, "-m", "gpuwarden", "exporter", *map(str, given)]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process without settings of gpuwarden and without GPUs of other vendors."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")}
    return ours | {"GPUWARDEN_EXPORTER_AMD": "off", "GPUWARDEN_EXPORTER_INTEL": "off"} | more


@contextmanager
def running(house: Path, *arguments: object, env: dict[str, str]) -> Iterator[Exporter]:
    process = subprocess.Popen(
        command(house, *arguments), env=environment(**env), stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert process.stderr
        log: list[dict[str, Any]] = []
        while not log or log[-1]["event"] != "exporter ready":
            line = process.stderr.readline()
            assert line, (process.communicate(), log)
            log.append(json.loads(line))
        yield Exporter(process=process, port=log[-1]["port"], log=log)
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.fixture
def program(house: Path, driver: Driver) -> Iterator[Exporter]:
    """An exporter on the driver, without Docker."""
    with running(house, "--docker", "none", "--nvml", "on", env=driver.environment) as exporter:
        yield exporter


@pytest.fixture
def no_library(tmp_path: Path) -> dict[str, str]:
    """An environment in which the NVIDIA library cannot be loaded, even if it is installed."""
    folder = tmp_path / "no-library"
    folder.mkdir()
    (folder / LIBRARY).touch()
    return {"LD_LIBRARY_PATH": str(folder)}


def working(*pids: int, percent: int = 60, uuid: str = "GPU-0") -> Card:
    """A GPU on which each of these processes has worked until now."""
    now_us = time.monotonic_ns() // 1000
    return Card(
        uuid=uuid,
        utilization=percent * len(pids),
        used_bytes=GIB * len(pids),
        compute=dict.fromkeys(pids, GIB),
        samples=tuple(Sample(pid=pid, timestamp_us=now_us, sm=percent) for pid in pids),
    )


def resting(*pids: int, uuid: str = "GPU-0") -> Card:
    """A GPU on which each of these processes holds memory and does nothing."""
    return Card(uuid=uuid, used_bytes=GIB * len(pids), compute=dict.fromkeys(pids, GIB))


def idle_s(found: Scrape, name: str) -> float:
    """Seconds for which a container has been idle; -1 if unknown."""
    seconds = found("container_gpu_idle_seconds", container=name)
    return -1 if seconds is None else seconds


def idle_workers(found: Scrape) -> list[str]:
    return [name for name in ("w0", "w1") if idle_s(found, name) >= 0]


# Attribution


@pytest.mark.needs_compiler
def test_worker_is_busy_by_its_pid_then_idle(program: Exporter, driver: Driver, start_worker: StartWorker) -> None:
    pid = start_worker("w0").pid
    driver.answer(resting(pid))
    program.until(lambda at: at("container_gpu_utilization_ratio", container="w0") == 0)

    at_work = program.until(
        lambda at: at("container_gpu_utilization_ratio", container="w0", gpu="GPU-0") == 0.6,
        meanwhile=lambda: driver.answer(working(pid)),
    )
    driver.answer(resting(pid))
    idle = program.until(lambda at: idle_s(at, "w0") > 0.5)

    assert at_work("gpu_info", gpu="GPU-0", index="0", name="Test GPU", source="nvml") == 1
    assert at_work("container_gpu_idle_seconds", container="w0") == 0
    assert at_work("container_gpu_memory_bytes", container="w0", gpu="GPU-0") == GIB
    assert at_work("gpu_unlisted_utilization_ratio", gpu="GPU-0") == 0
    assert idle("container_gpu_utilization_ratio", container="w0", gpu="GPU-0") == 0
    assert (idle("container_gpu_busy_seconds_total", container="w0", gpu="GPU-0") or 0) > 0
    assert (idle("gpu_busy_seconds_total", gpu="GPU-0") or 0) > 0
    assert program.stop()[0] == {
        "event": "reading GPUs from the NVIDIA driver", "library": LIBRARY, "level": "info",
        "timestamp": program.log[0]["timestamp"],
    }  # fmt: skip


@pytest.mark.needs_compiler
@pytest.mark.behaviour("A19")
def test_unattributed_work_leaves_no_zero(program: Exporter, driver: Driver, start_worker: StartWorker) -> None:
    start_worker("w0")
    driver.answer(Card(utilization=70, used_bytes=5 * GIB))
    series = ("utilization_ratio", "memory_bytes", "memory_peak_bytes", "busy_seconds_total")

    hidden = program.until(lambda at: at("container_gpu_attribution_missing", container="w0") == 1)
    driver.answer(Card(used_bytes=5 * GIB))
    at_rest = program.until(lambda at: at("container_gpu_attribution_missing", container="w0") == 0)

    assert [hidden(f"container_gpu_{each}", container="w0") for each in series] == [None] * len(series)
    assert (hidden("gpu_unlisted_utilization_ratio"), hidden("gpu_unlisted_memory_bytes")) == (0.7, 5 * GIB)
    assert [at_rest(f"container_gpu_{each}", container="w0") for each in series] == [0] * len(series)


@pytest.mark.needs_compiler
def test_refused_gpu_is_counted_and_the_page_says_what_to_do(program: Exporter, driver: Driver) -> None:
    driver.answer(Card(), Card(uuid="GPU-1"), Card(uuid="GPU-2"))
    program.until(lambda at: at("gpu_utilization_ratio", gpu="GPU-2") == 0)
    refused = ("error 1 * 4", "error 2 nvmlDeviceGetMemoryInfo 999")
    driver.answer(Card(utilization=150), Card(uuid="GPU-1"), Card(uuid="GPU-2"), but=refused)
    counts: list[float] = []

    def counted(at: Scrape) -> bool:
        counts.append(at("gpu_unknown_samples_total", gpu="GPU-1", field="gpu", reason="no_permission") or 0.0)
        return counts[-1] >= 5

    found = program.until(counted)
    page = program.page("/")

    assert found("gpu_utilization_ratio", gpu="GPU-1") is None
    assert found("gpu_memory_used_bytes", gpu="GPU-1") is None
    assert found("gpu_unknown_samples_total", gpu="GPU-0", field="utilization", reason="impossible")
    assert found("gpu_unknown_samples_total", gpu="GPU-2", field="memory", reason="failed")
    assert found("gpu_unknown_samples_total", gpu="GPU-2", field="gpu") is None
    assert "unknown: GPU-0: utilisation: impossible utilisation: 150 %" in page
    assert "GPU-1: Insufficient Permissions: the exporter's user needs to open /dev/nvidiactl and /dev/nvidia*" in page
    assert "GPU-2: memory: Unknown Error" in page


@pytest.mark.needs_compiler
@pytest.mark.behaviour("A19")
def test_worker_on_an_instance_is_not_idle(program: Exporter, driver: Driver, start_worker: StartWorker) -> None:
    pid = start_worker("w0", env={"NVIDIA_VISIBLE_DEVICES": "MIG-a"}).pid
    parts = (
        Instance(uuid="MIG-a", gpu_instance=7, used_bytes=2 * GIB, compute={pid: GIB}),
        Instance(uuid="MIG-b", gpu_instance=8, number=1, compute={1: GIB}),
    )

    driver.answer(Card(mig=True, used_bytes=3 * GIB, instances=parts))
    found = program.until(lambda at: at("container_gpu_memory_bytes", container="w0") is not None)

    assert found("container_gpu_memory_bytes", container="w0", gpu="MIG-a") == GIB
    assert found("container_gpu_memory_bytes", container="w0", gpu="MIG-b") is None
    assert found("container_gpu_utilization_ratio", container="w0") is None
    assert found("container_gpu_idle_seconds", container="w0") is None
    assert found("container_unknown_samples_total", container="w0", field="gpu", reason="not_measured")
    assert found("gpu_mig_info", gpu="MIG-a", parent="GPU-0", gpu_instance="7", compute_instance="0") == 1
    assert found("gpu_info", gpu="MIG-a", index="0:0", source="nvml", attribution="none") == 1
    assert found("container_gpu_attribution_missing", container="w0", gpu="MIG-a") == 1
    assert found("container_gpu_attribution_missing", container="w0", gpu="MIG-b") is None
    assert found("gpu_unlisted_memory_bytes", gpu="MIG-a") == GIB
    assert found("gpu_utilization_ratio", gpu="MIG-a") is None


# Unknown values


@pytest.fixture
def two_workers(program: Exporter, driver: Driver, start_worker: StartWorker) -> tuple[int, int]:
    """The pids of workers w0 and w1. Each is measured idle on its own GPU."""
    pids = [start_worker(f"w{n}", env={"CUDA_VISIBLE_DEVICES": str(n)}).pid for n in (0, 1)]
    driver.answer(resting(pids[0]), resting(pids[1], uuid="GPU-1"))
    program.until(lambda at: idle_workers(at) == ["w0", "w1"])
    return pids[0], pids[1]


@pytest.mark.needs_compiler
@pytest.mark.parametrize("listed", [True, False], ids=["reported as lost", "not listed"])
def test_lost_time_is_published_for_the_gpu_and_its_container(
    program: Exporter, driver: Driver, two_workers: tuple[int, int], *, listed: bool
) -> None:
    both = resting(two_workers[0]), resting(two_workers[1], uuid="GPU-1")
    lost_for = partial(program.until, lambda at: (at("container_gpu_lost_seconds", container="w1") or 0) >= 2)

    driver.answer(*(both if listed else both[:1]), but=("error 1 * 15",) if listed else ())
    lost = lost_for()
    driver.answer(*both)
    back = program.until(lambda at: idle_workers(at) == ["w0", "w1"])

    assert (lost("gpu_lost_seconds", gpu="GPU-1") or 0) >= 2
    assert lost("gpu_lost_seconds", gpu="GPU-0") == 0
    assert lost("gpu_info", gpu="GPU-1", name="Test GPU") == 1
    assert lost("container_gpu_lost_seconds", container="w0") is None
    assert lost("container_gpu_idle_seconds", container="w1") is None
    assert back("gpu_lost_seconds", gpu="GPU-1") == 0
    assert back("container_gpu_lost_seconds", container="w1") is None


@pytest.mark.needs_compiler
def test_reloaded_driver_is_read_again(program: Exporter, driver: Driver, two_workers: tuple[int, int]) -> None:
    both = resting(two_workers[0]), resting(two_workers[1], uuid="GPU-1")

    driver.answer(*both, but=("error - * 9",))
    gone = program.until(lambda at: not idle_workers(at))
    driver.answer(*both, session=2)
    program.until(lambda at: idle_workers(at) == ["w0", "w1"])

    assert gone("collector_success", collector="source_gpu") == 0
    assert gone("gpu_info") is None
    assert gone("worker_alive", worker="w0") == 1
    reasons = [(each["event"], each.get("reason")) for each in program.stop() if each.get("source") == "gpu"]
    assert reasons == [
        ("source failed", "the NVIDIA driver does not answer: Driver Not Loaded"),
        ("source answers again", None),
    ]


@pytest.mark.needs_compiler
def test_hanging_call_makes_the_gpus_unknown(house: Path, driver: Driver, start_worker: StartWorker) -> None:
    driver.answer(Card())
    with running(house, "--docker", "none", "--nvml-timeout-s", 3, env=driver.environment) as exporter:
        driver.answer(resting(start_worker("w0").pid))
        exporter.until(lambda at: idle_workers(at) == ["w0"])

        driver.answer(Card(), but=("hang - nvmlDeviceGetCount",))
        hung = exporter.until(lambda at: (at("driver_processes_killed_total") or 0) >= 1)
        driver.answer(Card())
        exporter.until(lambda at: idle_workers(at) == ["w0"])
        log = exporter.stop()

    assert hung("collector_success", collector="source_gpu") == 0
    assert hung("gpu_info") is None
    assert hung("container_gpu_idle_seconds", container="w0") is None
    assert hung("driver_processes_abandoned") == 0
    assert hung("collector_success", collector="sampler") == 1
    assert (hung("sample_age_seconds") or 0) < SNAPSHOT_FRESH_S
    assert hung("worker_alive", worker="w0") == 1
    assert hung("container_unknown_samples_total", container="w0", field="gpu", reason="source_failed")
    reasons = [each.get("reason", "") for each in log if each.get("source") == "gpu"]
    assert any(message.startswith("a call into the NVIDIA driver did not return within 3 s") for message in reasons)


@pytest.mark.needs_compiler
def test_hung_gpu_costs_one_deadline(house: Path, driver: Driver, start_worker: StartWorker) -> None:
    """Worker w0 has GPU-0, w1 has GPU-1, and w2 has both and works on the first."""
    answer_s = 5
    given = {"w0": "0", "w1": "1", "w2": "0,1"}
    pids = {name: start_worker(name, env={"CUDA_VISIBLE_DEVICES": gpus}).pid for name, gpus in given.items()}
    both = resting(pids["w0"], pids["w2"]), resting(pids["w1"], uuid="GPU-1")
    driver.answer(*both)
    with running(house, "--docker", "none", "--nvml-timeout-s", answer_s, env=driver.environment) as exporter:
        exporter.until(lambda at: idle_workers(at) == ["w0", "w1"] and idle_s(at, "w2") >= 0)

        driver.answer(*both, but=("hang 1 nvmlDeviceGetMemoryInfo",))
        exporter.until(lambda at: not idle_workers(at))
        began_s = time.monotonic()
        exporter.until(lambda at: idle_workers(at) == ["w0"])
        gap_s = time.monotonic() - began_s
        hung = exporter.until(lambda at: (at("container_gpu_idle_seconds", container="w0") or 0) >= 2 * answer_s)
        driver.answer(*both)
        back = exporter.until(lambda at: idle_workers(at) == ["w0", "w1"] and idle_s(at, "w2") >= 0, within_s=30)

    assert gap_s < 2 * answer_s
    assert idle_workers(hung) == ["w0"]
    assert idle_s(hung, "w2") == -1
    assert hung("gpu_utilization_ratio", gpu="GPU-0") == 0
    assert hung("gpu_utilization_ratio", gpu="GPU-1") is None
    assert hung("gpu_info", gpu="GPU-1", name="Test GPU") == 1
    assert hung("gpu_lost_seconds", gpu="GPU-1") is None
    assert hung("gpu_unknown_samples_total", gpu="GPU-1", field="gpu", reason="hung")
    assert hung("container_gpu_memory_bytes", container="w1") is None
    assert hung("container_gpu_memory_bytes", container="w2", gpu="GPU-0") == GIB
    assert hung("container_gpu_memory_bytes", container="w2", gpu="GPU-1") is None
    assert hung("container_gpu_lost_seconds", container="w1") is None
    assert hung("container_no_progress_seconds", container="w1") is None
    assert hung("container_no_progress_seconds", container="w0") is not None
    assert hung("container_unknown_samples_total", container="w1", field="gpu", reason="hung")
    assert hung("collector_success", collector="source_gpu") == 1
    assert hung("driver_processes_killed_total") == 1
    assert back("gpu_lost_seconds", gpu="GPU-1") == 0


@pytest.mark.needs_compiler
def test_late_answer_of_the_driver_has_its_time(house: Path, driver: Driver) -> None:
    slow_s = supervisor.WAIT_S + 0.1
    driver.answer(Card(), but=(f"slow 0 nvmlDeviceGetMemoryInfo {slow_s * 1000:.0f}",))
    took_s: list[float | None] = []
    asked_ago_s: list[float] = []
    asked_unix_s: set[float | None] = set()

    with running(house, "--docker", "none", env=driver.environment) as exporter:

        def has_three(at: Scrape) -> bool:
            if at("collector_success", collector="source_gpu") == 1:
                asked_unix_s.add(at("collector_last_success_timestamp_seconds", collector="source_gpu"))
                took_s.append(at("collector_duration_seconds", collector="source_gpu"))
                asked_ago_s.append(time.time() - max(each or 0.0 for each in asked_unix_s))
            return len(asked_unix_s) == 3

        exporter.until(has_three)

    assert min(each or 0.0 for each in took_s) >= slow_s
    assert min(asked_ago_s) >= slow_s - CLOCK_DRIFT_S


@pytest.mark.needs_compiler
def test_hung_driver_does_not_slow_samples(house: Path, driver: Driver) -> None:
    driver.answer(Card())
    with running(house, "--docker", "none", "--nvml-timeout-s", 6, env=driver.environment) as exporter:
        exporter.until(lambda at: at("gpu_info") == 1)
        driver.answer(Card(), but=("hang - nvmlDeviceGetCount",))
        exporter.until(lambda at: at("collector_success", collector="source_gpu") == 0)
        ages_s: list[float] = []

        def is_killed(at: Scrape) -> bool:
            ages_s.append(at("sample_age_seconds") or 0.0)
            return (at("driver_processes_killed_total") or 0) >= 1

        exporter.until(is_killed)

    # The median: a busy machine may delay a single sample. If samples waited for the driver, all were late.
    assert statistics.median(ages_s) < 1.0


@pytest.mark.needs_compiler
@pytest.mark.parametrize("but", [(), ("hang 0 nvmlDeviceGetUtilizationRates",)], ids=["idle", "in a hanging call"])
def test_killed_exporter_leaves_no_process(but: tuple[str, ...], program: Exporter, driver: Driver) -> None:
    driver.answer(Card())
    program.until(lambda at: at("gpu_info") == 1)
    (child,) = processes.process_tree(program.process.pid) - {program.process.pid}
    driver.answer(Card(), but=but)
    program.until(lambda at: at("gpu_info") == (None if but else 1))

    program.process.kill()
    program.process.communicate()

    assert eventually(lambda: not (procfs.PROC / str(child)).exists())


# Selection of the source


def run(house: Path, *arguments: object, env: dict[str, str]) -> tuple[int, str]:
    """Exit status and standard error of an exporter that ends."""
    done = subprocess.run(
        command(house, "--docker", "none", *arguments),
        env=environment(**env), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_missing_required_library_ends_the_program(house: Path, no_library: dict[str, str]) -> None:
    status, error = run(house, "--nvml", "on", env=no_library)

    assert status == 1
    assert error.startswith(f"gpuwarden exporter: {LIBRARY} cannot be loaded (")
    assert "install the NVIDIA driver" in error
    assert "--nvml off" in error
    assert error.count("\n") == 1


def test_two_gpu_sources_conflict(house: Path, tmp_path: Path) -> None:
    status, error = run(house, "--nvml", "on", "--simulate-gpu", tmp_path / "gpus.json", env={})

    assert status == 2
    assert "--nvml on conflicts with --simulate-gpu" in error


def test_no_gpus_without_the_library(house: Path, no_library: dict[str, str]) -> None:
    with running(house, "--docker", "none", env=no_library) as exporter:
        found = exporter.until(lambda at: at("workers_duplicate") == 0)
        log = exporter.stop()

    assert found("gpu_info") is None
    assert found("collector_success", collector="source_gpu") is None
    assert (log[0]["event"], log[0]["reason"].partition(" (")[0]) == (
        "no NVIDIA GPUs are read",
        f"{LIBRARY} cannot be loaded",
    )


@pytest.mark.needs_compiler
@pytest.mark.parametrize(
    ("arguments", "uuid", "event"),
    [
        pytest.param([], "GPU-0", "reading GPUs from the NVIDIA driver", id="auto with the library"),
        pytest.param(["--nvml", "on"], "GPU-0", "reading GPUs from the NVIDIA driver", id="on"),
        pytest.param(["--nvml", "off"], None, "no NVIDIA GPUs are read", id="off"),
        pytest.param(["--simulate-gpu"], "GPU-sim-0", "reading simulated GPUs", id="simulation overrides auto"),
    ],
)
def test_gpu_source_is_selected_and_logged(
    arguments: list[str], uuid: str | None, event: str, house: Path, driver: Driver, tmp_path: Path
) -> None:
    driver.answer(Card())
    simulation = tmp_path / "gpus.json"
    simulation.write_text(json.dumps({"gpus": [{"uuid": "GPU-sim-0", "index": 0}]}))
    more = [simulation] if arguments == ["--simulate-gpu"] else []

    with running(house, "--docker", "none", *arguments, *more, env=driver.environment) as exporter:
        found = exporter.until(lambda at: at("workers_duplicate") == 0)
        log = exporter.stop()

    assert log[0]["event"] == event
    assert [gpu for gpu in ("GPU-0", "GPU-sim-0") if found("gpu_info", gpu=gpu) == 1] == ([uuid] if uuid else [])


# A real GPU

CUDA_WORKER: Final = """
import ctypes, sys
from pathlib import Path
from gpuwarden.reporter import Reporter
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    if getattr(cuda, name)(*arguments):
        raise SystemExit(f"{name} failed")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
words = 2**28
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * words))
with Reporter(Path(sys.argv[1]), worker="w0", queue="gpu", subdirectory="w0", heartbeat_s=0.05):
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            call("cuMemsetD32_v2", memory, 1, ctypes.c_size_t(words))
            call("cuCtxSynchronize")
        print("done", flush=True)
"""
"""Holds 1 GiB of the first GPU, and fills it as often as each line of standard input says."""

FILLS: Final = 20_000
"""Some seconds of work."""


@pytest.fixture
def cuda_worker(house: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CUDA_WORKER, str(house)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def nvidia_smi(query: str) -> list[list[str]]:
    """The output of nvidia-smi: a list of fields per row."""
    asked = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60, check=True
    )
    return [[field.strip() for field in row] for row in csv.reader(asked.stdout.splitlines())]


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi on PATH: no NVIDIA driver")
def test_real_gpu_is_published_as_nvidia_smi_reports_it(house: Path, cuda_worker: subprocess.Popen[str]) -> None:
    with running(house, "--docker", "none", "--nvml", "on", "--sample-interval-s", 1, env={}) as exporter:
        found = exporter.until(lambda at: idle_s(at, "w0") > 0, within_s=30)
        smi = nvidia_smi("--query-gpu=uuid,index,name,memory.total,memory.used")
        apps = {
            (uuid, int(pid)): used for uuid, pid, used in nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
        }
        assert cuda_worker.stdin
        assert cuda_worker.stdout
        cuda_worker.stdin.write(f"{FILLS}\n")
        cuda_worker.stdin.flush()
        busy = exporter.until(
            lambda at: (at("container_gpu_utilization_ratio", container="w0") or 0) > 0.2, within_s=30
        )
        assert cuda_worker.stdout.readline() == "done\n"
        idle = exporter.until(lambda at: idle_s(at, "w0") > 3, within_s=30)

    for uuid, index, name, size_mib, used_mib in smi:
        assert found("gpu_info", gpu=uuid, index=index, name=name, source="nvml") == 1
        assert (found("gpu_memory_size_bytes", gpu=uuid) or 0) / 2**20 == pytest.approx(int(size_mib), abs=1)
        assert (found("gpu_memory_used_bytes", gpu=uuid) or 0) / 2**20 == pytest.approx(int(used_mib), abs=64)
    (own,) = (uuid for uuid, pid in apps if pid == cuda_worker.pid)
    held_bytes = found("container_gpu_memory_bytes", container="w0", gpu=own) or 0
    assert held_bytes / 2**20 == pytest.approx(int(apps[own, cuda_worker.pid]), abs=1)
    assert idle_s(busy, "w0") <= 0
    assert idle("container_gpu_utilization_ratio", container="w0", gpu=own) == 0
