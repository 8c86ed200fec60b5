"""GPUs that are cut into parts, on folders shaped like the kernel's: a part that is unmade is not lost, a GPU is.

The sources of their shapes are named by exporter/sources/cuts.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from exporter.lost import Losses, LossHistory
from exporter.readings import Gpu, GpuReadings
from exporter.sources import clients, cuts
from exporter.sources.driver_wire import Question
from exporter.sources.drm import AMD, INTEL, PARTITIONED, DrmGpus
from exporter.sources.kfd import Topology
from tests.exporter.gpu_tree import Tree

CARD, PF = "0000:c1:00.0", "0000:4d:00.0"
UNIQUE = 0x18B7_0C33_A1B2_C3D4
NAME = "GPU-18b70c33a1b2c3d4"
NOBODY = b"\xff" * 64


@dataclass
class Host:
    """A tree, what reads it, and what has been lost of it, a second a look."""

    tree: Tree
    source: DrmGpus
    history: LossHistory = field(default_factory=lambda: LossHistory(gap_max_s=5.0))
    now_s: float = 0.0

    def look(self, question: Question | None = None) -> tuple[Losses, GpuReadings]:
        self.now_s += 1.0
        losses, readings = self.history.observe(self.source.read(question), now_s=self.now_s)
        assert readings is not None
        return losses, readings

    def lost(self) -> dict[str, float]:
        """For how long each GPU that is lost has been lost, by its node or name."""
        return {uuid.rpartition("/")[2]: lost_s for uuid, lost_s in self.look()[0].lost_s.items()}

    def gpus(self) -> dict[str, Gpu]:
        return {gpu.node or "": gpu for gpu in self.look()[1].gpus}

    def folder(self, pci: str) -> Path:
        return self.tree.sys / "devices/pci0000:00" / pci

    def cut(self, mode: str, parts: int, *, fold: bool = False) -> None:
        self.tree.cut(CARD, mode, parts, unique_id=UNIQUE, fold=fold)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A GPU of AMD's that can be cut, and is not; a GPU of Intel's that is no part of one, nor cut."""
    monkeypatch.setattr(clients, "is_device", lambda _: True)
    tree = Tree(tmp_path)
    tree.gpu(128, CARD, "amdgpu", busy_percent=50, vram=(3, 16))
    host = Host(tree=tree, source=DrmGpus(AMD | INTEL, sys=tree.sys, proc=tree.proc))
    host.cut("SPX", 1)
    tree.gpu(160, PF, "xe")
    tree.functions(PF, {})
    return host


def nodes(first: int, count: int) -> list[str]:
    return [f"renderD{minor}" for minor in range(first, first + count)]


PARTS = nodes(128, 8)
FUNCTIONS = {"0000:4d:00.1": 161, "0000:4d:00.2": 162}
FIRST, SECOND = (f"pci-{address}" for address in FUNCTIONS)


# What is a GPU


def test_the_nodes_of_partitions_that_are_not_made_are_no_gpus(host: Host) -> None:
    found = host.gpus()

    assert list(found) == ["renderD128", "renderD160"]
    assert (found["renderD128"].uuid, found["renderD128"].utilization_ratio) == (NAME, 0.5)


@pytest.mark.parametrize("fold", [False, True], ids=["beside the address", "in place of the function"])
def test_each_partition_is_a_gpu_with_a_node_of_its_own_and_processes_of_its_own(fold: bool, host: Host) -> None:
    host.cut("CPX", 8, fold=fold)
    host.tree.computes(4001, vram={5003: 4096}, queues={0: 5003})
    (host.tree.proc / "4001/fd").mkdir(parents=True)

    found = host.gpus()

    assert list(found) == [*PARTS, "renderD160"]
    assert [found[node].uuid for node in PARTS] == [f"{NAME}/{node}" for node in PARTS]
    assert {(found[node].utilization_ratio, found[node].memory_used_bytes, found[node].unknown) for node in PARTS} == {
        (None, None, PARTITIONED)
    }
    assert {node: [each.pid for each in found[node].processes or ()] for node in PARTS if found[node].processes} == {
        "renderD131": [4001]
    }
    assert found["renderD131"].names == (f"{NAME}/renderD131", "renderD131", "amdgpu_xcp_2", "card3")


def test_the_one_partition_that_is_seen_of_several_has_no_figures_of_the_whole(host: Host) -> None:
    host.cut("CPX", 1)

    assert host.gpus()["renderD128"].unknown == PARTITIONED


# What is unmade


