"""Whether a host has NVIDIA hardware or its driver, even if no GPU can be read.

    /proc/driver/nvidia             the driver
    /sys/bus/pci/drivers/nvidia
    /sys/bus/pci/devices/*          hardware: `vendor` 0x10de, `class` 0x03… (display)

Source: Documentation/ABI/testing/sysfs-bus-pci of the kernel.
"""

from pathlib import Path
from typing import Final

from exporter.sources.gpu.drm.kfd import SYS
from gpuwarden import procfs

VENDOR: Final = "0x10de"
DISPLAY: Final = "0x03"


class NvidiaHost:
    """Looks for NVIDIA's driver and hardware. A GPU can fall off its bus, so they count from then on."""

    def __init__(self, *, sys: Path = SYS, proc: Path = procfs.PROC) -> None:
        self._drivers = (proc / "driver/nvidia", sys / "bus/pci/drivers/nvidia")
        self._devices = sys / "bus/pci/devices"
        self._present = False
        self._others: frozenset[str] = frozenset()

    def note_read(self) -> None:
        """Note that a GPU was read."""
        self._present = True

    def may_have_nvidia(self) -> bool:
        """Whether NVIDIA hardware or its driver is or was present, or cannot be checked."""
        try:
            self._present = self._present or any(each.exists() for each in self._drivers) or self._is_on_its_bus()
        except OSError:
            return True
        return self._present

    def _is_on_its_bus(self) -> bool:
        # Only new devices are read: a host has hundreds.
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
