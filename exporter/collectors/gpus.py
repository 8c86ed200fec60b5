"""GPUs as a whole, and their use by unlisted processes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import counter, gauge, or_nan
from exporter.evidence import gpu_attribution, vram_budgets
from exporter.model.gpu import THROTTLE_REASONS, Gpu, GpuTotals
from exporter.model.snapshot import DriverHealth, Snapshot

_GPU = ("gpu",)

_XIDS = (13, 31, 43, 45, 46, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143)
"""XIDs published as 0 from the first sample: `increase()` misses the first increase of a new counter.

13 to 45 are mostly faults of the program; then GPU, memory, NVLink, bus and firmware. `Thresholds.xids_fatal` are
among them.
"""


_NO_GPUS: Final = "no GPU source, or it failed"
_NOT_MEASURED: Final = "the driver does not report it"
_NO_PARTS: Final = "the GPU or a listed process is not measured"
_NO_DRIVER: Final = "no driver of the source is in use"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by GPU UUID; the info series has the source."""
    yield from _driver_families(snapshot.drivers)
    yield _xids(snapshot)
    readings = snapshot.gpus
    if readings is None:
        return
    gpus = readings.gpus
    yield gauge(
        "gpuwarden_gpu_info",
        "Identity of a GPU, and source of its readings; always 1. Attribution is `process`, `device` (not known by "
        "process) or `none` (unknown).",
        ("gpu", "index", "name", "source", "attribution"),
        (((gpu.uuid, gpu.number, gpu.name, gpu.source or readings.source, gpu.attribution), 1.0) for gpu in gpus),
        source="NVML `nvmlDeviceGetUUID`, `nvmlDeviceGetName`; `/sys/class/drm` and `/sys/class/kfd/kfd/topology`",
        absent=_NO_GPUS,
    )
    yield gauge(
        "gpuwarden_gpu_mig_info",
        "GPU and position of a MIG instance; always 1.",
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
        "Share of time the GPU was busy.",
        _GPU,
        (((gpu.uuid,), gpu.utilization_ratio) for gpu in gpus),
        source="NVML `nvmlDeviceGetSamples`, else `nvmlDeviceGetUtilizationRates`; amdgpu `gpu_busy_percent`; for "
        "Intel GPUs DRM fdinfo of all clients",
        absent=_NOT_MEASURED,
    )
    yield gauge(
        "gpuwarden_gpu_memory_used_bytes",
        "GPU memory in use.",
        _GPU,
        (((gpu.uuid,), gpu.memory_used_bytes) for gpu in gpus),
        source="NVML `nvmlDeviceGetMemoryInfo_v2`; amdgpu `mem_info_vram_used`",
        absent=_NOT_MEASURED,
    )
    yield gauge(
        "gpuwarden_gpu_memory_size_bytes",
        "Size of the GPU memory.",
        _GPU,
        (((gpu.uuid,), gpu.memory_size_bytes) for gpu in gpus),
        source="NVML `nvmlDeviceGetMemoryInfo_v2`; amdgpu `mem_info_vram_total`",
        absent=_NOT_MEASURED,
    )
    yield gauge(
        "gpuwarden_gpu_memory_free_bytes",
        "Free GPU memory by the driver.",
        _GPU,
        (((gpu.uuid,), or_nan(gpu.memory_free_bytes)) for gpu in gpus),
        source="NVML `nvmlDeviceGetMemoryInfo_v2`; amdgpu `mem_info_vram_total` less `mem_info_vram_used`",
        absent=f"{_NO_GPUS}; NaN while the driver does not report it",
    )
    yield gauge(
        "gpuwarden_gpu_memory_floor_bytes",
        "Minimum of free memory on the GPU.",
        _GPU,
        (
            ((gpu.uuid,), float(snapshot.thresholds.vram_floor_bytes))
            for gpu in gpus
            if vram_budgets.has_floor(gpu, snapshot.thresholds.vram_floor_bytes)
        ),
        source="`--vram-floor-mib`",
        absent=f"{_NO_GPUS}, or the GPU has less memory than that",
    )
    yield gauge(
        "gpuwarden_gpu_unlisted_utilization_ratio",
        "Share of the GPU's time used by unlisted processes. Above the idle ratio the GPU is not idle. Negative if "
        "listed processes exceed the GPU.",
        _GPU,
        (((gpu.uuid,), gpu.unattributed_ratio) for gpu in gpus),
        source="GPU utilisation less that of all listed processes, at each sample",
        absent=_NO_PARTS,
        values="ratio, 1 or less",
    )
    yield gauge(
        "gpuwarden_gpu_unlisted_memory_bytes",
        "GPU memory held by unlisted processes. Negative if listed processes exceed the memory in use.",
        _GPU,
        (((gpu.uuid,), gpu_attribution.unattributed_bytes(gpu)) for gpu in gpus),
        source="GPU memory in use less that of all listed processes, at each sample",
        absent=_NO_PARTS,
    )
    yield gauge(
        "gpuwarden_gpu_memory_reclaiming_bytes",
        "GPU memory of ended processes that the driver has not freed yet; NaN if unknown.",
        _GPU,
        (((gpu.uuid,), or_nan(snapshot.reclaiming_bytes.get(gpu.uuid))) for gpu in gpus),
        source="memory of processes that left the GPU's list, while the memory of unlisted processes is that much "
        "greater than before; for `--vram-return-s` at most",
        absent=(
            f"{_NO_GPUS}; NaN while processes or memory are unknown, and for `--vram-return-s` after the first sample, "
            "a gap, or the end of a process of unknown size"
        ),
    )
    yield gauge(
        "gpuwarden_gpu_uncontained_utilization_ratio",
        "Share of the GPU's time used by listed processes outside of all published containers.",
        _GPU,
        (((share.gpu,), share.utilization_ratio) for share in snapshot.unplaced),
        source="as `gpuwarden_container_gpu_utilization_ratio`, for pids outside of their cgroups and process trees",
        absent=(
            "processes of the GPU are not listed or not measured; containers, workers or a process cannot be read; "
            "two containers have one name"
        ),
        values="ratio, 0 or more",
    )
    yield gauge(
        "gpuwarden_gpu_uncontained_memory_bytes",
        "GPU memory of listed processes outside of all published containers.",
        _GPU,
        (((share.gpu,), share.memory_bytes) for share in snapshot.unplaced),
        source="as `gpuwarden_container_gpu_memory_bytes`, for pids outside of their cgroups and process trees",
        absent="as `gpuwarden_gpu_uncontained_utilization_ratio`",
    )
    yield gauge(
        "gpuwarden_gpu_lost_seconds",
        "Time since the driver reported the GPU as lost or stopped listing it; 0 while it is present.",
        _GPU,
        (((uuid,), lost_s) for uuid, lost_s in snapshot.gpu_lost_s.items()),
        source="the driver's answers at each sample: GPUs that it reports as lost or no longer lists",
        absent="its driver does not answer, or omits it for another reason",
    )
    yield from _counters(snapshot.gpu_totals)
    yield from _sensors(gpus)
    yield from _errors(gpus)