@pytest.mark.parametrize(("mode", "parts"), [("SPX", 1), ("DPX", 2)])
def test_partitions_that_are_unmade_are_not_lost(mode: str, parts: int, host: Host) -> None:
    host.cut("CPX", 8)
    host.look()

    host.cut(mode, parts)
    losses, readings = host.look()

    assert not losses.lost_s
    # The first one's node is the whole GPU's own.
    unmade = PARTS[parts:] if parts > 1 else PARTS
    assert losses.unmade == {f"{NAME}/{node}" for node in unmade}
    assert readings.dropped == ()
    assert not host.lost()


def test_a_gpu_that_is_cut_into_partitions_is_not_lost(host: Host) -> None:
    assert host.look()[0].there == {NAME, f"pci-{PF}"}

    host.cut("CPX", 8)

    assert host.lost() == {}
    assert host.look()[0].there == {*(f"{NAME}/{node}" for node in PARTS), f"pci-{PF}"}


@pytest.mark.parametrize("functions", [{}, {"0000:4d:00.1": 161}], ids=["all", "one of two"])
def test_virtual_functions_that_are_unmade_are_not_lost(functions: dict[str, int], host: Host) -> None:
    host.tree.functions(PF, FUNCTIONS)
    assert {FIRST, SECOND} <= host.look()[0].there

    host.tree.functions(PF, functions)
    losses, _ = host.look()

    assert not losses.lost_s
    assert losses.unmade == {FIRST, SECOND} - {f"pci-{address}" for address in functions}
    assert not host.lost()


def test_a_virtual_function_whose_driver_is_slow_to_let_it_go_is_not_lost_either(host: Host) -> None:
    host.tree.functions(PF, FUNCTIONS)
    host.look()

    for link in host.folder(PF).glob("virtfn*"):  # which go first (pci_iov_remove_virtfn in drivers/pci/iov.c)
        link.unlink()
    assert {FIRST, SECOND} <= host.look()[0].there
    for function in FUNCTIONS:
        host.tree.take_out(function)

    assert not host.lost()


def test_a_virtual_function_that_is_given_to_a_virtual_machine_is_not_lost(host: Host) -> None:
    host.tree.functions(PF, FUNCTIONS)
    host.look()
    function = "0000:4d:00.1"

    (host.tree.sys / "class/drm/renderD161").unlink()
    (host.folder(function) / "driver").unlink()
    between = host.lost()
    (host.folder(function) / "driver").symlink_to("../../../bus/pci/drivers/vfio-pci")

    assert between == {FIRST: 0.0}
    assert host.lost() == {}


def test_virtual_functions_of_a_gpu_that_only_a_host_driver_has_are_known_by_it(host: Host) -> None:
    host.tree.device("0000:83:00.0", "gim")
    host.tree.functions("0000:83:00.0", {"0000:83:02.0": 170}, driver="amdgpu")
    host.look()

    host.tree.functions("0000:83:00.0", {})

    assert not host.lost()


def test_what_was_unmade_is_not_lost_with_its_gpu_later_and_what_is_made_anew_is(host: Host) -> None:
    host.cut("CPX", 8)
    host.look()
    host.cut("DPX", 2)
    host.look()

    host.tree.take_out(CARD)

    assert set(host.lost()) == {"renderD128", "renderD129"}


# What is lost


def taken_out(host: Host) -> None:
    for pci in (CARD, PF):
        host.tree.take_out(pci)


def let_go(host: Host) -> None:
    """Their drivers let them go, and nothing answers on the bus (pci_dev_is_disconnected in drivers/pci/pci.h)."""
    kept = [host.folder(pci) / "config" for pci in (CARD, PF)]
    taken_out(host)
    for config in kept:
        config.parent.mkdir(parents=True)
        config.write_bytes(NOBODY)


def silent(host: Host) -> None:
    """Nothing answers at their place on the bus, their drivers still have them, and their parts are gone."""
    host.cut("SPX", 1)
    host.tree.functions(PF, {})
    for pci in (CARD, PF):
        (host.folder(pci) / "config").write_bytes(NOBODY)


def without_parts(host: Host) -> None:
    """They answer, and say that they are cut as they were; of the parts nothing is there."""
    host.cut("CPX", 1)
    for number, function in enumerate(FUNCTIONS):
        host.tree.take_out(function)
        link = host.folder(PF) / f"virtfn{number}"
        assert link.readlink().name == function


