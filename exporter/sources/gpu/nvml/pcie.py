"""What goes wrong on one GPU's PCI Express link, as NVIDIA's driver counts it. All counts are asked for by one call.

A driver that does not know a count, or a GPU that has none, says so of that count alone; it is not asked for again.
It counts much more, by what was damaged and by lane. That is left out: each would be a series of every GPU, and whoever
is to look at the slot knows by these that he has to.

Reference: https://docs.nvidia.com/deploy/nvml-api/group__nvmlFieldValueEnums.html
"""

from typing import Any, Final

import pynvml

from exporter.sources.gpu.nvml import calls

FIELDS: Final = {
    "correctable": pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS,
    "nonfatal": pynvml.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR,
    "fatal": pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR,
}
"""NVML's number of each kind: how bad an error was, in the words of PCI Express."""

COUNT_MAX: Final = 2**32 - 2
"""All ones is how NVML says "not available"; the rest is further than any link gets."""

_MEMBERS: Final = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
}
"""Where in the union a count of this type stands: elsewhere there may be anything. Of a double no count is made."""

_UNKNOWN_NUMBER: Final = calls.NOT_THERE | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""The number is the only argument that is said to be invalid of one count alone: an older driver does not know it."""


class LinkErrors:
    """Asks one GPU, as long as its handle is good. `unknown` has a fixed word why a count was not told just now."""

    def __init__(self) -> None:
        self.unknown: str | None = None
        self._asked = dict(FIELDS)

    def read(self, handle: Any) -> dict[str, Any] | None:
        """The counts that it tells, by kind, as the field of `GpuFigures`; `None` where it tells none now.

        Raises:
            NVMLError: it has none, the call failed, the GPU is lost, or the driver is gone.
        """
        self.unknown = None
        counts: dict[str, int] = {}
        values = pynvml.nvmlDeviceGetFieldValues(handle, [(number, 0) for number in self._asked.values()])
        for kind, value in zip(list(self._asked), values, strict=True):
            code = value.nvmlReturn
            if code in calls.SESSION_OVER | calls.GPU_LOST:
                raise pynvml.NVMLError(code)
            if code in _UNKNOWN_NUMBER:
                del self._asked[kind]
            elif code != pynvml.NVML_SUCCESS:
                self.unknown = self.unknown or calls.reason(pynvml.NVMLError(code))
            elif (count := _count(value)) is None:
                self.unknown = self.unknown or calls.IMPOSSIBLE
            else:
                counts[kind] = count
        if not self._asked:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return {"pcie_errors": counts} if counts else None


def _count(value: Any) -> int | None:
    """The count that stands there; `None` where that is none."""
    member = _MEMBERS.get(value.valueType)
    count = -1 if member is None else getattr(value.value, member)
    return count if 0 <= count <= COUNT_MAX else None
