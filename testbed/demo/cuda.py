"""Work for a real NVIDIA GPU through the driver's library, without the CUDA toolkit or a framework.

`occupy` keeps the GPU busy, as a training step does. Without further calls the GPU is idle and keeps the memory.
Reference: https://docs.nvidia.com/cuda/cuda-driver-api/
"""

import ctypes
from functools import cache
from typing import Any, Final

LIBRARY: Final = "libcuda.so.1"
SLICE_S: Final = 0.05
"""Length of one kernel, seconds. A GPU with a display ends longer kernels."""
FOREVER_S: Final = 3600.0
"""A kernel of this length or longer is started as one."""

# Spins in one thread for some nanoseconds. The driver compiles it for the GPU.
KERNEL: Final = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry spin(.param .u64 duration_ns)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [duration_ns];
    mov.u64 %rd2, %globaltimer;
again:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra again;
    ret;
}
"""


class CudaError(Exception):
    """The driver refused a call; the message names the call and CUDA's number of the error."""


class Gpu:
    """The first GPU that CUDA sees, with a context of this process."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        self._memory: dict[int, ctypes.c_uint64] = {}
        device, module, self._kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, device)
        self._call("cuModuleLoadData", ctypes.byref(module), KERNEL)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")

    def hold(self, size: int) -> None:
        """Hold so many bytes of GPU memory until the process ends."""
        self._use()
        if size and size not in self._memory:
            memory = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
            self._memory[size] = memory

    def occupy(self, seconds: float) -> None:
        """Start kernels that together run for so long; returns while they run."""
        self._use()
        if seconds >= FOREVER_S:
            self._launch(seconds)
            return
        for _ in range(round(seconds / SLICE_S)):
            self._launch(SLICE_S)

    def _launch(self, seconds: float) -> None:
        duration_ns = ctypes.c_uint64(int(seconds * 1e9))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(duration_ns))
        self._call("cuLaunchKernel", self._kernel, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)

    def _use(self) -> None:
        """Have this thread use the context."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise CudaError(f"{name} failed with CUDA error {status}")


@cache
def gpu() -> Gpu:
    """This process's GPU. Its first use takes a second or more."""
    return Gpu()
