"""GPUs as a whole, and what on them no listed process accounts for: the parts add up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import counter, gauge, or_nan
from exporter.evidence import gpu_attribution, vram_budgets
from exporter.model.gpu import THROTTLE_REASONS, Gpu, GpuTotals
from exporter.model.snapshot import DriverHealth, Snapshot

_GPU = ("gpu",)

_XIDS = (13, 31, 43, 45, 46, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143)
"""NVIDIA's numbers for errors that are told from the first look on, as 0: `increase()` does not see the first increase
of a counter that is born with it. 13 to 45 are mostly the program's; then the GPU, its memory, NVLink, the bus and the
firmware. All that are fatal unless set otherwise (`Thresholds.xids_fatal`) are among them."""


_NO_GPUS: Final = "there is no GPU source, or it failed"
_NOT_MEASURED: Final = "the driver does not say"
_NO_PARTS: Final = "the GPU, or a process on its list, is not measured"
_NO_DRIVER: Final = "no driver of the source's is asked"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by GPU UUID; where the figures come from stands on the info series."""
    yield from _drivers(snapshot.drivers)
    yield _xids(snapshot)
    readings = snapshot.gpus
    if readings is None:
        return
    gpus = readings.gpus
    yield gauge(
        "gpuwarden_gpu_info",
        "A GPU's identity and the source of its figures; always 1. Source `simulated` is no real GPU. Attribution is "
        "`process`, `device` where nobody tells what each process computes on it, or `none` where nobody tells what "
        "is done on it at all.",
        ("gpu", "index", "name", "source", "attribution"),
        (((gpu.uuid, gpu.number, gpu.name, gpu.source or readings.source, gpu.attribution), 1.0) for gpu in gpus),
        source="NVML `nvmlDeviceGetUUID`, `nvmlDeviceGetName`; `/sys/class/drm` and `/sys/class/kfd/kfd/topology`",
        absent=_NO_GPUS,
    )
    yield gauge(
        "gpuwarden_gpu_mig_info",
        "Which part of which GPU an instance is (MIG); always 1.",
        ("gpu", "parent", "gpu_instance", "compute_instance"),
        (
            ((gpu.uuid, gpu.mig.parent, str(gpu.mig.gpu_instance), str(gpu.mig.compute_instance)), 1.0)
            for gpu in gpus
            if gpu.mig is not None
        ),
        source="NVML `nvmlDeviceGetMigDeviceHandleByIndex`, `nvmlDeviceGetGpuInstanceId`, "
        "`nvmlDeviceGetComputeInstanceId`",
        absent="it is a whole GPU",
    )
    yield gauge(
        "gpuwarden_gpu_utilization_ratio",
        "Share of its time that the GPU was busy.",
        _GPU,
        (((gpu.uuid,), gpu.utilization_ratio) for gpu in gpus),
        source="NVML `nvmlDeviceGetSamples`, else `nvmlDeviceGetUtilizationRates`; amdgpu `gpu_busy_percent`; of "
        "Intel's DRM fdinfo of all clients",
        absent=_NOT_MEASURED,
    )
    yield gauge(
        "gpuwarden_gpu_memory_used_bytes",
        "GPU memory in use by anyone.",
        _GPU,
        (((gpu.uuid,), gpu.memory_used_bytes) for gpu in gpus),
        source="NVML `nvmlDeviceGetMemoryInfo_v2`; amdgpu `mem_info_vram_used`",
        absent=_NOT_MEASURED,
    )
    yield gauge(
        "gpuwarden_gpu_memory_size_bytes",
        "GPU memory there is.",
        _GPU,
        (((gpu.uuid,), gpu.memory_size_bytes) for gpu in gpus),
        source="NVML `nvmlDeviceGetMemoryInfo_v2`; amdgpu `mem_info_vram_total`",
        absent=_NOT_MEASURED,
    )
    yield gauge(
        "gpuwarden_gpu_memory_free_bytes",
        "GPU memory that anyone can still have, as the driver tells it.",
        _GPU,
        (((gpu.uuid,), or_nan(gpu.memory_free_bytes)) for gpu in gpus),
        source="NVML `nvmlDeviceGetMemoryInfo_v2`; amdgpu `mem_info_vram_total` less `mem_info_vram_used`",
        absent=f"{_NO_GPUS}; NaN while the driver does not say",
    )
    yield gauge(
        "gpuwarden_gpu_memory_floor_bytes",
        "Less free memory of a GPU than this is too little.",
        _GPU,
        (
            ((gpu.uuid,), float(snapshot.thresholds.vram_floor_bytes))
            for gpu in gpus
            if vram_budgets.has_floor(gpu, snapshot.thresholds.vram_floor_bytes)
        ),
        source="`--vram-floor-mib`",
        absent=f"{_NO_GPUS}, or the GPU has no more memory than that in all",
    )
    yield gauge(
        "gpuwarden_gpu_unlisted_utilization_ratio",
        "Share of the GPU's time used by no process on its list; it vetoes idle where it is over the idle ratio and "
        "their copies and video cannot be that time. Less than 0 is by how much its processes are told to do more "
        "than the GPU itself.",
        _GPU,
        (((gpu.uuid,), gpu.unattributed_ratio) for gpu in gpus),
        source="the GPU's utilisation less that of all its listed processes, at each look",
        absent=_NO_PARTS,
        values="ratio, 1 or less",
    )
    yield gauge(
        "gpuwarden_gpu_unlisted_memory_bytes",
        "GPU memory held by no process on its list. Less than 0 is by how much its processes are told to hold more "
        "than is in use.",
        _GPU,
        (((gpu.uuid,), gpu_attribution.unattributed_bytes(gpu)) for gpu in gpus),
        source="the GPU's memory in use less that of all its listed processes, at each look",
        absent=_NO_PARTS,
    )
    yield gauge(
        "gpuwarden_gpu_memory_reclaiming_bytes",
        "GPU memory that processes held which have ended, and which the driver counts as in use still; NaN if unknown.",
        _GPU,
        (((gpu.uuid,), or_nan(snapshot.returning_bytes.get(gpu.uuid))) for gpu in gpus),
        source="what has left the GPU's list at a look, for as long as the memory that no listed process holds is as "
        "much greater than before, where that is known, and for `--vram-return-s` at most",
        absent=(
            f"{_NO_GPUS}; NaN while the GPU's processes are not listed, or what is in "
            "use is unknown; for `--vram-return-s` after the first look, or one after so long a gap, and after one of "
            "unknown size has left"
        ),
    )
    yield gauge(
        "gpuwarden_gpu_uncontained_utilization_ratio",
        "Share of the GPU's time used by processes on its list that are in none of the containers told of here.",
        _GPU,
        (((share.gpu,), share.utilization_ratio) for share in snapshot.unplaced),
        source="as `gpuwarden_container_gpu_utilization_ratio`, of the pids in none of their cgroups and trees",
        absent=(
            "the GPU's processes are not listed, or such a one is not measured; or "
            "containers or workers cannot be listed, one of them has a name twice or cannot be inspected, or its "
            "processes are unknown"
        ),
        values="ratio, 0 or more",
    )
    yield gauge(
        "gpuwarden_gpu_uncontained_memory_bytes",
        "GPU memory held by processes on its list that are in none of the containers told of here.",
        _GPU,
        (((share.gpu,), share.memory_bytes) for share in snapshot.unplaced),
        source="as `gpuwarden_container_gpu_memory_bytes`, of the pids in none of their cgroups and trees",
        absent="as `gpuwarden_gpu_uncontained_utilization_ratio`",
    )
    yield gauge(
        "gpuwarden_gpu_lost_seconds",
        "For how long the GPU's driver has called it lost, or not listed it any more; 0 while it is there.",
        _GPU,
        (((uuid,), lost_s) for uuid, lost_s in snapshot.gpu_lost_s.items()),
        source="the driver's answers to each look: of which GPU it says that it is lost, or no longer tells",
        absent="its driver does not answer, or says nothing of it for another reason",
    )
    yield from _counted(snapshot.gpu_totals)
    yield from _sensors(gpus)
    yield from _errors(gpus)


