"""The process that reads AMD's and Intel's GPUs from the kernel: a read that does not come back, and its own end."""

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
    """A GPU of AMD's that a process computes on, and one of Intel's that it draws on."""
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
    """`start(answer_s=…)`: a source whose processes read the tree, and are not left behind."""
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


def test_what_is_read_is_what_would_be_read_here(start: Start, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "is_device", lambda _: True)
    source, here = start(), DrmGpus(AMD | INTEL, sys=tree.sys, proc=tree.proc)

    first, second = (source.read(), here.read()), (source.read(), here.read())

    assert first[0] == first[1]
    assert second[0] == second[1]
    assert [(gpu.node, gpu.utilization_ratio) for gpu in second[0].gpus] == [("renderD128", 0.0), ("renderD129", 0.0)]
    assert [each.pid for gpu in second[0].gpus for each in gpu.processes or ()] == [PID, PID]


def test_processes_that_cannot_be_listed_are_told_by_the_same_process(start: Start, tree: Tree) -> None:
    source = start()
    source.read()
    pid = asking(source)

    shutil.rmtree(tree.proc)
    because = refused(source)
    tree.proc.mkdir()

    assert because == f"[Errno 2] No such file or directory: {str(tree.proc)!r}"
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


def test_a_hanging_read_of_no_gpu_costs_its_process(start: Start, tree: Tree) -> None:
    source = start()
    source.read()
    pid = asking(source)
    held = topology(tree).read_bytes()
    source._answer_s, source._wait_s = 1.5, 0.2

    tree.hang(topology(tree))
    first = eventually(partial(because_of, source))
    last = eventually(lambda: because if GAVE_UP in (because := because_of(source)) else None)
    topology(tree).unlink()
    topology(tree).write_bytes(held)
    source._answer_s = source._wait_s = 20.0

    assert first == NO_ANSWER
    assert last.startswith(f"{GAVE_UP} 1.5 s, and its process was killed")
    assert (source.health().killed, source.health().abandoned) == (1, 0)
    assert not Path(f"/proc/{pid}").exists()
    assert [gpu.node for gpu in eventually(lambda: answered(source)).gpus] == ["renderD128", "renderD129"]
    assert asking(source) != pid


OF_THE_CARD = {
    "how busy it is": busy,
    "its memory": lambda tree: busy(tree).with_name("mem_info_vram_used"),
    "a sensor": lambda tree: busy(tree).with_name("hwmon") / "hwmon4/temp1_input",
    "whether it sleeps": lambda tree: busy(tree).with_name("power") / "runtime_status",
    "how it is cut": lambda tree: busy(tree).with_name("current_compute_partition"),
    "memory of a process": lambda tree: tree.sys / f"class/kfd/kfd/proc/{PID}/vram_{CARD_ID}",
    "what a process runs on it": lambda tree: tree.sys / f"class/kfd/kfd/proc/{PID}/stats_{CARD_ID}/cu_occupancy",
    "an open file": lambda tree: tree.proc / f"{PID}/fdinfo/6",
}


def hung(source: IsolatedDriver, tree: Tree, file: Path) -> str:
    """What is told of a read that hangs until its process is killed; the next one has all the time it needs."""
    source._answer_s, source._wait_s = 1.5, 0.5
    tree.hang(file)
    because = eventually(lambda: because if "did not return" in (because := because_of(source)) else None)
    source._answer_s = source._wait_s = 20.0
    return because


def left_out(source: IsolatedDriver, node: str) -> GpuReadings | None:
    """A look that tells of all GPUs but that one."""
    found = answered(source)
    return found if found and [gpu.node for gpu in found.gpus if gpu.unknown == HUNG] == [node] else None


def whole(source: IsolatedDriver) -> GpuReadings | None:
    """A look in which none is left out."""
    found = answered(source)
    return found if found and not any(gpu.is_hung for gpu in found.gpus) else None


@pytest.mark.parametrize("place", OF_THE_CARD.values(), ids=OF_THE_CARD)
def test_a_gpu_whose_file_hangs_is_left_out(place: Callable[[Tree], Path], start: Start, tree: Tree) -> None:
    tree.opens(PID, {6: ("/dev/dri/renderD128", gpu_tree.amdgpu(CARD))})
    tree.write(busy(tree).with_name("current_compute_partition"), "SPX")
    source = start()
    before = source.read().gpus[0]
    held = place(tree).read_bytes()

    because = hung(source, tree, place(tree))
    card, arc = eventually(lambda: left_out(source, "renderD128")).gpus
    killed = source.health().killed
    place(tree).unlink()
    place(tree).write_bytes(held)
    source._hung._hung[128].ask_s = 0.0
    back = eventually(lambda: whole(source))

    assert because.startswith(
        "a call into the kernel's AMD and Intel drivers about renderD128 did not return within 1.5 s, and its process "
        "was killed, and that GPU is skipped until it answers a separate process"
    )
    assert (card.uuid, card.name, card.names) == (before.uuid, before.name, before.names)
    assert (card.utilization_ratio, card.memory_used_bytes, card.processes) == (None, None, None)
    assert (card.lost, dict(card.figures.unknown)) == (None, {"gpu": "hung"})
    assert (arc.unknown, [each.pid for each in arc.processes or ()]) == (None, [PID])
    assert killed == 1
    assert [(gpu.uuid, gpu.memory_used_bytes) for gpu in back.gpus] == [(before.uuid, 3), (f"pci-{ARC}", None)]


def test_a_gpu_of_intels_that_hangs_costs_none_of_amds(start: Start, tree: Tree) -> None:
    source = start()
    source.read()

    hung(source, tree, tree.proc / f"{PID}/fdinfo/5")
    card, arc = eventually(lambda: left_out(source, "renderD129")).gpus

    assert (card.utilization_ratio, [each.pid for each in card.processes or ()]) == (0.0, [PID])
    assert (arc.uuid, arc.attribution, arc.utilization_ratio, arc.processes) == (f"pci-{ARC}", "process", None, None)


def because_of(source: IsolatedDriver) -> str:
    """Why a look was refused; empty where it was not."""
    try:
        source.read()
    except DriverError as error:
        return str(error)
    return ""


NEEDLESS = {"docker", "email", "exporter.evidence.container_history", "gpuwarden.state_file", "http", "logging",
            "prometheus_client", "pydantic", "requests", "socket", "structlog", "yaml"}  # fmt: skip


@pytest.mark.parametrize(("child", "more"), [("nvml", set[str]()), ("drm", {"ctypes.util", "pynvml", "subprocess"})])
def test_a_process_that_asks_a_driver_loads_nothing_that_it_does_not_need(child: str, more: set[str]) -> None:
    program = f"import sys, exporter.sources.gpu.{child}.child; print(*sys.modules, sep='\\n')"

    loaded = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout

    assert f"exporter.sources.gpu.{child}.child" in loaded.splitlines()
    assert set(loaded.splitlines()).isdisjoint(NEEDLESS | more)
