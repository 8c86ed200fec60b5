"""NVIDIA GPUs by NVML, with the package nvidia-ml-py (docs/reference/gpus.md).

A failed value is unknown, a lost GPU costs only its own values, and a reloaded driver costs one sample. Calls have no
timeout, so they run in a child process that can be killed. It names each GPU before a call about it, and shuts
nothing down.

Reference: https://docs.nvidia.com/deploy/nvml-api/
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import pynvml

from exporter.model.gpu import NO_ATTRIBUTION, UNIDENTIFIED, Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.sources.gpu.isolated.protocol import HUNG, HUNG_FIGURES, DriverError, Question
from exporter.sources.gpu.nvml import process_samples
from exporter.sources.gpu.nvml.calls import (
    GPU_LOST,
    IMPOSSIBLE,
    NOT_AVAILABLE,
    SESSION_OVER,
    UNSUPPORTED,
    Entry,
    Refusal,
    ask,
    describe,
    entries,
    gpu_samples,
    name_of,
    reason,
    running,
    utilizations,
)
from exporter.sources.gpu.nvml.process_samples import Cursor, GpuSample, Listed, Sample
from exporter.sources.gpu.nvml.sensors import NOT_SUPPORTED, Figures
from exporter.sources.gpu.nvml.xid_events import Report, XidWatch

SOURCE: Final = "nvml"

IN_MIG_MODE: Final = "it is in MIG mode: only the memory of its instances is measured"
UNREAD_INSTANCE: Final = "the utilisation of an instance of a GPU is not read"
INSTANCES_MAX: Final = 64
"""More than any GPU has."""

NO_INSTANCE: Final = 2**32 - 1
"""Value of a list entry without an instance."""

_LISTS: Final = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "MPS"}
"""Process lists."""

_PREFIXES: Final = {
    "utilization": "utilisation: ",
    "processes": "",
    "process_utilization": "utilisation of processes: ",
    "memory": "memory: ",
}
"""Prefix of an error by the value that failed."""

_IMPOSSIBLE_LISTS: Final = Refusal(IMPOSSIBLE, "its lists have impossible pids: update the driver")

_NO_NEW_SAMPLES: Final = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS})
"""Codes of the call for the size that mean an empty list."""


class NvmlGpus:
    """Calls the driver, in one thread at a time.

    Args:
        report: called with XIDs, from another thread.
        announce: called with a GPU's number before calls about it; `None` after.
    """

    def __init__(self, report: Report | None = None, announce: Callable[[int | None], None] = lambda _: None) -> None:
        self._report = report
        self._announce = announce
        self._xids: XidWatch | None = None
        self._hung_xids: dict[str, XidWatch] = {}
        self._initialised = False
        self._failed = False
        self._identities: dict[int, tuple[str, str]] = {}
        self._without_mig: set[str] = set()
        self._without_samples: set[str] = set()
        self._cursors: dict[str, Cursor] = {}
        self._figures: dict[str, Figures] = {}

    def read(self, question: Question | None = None) -> GpuReadings:
        """Read every GPU, or those of the question.

        Raises:
            DriverError: the driver does not answer; the next call initialises again.
        """
        if self._failed and not self._end_session():
            raise DriverError("a wait for NVIDIA driver events does not end", over=True)
        asked = question or Question()
        try:
            if not self._initialised:
                # GPUs attach when their handle is requested, so a faulty one does not fail the others.
                pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
                self._initialised = True
                self._xids = XidWatch(self._report) if self._report else None
            self._leave_hung_xids()
            gpus: list[Gpu] = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                if index in asked.without:
                    gpus.append(self._unreachable(index, HUNG, HUNG_FIGURES, lost=None))
                elif asked.only in (None, index):
                    self._announce(index)
                    gpus += self._gpu(index)
            return GpuReadings(source=SOURCE, gpus=tuple(gpus))
        except pynvml.NVMLError as error:
            self._failed = True
            if self._xids:
                self._xids.stop()
            raise DriverError(
                f"the NVIDIA driver does not answer: {describe(error)}",
                # A process keeps its loaded library. The next one loads the right one.
                over=error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
                reloaded=error.value in SESSION_OVER,
            ) from None
        finally:
            self._announce(None)

    def _end_session(self) -> bool:
        """Forget the state of a driver session; returns whether another session can start."""
        if not all(each.has_ended() for each in (self._xids, *self._hung_xids.values()) if each):
            return False
        if self._initialised:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        self._initialised = False
        self._identities = {}
        self._without_mig = set()
        self._without_samples = set()
        self._cursors = {}
        self._figures = {}
        self._xids = None
        self._hung_xids = {}
        self._failed = False
        return True

    def _leave_hung_xids(self) -> None:
        """Move the other GPUs' events to another thread if one GPU hangs."""
        self._hung_xids = {uuid: watch for uuid, watch in self._hung_xids.items() if not watch.is_over}
        if self._xids and self._report and (uuid := self._xids.hangs_on()) is not None:
            self._xids.stop()
            self._hung_xids[uuid] = self._xids
            self._xids = XidWatch(self._report)

    def _gpu(self, index: int) -> list[Gpu]:
        """Read a GPU and its MIG instances."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), name_of(handle)
            self._identities[index] = uuid, name
            whole = not self._in_mig_mode(handle, uuid)
            return [
                self._measured(handle, uuid, index, name, whole=whole),
                *([] if whole else _instances(handle, uuid, index, name)),
            ]
        except pynvml.NVMLError as error:
            if error.value in SESSION_OVER:
                raise
            if error.value in GPU_LOST:  # see `gpuwarden_gpu_lost_seconds`
                return [self._unreachable(index, describe(error), GpuFigures(), lost=True)]
            # Other errors may pass.
            return [self._unreachable(index, describe(error), GpuFigures(unknown={"gpu": reason(error)}), lost=None)]

    def _in_mig_mode(self, handle: Any, uuid: str) -> bool:
        """Whether a GPU is in MIG mode; unsupported ones are asked once per session."""
        if uuid in self._without_mig:
            return False
        modes, refusal = ask(pynvml.nvmlDeviceGetMigMode, handle)
        if refusal is not None and refusal.reason == NOT_SUPPORTED:
            self._without_mig.add(uuid)
        return modes is not None and modes[0] == pynvml.NVML_DEVICE_MIG_ENABLE

    def _unreachable(self, index: int, message: str, figures: GpuFigures, *, lost: bool | None) -> Gpu:
        # Stays in the readings, so that a container with every GPU is judged with it.
        uuid, name = self._identities.get(index, (f"{UNIDENTIFIED}{index}", ""))
        self._without_mig.discard(uuid)
        self._without_samples.discard(uuid)
        self._cursors.pop(uuid, None)
        self._figures.pop(uuid, None)
        if self._xids:
            self._xids.forget(uuid)
        return Gpu(
            uuid=uuid,
            index=index,
            name=name,
            utilization_ratio=None,
            memory_used_bytes=None,
            memory_size_bytes=None,
            processes=None,
            unknown=message,
            figures=figures,
            lost=lost,
        )

    def _measured(self, handle: Any, uuid: str, index: int, name: str, *, whole: bool) -> Gpu:
        # The second version does not count the driver's own memory as used.
        memory, memory_refused = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
        ratio: float | None = None
        processes: tuple[GpuProcess, ...] | None = None
        why: list[str | None] = [IN_MIG_MODE]
        refused: dict[str, Refusal | None] = {"memory": memory_refused}
        if whole:
            ratio, processes, refusals = self._work(handle, uuid)
            refused |= refusals
            why = [
                _describe(refused, "utilization"),
                _describe(refused, "processes"),
                _describe(refused, "process_utilization"),
            ]
            if not any(why[1:]) and any(process.utilization_ratio is None for process in processes or ()):
                why.append("the driver's samples do not include every process")
        figures = self._figures.setdefault(uuid, Figures()).read(handle)
        unknown = _reasons(refused)
        xids_unknown = self._why_no_xids(handle, uuid)
        if xids_unknown:
            unknown["xid"] = xids_unknown
        if unknown:
            figures = replace(figures, unknown={**figures.unknown, **unknown})
        return Gpu(
            uuid=uuid,
            index=index,
            name=name,
            utilization_ratio=ratio,
            memory_used_bytes=None if memory is None else memory.used,
            memory_size_bytes=None if memory is None else memory.total,
            memory_free_bytes=None if memory is None else memory.free,
            processes=processes,
            unknown="; ".join(filter(None, (*why, _describe(refused, "memory")))) or None,
            attribution="process" if whole else NO_ATTRIBUTION,
            figures=figures,
            xids_watched=self._xids is not None and xids_unknown is None,
        )

    def _why_no_xids(self, handle: Any, uuid: str) -> str | None:
        if self._xids is None:
            return None
        if uuid in self._hung_xids:
            return "hung"
        self._xids.watch(uuid, handle)
        return self._xids.why_not(uuid)

    def _work(
        self, handle: Any, uuid: str
    ) -> tuple[float | None, tuple[GpuProcess, ...] | None, dict[str, Refusal | None]]:
        """The GPU's utilisation, its listed processes, and what failed."""
        # List first: a process that starts in between is unattributed for a sample, and not idle.
        listed, not_listed = _list_processes(handle)
        if listed is None:
            ratio, refused = _utilization(handle)
            return ratio, None, {"utilization": refused, "processes": not_listed}
        cursor = self._cursors.get(uuid, Cursor())
        # The GPU's own samples first, so that all of the processes' samples are read.
        whole = self._gpu_samples(handle, uuid, cursor)
        found, not_measured = _samples(handle, cursor.seen_us or 0)
        if process_samples.are_newer(found or [], process_samples.newest_us(whole, cursor)):
            whole = self._gpu_samples(handle, uuid, cursor)
        ratio, refused = process_samples.mean_ratio(whole, cursor), None
        if ratio is None:
            ratio, refused = _utilization(handle)
        figures = process_samples.measure(listed, found, cursor)
        gpu_us = process_samples.newest_us(whole, cursor)
        if found is not None or gpu_us is not None:
            self._cursors[uuid] = process_samples.advance(cursor, listed, found or [], gpu_ratio=ratio, gpu_us=gpu_us)
        return ratio, figures, {"utilization": refused, "process_utilization": not_measured}

    def _gpu_samples(self, handle: Any, uuid: str, cursor: Cursor) -> list[GpuSample]:
        """The GPU's new samples; an unsupported call is not repeated, as in `_in_mig_mode`."""
        if uuid in self._without_samples:
            return []
        found, refusal = ask(gpu_samples, handle, cursor.seen_us or 0, absent=_NO_NEW_SAMPLES)
        if refusal is not None and refusal.reason == NOT_SUPPORTED:
            self._without_samples.add(uuid)
        return found or []