@pytest.mark.parametrize("how", [taken_out, let_go, silent, without_parts])
def test_parts_of_a_gpu_that_is_lost_are_lost_and_stay_so(how: Callable[[Host], None], host: Host) -> None:
    host.cut("CPX", 8)
    host.tree.functions(PF, FUNCTIONS)
    host.look()

    how(host)
    first, *_, last = host.lost(), host.lost(), host.lost()

    assert set(first) >= {*PARTS[1:], FIRST, SECOND}
    assert last == dict.fromkeys(first, 2.0)


def test_a_gpu_that_can_be_cut_and_was_not_is_lost_like_any(host: Host) -> None:
    host.look()

    taken_out(host)

    assert host.lost() == {NAME: 0.0, f"pci-{PF}": 0.0}


# What is unknown


def half_a_topology(host: Host) -> None:
    host.cut("SPX", 1)
    (host.tree.sys / "class/kfd/kfd/topology/nodes/1/properties").write_bytes(b"\xff")


def none_of_the_topology(host: Host) -> None:
    """In the middle of a change (amdgpu_amdkfd_device_fini_sw in amdgpu_amdkfd.c, of aqua_vanjaram.c)."""
    host.cut("SPX", 0)


def no_mode(host: Host) -> None:
    """While the GPU is reset that is refused (amdgpu_gfx_get_current_compute_partition in amdgpu_gfx.c)."""
    host.cut("SPX", 1)
    (host.folder(CARD) / "current_compute_partition").unlink()
    (host.folder(CARD) / "current_compute_partition").mkdir()


def no_known_mode(host: Host) -> None:
    host.cut("UNKNOWN", 1)


def asleep(host: Host) -> None:
    host.cut("SPX", 1)
    host.tree.functions(PF, {})
    for pci in (CARD, PF):
        host.tree.write(host.folder(pci) / "power/runtime_status", "suspended")


def no_word_of_the_bus(host: Host) -> None:
    host.cut("SPX", 1)
    host.tree.functions(PF, {})
    for pci, what in ((CARD, b""), (PF, b"\x86")):
        (host.folder(pci) / "config").write_bytes(what)


def no_answer_of_the_bus(host: Host) -> None:
    host.cut("SPX", 1)
    host.tree.functions(PF, {})
    (host.folder(CARD) / "config").unlink()
    (host.folder(PF) / "config").unlink()
    (host.folder(PF) / "config").mkdir()


@pytest.mark.parametrize(
    "how",
    [half_a_topology, none_of_the_topology, no_mode, no_known_mode, asleep, no_word_of_the_bus, no_answer_of_the_bus],
)
def test_where_it_cannot_be_told_parts_that_are_not_listed_are_unknown(how: Callable[[Host], None], host: Host) -> None:
    host.cut("CPX", 8)
    host.tree.functions(PF, FUNCTIONS)
    host.look()

    how(host)
    losses, _ = host.look()

    assert not losses.lost_s
    assert not losses.unmade
    assert f"{NAME}/renderD129" not in losses.there
    taken_out(host)
    assert set(host.lost()) >= set(PARTS[1:])


def test_a_gpu_that_is_cut_anew_in_the_middle_of_a_look_is_unknown_for_that_look(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.cut("CPX", 8)
    host.look()
    read = host.source._kfd.topology

    def topology() -> Topology:
        host.cut("SPX", 1)
        return read()

    with monkeypatch.context() as between:
        between.setattr(host.source._kfd, "topology", topology)
        then, _ = host.look()
    after, _ = host.look()

    assert (then.lost_s, then.unmade) == ({}, frozenset())
    assert (after.lost_s, len(after.unmade)) == ({}, len(PARTS))


def test_only_an_address_is_a_gpu_of_a_driver(host: Host) -> None:
    driver = host.tree.sys / "bus/pci/drivers/amdgpu"
    (driver / "module/current_compute_partition").mkdir(parents=True)

    assert list(cuts.Cuts(AMD, sys=host.tree.sys).look()) == [f"{CARD}/current_compute_partition"]


def test_how_a_gpu_that_is_left_out_is_cut_is_unknown_and_none_of_its_parts_is_unmade_or_lost(host: Host) -> None:
    host.cut("CPX", 8)
    host.look()
    host.cut("SPX", 1)
    for file in ("config", "current_compute_partition"):
        host.tree.hang(host.tree.sys / "devices/pci0000:00" / CARD / file)

    losses, readings = host.look(Question(without=frozenset({128})))

    assert readings.cuts[f"{CARD}/current_compute_partition"] is None
    assert (losses.lost_s, losses.unmade) == ({}, frozenset())
