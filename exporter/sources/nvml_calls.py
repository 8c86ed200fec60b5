"""One call into NVIDIA's driver library: its answer, or why there is none.

Reference: https://docs.nvidia.com/deploy/nvml-api/
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pynvml

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


def ask(call: Callable[..., Any], *arguments: Any, absent: frozenset[int] = frozenset()) -> tuple[Any, str | None]:
    """One answer, or `None` and why there is none; codes in `absent` say that there is nothing, for no bad reason.

    Raises:
        NVMLError: the GPU is lost, or the driver is gone.
    """
    because = None
    for _ in range(TRIES_MAX):
        try:
            return call(*arguments), None
        except pynvml.NVMLError as error:
            if error.value in SESSION_OVER | GPU_LOST:
                raise
            if error.value in absent:
                return None, None
            because = said(error)
            if error.value != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
    return None, because


def said(error: pynvml.NVMLError) -> str:
    """The driver's own words, and what to do about it."""
    return ": ".join(filter(None, (str(error).rstrip("."), _ADVICE.get(error.value))))


def reason(error: pynvml.NVMLError) -> str:
    """One of a few fixed words, for a label."""
    return _REASONS.get(error.value, "failed")
