"""The process that reads AMD and Intel GPUs from the kernel: reads that hang, and its own end."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from exporter.model.gpu import GpuReadings
from exporter.sources.gpu.drm import clients, gpus
from exporter.sources.gpu.drm.gpus import AMD, INTEL, DrmGpus
from exporter.sources.gpu.isolated.process import Driver
from exporter.sources.gpu.isolated.protocol import HUNG, PROCESSES_MAX, TOO_MANY, DriverError
from exporter.sources.gpu.isolated.supervisor import IsolatedDriver
from tests.exporter.sources.gpu import gpu_tree
from tests.exporter.sources.gpu.gpu_tree import Tree
from tests.exporter.sources.gpu.isolated_drivers import Start, answered, asking, refused, starting
from tests.waiting import eventually

CARD, ARC = "0000:03:00.0", "0000:00:02.0"
CARD_ID, PID = 51706, 4001
NO_ANSWER = "no answer yet from the kernel's AMD and Intel drivers"
GAVE_UP = "a call into the kernel's AMD and Intel drivers did not return within"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An AMD GPU with a compute process, and an Intel GPU with a graphics process."""
    tree = Tree(tmp_path / "host")
    tree.node(1, gpu_id=CARD_ID, minor=128, unique_id=0x18B7_0C33_A1B2_C3D4)
    folder = tree.gpu(128, CARD, "amdgpu", busy_percent=0, vram=(3, 16))
    tree.write(folder / "hwmon/hwmon4/temp1_input", 61_000)
    tree.gpu(129, ARC, "i915")
    tree.computes(PID, vram={CARD_ID: 4096}, queues={0: CARD_ID}, occupied={CARD_ID: 0})
    tree.opens(PID, {5: ("/dev/dri/renderD129", gpu_tree.i915(ARC, render_ns=0))})
    return tree


