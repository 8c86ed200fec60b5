"""One call into NVIDIA's driver library: its answer, or why there is none.

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
"""nvmlProcessUtilizationSample_t: pid, timeStamp, smUtil, memUtil, encUtil, decUtil, as `Sample` has them."""

_GPU_SAMPLES: Final[Mapping[int, Struct]] = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: Struct("QI4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: Struct("QQ"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: Struct("QQ"),
}
"""nvmlSample_t, by the type of its value: timeStamp, sampleValue, as `GpuSample` has them."""

_GPU_SAMPLE_BYTES: Final = 16
GPU_SAMPLES_MAX: Final = 512
"""Samples of a GPU that are made room for. A driver keeps about 14 s of them, five a second."""

NOT_AVAILABLE: Final = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE, of 64 bits."""

ROOM: Final = 64
"""Entries of a list that are made room for at once; of a longer one the size is asked first, which is another call."""

TRIES_MAX: Final = 3
"""How often a list is asked for that grew between the call for its size and the one for its content."""

SESSION_OVER: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
GPU_LOST: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
NOT_THERE: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""This GPU, or this driver, does not know of such a thing."""

IMPOSSIBLE: Final = "impossible"
"""The reason of a figure that no GPU can have."""

_REASONS: Final[Mapping[int, str]] = {
    **dict.fromkeys(NOT_THERE, "not_supported"),
    **dict.fromkeys(GPU_LOST, "gpu_lost"),
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "corrupted_inforom",
    pynvml.NVML_ERROR_NO_DATA: "no_data",
}

_ADVICE: Final = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "its library and its kernel module are of two versions, "
    "load the module anew or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "the exporter's user needs to open /dev/nvidiactl and /dev/nvidia*",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "a driver from R510 on is needed",
}


class Refusal(NamedTuple):
    """Why a figure is not told: one of a few fixed words, for a label, and what to say about it."""

    reason: str
    because: str


def ask(call: Callable[..., Any], *arguments: Any, absent: frozenset[int] = frozenset()) -> tuple[Any, Refusal | None]:
    """One answer, or `None` and why there is none; codes in `absent` say that there is nothing, for no bad reason.

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
            refusal = Refusal(reason(error), said(error))
            if error.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
    return None, refusal


class Entry(NamedTuple):
    """One process of a list of NVML's (nvmlProcessInfo_t), as it stands there: bytes of memory, or `NOT_AVAILABLE`."""

    pid: int
    memory_bytes: int
    gpu_instance: int
    compute_instance: int


def running(function: str, handle: Any) -> bytes:
    """A list of running processes as it stands in memory, by the name of the function that tells it, its version 3.

    The package makes an object of each entry, field by field, which costs ten times as much as to ask the driver; from
    look to look most lists are the same.

    Raises:
        NVMLError: the driver gives none, or it grew between the two calls.
    """
    call, count = pynvml._nvmlGetFunctionPointer(function), c_uint(ROOM)  # noqa: SLF001 - it has loaded the library
    into = create_string_buffer(ROOM * _PROCESS.size)
    code = call(handle, byref(count), into)
    if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        count.value = count.value * 2 + 5  # as the package has it: more may come before the second call
        into = create_string_buffer(count.value * _PROCESS.size)
        code = call(handle, byref(count), into)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return into.raw[: count.value * _PROCESS.size]


def entries(told: bytes) -> Iterator[Entry]:
    """What a list says."""
    return map(Entry._make, _PROCESS.iter_unpack(told))


def utilizations(handle: Any, seen_us: int) -> list[Sample]:
    """What each process did, newer than a timestamp of the driver's.

    The size is asked first: an H100 refuses room for less than its whole buffer, 72 samples, however few there are.

    Raises:
        NVMLError: the driver tells none, or has none; also with its code for success, as the package has it.
    """
    call, count = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization"), c_uint(0)  # noqa: SLF001 - as above
    code = call(handle, None, byref(count), c_ulonglong(seen_us))
    if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        raise pynvml.NVMLError(code)
    into = create_string_buffer(max(1, count.value) * _SAMPLE.size)
    code = call(handle, into, byref(count), c_ulonglong(seen_us))
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return [Sample._make(each) for each in _SAMPLE.iter_unpack(into.raw[: count.value * _SAMPLE.size])]


def gpu_samples(handle: Any, seen_us: int) -> list[GpuSample]:
    """How busy the GPU was, by the driver's samples newer than a timestamp of the driver's, oldest first.

    Raises:
        NVMLError: the driver has no newer ones, or refuses.
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
    """What a GPU is called. A byte of that which is no text is written as its number: it must cost no figure.

    Raises:
        NVMLError: the driver does not say.
    """
    try:
        return str(pynvml.nvmlDeviceGetName(handle))
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "backslashreplace")


def said(error: pynvml.NVMLError) -> str:
    """The driver's own words, and what to do about it."""
    return ": ".join(filter(None, (str(error).rstrip("."), _ADVICE.get(error.value))))


def reason(error: pynvml.NVMLError) -> str:
    """One of a few fixed words, for a label."""
    return _REASONS.get(error.value, "failed")
