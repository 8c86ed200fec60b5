"""Containers: RAM, their share of each GPU, and how long they have been inactive."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import counter, gauge, or_nan
from exporter.evidence import vram_budgets
from exporter.evidence.gpu_attribution import NO_GPU
from exporter.model.container import ContainerEvidence
from exporter.model.snapshot import Snapshot
from gpuwarden.gpu_names import ALL, ALL_NODES

_NAME = ("container",)
_ON_GPU = ("container", "gpu")

_IDLE_BY: Final = (
    "`gpuwarden_container_gpu_utilization_ratio`, or `gpuwarden_container_gpu_busiest_engine_ratio` if present"
)


_NOT_RUNNING: Final = "the container does not run"
_NO_BUDGET: Final = "the container has no label with a VRAM budget, or an invalid one"
_NO_NODE: Final = "not `--pods api`, or the Kubernetes API does not answer"
_NO_WORK_READ: Final = f"{_NOT_RUNNING}; NaN while it is paused or its processes cannot be read"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by container name; only the info series has the full id and incarnation."""
    found = snapshot.containers
    yield gauge(
        "gpuwarden_container_info",
        "Identity of a container; always 1. Kind is docker, podman, kubernetes, systemd, process, containerd, cri-o, "
        "libpod or container.",
        ("container", "container_id", "incarnation", "kind", "image", "namespace", "pod"),
        (
            ((each.container.name, each.container.id, each.container.incarnation, each.container.kind,
              each.container.image or "", each.container.namespace or "", each.container.pod or ""), 1.0)
            for each in found
        ),
        source="Docker's or Podman's API; the Kubernetes API or `/var/log/containers`; `/run/systemd/units`; else "
        "`/proc/PID/cgroup`. Kind `process`: a worker without a container", absent=_NOT_RUNNING,
    )  # fmt: skip
    yield gauge(
        "gpuwarden_container_managed",
        "1 for a container that gpuwarden may restart, else 0.",
        _NAME,
        (
            ((each.container.name,), None if each.container.managed is None else float(each.container.managed))
            for each in found
        ),
        source="label `gpuwarden.managed`, by its engine's API; for a pod its labels and controller, and "
        "`--pod-namespaces`",
        absent="kind is not docker, podman or kubernetes, or `--pods` is not `api`",
    )
    for name, help_text, value, source, absent in (
        (
            "memory_bytes",
            "RAM of its cgroup with page cache; for kind `process` the sum of its processes.",
            "usage_bytes",
            "cgroup `memory.current`, or `memory.usage_in_bytes` of version 1; `/proc/PID/statm` for kind `process`",
            "the memory controller is off or cannot be read",
        ),
        (
            "memory_anon_bytes",
            "Anonymous RAM of the container.",
            "anon_bytes",
            "cgroup `memory.stat`: `anon`, or `total_rss` of version 1",
            "as `gpuwarden_container_memory_bytes`; always for kind `process`",
        ),
        (
            "memory_working_set_bytes",
            "RAM of the container without its inactive page cache.",
            "working_set_bytes",
            "the cgroup's memory less `inactive_file` of `memory.stat`, or `total_inactive_file` of version 1",
            "as `gpuwarden_container_memory_bytes`; always for kind `process`",
        ),
    ):
        yield gauge(
            f"gpuwarden_container_{name}",
            help_text,
            _NAME,
            (((each.container.name,), getattr(each.ram, value)) for each in found),
            source=source,
            absent=absent,
        )
    yield from _inactivity(found)
    yield gauge(
        "gpuwarden_container_gpu_utilization_ratio",
        "Share of the GPU's time that the container's processes used: their sum, may exceed 1. Absent if unknown.",
        _ON_GPU,
        (((each.container.name, share.gpu), share.utilization_ratio) for each in found for share in each.shares),
        source="for the pids in its cgroup, NVML `nvmlDeviceGetProcessUtilization`: `smUtil`; DRM fdinfo, and for "
        "compute on AMD GPUs queues and `cu_occupancy` in `/sys/class/kfd/kfd/proc`",
        absent=(
            "it has no GPU, or one of its processes on this GPU is not measured; instead "
            "of 0, also while `gpuwarden_container_gpu_attribution_missing` is 1"
        ),
        values="ratio, 0 or more",
    )
    yield gauge(
        "gpuwarden_container_gpu_busiest_engine_ratio",
        "Share of time of the busiest engine, with copies and video, for the container's processes. It decides whether "
        "the GPU is idle for them.",
        _ON_GPU,
        (
            ((each.container.name, share.gpu), share.busiest_ratio)
            for each in found
            for share in each.shares
            if share.busiest_ratio is not None and share.busiest_ratio > (share.utilization_ratio or 0.0)
        ),
        source="for the pids in its cgroup, NVML `nvmlDeviceGetProcessUtilization`: the greatest of `smUtil`, "
        "`memUtil`, `encUtil`, `decUtil` of each",
        absent=(
            "it does not exceed the utilisation, or is unknown; always on "
            "AMD and Intel GPUs, whose utilisation is already that of the busiest engine"
        ),
    )
    yield gauge(
        "gpuwarden_container_gpu_attribution_missing",
        "1 while GPU use cannot be attributed: the container may use all or nothing of it; else 0.",
        _ON_GPU,
        (
            ((each.container.name, gpu), missing)
            for each in found
            for gpu, missing in _attribution_missing(each, snapshot.lost_gpus).items()
        ),
        source="the utilisation of the GPU and of its processes, compared at each sample; 1 for a requested name that "
        "fits no GPU",
        absent="it is on no GPU, or the utilisation of the GPU is unknown",
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_bytes",
        "GPU memory that the container's processes hold.",
        _ON_GPU,
        (((each.container.name, gpu), or_nan(held)) for each in found for gpu, held in _gpu_memory(each)),
        source="for the pids in its cgroup, NVML `nvmlDeviceGet{Compute,Graphics,MPSCompute}RunningProcesses_v3`; the "
        "greater of `/sys/class/kfd/kfd/proc/PID/vram_GPUID` and DRM fdinfo on AMD; DRM fdinfo on Intel",
        absent=(
            "it is on no GPU; NaN while its processes or their memory are unknown, or the GPU is missing. NaN instead "
            "of 0 while busy unlisted processes hold unknown memory, or more than `--vram-tie-mib`"
        ),
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_peak_bytes",
        "Peak GPU memory of its processes in this incarnation, sampled once a second.",
        _ON_GPU,
        (((each.container.name, gpu), float(peak)) for each in found for gpu, peak in each.peak_bytes.items()),
        source="the greatest `gpuwarden_container_gpu_memory_bytes` of all samples",
        absent="its memory on this GPU was never measured",
    )
    yield from _vram_budgets(snapshot)
    yield from _oom_kills(snapshot)
    yield counter(
        "gpuwarden_container_gpu_busy_seconds",
        "GPU time used by the container's processes since it was first seen; unknown samples do not count.",
        _ON_GPU,
        (((each.container.name, gpu), seconds) for each in found for gpu, seconds in each.busy_s.items()),
        source="`gpuwarden_container_gpu_utilization_ratio`, integrated over samples",
        absent="its share of this GPU was never measured",
    )
    yield counter(
        "gpuwarden_container_unknown_samples",
        "Samples in which a metric of the container was unknown, by metric and reason.",
        ("container", "field", "reason"),
        ((key, float(count)) for key, count in sorted(snapshot.unknown.items())),
        source="count of unknown values at each sample",
        absent="no metric was unknown so far",
    )


