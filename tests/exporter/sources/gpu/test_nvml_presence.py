"""Whether anything of NVIDIA's is on a host, on folders shaped like the kernel's."""

from pathlib import Path

import pytest

from exporter.sources.gpu.nvml.presence import NvidiaHost
from tests.exporter.sources.gpu.gpu_tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def device(tree: Tree, pci: str, vendor: str, class_: str) -> Path:
    folder = tree.sys / "bus/pci/devices" / pci
    tree.write(folder / "vendor", vendor)
    tree.write(folder / "class", class_)
    return folder


def host(tree: Tree) -> NvidiaHost:
    return NvidiaHost(sys=tree.sys, proc=tree.proc)


@pytest.mark.parametrize(
    ("vendor", "class_", "there"),
    [
        pytest.param("0x10de", "0x030000", True, id="a display controller of NVIDIA's"),
        pytest.param("0x10de", "0x030200", True, id="one without a display"),
        pytest.param("0x10de", "0x040300", False, id="NVIDIA's sound"),
        pytest.param("0x1002", "0x030000", False, id="a display controller of AMD's"),
    ],
)
def test_nvidias_hardware_is_told_by_its_numbers(vendor: str, class_: str, *, there: bool, tree: Tree) -> None:
    device(tree, "0000:00:02.0", "0x8086", "0x030000")
    look = host(tree)
    assert not look.may_have_nvidia()

    device(tree, "0000:01:00.0", vendor, class_)

    assert look.may_have_nvidia() is there


@pytest.mark.parametrize("folder", ["proc/driver/nvidia", "sys/bus/pci/drivers/nvidia"])
def test_nvidias_driver_alone_tells_of_it(folder: str, tree: Tree) -> None:
    (tree.sys.parent / folder).mkdir(parents=True)

    assert host(tree).may_have_nvidia()


def test_what_was_there_is_there_though_it_fell_off_its_bus(tree: Tree) -> None:
    folder = device(tree, "0000:01:00.0", "0x10de", "0x030000")
    seen, told, new = host(tree), host(tree), host(tree)
    assert seen.may_have_nvidia()
    told.note_read()
    folder.rename(tree.sys / "gone")

    assert [each.may_have_nvidia() for each in (seen, told, new)] == [True, True, False]


def test_where_the_kernel_does_not_tell_it_may_be_there(tree: Tree) -> None:
    (tree.sys / "bus/pci/devices").rmdir()
    look = host(tree)
    assert look.may_have_nvidia()

    (tree.sys / "bus/pci/devices").mkdir()

    assert not look.may_have_nvidia()
