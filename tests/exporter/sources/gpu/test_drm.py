"""AMD and Intel GPUs from folders like those of the kernel: their processes and values."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from exporter.model.gpu import STALL_METRICS, Gpu, GpuFigures
from exporter.sources.gpu.drm import clients, gpus, kfd
from exporter.sources.gpu.drm.gpus import AMD, INTEL, DrmGpus
from exporter.sources.gpu.isolated.protocol import HUNG, Question
from tests.exporter.sources.gpu import gpu_tree
from tests.exporter.sources.gpu.gpu_tree import Tree

AMD_PCI, SECOND_PCI, INTEL_PCI = "0000:03:00.0", "0000:83:00.0", "0000:00:02.0"
AMD_ID, SECOND_ID = 51706, 4242
UNIQUE = 0x18B7_0C33_A1B2_C3D4
MIB = 2**20
S = 10**9


@dataclass
class Host:
    """A tree, its reader, and its clock, monotonic seconds."""

    tree: Tree
    source: DrmGpus
    clock: SimpleNamespace

    def look(self, question: Question | None = None, *, after_s: float = 1.0) -> dict[str, Gpu]:
        """One sample: the GPUs by their node."""
        self.clock.now_s += after_s
        return {gpu.node or "": gpu for gpu in self.source.read(question).gpus}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host without GPUs. Open files are devices by their names, since only root can make devices."""
    monkeypatch.setattr(clients, "is_device", lambda _: True)
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    tree = Tree(tmp_path)
    return Host(tree=tree, source=DrmGpus(AMD | INTEL, sys=tree.sys, proc=tree.proc), clock=clock)


def amd(host: Host, *, busy_percent: int = 0, vram: tuple[int, int] = (3 * MIB, 16 * MIB)) -> Path:
    """An AMD GPU with a compute driver, renderD128."""
    host.tree.node(0, gpu_id=0)
    host.tree.node(1, gpu_id=AMD_ID, minor=128, unique_id=UNIQUE)
    return host.tree.gpu(128, AMD_PCI, "amdgpu", busy_percent=busy_percent, vram=vram)