def _attribution_missing(each: ContainerEvidence, lost: Collection[str]) -> Mapping[str, float]:
    """Whether GPU use cannot be attributed, by GPU, and by requested name that fits none. Lost GPUs have an alert."""
    known = {share.gpu: share.attributed for share in each.shares}
    found = {gpu: float(not attributed) for gpu, attributed in known.items() if attributed is not None}
    if each.gpu_unknown is not None:
        # A request for all GPUs is common on hosts without one.
        unseen = {*each.nameless, *each.gpus}.difference(known, lost, (ALL, ALL_NODES))
        found |= dict.fromkeys(sorted(unseen), 1.0)
    return found


def _inactivity(found: Sequence[ContainerEvidence]) -> Iterable[Metric]:
    """Times without activity, by kind of activity."""
    for name, help_text, read, source, absent in (
        (
            "ram_idle_seconds",
            "Time for which the container's RAM has changed by at most the threshold.",
            lambda each: or_nan(each.ram_idle_s),
            "`gpuwarden_container_memory_bytes`, compared at each sample with `--ram-idle-mib`",
            (f"{_NOT_RUNNING}; NaN while `gpuwarden_container_memory_bytes` is absent, or it is paused"),
        ),
        (
            "gpu_idle_seconds",
            "Time for which every GPU of the container has been at or under the idle ratio; NaN if unknown.",
            _idle_s,
            f"{_IDLE_BY}, compared at each sample with `--gpu-idle-ratio`",
            ("it has no GPU; NaN while one of its GPUs is unknown or used by an unlisted process, or it is paused"),
        ),
        (
            "gpu_lost_seconds",
            "Time for which a GPU of the container has been lost and the others lost or idle; NaN if unknown.",
            _lost_s,
            "the driver's answers at each sample: GPUs that it reports as lost or no longer lists",
            ("it has no GPU, or each is measured; NaN while a GPU is unknown, or it is paused"),
        ),
        (
            "gpu_saturated_seconds",
            "Time for which it has saturated the same GPUs, with the others idle or lost; absent if unknown.",
            lambda each: each.gpu_saturated_s,
            "its share of each of its GPUs at each sample",
            ("it has only lost GPUs, another is unknown or used by an unlisted process, or it is paused"),
        ),
        (
            "gpu_last_busy_age_seconds",
            "Time since one of its GPUs was last measured as busy for it.",
            lambda each: or_nan(each.gpu_last_busy_age_s),
            "its share of each of its GPUs at each sample, compared with `--gpu-idle-ratio`",
            (
                f"{_NOT_RUNNING}; NaN while it is paused, may be on an unknown GPU, or has a "
                "GPU that hangs or whose source does not answer, for less than 20 minutes"
            ),
        ),
        (
            "io_idle_seconds",
            "Time for which I/O of its processes has been at most the threshold.",
            lambda each: or_nan(each.io_idle_s),
            "`/proc/PID/io`, compared at each sample with `--io-idle-kib-per-s`",
            f"{_NO_WORK_READ}, or the kernel does not report their I/O",
        ),
        (
            "page_fault_idle_seconds",
            "Time for which page faults of its processes have been at most the threshold.",
            lambda each: or_nan(each.page_fault_idle_s),
            "`/proc/PID/stat`, compared at each sample with `--page-faults-idle-per-s`",
            _NO_WORK_READ,
        ),
        (
            "cpu_idle_seconds",
            "Time for which CPU time of its processes has been at most the threshold.",
            lambda each: or_nan(each.cpu_idle_s),
            "`/proc/PID/stat`, compared at each sample with `--cpu-idle-ratio`",
            _NO_WORK_READ,
        ),
        (
            "work_idle_seconds",
            "Time without I/O, page faults and CPU time of its processes.",
            lambda each: or_nan(each.work_idle_s),
            "the least of the three times for I/O, page faults and CPU time",
            f"{_NOT_RUNNING}; NaN while any of the three is",
        ),
        (
            "heavy_work_idle_seconds",
            "Time without heavy I/O, and without much CPU time and many page faults together.",
            lambda each: or_nan(each.heavy_work_idle_s),
            "`/proc/PID/io` over 16 MiB/s; `/proc/PID/stat` over 0.9 of a CPU with over 400 page faults/s",
            f"{_NO_WORK_READ}, or the kernel does not report their I/O",
        ),
        (
            "no_progress_seconds",
            "Time without RAM changes, I/O and page faults, with a saturated GPU, or without GPU and CPU use.",
            lambda each: or_nan(each.no_progress_s),
            "the least of the times for RAM, I/O and page faults, and of saturated GPU or idle GPU and CPU",
            (
                f"{_NOT_RUNNING}; NaN while RAM, I/O or page faults are unknown, GPU and CPU "
                "time are, or the GPU has been unreadable for less than 20 minutes"
            ),
        ),
    ):
        yield gauge(
            f"gpuwarden_container_{name}",
            help_text,
            _NAME,
            (((each.container.name,), read(each)) for each in found),
            source=source,
            absent=absent,
        )


