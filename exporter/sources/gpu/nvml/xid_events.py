"""What the NVIDIA driver reports unasked: XIDs, its numbers for what goes wrong on a GPU (NVML, event notification).

A thread of its own waits for them, so that none is missed between two looks; it alone handles the event set. A GPU that
is lost ends a wait for all of them: then the set is made anew, of the others. The call by which a GPU is added to the
set can hang: the thread tells about which GPU it does, and another one can wait for the others.

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
"""How long one wait is, milliseconds: so long may it take until a GPU that is new is waited for, or the end is seen. A
report ends it at once."""

RETRY_S: Final = 1.0
"""How long after a wait failed the next set is made, seconds."""

END_S: Final = 3.0
"""How long the thread may take to end, seconds."""

HUNG_S: Final = 5.0
"""How long the call by which a GPU is added may take, seconds, until another thread waits for the others."""

CODE_MAX: Final = 999
"""NVIDIA's list ends below 200; a greater number is none of it, and told as 0."""

Report = Callable[[str, int], None]
"""Told of each error: the GPU's UUID, and NVIDIA's number for it."""


class XidWatch:
    """Waits for the reports of one session with the driver, until it is stopped."""

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
        """Have this GPU waited for, from soon on."""
        self._wanted.setdefault(uuid, handle)

    def forget(self, uuid: str) -> None:
        """It is lost: when it is back it is to be asked for anew."""
        self._wanted.pop(uuid, None)

    def why_not(self, uuid: str) -> str | None:
        """`None` while this GPU is waited for, else a fixed word why it is not."""
        if uuid in tuple(self._watched.values()):
            return None
        handle, because = self._refused.get(uuid, (None, ""))
        return because if handle is not None and handle is self._wanted.get(uuid) else "not_yet"

    def hangs_on(self) -> str | None:
        """The GPU that it has tried to wait for for too long, by UUID."""
        uuid, since_s = self._adds or (None, 0.0)
        return uuid if uuid is not None and time.monotonic() - since_s >= HUNG_S else None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Have it end, soon."""
        self._stopping.set()

    def has_ended(self) -> bool:
        """Whether it has ended, after `stop`; waits for that a while. A call that hangs prevents it."""
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
                    break  # another thread waits for the same by now: each report is to be told once
                if self._watched:
                    self._wait(events)
                else:
                    self._stopping.wait(WAIT_MS / 1000)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _register(self, events: Any) -> None:
        """Add the GPUs that are not in the set yet."""
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
                    raise  # the set is in no known state any more
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