def _counters(totals: Mapping[str, GpuTotals]) -> Iterable[Metric]:
    yield counter(
        "gpuwarden_gpu_busy_seconds",
        "Busy time of the GPU since it was first seen; unknown samples do not count.",
        _GPU,
        (((uuid,), found.busy_s) for uuid, found in totals.items()),
        source="`gpuwarden_gpu_utilization_ratio`, integrated over samples",
        absent="its utilisation was never measured",
    )
    yield counter(
        "gpuwarden_gpu_unknown_samples",
        "Samples in which a metric of the GPU was unknown, by metric and reason. Fields utilization, memory, "
        "processes and process_utilization decide conditions.",
        (*_GPU, "field", "reason"),
        (
            ((uuid, figure, reason), float(count))
            for uuid, found in totals.items()
            for (figure, reason), count in sorted(found.unknown.items())
        ),
        source="count of unknown values at each sample",
        absent="no metric was unknown so far",
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
            "Lowest power limit of the GPU.",
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
        "1 while this reason holds the GPU clocks down, else 0.",
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
            "Memory errors found by ECC since the driver was loaded.",
            "ecc",
            "NVML `nvmlDeviceGetTotalEccErrors`, volatile",
            f"{_NOT_MEASURED}, or ECC is off",
        ),
        (
            "ecc_lifetime_errors",
            "Memory errors found by ECC since the GPU was made.",
            "ecc_lifetime",
            "NVML `nvmlDeviceGetTotalEccErrors`, aggregate",
            f"{_NOT_MEASURED}, or ECC is off",
        ),
        (
            "remapped_rows",
            "Memory rows that the GPU has replaced, by type of error.",
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
        ("row_remap_pending", "1 while a memory row waits for the next GPU reset to be replaced."),
        ("row_remap_failed", "1 once a memory row could not be replaced: replace the GPU."),
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
        "PCI Express packets sent again.",
        _GPU,
        (((gpu.uuid,), gpu.figures.pcie_replays) for gpu in gpus),
        source="NVML `nvmlDeviceGetPcieReplayCounter`",
        absent=_NOT_MEASURED,
    )
    yield counter(
        "gpuwarden_gpu_pcie_errors",
        "Errors on the GPU's PCI Express link, by severity.",
        (*_GPU, "kind"),
        (((gpu.uuid, kind), float(count)) for gpu in gpus for kind, count in (gpu.figures.pcie_errors or {}).items()),
        source="NVML `nvmlDeviceGetFieldValues`, `NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS` and such",
        absent=f"{_NOT_MEASURED}, of that kind",
    )


def _driver_families(drivers: Mapping[str, DriverHealth]) -> Iterable[Metric]:
    """Published also while a driver does not answer."""
    yield counter(
        "gpuwarden_driver_processes_killed",
        "Driver processes of a source that were killed because a call did not return.",
        ("collector",),
        (((f"source_{source}",), float(health.killed)) for source, health in drivers.items()),
        source="counted by the exporter, which starts these processes",
        absent=_NO_DRIVER,
    )
    yield gauge(
        "gpuwarden_driver_processes_abandoned",
        "Driver processes of a source that hang and cannot be killed.",
        ("collector",),
        (((f"source_{source}",), float(health.abandoned)) for source, health in drivers.items()),
        source="counted by the exporter, which starts these processes",
        absent=_NO_DRIVER,
    )


def _xids(snapshot: Snapshot) -> Metric:
    """Published also for unknown GPUs: an XID often comes right before."""
    gpus = () if snapshot.gpus is None else snapshot.gpus.gpus
    counts = {(gpu.uuid, code): 0 for gpu in gpus if gpu.xids_watched for code in _XIDS}
    for health in snapshot.drivers.values():
        counts.update(health.xids)
    return counter(
        "gpuwarden_gpu_xid_errors",
        "GPU errors reported by the NVIDIA driver, by XID.",
        (*_GPU, "xid"),
        (((uuid, str(code)), float(count)) for (uuid, code), count in sorted(counts.items())),
        source="NVML `nvmlEventSetWait_v2`, counted as they arrive",
        absent="error events are not read, and none came before; for rare numbers: none so far",
    )