def _describe(refused: Mapping[str, Refusal | None], figure: str) -> str | None:
    refusal = refused.get(figure)
    return None if refusal is None else f"{_PREFIXES[figure]}{refusal.message}"


def _reasons(refused: Mapping[str, Refusal | None]) -> dict[str, str]:
    return {figure: refusal.reason for figure, refusal in refused.items() if refusal is not None}


def _instances(handle: Any, parent: str, index: int, name: str) -> list[Gpu]:
    count, _ = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    parts: list[tuple[Any, str, MigInstance]] = []
    for number in range(min(count or 0, INSTANCES_MAX)):
        part, _ = ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is None:
            continue
        uuid, _ = ask(pynvml.nvmlDeviceGetUUID, part)
        gpu_instance, _ = ask(pynvml.nvmlDeviceGetGpuInstanceId, part)
        compute_instance, _ = ask(pynvml.nvmlDeviceGetComputeInstanceId, part)
        if None not in (uuid, gpu_instance, compute_instance):
            parts.append(
                (part, uuid, MigInstance(parent=parent, number=number, gpu_instance=gpu_instance,
                                         compute_instance=compute_instance))
            )  # fmt: skip
    sharers = Counter(mig.gpu_instance for _, _, mig in parts)
    return [
        _instance(part, uuid, index, name, replace(mig, shares_memory=sharers[mig.gpu_instance] > 1))
        for part, uuid, mig in parts
    ]


