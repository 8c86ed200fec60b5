"""Containers: RAM, their share of each GPU, and how long they have shown no sign of life."""

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import counter, gauge, or_nan
from exporter.evidence import vram_budgets
from exporter.evidence.gpu_attribution import NO_GPU
from exporter.model.container import ContainerEvidence
from exporter.model.snapshot import Snapshot

_NAME = ("container",)
_ON_GPU = ("container", "gpu")

_IDLE_BY: Final = (
    "`gpuwarden_container_gpu_utilization_ratio`, or `gpuwarden_container_gpu_busiest_engine_ratio` where there is one"
)


_IT_IS_DOWN: Final = "the container does not run"
_NO_BUDGET: Final = "the container has no label with a VRAM budget, or one that cannot be read"
_NO_WORK_READ: Final = f"{_IT_IS_DOWN}; NaN while it is paused, its processes cannot be listed or read"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by container name; full id and incarnation on the info series alone."""
    found = snapshot.containers
    yield gauge(
        "gpuwarden_container_info",
        "A container's identity; always 1. Kind is docker, podman, kubernetes or systemd; process for a worker in "
        "none; of one that no engine lists who runs it by its cgroup: containerd, cri-o, libpod, else container. "
        "Namespace and pod are empty where there is none.",
        ("container", "container_id", "incarnation", "kind", "image", "namespace", "pod"),
        (
            ((each.container.name, each.container.id, each.container.incarnation, each.container.kind,
              each.container.image or "", each.container.namespace or "", each.container.pod or ""), 1.0)
            for each in found
        ),
        source="Docker's or Podman's API; the Kubernetes API or `/var/log/containers`; `/run/systemd/units`; of one "
        "that none of them lists `/proc/PID/cgroup`", absent=_IT_IS_DOWN,
    )  # fmt: skip
    yield gauge(
        "gpuwarden_container_managed",
        "1 for a container that opted in to being stopped and started, 0 for one that did not.",
        _NAME,
        (
            ((each.container.name,), None if each.container.managed is None else float(each.container.managed))
            for each in found
        ),
        source="label `gpuwarden.managed`, by its engine's API",
        absent="kind is neither docker nor podman, whose containers alone have the label",
    )
    for name, help_text, value, source, absent in (
        (
            "memory_bytes",
            "RAM charged to its cgroup, page cache included; of kind `process` its processes', shared pages for each.",
            "usage_bytes",
            "cgroup `memory.current`, or `memory.usage_in_bytes` of version 1; `/proc/PID/statm` for kind `process`",
            "no memory controller accounts for it, or it cannot be read",
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
            "RAM of the container less its inactive page cache.",
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
    yield from _durations(found)
    yield gauge(
        "gpuwarden_container_gpu_utilization_ratio",
        "Share of the GPU's time that the container's processes used, as its own utilisation counts it: their sum, "
        "be it over 1; 0 is measured, unknown is absent.",
        _ON_GPU,
        (((each.container.name, share.gpu), share.utilization_ratio) for each in found for share in each.shares),
        source="of the pids in its cgroup, NVML `nvmlDeviceGetProcessUtilization`: `smUtil`; DRM fdinfo, and for what "
        "an AMD GPU computes its queues and `cu_occupancy` in `/sys/class/kfd/kfd/proc`",
        absent=(
            "it has no GPU, or a process of it on this GPU is not measured; where "
            "it would be 0, also while `gpuwarden_container_gpu_attribution_missing` is 1"
        ),
        values="ratio, 0 or more",
    )
    yield gauge(
        "gpuwarden_container_gpu_busiest_engine_ratio",
        "Time of the engine that did most for the container's processes, copies and video too, where that is more than "
        "their utilisation: it decides then whether the GPU is idle for them.",
        _ON_GPU,
        (
            ((each.container.name, share.gpu), share.busiest_ratio)
            for each in found
            for share in each.shares
            if share.busiest_ratio is not None and share.busiest_ratio > (share.utilization_ratio or 0.0)
        ),
        source="of the pids in its cgroup, NVML `nvmlDeviceGetProcessUtilization`: the greatest of `smUtil`, "
        "`memUtil`, `encUtil`, `decUtil` of each",
        absent=(
            "no engine did more for it than its utilisation there says, or "
            "that is unknown; always on AMD's and Intel's, whose utilisation is the busiest engine's already"
        ),
    )
    yield gauge(
        "gpuwarden_container_gpu_attribution_missing",
        "1 while what the GPU does cannot be told apart, or at all, so that its container may do all or nothing of it; "
        "else 0.",
        _ON_GPU,
        (
            ((each.container.name, share.gpu), float(not share.attributed))
            for each in found
            for share in each.shares
            if share.attributed is not None
        ),
        source="the utilisation of the GPU and of its processes, compared at each look",
        absent="it is on no GPU, or nobody tells just now how busy the GPU is",
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_bytes",
        "GPU memory that the container's processes hold.",
        _ON_GPU,
        (((each.container.name, gpu), or_nan(held)) for each in found for gpu, held in _held(each)),
        source="of the pids in its cgroup, NVML `nvmlDeviceGet{Compute,Graphics,MPSCompute}RunningProcesses_v3`; the "
        "greater of AMD's `/sys/class/kfd/kfd/proc/PID/vram_GPUID` and DRM fdinfo; of Intel's DRM fdinfo",
        absent=(
            "it is on no GPU; NaN while its processes, or what one of them holds "
            "there, are unknown, or the GPU is missing; where it would be 0, also while the GPU does more than the "
            "processes on its list, by more than the idle ratio, and more of its memory than `--vram-tie-mib` is in "
            "use beyond them, or an unknown amount"
        ),
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_peak_bytes",
        "The most GPU memory that its processes were seen to hold, once a second, in this incarnation.",
        _ON_GPU,
        (((each.container.name, gpu), float(peak)) for each in found for gpu, peak in each.peak_bytes.items()),
        source="the greatest `gpuwarden_container_gpu_memory_bytes` of all looks",
        absent="its memory on this GPU was never measured",
    )
    yield from _tenancy(snapshot)
    yield from _mishaps(snapshot)
    yield counter(
        "gpuwarden_container_gpu_busy_seconds",
        "GPU time used by the container's processes since it was first seen, measured samples only.",
        _ON_GPU,
        (((each.container.name, gpu), seconds) for each in found for gpu, seconds in each.busy_s.items()),
        source="`gpuwarden_container_gpu_utilization_ratio`, integrated look by look",
        absent="its share of this GPU was never measured",
    )
    yield counter(
        "gpuwarden_container_unknown_samples",
        "Samples in which something of a container was unknown, by what and why.",
        ("container", "what", "reason"),
        ((key, float(count)) for key, count in sorted(snapshot.unknown.items())),
        source="what was unknown at each look, counted",
        absent="nothing of the container was unknown so far",
    )


def _durations(found: Sequence[ContainerEvidence]) -> Iterable[Metric]:
    """For how long each container has shown no sign of life, by each that there is."""
    for name, help_text, told, source, absent in (
        (
            "ram_idle_seconds",
            "For how long the container's RAM has moved by no more than the delta.",
            lambda each: or_nan(each.ram_idle_s),
            "`gpuwarden_container_memory_bytes`, compared at each look with `--ram-idle-mib`",
            (f"{_IT_IS_DOWN}; NaN while `gpuwarden_container_memory_bytes` is absent, or it is paused"),
        ),
        (
            "gpu_idle_seconds",
            "For how long every GPU of the container has been measured at or under the idle ratio; NaN if unknown.",
            _idle_s,
            f"{_IDLE_BY}, compared at each look with `--gpu-idle-ratio`",
            ("it has no GPU; NaN while any of its GPUs is unknown or used by no listed process, or it is paused"),
        ),
        (
            "gpu_lost_seconds",
            "For how long a GPU of the container has been lost and each other one was lost or idle; NaN if unknown.",
            _lost_s,
            "the driver's answers to each look: of which GPU it says that it is lost, or no longer tells",
            (
                "it has no GPU, or each is measured; NaN while one is unknown and none is "
                "lost, or while beside a lost one another is unknown, or it is paused"
            ),
        ),
        (
            "gpu_saturated_seconds",
            "For how long it kept the same GPUs fully busy without a pause, others idle or lost; absent if unknown.",
            lambda each: each.gpu_saturated_s,
            "its share of each of its GPUs at each look",
            ("it has no GPU but lost ones, another of its is unknown or used by no listed process, or it is paused"),
        ),
        (
            "gpu_last_busy_age_seconds",
            "For how long no GPU was measured to do anything for it: each was idle or unknown, or it is on none.",
            lambda each: or_nan(each.gpu_last_busy_age_s),
            "its share of each of its GPUs at each look, compared with `--gpu-idle-ratio`",
            (
                f"{_IT_IS_DOWN}; NaN while it has no GPU and may be on one that "
                "does not tell, is paused, or one of its GPUs hangs or its source does not answer, for less than 20 "
                "minutes"
            ),
        ),
        (
            "io_idle_seconds",
            "For how long its processes have read and written no more than the threshold.",
            lambda each: or_nan(each.io_idle_s),
            "`/proc/PID/io`, compared at each look with `--io-idle-kib-per-s`",
            f"{_NO_WORK_READ}, or the kernel does not tell their I/O",
        ),
        (
            "page_fault_idle_seconds",
            "For how long its processes have had no more page faults than the threshold.",
            lambda each: or_nan(each.page_fault_idle_s),
            "`/proc/PID/stat`, compared at each look with `--page-faults-idle-per-s`",
            _NO_WORK_READ,
        ),
        (
            "cpu_idle_seconds",
            "For how long its processes have used no more CPU time than the threshold.",
            lambda each: or_nan(each.cpu_idle_s),
            "`/proc/PID/stat`, compared at each look with `--cpu-idle-ratio`",
            _NO_WORK_READ,
        ),
        (
            "work_idle_seconds",
            "For how long I/O, page faults and CPU time of its processes have all been still.",
            lambda each: or_nan(each.work_idle_s),
            "the least of the three times for I/O, page faults and CPU time",
            f"{_IT_IS_DOWN}; NaN while any of the three is",
        ),
        (
            "no_progress_seconds",
            "For how long its RAM, I/O and page faults were still, and its GPU pegged, or not busy with its CPU still.",
            lambda each: or_nan(each.no_progress_s),
            "the least of the times for RAM, I/O, page faults, and the longer one of a GPU that is pegged or at rest",
            (
                f"{_IT_IS_DOWN}; NaN while RAM, I/O or faults are unknown, or its GPU is, "
                "with its CPU time, or nobody has been able to look at that for less than 20 minutes"
            ),
        ),
    ):
        yield gauge(
            f"gpuwarden_container_{name}",
            help_text,
            _NAME,
            (((each.container.name,), told(each)) for each in found),
            source=source,
            absent=absent,
        )


def _idle_s(each: ContainerEvidence) -> float | None:
    return or_nan(each.gpu_idle_s) if _has_gpus(each) else None


def _lost_s(each: ContainerEvidence) -> float | None:
    """Absent where each GPU is measured: none is lost then, and its idleness contradicts what was lost before."""
    unknown = _has_gpus(each) and each.gpu_unknown is not None
    return or_nan(each.gpu_lost_s) if unknown else each.gpu_lost_s


def _held(each: ContainerEvidence) -> Iterable[tuple[str, int | None]]:
    """What it holds of each GPU that it is on, or of which it is not known whether it is."""
    told = {share.gpu: share.memory_bytes for share in each.shares}
    return {**dict.fromkeys(each.gpus), **told}.items()


def _has_gpus(each: ContainerEvidence) -> bool:
    return each.gpu_unknown is None or each.gpu_unknown.reason != NO_GPU


def _mishaps(snapshot: Snapshot) -> Iterable[Metric]:
    """What went wrong with each container in the eyes of the kernel and of who runs it."""
    found = snapshot.containers
    yield counter(
        "gpuwarden_container_oom_kills",
        "Processes of the container that the kernel has killed for want of memory, in this incarnation.",
        _NAME,
        (((each.container.name,), each.ram.oom_kills) for each in found),
        source="`oom_kill` in cgroup `memory.events`, or `memory.oom_control` of version 1",
        absent="no memory controller accounts for it, or the kernel does not count them",
    )


def _tenancy(snapshot: Snapshot) -> Iterable[Metric]:
    """What each container may hold of a GPU's memory."""
    found = [each.container for each in snapshot.containers]
    yield gauge(
        "gpuwarden_container_gpu_memory_budget_bytes",
        "How much memory of each of its GPUs the container may hold, as its owner says.",
        _NAME,
        (((each.name,), each.vram_budget.budget_bytes) for each in found),
        source="label `gpuwarden.vram-budget-mib`, by its engine's API; of a pod the limit of `--budget-resource`",
        absent=_NO_BUDGET,
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_over_budget_bytes",
        "By how much more of a GPU's memory the container holds than its budget, only while it does.",
        _ON_GPU,
        (
            ((each.container.name, gpu), float(held - budget))
            for each in snapshot.containers
            if (budget := each.container.vram_budget.budget_bytes) is not None
            for gpu, held in _held(each)
            if held is not None and held > budget
        ),
        source="`gpuwarden_container_gpu_memory_bytes` less `gpuwarden_container_gpu_memory_budget_bytes`",
        absent=("it holds no more than its budget, has none, or what it holds is unknown"),
    )
    yield gauge(
        "gpuwarden_container_recyclable",
        "1 for a container with a budget that may be stopped for its GPU memory's sake; 0 for a protected one, one "
        "that did not opt in, is paused, holds workers, or is removed when it ends.",
        _NAME,
        (
            ((each.container.name,), float(vram_budgets.may_recycle(each, snapshot)))
            for each in snapshot.containers
            if each.container.vram_budget.budget_bytes is not None
        ),
        source="labels `gpuwarden.managed` and `gpuwarden.vram-protected`, AutoRemove and state, by its engine's API; "
        "worker files",
        absent=_NO_BUDGET,
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_budget_invalid",
        "1 for a container whose budget cannot be read, by the reason: it has none.",
        ("container", "reason"),
        (((each.name, each.vram_budget.invalid.reason), 1.0) for each in found if each.vram_budget.invalid is not None),
        source="as `gpuwarden_container_gpu_memory_budget_bytes`",
        absent="its budget can be read, or it has none",
    )
