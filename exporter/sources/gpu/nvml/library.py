"""The NVIDIA driver's library."""

import ctypes
from typing import Final

from exporter.sources.gpu.isolated.process import Driver
from exporter.sources.gpu.isolated.protocol import DriverError

LIBRARY: Final = "libnvidia-ml.so.1"

DRIVER: Final = Driver(who="the NVIDIA driver", program=("-m", "exporter.sources.gpu.nvml.child"))


class LibraryMissingError(DriverError):
    """The library cannot be loaded."""


def load() -> None:
    """Check that the library can be loaded, without a call into it.

    Raises:
        LibraryMissingError: it cannot be loaded.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise LibraryMissingError(
            f"{LIBRARY} cannot be loaded ({error}): install the NVIDIA driver, make its library visible to the "
            "exporter, or set --nvml off"
        ) from None
