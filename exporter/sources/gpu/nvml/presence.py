"""Whether a host has anything of NVIDIA's, as the Linux kernel tells it: also where no GPU of NVIDIA's can be read.

    /proc/driver/nvidia             the driver, and the kernel's folder of what it drives
    /sys/bus/pci/drivers/nvidia
    /sys/bus/pci/devices/*          hardware, whatever drives it: `vendor` 0x10de, `class` 0x03…, a display controller

Sources: Documentation/ABI/testing/sysfs-bus-pci of the kernel, include/linux/pci_ids.h for the numbers.
"""

from pathlib import Path
from typing import Final

from exporter.sources.gpu.drm.kfd import SYS
from gpuwarden import procfs

VENDOR: Final = "0x10de"
DISPLAY: Final = "0x03"


class NvidiaHost:
    """Looks for NVIDIA's driver and hardware. What was there once counts for good: a GPU can fall off its bus."""

    def __init__(self, *, sys: Path = SYS, proc: Path = procfs.PROC) -> None:
        self._drivers = (proc / "driver/nvidia", sys / "bus/pci/drivers/nvidia")
        self._devices = sys / "bus/pci/devices"
        self._there = False
        self._others: frozenset[str] = frozenset()

    def told(self) -> None:
        """A GPU of NVIDIA's has been read."""
        self._there = True

    def may_be_there(self) -> bool:
        """Whether there is, or was, anything of NVIDIA's; also where the kernel does not tell."""
        try:
            self._there = self._there or any(each.exists() for each in self._drivers) or self._is_on_its_bus()
        except OSError:
            return True
        return self._there

    def _is_on_its_bus(self) -> bool:
        """Only devices that are new are asked: a host has hundreds."""
        names = frozenset(each.name for each in self._devices.iterdir())
        if any(self._is_a_gpu(self._devices / name) for name in names - self._others):
            return True
        self._others = names
        return False

    @staticmethod
    def _is_a_gpu(device: Path) -> bool:
        if (device / "vendor").read_text(encoding="ascii").strip() != VENDOR:
            return False
        return (device / "class").read_text(encoding="ascii").startswith(DISPLAY)