def computes(
    host: Host, pid: int = 4001, *, vram_bytes: int = MIB, queues: int = 1, occupied: int | None = None
) -> Path:
    """A process that computes on it and has it open."""
    (host.tree.proc / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
    return host.tree.computes(
        pid,
        vram={AMD_ID: vram_bytes},
        queues=dict.fromkeys(range(queues), AMD_ID),
        occupied=None if occupied is None else {AMD_ID: occupied},
    )


def renders(host: Host, pid: int, text: str, *, number: int = 5, node: str = "renderD128") -> None:
    """A process that has a GPU open."""
    host.tree.opens(pid, {0: ("/dev/null", "pos:\t0"), number: (f"/dev/dri/{node}", text)})


def on(gpu: Gpu) -> dict[int, tuple[float | None, int | None]]:
    """The processes of a GPU: utilisation and memory by pid."""
    return {each.pid: (each.utilization_ratio, each.memory_bytes) for each in gpu.processes or ()}


def test_amd_gpu_has_the_unique_id_of_its_chip(host: Host) -> None:
    sensors(amd(host, busy_percent=37))

    gpu = host.look()["renderD128"]

    assert gpu == Gpu(
        uuid="GPU-18b70c33a1b2c3d4", index=0, name="navi31", utilization_ratio=0.37, memory_used_bytes=3 * MIB,
        memory_size_bytes=16 * MIB, memory_free_bytes=13 * MIB, processes=(), source="amdgpu", node="renderD128",
        other_names=(AMD_PCI, "card0"), attribution="device",
        figures=GpuFigures(temperature_celsius=61.0, power_watts=310.25, power_limit_watts=355.0),
    )  # fmt: skip


def unknown_required(gpu: Gpu) -> dict[str, str]:
    """The unknown values which a rule needs, and the reasons."""
    return {figure: reason for figure, reason in gpu.figures.unknown.items() if figure in STALL_METRICS}


@pytest.mark.parametrize(
    ("file", "figure"),
    [
        ("gpu_busy_percent", "utilization"), ("mem_info_vram_used", "memory"), ("mem_info_vram_total", "memory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(None, "not_supported", id="no such file"),
        pytest.param("?", "unreadable", id="half written"),
    ],
)
def test_missing_amd_values_are_counted(file: str, figure: str, text: str | None, reason: str, host: Host) -> None:
    folder = amd(host)
    if text is None:
        (folder / file).unlink()
    else:
        host.tree.write(folder / file, text)

    assert unknown_required(host.look()["renderD128"]) == {figure: reason}


def test_missing_values_of_a_sleeping_amd_gpu_have_the_reason_asleep(host: Host) -> None:
    folder = amd(host)
    host.tree.write(folder / "power/runtime_status", "suspended")
    host.tree.write(folder / "mem_info_vram_used", "?")

    gpu = host.look()["renderD128"]

    assert (gpu.utilization_ratio, gpu.memory_used_bytes) == (0.0, None)
    assert unknown_required(gpu) == {"memory": "asleep"}


def sensors(folder: Path, **values: object) -> None:
    """The sensors of an AMD GPU; `None` removes one."""
    usual = {"temp1_input": 61_000, "power1_average": 310_250_000, "power1_cap": 355_000_000}
    for name, value in {**usual, **values}.items():
        if value is not None:
            Tree.write(folder / "hwmon/hwmon4" / name, value)


@pytest.mark.parametrize(
    ("values", "figures"),
    [
        pytest.param({"power1_average": None, "power1_input": 9_500_000}, (61.0, 9.5, 355.0), id="current power"),
        pytest.param({"power1_input": 9_500_000}, (61.0, 310.25, 355.0), id="average and current power"),
        pytest.param({"temp1_input": None}, (None, 310.25, 355.0), id="no sensor"),
        pytest.param({"temp1_input": None, "temp2_input": 58_000}, (58.0, 310.25, 355.0), id="MI300: junction alone"),
        pytest.param({"temp2_input": 70_000}, (61.0, 310.25, 355.0), id="edge before junction"),
        pytest.param({"power1_cap": "?"}, (61.0, 310.25, None), id="half written"),
        pytest.param({"temp1_input": 511_000}, (None, 310.25, 355.0), id="too hot for any GPU"),
        pytest.param({"power1_average": -1}, (61.0, None, 355.0), id="negative power"),
    ],
)
def test_each_amd_sensor_is_read_alone(
    host: Host, values: dict[str, object], figures: tuple[float | None, ...]
) -> None:
    sensors(amd(host), **values)

    found = host.look()["renderD128"].figures

    assert (found.temperature_celsius, found.power_watts, found.power_limit_watts) == figures
    names = ("temperature_celsius", "power_watts", "power_limit_watts")
    assert found.unknown == {name: "unreadable" for name, value in zip(names, figures, strict=True) if value is None}


def test_sleeping_gpu_is_not_woken_for_its_sensors(host: Host) -> None:
    folder = amd(host)
    sensors(folder)
    host.tree.write(folder / "power/runtime_status", "suspended")

    assert host.look()["renderD128"].figures == GpuFigures()


def test_gpu_has_the_names_of_its_node_and_pci_address(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    amd(host)

    names = {node: gpu.names for node, gpu in host.look().items()}

    assert names == {
        "renderD128": ("GPU-18b70c33a1b2c3d4", "renderD128", AMD_PCI, "card0"),
        "renderD130": (f"pci-{INTEL_PCI}", "renderD130", INTEL_PCI, "card2"),
    }


def test_gpus_are_numbered_as_by_amds_runtime_with_other_gpus_last(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    host.tree.node(1, gpu_id=AMD_ID, minor=129)
    host.tree.gpu(128, SECOND_PCI, "amdgpu", busy_percent=0)
    host.tree.node(2, gpu_id=SECOND_ID, minor=128)
    host.tree.gpu(129, AMD_PCI, "amdgpu", busy_percent=0)
    host.tree.gpu(131, "0000:01:00.0", "nvidia")

    found = host.look()

    assert [(gpu.index, gpu.uuid, gpu.source) for gpu in found.values()] == [
        (0, f"pci-{AMD_PCI}", "amdgpu"), (1, f"pci-{SECOND_PCI}", "amdgpu"), (2, f"pci-{INTEL_PCI}", "i915"),
    ]  # fmt: skip


def test_gpu_has_its_product_name_or_its_pci_ids(host: Host) -> None:
    host.tree.write(amd(host) / "product_name", "AMD Instinct MI300X")
    host.tree.gpu(130, INTEL_PCI, "xe")

    assert {node: gpu.name for node, gpu in host.look().items()} == {
        "renderD128": "AMD Instinct MI300X",
        "renderD130": "PCI 8086:744c",
    }


@pytest.mark.behaviour("A19")
@pytest.mark.parametrize(
    ("busy_percent", "queues", "occupied", "ratio"),
    [
        pytest.param(93, 1, None, None, id="busy GPU with a queue: unattributed"),
        pytest.param(93, 1, 0, None, id="no wave now"),
        pytest.param(93, 1, 40, None, id="waves now"),
        pytest.param(93, 0, None, 0.0, id="no queue"),
        pytest.param(0, 1, 0, 0.0, id="idle GPU without waves"),
        pytest.param(0, 1, 1, None, id="0 % with a wave"),
        pytest.param(0, 1, None, None, id="0 %, never another value"),
    ],
)
def test_compute_use_of_a_process(
    busy_percent: int, queues: int, occupied: int | None, ratio: float | None, host: Host
) -> None:
    amd(host, busy_percent=busy_percent)
    computes(host, queues=queues, occupied=occupied)

    gpu = host.look()["renderD128"]

    assert on(gpu) == {4001: (ratio, MIB)}
    assert gpu.unknown == (gpus.COMPUTE_NOT_REPORTED if ratio is None else None)


def test_zero_counts_after_the_value_has_changed(host: Host) -> None:
    folder = amd(host, busy_percent=90)
    process = computes(host)
    busy = host.look()["renderD128"]
    host.tree.write(folder / "gpu_busy_percent", 0)

    idle = host.look()["renderD128"]

    assert (on(busy), on(idle)) == ({4001: (None, MIB)}, {4001: (0.0, MIB)})
    assert process.exists()


def test_value_that_changed_without_compute_processes_proves_nothing(host: Host) -> None:
    folder = amd(host, busy_percent=90)
    host.look()
    host.tree.write(folder / "gpu_busy_percent", 0)
    computes(host)

    assert on(host.look()["renderD128"]) == {4001: (None, MIB)}


def test_process_is_on_the_gpus_with_its_memory_or_queues(host: Host) -> None:
    amd(host, busy_percent=50)
    host.tree.node(2, gpu_id=SECOND_ID, minor=129)
    host.tree.gpu(129, SECOND_PCI, "amdgpu", busy_percent=50)
    for pid in (1, 2, 3):
        (host.tree.proc / str(pid) / "fd").mkdir(parents=True)
    host.tree.computes(1, vram={AMD_ID: MIB, SECOND_ID: 0}, queues={0: AMD_ID})
    host.tree.computes(2, vram={AMD_ID: 0, SECOND_ID: 0}, queues={0: SECOND_ID})
    host.tree.computes(3, vram={AMD_ID: 0, SECOND_ID: 5}, queues={})

    found = host.look()

    assert on(found["renderD128"]) == {1: (None, MIB)}
    assert on(found["renderD129"]) == {2: (None, 0), 3: (0.0, 5)}


def test_ended_queue_is_dropped_and_its_reused_number_is_read_again(host: Host) -> None:
    amd(host, busy_percent=50)
    host.tree.node(2, gpu_id=SECOND_ID, minor=129)
    host.tree.gpu(129, SECOND_PCI, "amdgpu", busy_percent=50)
    process = computes(host)
    host.look()
    (process / "queues/0").rename(process / "old")  # The kernel does not reuse the number of an existing folder.
    host.tree.computes(4001, vram={AMD_ID: MIB, SECOND_ID: 0}, queues={0: SECOND_ID})

    found = host.look()

    assert on(found["renderD128"]) == {4001: (0.0, MIB)}
    assert on(found["renderD129"]) == {4001: (None, 0)}


def test_graphics_use_is_measured_by_engine_time(host: Host) -> None:
    amd(host, busy_percent=30)
    renders(host, 4001, gpu_tree.amdgpu(AMD_PCI, gfx=5 * S, vram_kib=2048))
    host.look()
    renders(host, 4001, gpu_tree.amdgpu(AMD_PCI, gfx=5 * S + S // 4, dec=S // 2, vram_kib=2048))

    gpu = host.look()["renderD128"]

    assert (on(gpu), gpu.unknown) == ({4001: (0.5, 2 * MIB)}, None)


def test_compute_use_is_unknown_even_if_graphics_use_is_known(host: Host) -> None:
    amd(host, busy_percent=30)
    computes(host, vram_bytes=5 * MIB)
    renders(host, 4001, gpu_tree.amdgpu(AMD_PCI, vram_kib=6 * 1024))

    assert on(host.look()["renderD128"]) == {4001: (None, 6 * MIB)}, "the greater of two values for the same memory"


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("gpu_busy_percent", "utilization_ratio"),
        ("mem_info_vram_used", "memory_used_bytes"),
        ("mem_info_vram_total", "memory_size_bytes"),
    ],
)
@pytest.mark.parametrize("text", ["", "12 %\n", "half a li", None])
def test_unreadable_file_makes_only_its_value_unknown(name: str, figure: str, text: str | None, host: Host) -> None:
    folder = amd(host, busy_percent=37)
    (folder / name).unlink() if text is None else (folder / name).write_text(text)

    gpu = host.look()["renderD128"]

    figures = {"utilization_ratio": 0.37, "memory_used_bytes": 3 * MIB, "memory_size_bytes": 16 * MIB}
    assert {each: getattr(gpu, each) for each in figures} == {**figures, figure: None}
    assert (gpu.memory_free_bytes is None) == (figure != "utilization_ratio")


@pytest.mark.parametrize("percent", [-1, 101])
def test_utilisation_over_100_percent_is_unknown(percent: int, host: Host) -> None:
    amd(host, busy_percent=percent)

    assert host.look()["renderD128"].utilization_ratio is None


def test_process_is_not_on_a_gpu_that_it_may_not_use(host: Host) -> None:
    amd(host, busy_percent=50)
    host.tree.node(2, gpu_id=SECOND_ID, minor=129)
    host.tree.gpu(129, SECOND_PCI, "amdgpu", busy_percent=50)
    computes(host)

    found = host.look()

    assert (on(found["renderD128"]), on(found["renderD129"])) == ({4001: (None, MIB)}, {})


def test_suspended_gpu_is_idle_and_is_not_woken(host: Host) -> None:
    folder = amd(host)
    host.tree.write(folder / "power/runtime_status", "suspended")
    (folder / "gpu_busy_percent").unlink()
    arc = host.tree.gpu(130, INTEL_PCI, "xe", status="suspended")
    renders(host, 4001, gpu_tree.xe(INTEL_PCI, cycles=5), node="renderD130")
    (host.tree.proc / "4001/fdinfo/5").unlink()
    assert arc.exists()

    found = host.look()

    assert (found["renderD128"].utilization_ratio, found["renderD130"].utilization_ratio) == (0.0, 0.0)
    assert on(found["renderD130"]) == {4001: (0.0, None)}


def test_partitions_of_a_gpu_are_separate_and_have_no_values_of_the_whole(host: Host) -> None:
    amd(host, busy_percent=50)
    host.tree.node(2, gpu_id=SECOND_ID, minor=129, unique_id=UNIQUE)
    host.tree.gpu(129, AMD_PCI, "amdgpu")
    computes(host)
    computes(host, 4002, queues=0)

    found = host.look()

    assert [gpu.uuid for gpu in found.values()] == [
        "GPU-18b70c33a1b2c3d4/renderD128", "GPU-18b70c33a1b2c3d4/renderD129",
    ]  # fmt: skip
    assert [(gpu.utilization_ratio, gpu.memory_used_bytes, gpu.unknown) for gpu in found.values()] == [
        (None, None, gpus.PARTITIONED),
    ] * 2
    assert {gpu.attribution for gpu in found.values()} == {"none"}
    assert (on(found["renderD128"]), on(found["renderD129"])) == ({4001: (None, MIB), 4002: (None, MIB)}, {})


@pytest.mark.parametrize("file", ["topology/nodes/1/properties", "topology/nodes/1/gpu_id", "topology/generation_id"])
def test_half_written_topology_makes_processes_unknown_and_is_read_again(file: str, host: Host) -> None:
    amd(host, busy_percent=50)
    computes(host)
    broken = host.tree.sys / "class/kfd/kfd" / file
    whole = broken.read_bytes()
    broken.write_bytes(b"\xff")

    unknown = host.look()["renderD128"]
    broken.write_bytes(whole)
    known = host.look()["renderD128"]

    assert (unknown.processes, unknown.unknown) == (None, gpus.COMPUTE_UNREAD)
    assert unknown_required(unknown) == {"processes": "unreadable"}
    assert on(known) == {4001: (None, MIB)}
    assert unknown_required(known) == {}


@pytest.mark.parametrize("folder", ["proc", "topology/nodes"])
def test_unreadable_list_is_not_empty(folder: str, host: Host) -> None:
    amd(host)
    shutil.rmtree(host.tree.sys / "class/kfd/kfd" / folder)

    assert host.look()["renderD128"].processes is None


def test_unreadable_values_of_a_process_are_unknown(host: Host) -> None:
    amd(host, busy_percent=50)
    process = computes(host)
    host.tree.write(process / f"vram_{AMD_ID}", "?")
    host.tree.write(process / "queues/0/gpuid", "?")

    assert on(host.look()["renderD128"]) == {4001: (None, None)}


def test_process_that_ends_during_the_read_is_left_out(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    amd(host, busy_percent=50)
    process = computes(host)
    computes(host, 4002)
    scandir = os.scandir

    def ends(path: str) -> object:
        if path == f"{process}/queues":
            shutil.rmtree(process)
            shutil.rmtree(host.tree.proc / "4001")
        return scandir(path)

    monkeypatch.setattr("exporter.sources.gpu.drm.kfd.os.scandir", ends)

    assert on(host.look()["renderD128"]) == {4002: (None, MIB)}


def test_intel_gpu_is_as_busy_as_its_clients_together(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI, client=1), node="renderD130")
    renders(host, 2, gpu_tree.i915(INTEL_PCI, client=2), node="card2")
    host.look()
    renders(host, 1, gpu_tree.i915(INTEL_PCI, client=1, render_ns=S // 4), node="renderD130")
    renders(host, 2, gpu_tree.i915(INTEL_PCI, client=2, render_ns=S // 4, video_ns=S), node="card2")

    gpu = host.look()["renderD130"]

    assert (gpu.utilization_ratio, gpu.unknown, gpu.attribution) == (0.5, None, "process")
    assert on(gpu) == {1: (0.25, 512 * MIB), 2: (0.5, 512 * MIB)}


def test_xe_is_measured_by_its_cycles(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "xe")
    renders(host, 1, gpu_tree.xe(INTEL_PCI, cycles=50, total=1000), node="renderD130")
    first = host.look()["renderD130"]
    renders(host, 1, gpu_tree.xe(INTEL_PCI, cycles=300, total=2000), node="renderD130")

    second = host.look()["renderD130"]

    assert (on(first), first.utilization_ratio) == ({1: (None, 23992 * 1024)}, None)
    assert (on(second), second.utilization_ratio) == ({1: (0.25, 23992 * 1024)}, 0.25)


def test_shared_client_counts_once_for_its_first_process(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    shared = gpu_tree.i915(INTEL_PCI, client=9, render_ns=0)
    host.tree.opens(20, {3: ("/dev/dri/renderD130", shared), 4: ("/dev/dri/renderD130", shared)})
    host.look()
    shared = gpu_tree.i915(INTEL_PCI, client=9, render_ns=S // 2)
    host.tree.opens(20, {3: ("/dev/dri/renderD130", shared), 4: ("/dev/dri/renderD130", shared)})
    host.tree.opens(10, {3: ("/dev/dri/renderD130", shared)})

    gpu = host.look()["renderD130"]

    assert on(gpu) == {10: (0.0, 0), 20: (0.5, 512 * MIB)}
    assert gpu.utilization_ratio == 0.5


def test_clients_with_the_same_number_on_two_gpus_are_separate(host: Host) -> None:
    host.tree.gpu(128, AMD_PCI, "i915")
    host.tree.gpu(130, INTEL_PCI, "i915")
    host.tree.opens(
        1, {3: ("/dev/dri/renderD128", gpu_tree.i915(AMD_PCI)), 4: ("/dev/dri/renderD130", gpu_tree.i915(INTEL_PCI))}
    )
    host.look()
    host.tree.opens(1, {3: ("/dev/dri/renderD128", gpu_tree.i915(AMD_PCI, render_ns=S // 2))})

    found = host.look()

    assert (on(found["renderD128"]), on(found["renderD130"])) == ({1: (0.5, 512 * MIB)}, {1: (0.0, 512 * MIB)})


def test_renamed_device_in_a_container_is_matched_by_its_pci_address(host: Host) -> None:
    host.tree.gpu(128, AMD_PCI, "i915")
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI), node="renderD128")

    found = host.look()

    assert (on(found["renderD128"]), on(found["renderD130"])) == ({}, {1: (0.0, 512 * MIB)})


@pytest.mark.parametrize("node", ["renderD130", "card2"])
def test_client_without_driver_values_makes_the_gpu_unknown(node: str, host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, "pos:\t0\nflags:\t0100002\n", node=node)

    gpu = host.look()["renderD130"]

    assert (on(gpu), gpu.utilization_ratio, gpu.unknown) == ({1: (None, None)}, None, gpus.CLIENTS_NOT_REPORTED)
    assert unknown_required(gpu) == {"utilization": "not_told"}


def test_client_that_closes_its_file_during_the_read_is_left_out(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI), node="renderD130")
    (host.tree.proc / "1/fdinfo/5").unlink()

    gpu = host.look()["renderD130"]

    assert (on(gpu), gpu.utilization_ratio) == ({}, 0.0)


def test_reused_file_number_is_not_a_client(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    for pid in range(clients.RELIST_LOOKS):  # At most one of them is listed again in the next sample.
        host.tree.opens(pid + 1, {5: ("/dev/dri/renderD130", gpu_tree.i915(INTEL_PCI, client=pid))})
    host.look()
    for pid in range(clients.RELIST_LOOKS):
        host.tree.opens(pid + 1, {5: ("/var/log/a", "pos:\t0\nflags:\t0100002")})

    gpu = host.look()["renderD130"]

    assert (on(gpu), gpu.unknown) == ({}, None)


def test_file_with_the_name_of_a_gpu_is_not_a_client(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    amd(host)
    monkeypatch.undo()  # The real check finds no device.
    for node in ("renderD130", "renderD128"):
        renders(host, 1, "pos:\t0\nflags:\t0100002\n", node=node)

    found = host.source.read().gpus

    assert [(gpu.utilization_ratio, gpu.unknown, gpu.processes) for gpu in found] == [(0.0, None, ())] * 2


def test_device_is_recognized_by_its_number_if_opened_for_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "renderD128").touch()
    assert [clients.is_device(str(each)) for each in (tmp_path / "renderD128", "/dev/null", tmp_path / "gone")] == [
        False
    ] * 3
    monkeypatch.setattr(clients, "MAJOR", 1)  # The major number of /dev/null.
    monkeypatch.setattr(clients, "DEVICES", "/dev/")
    opened = [os.open("/dev/null", flags) for flags in (os.O_RDONLY, os.O_WRONLY, os.O_PATH)]

    nodes = [clients.Clients()._node(os.getpid(), str(each)) for each in opened]

    assert nodes == ["null", "null", None]
    for each in opened:
        os.close(each)


def test_too_many_open_files_make_the_gpu_unknown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FILES_MAX", 8)
    host.tree.gpu(130, INTEL_PCI, "i915")
    host.tree.opens(1, dict.fromkeys(range(8), ("/dev/null", "pos:\t0")))
    few = host.look()["renderD130"]
    host.tree.opens(2, dict.fromkeys(range(9), ("/dev/null", "pos:\t0")))

    many = host.look()["renderD130"]

    assert (few.utilization_ratio, many.utilization_ratio) == (0.0, None)
    assert many.unknown == gpus.UNLISTED.format(count=1)


def test_late_process_is_unknown_for_one_sample(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI, render_ns=90 * S), node="renderD130")
    host.look()
    with monkeypatch.context() as patch:
        patch.setattr(clients, "LOOK_S", -1.0)
        host.tree.opens(2, {0: ("/dev/null", "pos:\t0")})
        late = host.look()["renderD130"]
    renders(host, 1, gpu_tree.i915(INTEL_PCI, render_ns=90 * S + S // 2), node="renderD130")

    again = host.look()["renderD130"]

    assert (on(late), late.unknown) == ({1: (None, None)}, gpus.UNLISTED.format(count=2))
    assert (on(again), again.unknown) == ({1: (0.25, 512 * MIB)}, None)


def test_client_after_a_thousand_locks_is_unknown(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    locks = "".join(f"lock:\t{each}: POSIX  ADVISORY  WRITE 4242 00:05:685 {each} {each}\n" for each in range(1000))
    renders(host, 1, locks + gpu_tree.i915(INTEL_PCI), node="renderD130")

    gpu = host.look()["renderD130"]

    assert (gpu.utilization_ratio, gpu.unknown) == (None, gpus.UNLISTED.format(count=1))


def test_process_on_another_gpu_is_seen_at_once_by_queue_and_soon_by_memory(host: Host) -> None:
    amd(host, busy_percent=50)
    host.tree.node(2, gpu_id=SECOND_ID, minor=129)
    host.tree.gpu(129, SECOND_PCI, "amdgpu", busy_percent=50)
    for pid in (3, 4):  # Their turn is not the next sample.
        (host.tree.proc / str(pid) / "fd").mkdir(parents=True)
        host.tree.computes(pid, vram={AMD_ID: MIB, SECOND_ID: 0}, queues={0: AMD_ID})
    host.look()
    host.tree.computes(3, vram={AMD_ID: MIB, SECOND_ID: 5}, queues={1: SECOND_ID})
    host.tree.computes(4, vram={AMD_ID: MIB, SECOND_ID: 5}, queues={})

    seen = [on(host.look()["renderD129"]) for _ in range(kfd.RELIST_LOOKS)]

    assert seen[0] == {3: (None, 5)}
    assert seen[-1] == {3: (None, 5), 4: (0.0, 5)}


def test_unreadable_process_makes_intel_gpus_unknown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI), node="renderD130")
    amd(host, busy_percent=0)
    computes(host, 2, queues=0)
    forbid(monkeypatch, host.tree.proc / "2/fd")

    found = host.look()

    assert found["renderD130"].utilization_ratio is None
    assert found["renderD130"].unknown == gpus.UNLISTED.format(count=1)
    assert on(found["renderD130"]) == {1: (0.0, 512 * MIB)}
    assert (on(found["renderD128"]), found["renderD128"].unknown) == ({2: (None, MIB)}, gpus.UNLISTED.format(count=1))
    assert unknown_required(found["renderD130"]) == {"utilization": "unlisted"}
    assert unknown_required(found["renderD128"]) == {"process_utilization": "unlisted"}


def test_unreadable_client_does_not_count_as_closed(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI), node="renderD130")
    (host.tree.proc / "1/fdinfo/5").unlink()
    (host.tree.proc / "1/fdinfo/5").mkdir()  # Root can read any other file.

    gpu = host.look()["renderD130"]

    assert (gpu.utilization_ratio, gpu.unknown) == (None, gpus.UNLISTED.format(count=1))


def test_process_that_may_use_a_gpu_is_named_by_pid(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.tree.opens(2, {0: ("/dev/null", "pos:\t0")})
    with monkeypatch.context() as patch:
        patch.setattr(clients, "LOOK_S", -1.0)
        without = host.source.read().unlisted
        amd(host)
        missed = host.source.read().unlisted

    assert (without, missed, host.source.read().unlisted) == ((), (2,), ())


def test_process_that_is_readable_again_is_listed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI), node="renderD130")
    with monkeypatch.context() as patch:
        forbid(patch, host.tree.proc / "1/fd")
        host.look()

    found = [host.look()["renderD130"].utilization_ratio for _ in range(clients.RELIST_LOOKS)]

    assert found[-1] == 0.0


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The kernel's answer to a process without the right to trace (ptrace(2)). Root may list every folder."""
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("exporter.sources.gpu.drm.clients.os.scandir", refuse)


def test_late_opener_is_seen_within_a_few_samples_and_a_new_process_at_once(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    host.tree.opens(1, {0: ("/dev/null", "pos:\t0")})
    host.look()
    renders(host, 1, gpu_tree.i915(INTEL_PCI, client=1), node="renderD130")
    renders(host, 2, gpu_tree.i915(INTEL_PCI, client=2), node="renderD130")

    seen = [set(on(host.look()["renderD130"])) for _ in range(clients.RELIST_LOOKS)]

    assert seen[0] >= {2}
    assert seen[-1] == {1, 2}


def test_new_client_did_all_its_work_since_the_last_sample(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    host.look()
    renders(host, 1, gpu_tree.i915(INTEL_PCI, render_ns=S // 2), node="renderD130")

    assert on(host.look()["renderD130"]) == {1: (0.5, 512 * MIB)}


def test_client_with_work_before_the_first_sample_is_unknown_until_the_next(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI, render_ns=90 * S), node="renderD130")

    looks = [on(host.look()["renderD130"]) for _ in range(2)]

    assert looks == [{1: (None, 512 * MIB)}, {1: (0.0, 512 * MIB)}]


def test_reused_pid_has_no_work_of_the_earlier_process(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 1, gpu_tree.i915(INTEL_PCI, client=1, render_ns=5 * S), node="renderD130")
    host.look()
    shutil.rmtree(host.tree.proc / "1")
    renders(host, 1, gpu_tree.i915(INTEL_PCI, client=2, render_ns=0), node="renderD130")

    assert on(host.look()["renderD130"]) == {1: (0.0, 512 * MIB)}


def test_ended_processes_leave_no_state(host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    amd(host)
    for pid in range(1, 9):
        renders(host, pid, gpu_tree.i915(INTEL_PCI, client=pid), node="renderD130")
        computes(host, pid)
    host.look()
    shutil.rmtree(host.tree.proc)
    host.tree.proc.mkdir()
    for pid in range(1, 9):
        shutil.rmtree(host.tree.sys / "class/kfd/kfd/proc" / str(pid))

    found = host.look()

    assert [gpu.processes for gpu in found.values()] == [(), ()]
    followed = host.source._clients
    assert (followed._files, followed._meters, followed._owners, host.source._kfd._queues) == ({}, {}, {}, {})


def test_removed_gpu_is_gone_in_the_next_sample(host: Host) -> None:
    amd(host)
    host.look()
    (host.tree.sys / "class/drm/renderD128").unlink()

    assert host.look() == {}


def test_host_without_gpus_has_none(host: Host) -> None:
    shutil.rmtree(host.tree.sys)

    assert (host.look(), host.source.drivers_found()) == ({}, frozenset())


def test_only_the_selected_drivers_are_read(host: Host) -> None:
    amd(host)
    host.tree.gpu(130, INTEL_PCI, "xe")

    source = DrmGpus(INTEL, sys=host.tree.sys, proc=host.tree.proc)

    assert [gpu.source for gpu in source.read().gpus] == ["xe"]
    assert [sorted(each.drivers_found()) for each in (source, host.source)] == [["xe"], ["amdgpu", "xe"]]


# GPUs that hang


def without(*minors: int) -> Question:
    return Question(without=frozenset(minors))


def test_skipped_gpu_stays_listed_and_its_files_are_not_read(host: Host) -> None:
    folder = amd(host, busy_percent=40)
    host.tree.gpu(130, INTEL_PCI, "i915")
    computes(host)
    renders(host, 4001, gpu_tree.amdgpu(AMD_PCI))
    before = host.look()["renderD128"]
    for file in ("gpu_busy_percent", "mem_info_vram_used", "power/runtime_status"):
        host.tree.hang(folder / file)
    host.tree.hang(host.tree.proc / "4001/fdinfo/5")
    host.tree.hang(host.tree.sys / f"class/kfd/kfd/proc/4001/vram_{AMD_ID}")

    found = host.look(without(128))

    left_out = found["renderD128"]
    assert (left_out.uuid, left_out.names, left_out.index) == (before.uuid, before.names, before.index)
    assert (left_out.unknown, left_out.lost, left_out.is_hung) == (HUNG, None, True)
    assert (left_out.utilization_ratio, left_out.memory_size_bytes, left_out.processes) == (None, None, None)
    assert (left_out.source, left_out.attribution) == ("amdgpu", "device")
    assert (found["renderD130"].unknown, found["renderD130"].utilization_ratio) == (None, 0.0)


def test_question_about_one_gpu_reads_no_file_of_another(host: Host) -> None:
    amd(host, busy_percent=40)
    folder = host.tree.gpu(130, INTEL_PCI, "i915")
    computes(host)
    renders(host, 4001, gpu_tree.i915(INTEL_PCI), node="renderD130")
    renders(host, 4002, gpu_tree.i915(INTEL_PCI), node="renderD140")
    host.tree.hang(folder / "power/runtime_status")
    for pid in (4001, 4002):
        host.tree.hang(host.tree.proc / f"{pid}/fdinfo/5")

    found = host.look(Question(only=128))

    assert {node: gpu.utilization_ratio for node, gpu in found.items()} == {"renderD128": 0.4}


@pytest.fixture
def cut(host: Host) -> Callable[..., dict[str, Gpu]]:
    """Partition the AMD GPU and take a sample."""
    amd(host, busy_percent=50)

    def look(mode: str, parts: int, *, fold: bool = False) -> dict[str, Gpu]:
        host.tree.cut(AMD_PCI, mode, parts, unique_id=UNIQUE, fold=fold)
        return host.look()

    return look


PARTS = [f"renderD{minor}" for minor in range(128, 136)]
NAME = "GPU-18b70c33a1b2c3d4"


def test_nodes_of_unused_partitions_are_not_gpus(cut: Callable[..., dict[str, Gpu]]) -> None:
    found = cut("SPX", 1)

    assert {node: (gpu.uuid, gpu.utilization_ratio) for node, gpu in found.items()} == {"renderD128": (NAME, 0.5)}


@pytest.mark.parametrize("fold", [False, True], ids=["separate from the address", "replaces the function"])
def test_each_partition_is_a_gpu(fold: bool, host: Host, cut: Callable[..., dict[str, Gpu]]) -> None:
    cut("SPX", 1)
    host.tree.computes(4001, vram={5003: 4096}, queues={0: 5003})
    (host.tree.proc / "4001/fd").mkdir(parents=True)

    found = cut("CPX", 8, fold=fold)

    assert list(found) == PARTS
    assert [found[node].uuid for node in PARTS] == [f"{NAME}/{node}" for node in PARTS]
    assert {(found[node].utilization_ratio, found[node].memory_used_bytes, found[node].unknown) for node in PARTS} == {
        (None, None, gpus.PARTITIONED)
    }
    assert {node: [each.pid for each in found[node].processes or ()] for node in PARTS if found[node].processes} == {
        "renderD131": [4001]
    }
    assert found["renderD131"].names == (f"{NAME}/renderD131", "renderD131", "amdgpu_xcp_2", "card3")


def test_single_partition_has_no_values_of_the_whole(cut: Callable[..., dict[str, Gpu]]) -> None:
    assert cut("CPX", 1)["renderD128"].unknown == gpus.PARTITIONED


def test_all_partitions_are_skipped_with_one(host: Host) -> None:
    amd(host)
    host.tree.cut(AMD_PCI, "CPX", 3)

    found = host.look(without(129))

    assert {node: gpu.is_hung for node, gpu in found.items()} == dict.fromkeys(
        ("renderD128", "renderD129", "renderD130"), True
    )


@pytest.mark.parametrize("part", [128, 129])
def test_hung_partition_stops_reads_of_all_partitions(part: int, host: Host) -> None:
    amd(host)
    host.tree.cut(AMD_PCI, "CPX", 3)
    asked: list[int | None] = []
    source = DrmGpus(AMD, sys=host.tree.sys, proc=host.tree.proc, announce=asked.append)

    source.read(without(part))

    assert set(asked) == {None}


@pytest.mark.parametrize("opened", ["before", "meanwhile"])
def test_work_during_a_skip_does_not_count_as_work_of_one_sample(opened: str, host: Host) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 4001, gpu_tree.i915(INTEL_PCI, render_ns=0), node="renderD130")
    host.look()
    pid = 4001 if opened == "before" else 4002
    renders(host, pid, gpu_tree.i915(INTEL_PCI, client=pid, render_ns=0), node="renderD130")

    for _ in range(8):
        host.look(without(130))
    renders(host, pid, gpu_tree.i915(INTEL_PCI, client=pid, render_ns=8 * 10**9), node="renderD130")
    back = on(host.look()["renderD130"])
    renders(host, pid, gpu_tree.i915(INTEL_PCI, client=pid, render_ns=8 * 10**9 + 10**8), node="renderD130")
    later = on(host.look()["renderD130"])

    assert back[pid][0] is None
    assert later[pid][0] == pytest.approx(0.1)


def test_process_that_is_missed_after_a_skip_is_new(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.tree.gpu(130, INTEL_PCI, "i915")
    renders(host, 4001, gpu_tree.i915(INTEL_PCI, render_ns=3600 * S), node="renderD130")
    host.look()
    host.look(without(130))
    with monkeypatch.context() as patch:
        patch.setattr(clients, "LOOK_S", -1.0)
        host.look()

    back, later = (on(host.look()["renderD130"])[4001][0] for _ in range(2))

    assert (back, later) == (None, 0.0)


@pytest.mark.parametrize("question", [None, without(128), Question(only=128)], ids=["all", "skipped", "one"])
def test_finished_sample_announces_that_no_gpu_is_being_read(question: Question | None, host: Host) -> None:
    amd(host)
    computes(host)
    renders(host, 4001, gpu_tree.amdgpu(AMD_PCI))
    asked: list[int | None] = []
    source = DrmGpus(AMD | INTEL, sys=host.tree.sys, proc=host.tree.proc, announce=asked.append)

    source.read(question)

    assert asked[-1] is None
    assert (128 in asked) == (question != without(128))
