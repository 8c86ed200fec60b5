"""How the GPUs of AMD's and Intel's that can be cut into parts are cut just now. What is unmade so is not lost.

    /sys/bus/pci/drivers/DRIVER/ADDRESS/    a GPU that the driver has; of it:
        current_compute_partition           AMD: into how many it computes: SPX (one), DPX, TPX, QPX, CPX
        virtfn0, virtfn1, …                 its virtual functions (SR-IOV), links; each has a link `physfn` to it
        config                              the first two bytes are its maker's number; all ones where nothing answers
        power/runtime_status                `suspended`: it is switched off, and a question would wake it

A partition's node in /sys/class/drm belongs to a device of the platform, amdgpu_xcp_N, which stays when it is unmade.
Of which GPU it is, if of any, AMD's topology alone tells (exporter/sources/kfd.py), which is made anew at each change.
Virtual functions are made all together and go all together. sriov_numvfs, which tells how many there are, is not read:
before Linux 6.9 that waits for whoever makes them.

Sources: drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c, amdgpu_gfx.h (amdgpu_gfx_compute_mode_desc), amdgpu_xcp.c and
aqua_vanjaram.c, drivers/gpu/drm/amd/amdxcp/amdgpu_xcp_drv.c, drivers/pci/iov.c, and Documentation/ABI/testing/
sysfs-bus-pci of the kernel.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from exporter.readings import NODE
from exporter.sources.driver_wire import Question
from exporter.sources.kfd import Asks, Topology, content

XCP: Final = re.compile(r"amdgpu_xcp[._][0-9]+")
"""The name of a partition's device; with a dot on the first kernels that had any."""

WHOLE: Final = "SPX"
MODES: Final = frozenset({WHOLE, "DPX", "TPX", "QPX", "CPX"})

HOSTS: Final = frozenset({"gim"})
"""Drivers that only make virtual functions of AMD's GPUs, and give no node for the GPU itself."""

_PARTITION: Final = "current_compute_partition"
_FUNCTIONS: Final = "virtfn"
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NOBODY: Final = b"\xff\xff"


def told_by(folder: Path, cuts: Mapping[str, str | None], *, whole: bool) -> tuple[str | None, str | None]:
    """What in `cuts` tells whether what is of the device in this folder is still made, and by which word.

    Neither of a GPU that is no part of one; no word where it cannot be told just now.
    """
    try:
        return f"{(folder / 'physfn').readlink().name}/{_FUNCTIONS}", folder.name
    except OSError:
        by = f"{folder.name}/{_PARTITION}"
        return (None, None) if whole else (by, cuts.get(by))


def is_partitioned(address: str, cuts: Mapping[str, str | None]) -> bool:
    """Whether the GPU at a PCI address says that it is cut into partitions."""
    return cuts.get(f"{address}/{_PARTITION}") not in {None, WHOLE}


class Cuts:
    """Looks at the GPUs of these drivers; `asks` as of `kfd.Kfd`."""

    def __init__(self, drivers: frozenset[str], *, sys: Path, asks: Asks = lambda _: None) -> None:
        self._drivers = drivers
        self._asks = asks
        self._folders = [sys / "bus/pci/drivers" / driver for driver in sorted(drivers)]

    def look(self, question: Question | None = None) -> Mapping[str, str | None]:
        """How each is cut, in words, by what tells it; `None` where that cannot be told just now, or is not asked.

        That is its mode, or the addresses of its virtual functions, less those that another driver has, such as one
        that gives them to virtual machines. A GPU that is not there, or does not answer, is not in it.
        """
        asked = question or Question()
        found: dict[str, str | None] = {}
        for folder in self._folders:
            for name in _names(folder):
                card = folder / name
                place = _place(card)
                if asked.is_about(place):
                    self._asks(place)
                    told = self._told(card)
                    self._asks(None)
                else:
                    told = dict.fromkeys(_kinds(card))
                found.update((f"{name}/{what}", cut) for what, cut in told.items())
        return found

    def _told(self, card: Path) -> Mapping[str, str | None]:
        told = {what: _mode(card) if what == _PARTITION else self._functions(card) for what in _kinds(card)}
        answers = (None if _is_asleep(card) else _answers(card)) if told else None
        if answers is False:
            return {}
        return told if answers else dict.fromkeys(told)

    def _functions(self, card: Path) -> str | None:
        try:
            links = list(card.glob(f"{_FUNCTIONS}*"))
            return " ".join(sorted(link.readlink().name for link in links if _driver(link) in {None, *self._drivers}))
        except OSError:
            return None


def settled(
    before: Mapping[str, str | None], after: Mapping[str, str | None], topology: Topology
) -> Mapping[str, str | None]:
    """How each was cut all the time between two looks; `None` where it was being cut anew, or that cannot be told.

    While the topology is half there it says nothing of partitions.
    """
    placed = {address for node in topology.nodes.values() for address in node.addresses} if topology.whole else set()
    return {
        by: cut
        if cut == before.get(by) and (not by.endswith(_PARTITION) or by.removesuffix(f"/{_PARTITION}") in placed)
        else None
        for by, cut in after.items()
    }


def _kinds(card: Path) -> list[str]:
    """In which ways it can be cut. No driver is called: the files are there, or not."""
    files = {_PARTITION: _PARTITION, _FUNCTIONS: "sriov_totalvfs"}
    return [what for what, file in files.items() if (card / file).exists()]


def _place(card: Path) -> int | None:
    """The minor number of its own render node; `None` where it has none."""
    try:
        names = [each.name for each in (card / "drm").iterdir() if NODE.fullmatch(each.name)]
    except OSError:
        return None
    return min((int(name.removeprefix("renderD")) for name in names), default=None)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(each.name for each in folder.iterdir() if _ADDRESS.fullmatch(each.name))
    except OSError:  # no such driver
        return []


def _driver(function: Path) -> str | None:
    try:
        return (function / "driver").readlink().name
    except OSError:
        return None


def _mode(card: Path) -> str | None:
    try:
        mode = content(f"{card}/{_PARTITION}").decode("ascii").strip()
    except (OSError, ValueError):  # while it is reset
        return None
    return mode if mode in MODES else None


def _is_asleep(card: Path) -> bool:
    try:
        return content(f"{card}/power/runtime_status").strip() == b"suspended"
    except OSError:
        return False


def _answers(card: Path) -> bool | None:
    """Whether something answers at its place on the bus; `None` where that cannot be told."""
    try:
        opened = os.open(card / "config", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None if card.exists() else False
    except OSError:
        return None
    try:
        maker = os.pread(opened, len(_NOBODY), 0)
    except OSError:
        return None
    finally:
        os.close(opened)
    return maker != _NOBODY if len(maker) == len(_NOBODY) else None