def _counted(totals: Mapping[str, GpuTotals]) -> Iterable[Metric]:
    yield counter(
        "gpuwarden_gpu_busy_seconds",
        "Time that the GPU was busy since it was first seen, measured samples only.",
        _GPU,
        (((uuid,), found.busy_s) for uuid, found in totals.items()),
        source="`gpuwarden_gpu_utilization_ratio`, integrated look by look",
        absent="its utilisation was never measured",
    )
    yield counter(
        "gpuwarden_gpu_unknown_samples",
        "Samples in which a figure of the GPU was unknown, by which and why: `gpu` is all of one that cannot be asked; "
        "`utilization`, `memory`, `processes` (who is on it) and `process_utilization` are what it is watched by; the "
        "others are sensors, error counters and the returning memory.",
        (*_GPU, "figure", "reason"),
        (
            ((uuid, figure, reason), float(count))
            for uuid, found in totals.items()
            for (figure, reason), count in sorted(found.unknown.items())
        ),
        source="what was unknown at each look, counted",
        absent="none of them was unknown so far",
    )


def _sensors(gpus: Sequence[Gpu]) -> Iterable[Metric]:
    for figure, help_text, source in (
        (
            "temperature_celsius",
            "Temperature of the GPU's core.",
            "NVML `nvmlDeviceGetTemperature`; amdgpu hwmon `temp1_input`",
        ),
        (
            "power_watts",
            "Power that the GPU draws.",
            "NVML `nvmlDeviceGetPowerUsage`; amdgpu hwmon `power1_average`, else `power1_input`",
        ),
        (
            "power_limit_watts",
            "Power that the GPU may draw, by the strictest of its limits.",
            "NVML `nvmlDeviceGetEnforcedPowerLimit`; amdgpu hwmon `power1_cap`",
        ),
        ("sm_clock_hertz", "Clock of the GPU's streaming multiprocessors.", "NVML `nvmlDeviceGetClockInfo`"),
        ("memory_clock_hertz", "Clock of the GPU's memory.", "NVML `nvmlDeviceGetClockInfo`"),
    ):
        yield gauge(
            f"gpuwarden_gpu_{figure}",
            help_text,
            _GPU,
            (((gpu.uuid,), getattr(gpu.figures, figure)) for gpu in gpus),
            source=source,
            absent=_NOT_MEASURED,
        )
    yield gauge(
        "gpuwarden_gpu_throttled",
        "1 where this holds the GPU's clocks below what they could be, 0 where it does not.",
        (*_GPU, "reason"),
        (
            ((gpu.uuid, reason), float(reason in gpu.figures.throttled))
            for gpu in gpus
            if gpu.figures.throttled is not None
            for reason in THROTTLE_REASONS
        ),
        source="NVML `nvmlDeviceGetCurrentClocksThrottleReasons`",
        absent=_NOT_MEASURED,
    )


