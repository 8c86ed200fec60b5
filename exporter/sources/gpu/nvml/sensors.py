"""Sensors and error counters of one NVIDIA GPU; each is a separate call.

Unsupported ones are not called again in a session. Sensors are read in every fifth sample, because some take
milliseconds; counters in every tenth.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pynvml

from exporter.model.gpu import THROTTLE_REASONS, GpuFigures
from exporter.sources.gpu.nvml import calls
from exporter.sources.gpu.nvml.pcie import LinkErrors

SENSOR_LOOKS: Final = 5
"""Samples between two readings of sensors; after a failure the next sample reads them."""

SLOW_LOOKS: Final = 10
"""Samples between two readings of counters."""

NOT_SUPPORTED: Final = calls.reason(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))

_CELSIUS_MAX: Final = 250
_MILLIWATTS_MAX: Final = 10_000_000
_MEGAHERTZ_MAX: Final = 100_000
_COUNT_MAX: Final = 2**63
_SMALL_COUNT_MAX: Final = 2**32 - 2
"""All ones is NVML's "not available"."""


@dataclass(frozen=True, kw_only=True)
class _Number:
    """A call that returns one number, in units of `scale`."""

    figure: str
    call: Callable[..., int]
    arguments: tuple[int, ...] = ()
    greatest: int
    scale: float | None = None
    slow: bool = False


def _ecc(figure: str, error: int, counter: int) -> _Number:
    return _Number(
        figure=figure, call=pynvml.nvmlDeviceGetTotalEccErrors, arguments=(error, counter), greatest=_COUNT_MAX,
        slow=True,
    )  # fmt: skip


_NUMBERS: Final = (
    _Number(
        figure="temperature_celsius", call=pynvml.nvmlDeviceGetTemperature,
        arguments=(pynvml.NVML_TEMPERATURE_GPU,), greatest=_CELSIUS_MAX, scale=1.0,
    ),
    _Number(figure="power_watts", call=pynvml.nvmlDeviceGetPowerUsage, greatest=_MILLIWATTS_MAX, scale=1e-3),
    _Number(
        figure="power_limit_watts", call=pynvml.nvmlDeviceGetEnforcedPowerLimit, greatest=_MILLIWATTS_MAX, scale=1e-3,
    ),
    _Number(
        figure="sm_clock_hertz", call=pynvml.nvmlDeviceGetClockInfo, arguments=(pynvml.NVML_CLOCK_SM,),
        greatest=_MEGAHERTZ_MAX, scale=1e6,
    ),
    _Number(
        figure="memory_clock_hertz", call=pynvml.nvmlDeviceGetClockInfo, arguments=(pynvml.NVML_CLOCK_MEM,),
        greatest=_MEGAHERTZ_MAX, scale=1e6,
    ),
    _ecc("ecc_corrected", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
    _ecc("ecc_uncorrected", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
    _ecc("ecc_lifetime_corrected", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_AGGREGATE_ECC),
    _ecc("ecc_lifetime_uncorrected", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC),
    _Number(
        figure="pcie_replays", call=pynvml.nvmlDeviceGetPcieReplayCounter, greatest=_SMALL_COUNT_MAX, slow=True,
    ),
)  # fmt: skip


class Figures:
    """Reads one GPU while its handle is valid."""

    def __init__(self) -> None:
        self._unsupported: set[str] = set()
        self._fast: dict[str, Any] = {}
        self._fast_unknown: dict[str, str] = {}
        self._slow: dict[str, Any] = {}
        self._slow_unknown: dict[str, str] = {}
        self._link = LinkErrors()
        self._looks = 0
        self._figures = GpuFigures()

    def read(self, handle: Any) -> GpuFigures:
        """Read every value.

        Raises:
            NVMLError: the GPU is lost, or the driver is gone.
        """
        changed = False
        if self._looks % SLOW_LOOKS == 0:
            changed = True
            self._slow, self._slow_unknown = {}, {}
            self._take(self._slow_asked(handle), self._slow, self._slow_unknown)
        if self._looks % SENSOR_LOOKS == 0 or any(each != NOT_SUPPORTED for each in self._fast_unknown.values()):
            changed = True
            self._fast, self._fast_unknown = {}, {}
            self._take(self._fast_asked(handle), self._fast, self._fast_unknown)
        self._looks += 1
        if changed:
            unknown = {**self._fast_unknown, **self._slow_unknown}
            self._figures = GpuFigures(**self._fast, **self._slow, unknown=unknown)
        return self._figures

    @staticmethod
    def _take(asked: Iterator[tuple[str, dict[str, Any] | str]], into: dict[str, Any], unknown: dict[str, str]) -> None:
        for figure, answer in asked:
            if isinstance(answer, str):
                unknown[figure] = answer
            else:
                into.update(answer)

    def _fast_asked(self, handle: Any) -> Iterator[tuple[str, dict[str, Any] | str]]:
        yield from self._numbers(handle, slow=False)
        yield "throttle", self._call("throttle", partial(_throttle, handle))

    def _slow_asked(self, handle: Any) -> Iterator[tuple[str, dict[str, Any] | str]]:
        yield from self._numbers(handle, slow=True)
        yield "remapped_rows", self._call("remapped_rows", partial(_remapped, handle))
        yield "pcie_errors", self._call("pcie_errors", partial(self._link.read, handle))
        if self._link.unknown is not None:  # some counts are missing
            yield "pcie_errors", self._link.unknown

    def _numbers(self, handle: Any, *, slow: bool) -> Iterator[tuple[str, dict[str, Any] | str]]:
        for each in _NUMBERS:
            if each.slow == slow:
                yield each.figure, self._call(each.figure, partial(_number, handle, each))

    def _call(self, figure: str, ask: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | str:
        """Return the fields of a call, or why there are none."""
        if figure in self._unsupported:
            return NOT_SUPPORTED
        try:
            return ask() or calls.IMPOSSIBLE
        except pynvml.NVMLError as error:
            if error.value in calls.SESSION_OVER | calls.GPU_LOST:
                raise
            if error.value in calls.UNSUPPORTED:
                self._unsupported.add(figure)
            return calls.reason(error)


def _number(handle: Any, number: _Number) -> dict[str, Any] | None:
    value = number.call(handle, *number.arguments)
    if value > number.greatest:
        return None
    return {number.figure: value if number.scale is None else value * number.scale}


def _throttle(handle: Any) -> dict[str, Any] | None:
    bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    # Newer drivers set bits without a name here; these are ignored.
    return (
        None
        if bits > _COUNT_MAX
        else {"throttled": [name for bit, name in enumerate(THROTTLE_REASONS) if bits >> bit & 1]}
    )


def _remapped(handle: Any) -> dict[str, Any] | None:
    corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    if max(corrected, uncorrected) > _SMALL_COUNT_MAX or max(pending, failed) > 1:
        return None
    return {
        "remapped_rows_corrected": corrected,
        "remapped_rows_uncorrected": uncorrected,
        "row_remap_pending": bool(pending),
        "row_remap_failed": bool(failed),
    }