def _idle_s(each: ContainerEvidence) -> float | None:
    return or_nan(each.gpu_idle_s) if _has_gpus(each) else None


def _lost_s(each: ContainerEvidence) -> float | None:
    """Absent if each GPU is measured: then none is lost."""
    unknown = _has_gpus(each) and each.gpu_unknown is not None
    return or_nan(each.gpu_lost_s) if unknown else each.gpu_lost_s


def _gpu_memory(each: ContainerEvidence) -> Iterable[tuple[str, int | None]]:
    """Memory on each GPU that the container uses or may use."""
    measured = {share.gpu: share.memory_bytes for share in each.shares}
    return {**dict.fromkeys(each.gpus), **measured}.items()


def _has_gpus(each: ContainerEvidence) -> bool:
    return each.gpu_unknown is None or each.gpu_unknown.reason != NO_GPU


def _oom_kills(snapshot: Snapshot) -> Iterable[Metric]:
    found = snapshot.containers
    yield counter(
        "gpuwarden_container_oom_kills",
        "Processes of the container that the kernel OOM killer killed in this incarnation.",
        _NAME,
        (((each.container.name,), each.ram.oom_kills) for each in found),
        source="`oom_kill` in cgroup `memory.events`, or `memory.oom_control` of version 1",
        absent="the memory controller is off, or the kernel does not count them",
    )