@pytest.fixture
def start(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(answer_s=…)`: a source whose processes read the tree. They end with the test."""
    driver = Driver(
        who=gpus.WHO,
        program=tree.child,
        arguments=tuple(sorted(AMD | INTEL)),
        gpu=gpus.GPU_OF_NUMBER,
    )
    with starting(driver, monkeypatch) as begin:
        yield begin


def busy(tree: Tree) -> Path:
    return tree.sys / "devices/pci0000:00" / CARD / "gpu_busy_percent"


def test_isolated_reads_equal_direct_reads(start: Start, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "is_device", lambda _: True)
    source, here = start(), DrmGpus(AMD | INTEL, sys=tree.sys, proc=tree.proc)

    first, second = (source.read(), here.read()), (source.read(), here.read())

    assert first[0] == first[1]
    assert second[0] == second[1]
    assert [(gpu.node, gpu.utilization_ratio) for gpu in second[0].gpus] == [("renderD128", 0.0), ("renderD129", 0.0)]
    assert [each.pid for gpu in second[0].gpus for each in gpu.processes or ()] == [PID, PID]


def test_unlistable_processes_are_reported_by_the_same_process(start: Start, tree: Tree) -> None:
    source = start()
    source.read()
    pid = asking(source)

    shutil.rmtree(tree.proc)
    message = refused(source)
    tree.proc.mkdir()

    assert message == f"[Errno 2] No such file or directory: {str(tree.proc)!r}"
    assert source.read()
    assert asking(source) == pid


def test_too_many_processes_make_one_gpu_unknown(start: Start, tree: Tree) -> None:
    for pid in range(10_000, 10_000 + PROCESSES_MAX):
        tree.computes(pid, vram={CARD_ID: 0}, queues={0: CARD_ID})
    source = start()

    crowded, arc = source.read().gpus

    assert (crowded.processes, crowded.unknown) == (None, TOO_MANY.format(count=PROCESSES_MAX + 1))
    assert crowded.figures.unknown["processes"] == "too_many"
    assert "processes" not in arc.figures.unknown
    assert [each.pid for each in arc.processes or ()] == [PID]


def topology(tree: Tree) -> Path:
    return tree.sys / "class/kfd/kfd/topology/generation_id"


def test_hanging_read_outside_a_gpu_kills_the_process(start: Start, tree: Tree) -> None:
    source = start()
    source.read()
    pid = asking(source)
    held = topology(tree).read_bytes()
    source._answer_s, source._wait_s = 1.5, 0.2

    tree.hang(topology(tree))
    first = eventually(partial(message_of, source))
    last = eventually(lambda: message if GAVE_UP in (message := message_of(source)) else None)
    topology(tree).unlink()
    topology(tree).write_bytes(held)
    source._answer_s = source._wait_s = 20.0

    assert first == NO_ANSWER
    assert last.startswith(f"{GAVE_UP} 1.5 s, and its process was killed")
    assert (source.health().killed, source.health().abandoned) == (1, 0)
    assert not Path(f"/proc/{pid}").exists()
    assert [gpu.node for gpu in eventually(lambda: answered(source)).gpus] == ["renderD128", "renderD129"]
    assert asking(source) != pid


AMD_FILES = {
    "utilisation": busy,
    "its memory": lambda tree: busy(tree).with_name("mem_info_vram_used"),
    "a sensor": lambda tree: busy(tree).with_name("hwmon") / "hwmon4/temp1_input",
    "whether it sleeps": lambda tree: busy(tree).with_name("power") / "runtime_status",
    "partition mode": lambda tree: busy(tree).with_name("current_compute_partition"),
    "memory of a process": lambda tree: tree.sys / f"class/kfd/kfd/proc/{PID}/vram_{CARD_ID}",
    "occupancy of a process": lambda tree: tree.sys / f"class/kfd/kfd/proc/{PID}/stats_{CARD_ID}/cu_occupancy",
    "an open file": lambda tree: tree.proc / f"{PID}/fdinfo/6",
}


def hung(source: IsolatedDriver, tree: Tree, file: Path) -> str:
    """The reason for a read that hangs until its process is killed; the next one has as much time as it needs."""
    source._answer_s, source._wait_s = 1.5, 0.5
    tree.hang(file)
    message = eventually(lambda: message if "did not return" in (message := message_of(source)) else None)
    source._answer_s = source._wait_s = 20.0
    return message


def left_out(source: IsolatedDriver, node: str) -> GpuReadings | None:
    """A sample with all GPUs except this one."""
    found = answered(source)
    return found if found and [gpu.node for gpu in found.gpus if gpu.unknown == HUNG] == [node] else None


def whole(source: IsolatedDriver) -> GpuReadings | None:
    """A sample with all GPUs."""
    found = answered(source)
    return found if found and not any(gpu.is_hung for gpu in found.gpus) else None


@pytest.mark.parametrize("place", AMD_FILES.values(), ids=AMD_FILES)
def test_gpu_with_a_hanging_file_is_skipped(place: Callable[[Tree], Path], start: Start, tree: Tree) -> None:
    tree.opens(PID, {6: ("/dev/dri/renderD128", gpu_tree.amdgpu(CARD))})
    tree.write(busy(tree).with_name("current_compute_partition"), "SPX")
    source = start()
    before = source.read().gpus[0]
    held = place(tree).read_bytes()

    message = hung(source, tree, place(tree))
    card, arc = eventually(lambda: left_out(source, "renderD128")).gpus
    killed = source.health().killed
    place(tree).unlink()
    place(tree).write_bytes(held)
    source._hung._hung[128].ask_s = 0.0
    back = eventually(lambda: whole(source))

    assert message.startswith(
        "a call into the kernel's AMD and Intel drivers about renderD128 did not return within 1.5 s, and its process "
        "was killed, and that GPU is skipped until it answers a separate process"
    )
    assert (card.uuid, card.name, card.names) == (before.uuid, before.name, before.names)
    assert (card.utilization_ratio, card.memory_used_bytes, card.processes) == (None, None, None)
    assert (card.lost, dict(card.figures.unknown)) == (None, {"gpu": "hung"})
    assert (arc.unknown, [each.pid for each in arc.processes or ()]) == (None, [PID])
    assert killed == 1
    assert [(gpu.uuid, gpu.memory_used_bytes) for gpu in back.gpus] == [(before.uuid, 3), (f"pci-{ARC}", None)]


def test_hung_intel_gpu_does_not_affect_amd_gpus(start: Start, tree: Tree) -> None:
    source = start()
    source.read()

    hung(source, tree, tree.proc / f"{PID}/fdinfo/5")
    card, arc = eventually(lambda: left_out(source, "renderD129")).gpus

    assert (card.utilization_ratio, [each.pid for each in card.processes or ()]) == (0.0, [PID])
    assert (arc.uuid, arc.attribution, arc.utilization_ratio, arc.processes) == (f"pci-{ARC}", "process", None, None)


def message_of(source: IsolatedDriver) -> str:
    """The reason for a failed read; empty if it succeeded."""
    try:
        source.read()
    except DriverError as error:
        return str(error)
    return ""


NEEDLESS = {"docker", "email", "exporter.evidence.container_history", "gpuwarden.state_file", "http", "logging",
            "prometheus_client", "pydantic", "requests", "socket", "structlog", "yaml"}  # fmt: skip


@pytest.mark.parametrize(("child", "more"), [("nvml", set[str]()), ("drm", {"ctypes.util", "pynvml", "subprocess"})])
def test_driver_process_loads_only_the_modules_it_needs(child: str, more: set[str]) -> None:
    program = f"import sys, exporter.sources.gpu.{child}.child; print(*sys.modules, sep='\\n')"

    loaded = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout

    assert f"exporter.sources.gpu.{child}.child" in loaded.splitlines()
    assert set(loaded.splitlines()).isdisjoint(NEEDLESS | more)
