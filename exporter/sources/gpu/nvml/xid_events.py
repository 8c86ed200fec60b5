"""XIDs, the NVIDIA driver's errors of a GPU (NVML, event notification), received in a thread.

A lost GPU ends the wait for all, so a new event set is created. The call that adds a GPU can hang, so another thread
then waits for the others.

Reference: https://docs.nvidia.com/deploy/xid-errors/
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pynvml

from exporter.sources.gpu.nvml import calls

WAIT_MS: Final = 1000
"""Longest wait, milliseconds, before new GPUs are added or a stop is seen."""

RETRY_S: Final = 1.0

END_S: Final = 3.0

HUNG_S: Final = 5.0
"""Seconds for the call that adds a GPU, before another thread takes the others."""

CODE_MAX: Final = 999
"""NVIDIA's list ends below 200. Greater numbers are reported as 0."""

Report = Callable[[str, int], None]
"""Called with the GPU's UUID and the XID."""


class XidWatch:
    """Waits for the events of one driver session until it is stopped."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._wanted: dict[str, Any] = {}
        self._watched: dict[int, str] = {}
        self._refused: dict[str, tuple[Any, str]] = {}
        self._adds: tuple[str, float] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._wait_on, name="xids", daemon=True)
        self._thread.start()

    def watch(self, uuid: str, handle: Any) -> None:
        """Add a GPU soon."""
        self._wanted.setdefault(uuid, handle)

    def forget(self, uuid: str) -> None:
        """Remove a lost GPU; it is added again when it is back."""
        self._wanted.pop(uuid, None)

    def why_not(self, uuid: str) -> str | None:
        """Why a GPU is not watched, as a label value."""
        if uuid in tuple(self._watched.values()):
            return None
        handle, message = self._refused.get(uuid, (None, ""))
        return message if handle is not None and handle is self._wanted.get(uuid) else "not_yet"

    def hangs_on(self) -> str | None:
        """UUID of the GPU whose addition hangs."""
        uuid, since_s = self._adds or (None, 0.0)
        return uuid if uuid is not None and time.monotonic() - since_s >= HUNG_S else None

    @property
    def is_over(self) -> bool:
        """Whether the thread ended."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Request the end."""
        self._stopping.set()

    def has_ended(self) -> bool:
        """Wait for the end after `stop`; a hanging call prevents it."""
        self._thread.join(timeout=END_S)
        return self.is_over

    def _wait_on(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(pynvml.NVMLError):
                self._with_a_set()
            self._watched = {}
            self._stopping.wait(RETRY_S)

    def _with_a_set(self) -> None:
        events = pynvml.nvmlEventSetCreate()
        try:
            while not self._stopping.is_set():
                self._register(events)
                if self._stopping.is_set():
                    break  # another thread now waits for the same GPUs
                if self._watched:
                    self._wait(events)
                else:
                    self._stopping.wait(WAIT_MS / 1000)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _register(self, events: Any) -> None:
        """Add new GPUs to the set."""
        for uuid, handle in tuple(self._wanted.items()):
            refused, _ = self._refused.get(uuid, (None, ""))
            if handle is refused or uuid in self._watched.values():
                continue
            self._adds = uuid, time.monotonic()
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError as error:
                self._refused[uuid] = handle, calls.reason(error)
                if error.value == pynvml.NVML_ERROR_UNKNOWN:
                    raise  # the set's state is unknown
            else:
                self._watched = {**self._watched, _address(handle): uuid}
            finally:
                self._adds = None
            if self._stopping.is_set():
                return

    def _wait(self, events: Any) -> None:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                raise
            return
        uuid = self._watched.get(_address(event.device))
        if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
            self._report(uuid, event.eventData if event.eventData <= CODE_MAX else 0)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
