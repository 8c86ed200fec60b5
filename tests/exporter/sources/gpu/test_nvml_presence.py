"""Whether a host has NVIDIA GPUs, from folders like those of the kernel."""

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
        pytest.param("0x10de", "0x030000", True, id="NVIDIA display controller"),
        pytest.param("0x10de", "0x030200", True, id="NVIDIA 3D controller"),
        pytest.param("0x10de", "0x040300", False, id="NVIDIA audio"),
        pytest.param("0x1002", "0x030000", False, id="AMD display controller"),
    ],
)
def test_nvidia_hardware_is_known_by_vendor_and_class(vendor: str, class_: str, *, there: bool, tree: Tree) -> None:
    device(tree, "0000:00:02.0", "0x8086", "0x030000")
    look = host(tree)
    assert not look.may_have_nvidia()

    device(tree, "0000:01:00.0", vendor, class_)

    assert look.may_have_nvidia() is there


@pytest.mark.parametrize("folder", ["proc/driver/nvidia", "sys/bus/pci/drivers/nvidia"])
def test_nvidia_driver_is_enough(folder: str, tree: Tree) -> None:
    (tree.sys.parent / folder).mkdir(parents=True)

    assert host(tree).may_have_nvidia()


def test_gpu_that_was_present_counts_after_its_removal(tree: Tree) -> None:
    folder = device(tree, "0000:01:00.0", "0x10de", "0x030000")
    seen, read, new = host(tree), host(tree), host(tree)
    assert seen.may_have_nvidia()
    read.note_read()
    folder.rename(tree.sys / "gone")

    assert [each.may_have_nvidia() for each in (seen, read, new)] == [True, True, False]


def test_unreadable_bus_may_have_a_gpu(tree: Tree) -> None:
    (tree.sys / "bus/pci/devices").rmdir()
    look = host(tree)
    assert look.may_have_nvidia()

    (tree.sys / "bus/pci/devices").mkdir()

    assert not look.may_have_nvidia()