def _errors(gpus: Sequence[Gpu]) -> Iterable[Metric]:
    for name, help_text, figure, source, absent in (
        (
            "ecc_errors",
            "Memory errors that ECC found since the driver was loaded.",
            "ecc",
            "NVML `nvmlDeviceGetTotalEccErrors`, volatile",
            f"{_NOT_MEASURED}, or ECC is off",
        ),
        (
            "ecc_lifetime_errors",
            "Memory errors that ECC found in the GPU's whole life.",
            "ecc_lifetime",
            "NVML `nvmlDeviceGetTotalEccErrors`, aggregate",
            f"{_NOT_MEASURED}, or ECC is off",
        ),
        (
            "remapped_rows",
            "Rows of its memory that the GPU has replaced for good, by the errors that they had.",
            "remapped_rows",
            "NVML `nvmlDeviceGetRemappedRows`",
            f"{_NOT_MEASURED}, or the GPU replaces no rows",
        ),
    ):
        yield counter(
            f"gpuwarden_gpu_{name}",
            help_text,
            (*_GPU, "error"),
            (
                ((gpu.uuid, error), getattr(gpu.figures, f"{figure}_{error}"))
                for gpu in gpus
                for error in ("corrected", "uncorrected")
            ),
            source=source,
            absent=absent,
        )
    for name, help_text in (
        ("row_remap_pending", "1 while a row waits to be replaced at the GPU's next reset."),
        ("row_remap_failed", "1 once a row could not be replaced: the GPU is to be replaced itself."),
    ):
        yield gauge(
            f"gpuwarden_gpu_{name}",
            help_text,
            _GPU,
            (((gpu.uuid,), getattr(gpu.figures, name)) for gpu in gpus),
            source="NVML `nvmlDeviceGetRemappedRows`",
            absent="as `gpuwarden_gpu_remapped_rows_total`",
        )
    yield counter(
        "gpuwarden_gpu_pcie_replays",
        "Packets that were sent again over the PCI Express link.",
        _GPU,
        (((gpu.uuid,), gpu.figures.pcie_replays) for gpu in gpus),
        source="NVML `nvmlDeviceGetPcieReplayCounter`",
        absent=_NOT_MEASURED,
    )
    yield counter(
        "gpuwarden_gpu_pcie_errors",
        "Errors on the GPU's PCI Express link, by kind: how bad each was.",
        (*_GPU, "kind"),
        (((gpu.uuid, kind), float(count)) for gpu in gpus for kind, count in (gpu.figures.pcie_errors or {}).items()),
        source="NVML `nvmlDeviceGetFieldValues`, `NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS` and such",
        absent=f"{_NOT_MEASURED}, of that kind",
    )


def _drivers(asked: Mapping[str, DriverHealth]) -> Iterable[Metric]:
    """Also while a driver does not answer: then most of all."""
    yield counter(
        "gpuwarden_driver_processes_killed",
        "Processes asking the GPU drivers of a source that were killed because a call did not return.",
        ("collector",),
        (((f"source_{source}",), float(health.killed)) for source, health in asked.items()),
        source="counted by the exporter, which starts these processes",
        absent=_NO_DRIVER,
    )
    yield gauge(
        "gpuwarden_driver_processes_abandoned",
        "Processes that hang in the GPU drivers of a source and cannot be killed.",
        ("collector",),
        (((f"source_{source}",), float(health.abandoned)) for source, health in asked.items()),
        source="counted by the exporter, which starts these processes",
        absent=_NO_DRIVER,
    )


def _xids(snapshot: Snapshot) -> Metric:
    """Also of GPUs that are unknown by now: many an XID comes right before that."""
    gpus = () if snapshot.gpus is None else snapshot.gpus.gpus
    counts = {(gpu.uuid, code): 0 for gpu in gpus if gpu.xids_watched for code in _XIDS}
    for health in snapshot.drivers.values():
        counts.update(health.xids)
    return counter(
        "gpuwarden_gpu_xid_errors",
        "Errors that the NVIDIA driver reported of the GPU, by NVIDIA's number for them (XID).",
        (*_GPU, "xid"),
        (((uuid, str(code)), float(count)) for (uuid, code), count in sorted(counts.items())),
        source="NVML `nvmlEventSetWait_v2`, counted as they come",
        absent="its reports are not waited for, and none came before; rare numbers: none so far",
    )
