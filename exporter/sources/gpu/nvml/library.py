"""The NVIDIA driver's library: whether it is there, and the process that asks it."""

import ctypes
from typing import Final

from exporter.sources.gpu.isolated.process import Driver
from exporter.sources.gpu.isolated.protocol import DriverError

LIBRARY: Final = "libnvidia-ml.so.1"

DRIVER: Final = Driver(who="the NVIDIA driver", program=("-m", "exporter.sources.gpu.nvml.child"))


class LibraryMissingError(DriverError):
    """The driver's library cannot be loaded."""


def load() -> None:
    """See whether the driver's library can be loaded. Nothing of it is called in this process.

    Raises:
        LibraryMissingError: it cannot be loaded, and why.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise LibraryMissingError(
            f"{LIBRARY} cannot be loaded ({error}): install the NVIDIA driver on this host, or make its library "
            "visible to the exporter, or start it with --nvml off"
        ) from None