def _vram_budgets(snapshot: Snapshot) -> Iterable[Metric]:
    found = list(vram_budgets.tenants(snapshot))
    yield gauge(
        "gpuwarden_node_gpu_memory_advertised_bytes",
        "GPU memory that the Kubernetes node advertises to the scheduler; 0 if it advertises none.",
        (),
        [((), snapshot.advertised_bytes)],
        source="`status.allocatable` of the node: `--budget-resource`, read every 30 s",
        absent=_NO_NODE,
    )
    yield gauge(
        "gpuwarden_node_gpu_memory_declared_bytes",
        "GPU memory that running pods declare in the resource that the node advertises, or in ours if it has none.",
        (),
        [((), snapshot.declared_bytes)],
        source="limits of the pods, as the scheduler counts them",
        absent=_NO_NODE,
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_budget_bytes",
        "VRAM budget of the container on each of its GPUs, set by its owner. That of a pod is on one container.",
        _NAME,
        (((each.place.container.name,), each.budget.budget_bytes) for each in found),
        source="label `gpuwarden.vram-budget-mib`, by its engine's API; for a pod what the scheduler counts of "
        "`--budget-resource`, or `--budget-annotation`",
        absent=_NO_BUDGET,
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_over_budget_bytes",
        "VRAM of the container, or of all containers of the pod, over its budget on this GPU, only while it is over.",
        _ON_GPU,
        (
            ((each.place.container.name, gpu), float(held - budget))
            for each in found
            if (budget := each.budget.budget_bytes) is not None
            for gpu, held in each.memory_bytes().items()
            if held is not None and held > budget
        ),
        source="`gpuwarden_container_gpu_memory_bytes` less `gpuwarden_container_gpu_memory_budget_bytes`",
        absent=("it is within its budget, has none, or its memory is unknown"),
    )
    yield gauge(
        "gpuwarden_container_recyclable",
        "1 for a container with a VRAM budget that may be evicted. 0 if protected, not managed, paused, with workers, "
        "or removed at its end.",
        _NAME,
        (
            ((each.place.container.name,), float(vram_budgets.may_recycle(each.place, snapshot)))
            for each in found
            if each.budget.budget_bytes is not None
        ),
        source="labels `gpuwarden.managed` and `gpuwarden.vram-protected`, AutoRemove and state, by its engine's API; "
        "a pod's labels and controller, and `--pod-namespaces`; worker files",
        absent=_NO_BUDGET,
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_budget_invalid",
        "1 for a container whose VRAM budget is invalid and not used, by reason.",
        ("container", "reason"),
        (
            ((each.place.container.name, each.budget.invalid.reason), 1.0)
            for each in found
            if each.budget.invalid is not None
        ),
        source="as `gpuwarden_container_gpu_memory_budget_bytes`",
        absent="its budget is valid, or it has none",
    )
