"""PCI Express errors of one GPU, in one NVML call. Unsupported counts are not read again.

Counts by damage and lane are left out: these show a faulty slot.
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
"""NVML's field numbers, by severity."""

COUNT_MAX: Final = 2**32 - 2
"""All ones is NVML's "not available"."""

_MEMBERS: Final = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
}
"""The union's member by value type. Doubles are not counts."""

_UNKNOWN_NUMBER: Final = calls.UNSUPPORTED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""An older driver rejects an unknown field number as an invalid argument."""


class LinkErrors:
    """Reads one GPU while its handle is valid; `unknown` is why a count is missing."""

    def __init__(self) -> None:
        self.unknown: str | None = None
        self._asked = dict(FIELDS)

    def read(self, handle: Any) -> dict[str, Any] | None:
        """Read the counts.

        Raises:
            NVMLError: unsupported, failed, GPU lost, or driver gone.
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
    member = _MEMBERS.get(value.valueType)
    count = -1 if member is None else getattr(value.value, member)
    return count if 0 <= count <= COUNT_MAX else None