def _instance(handle: Any, uuid: str, index: int, name: str, mig: MigInstance) -> Gpu:
    memory, memory_refused = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    own_name, _ = ask(name_of, handle)
    listed, not_listed = _list_processes(handle, mig)
    refused = {"memory": memory_refused, "processes": not_listed}
    return Gpu(
        uuid=uuid,
        index=index,
        name=own_name or name,
        utilization_ratio=None,
        memory_used_bytes=None if memory is None else memory.used,
        memory_size_bytes=None if memory is None else memory.total,
        memory_free_bytes=None if memory is None else memory.free,
        processes=None if listed is None else process_samples.measure(listed, None, Cursor()),
        unknown="; ".join(
            filter(None, (_describe(refused, "processes") or UNREAD_INSTANCE, _describe(refused, "memory")))
        ),
        attribution=NO_ATTRIBUTION,
        figures=GpuFigures(unknown=_reasons(refused)),
        mig=mig,
    )


def _belongs(process: Entry, mig: MigInstance) -> bool:
    # A list may include the other instances of the GPU instance.
    own = (mig.gpu_instance, mig.compute_instance)
    lists = (process.gpu_instance, process.compute_instance)
    return all(each in (mine, NO_INSTANCE) for each, mine in zip(lists, own, strict=True))


def _utilization(handle: Any) -> tuple[float | None, Refusal | None]:
    rates, refusal = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    if refusal is not None:
        return None, refusal
    if rates.gpu > process_samples.PERCENT_MAX:
        return None, Refusal(IMPOSSIBLE, f"impossible utilisation: {rates.gpu} %")
    return rates.gpu / process_samples.PERCENT_MAX, None


def _list_processes(handle: Any, mig: MigInstance | None = None) -> tuple[Mapping[int, Listed] | None, Refusal | None]:
    """Join the compute, graphics and MPS lists; returns the reason without them."""
    merged: list[Listed] = []
    for name in _LISTS:
        function = f"nvmlDeviceGet{name}RunningProcesses_v3"
        absent = frozenset[int]() if name == "Compute" else UNSUPPORTED
        found, refusal = ask(running, function, handle, absent=absent)
        if refusal is not None:
            return None, Refusal(refusal.reason, f"list of {_LISTS[name]} processes: {refusal.message}")
        merged += [
            Listed(each.pid, None if each.memory_bytes == NOT_AVAILABLE else each.memory_bytes, name == "MPSCompute")
            for each in entries(found or b"")
            if mig is None or _belongs(each, mig)
        ]
    by_pid = process_samples.merge(merged)
    return by_pid, _IMPOSSIBLE_LISTS if by_pid is None else None


def _samples(handle: Any, seen_us: int) -> tuple[list[Sample] | None, Refusal | None]:
    found, refusal = ask(utilizations, handle, seen_us, absent=_NO_NEW_SAMPLES)
    return (found or [], None) if refusal is None else (None, refusal)
