"""Calls into the NVML library.

Reference: https://docs.nvidia.com/deploy/nvml-api/
"""

from collections.abc import Callable, Iterator, Mapping
from ctypes import byref, c_uint, c_ulonglong, create_string_buffer
from struct import Struct
from typing import Any, Final, NamedTuple

import pynvml

from exporter.sources.gpu.nvml.process_samples import GpuSample, Sample

_PROCESS: Final = Struct("I4xQII")
"""nvmlProcessInfo_t: pid, usedGpuMemory, gpuInstanceId, computeInstanceId."""

_SAMPLE: Final = Struct("I4xQIIII")
"""nvmlProcessUtilizationSample_t: pid, timeStamp, smUtil, memUtil, encUtil, decUtil."""

_GPU_SAMPLES: Final[Mapping[int, Struct]] = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: Struct("QI4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: Struct("QQ"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: Struct("QQ"),
}
"""nvmlSample_t, by the type of its value: timeStamp, sampleValue, as `GpuSample` has them."""

_GPU_SAMPLE_BYTES: Final = 16
GPU_SAMPLES_MAX: Final = 512
"""A driver keeps about 14 s, five samples a second."""

NOT_AVAILABLE: Final = 2**64 - 1

ROOM: Final = 64
"""Entries that fit into the first call; a longer list takes a second one."""

TRIES_MAX: Final = 3
"""Calls for a list that grows between size and content."""

SESSION_OVER: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
GPU_LOST: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
UNSUPPORTED: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})

IMPOSSIBLE: Final = "impossible"

_REASONS: Final[Mapping[int, str]] = {
    **dict.fromkeys(UNSUPPORTED, "not_supported"),
    **dict.fromkeys(GPU_LOST, "gpu_lost"),
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "corrupted_inforom",
    pynvml.NVML_ERROR_NO_DATA: "no_data",
}

_ADVICE: Final = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "its library and its kernel module have different versions, "
    "reload the module or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "the exporter's user needs to open /dev/nvidiactl and /dev/nvidia*",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "it needs driver R510 or later",
}


class Refusal(NamedTuple):
    """Why a value is missing: a label value and a sentence."""

    reason: str
    message: str


def ask(call: Callable[..., Any], *arguments: Any, absent: frozenset[int] = frozenset()) -> tuple[Any, Refusal | None]:
    """Call; returns the answer, or `None` and why. Codes in `absent` mean that there is nothing to return.

    Raises:
        NVMLError: the GPU is lost, or the driver is gone.
    """
    refusal = None
    for _ in range(TRIES_MAX):
        try:
            return call(*arguments), None
        except pynvml.NVMLError as error:
            if error.value in SESSION_OVER | GPU_LOST:
                raise
            if error.value in absent:
                return None, None
            refusal = Refusal(reason(error), describe(error))
            if error.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
    return None, refusal


class Entry(NamedTuple):
    """One process of an NVML list (nvmlProcessInfo_t)."""

    pid: int
    memory_bytes: int
    gpu_instance: int
    compute_instance: int


def running(function: str, handle: Any) -> bytes:
    """Return a list of running processes as raw bytes, by its version 3 function.

    The package creates an object per entry, which takes ten times the time of the call.

    Raises:
        NVMLError: the driver has none, or it grew between two calls.
    """
    call, count = pynvml._nvmlGetFunctionPointer(function), c_uint(ROOM)  # noqa: SLF001
    into = create_string_buffer(ROOM * _PROCESS.size)
    code = call(handle, byref(count), into)
    if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        count.value = count.value * 2 + 5  # as in the package
        into = create_string_buffer(count.value * _PROCESS.size)
        code = call(handle, byref(count), into)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return into.raw[: count.value * _PROCESS.size]


def entries(raw: bytes) -> Iterator[Entry]:
    """Parse a list."""
    return map(Entry._make, _PROCESS.iter_unpack(raw))


def utilizations(handle: Any, seen_us: int) -> list[Sample]:
    """Return the samples of processes after a timestamp of the driver.

    The size comes first: an H100 refuses room for less than its whole buffer of 72 samples.

    Raises:
        NVMLError: there are none; its code may be success, as in the package.
    """
    call, count = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization"), c_uint(0)  # noqa: SLF001
    code = call(handle, None, byref(count), c_ulonglong(seen_us))
    if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        raise pynvml.NVMLError(code)
    into = create_string_buffer(max(1, count.value) * _SAMPLE.size)
    code = call(handle, into, byref(count), c_ulonglong(seen_us))
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return [Sample._make(each) for each in _SAMPLE.iter_unpack(into.raw[: count.value * _SAMPLE.size])]


def gpu_samples(handle: Any, seen_us: int) -> list[GpuSample]:
    """Return the GPU's own samples after a timestamp of the driver, the oldest first.

    Raises:
        NVMLError: there are none.
    """
    call, count = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetSamples"), c_uint(GPU_SAMPLES_MAX)  # noqa: SLF001
    into, kind = create_string_buffer(GPU_SAMPLES_MAX * _GPU_SAMPLE_BYTES), c_uint(0)
    about = (handle, c_uint(pynvml.NVML_GPU_UTILIZATION_SAMPLES), c_ulonglong(seen_us))
    code = call(*about, byref(kind), byref(count), into)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    layout = _GPU_SAMPLES.get(kind.value)
    if layout is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return [GpuSample._make(each) for each in layout.iter_unpack(into.raw[: count.value * _GPU_SAMPLE_BYTES])]


def name_of(handle: Any) -> str:
    """Return a GPU's name; invalid bytes are escaped.

    Raises:
        NVMLError: there is none.
    """
    try:
        return str(pynvml.nvmlDeviceGetName(handle))
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "backslashreplace")


def describe(error: pynvml.NVMLError) -> str:
    """The driver's message, with advice."""
    return ": ".join(filter(None, (str(error).rstrip("."), _ADVICE.get(error.value))))


def reason(error: pynvml.NVMLError) -> str:
    """A label value for an error."""
    return _REASONS.get(error.value, "failed")
