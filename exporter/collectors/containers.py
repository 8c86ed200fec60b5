"""Containers: RAM, their share of each GPU, and how long they have shown no sign of life."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from exporter import tenancy
from exporter.collectors.family import counter, gauge
from exporter.readings import Snapshot

_NAME = ("container",)
_ON_GPU = ("container", "gpu")


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
    )  # fmt: skip
    for name, help_text, value in (
        ("memory_bytes", "RAM charged to the container's cgroup, page cache included.", "ram_bytes"),
        ("memory_anon_bytes", "Anonymous RAM of the container.", "ram_anon_bytes"),
        ("memory_working_set_bytes", "RAM of the container less its inactive page cache.", "ram_working_set_bytes"),
        ("ram_still_seconds", "For how long the container's RAM has moved by no more than the delta.", "ram_still_s"),
        (
            "gpu_idle_seconds",
            "For how long every GPU of the container has been measured at or under the idle ratio; absent if unknown.",
            "gpu_idle_s",
        ),
        (
            "gpu_lost_seconds",
            "For how long a GPU of the container has been lost and each other one was lost or idle; absent if unknown.",
            "gpu_lost_s",
        ),
        ("io_still_seconds", "For how long its processes have read and written no more than the threshold.",
         "io_still_s"),
        ("fault_still_seconds", "For how long its processes have had no more page faults than the threshold.",
         "fault_still_s"),
        ("cpu_still_seconds", "For how long its processes have used no more CPU time than the threshold.",
         "cpu_still_s"),
        ("work_still_seconds", "For how long I/O, page faults and CPU time of its processes have all been still.",
         "work_still_s"),
    ):  # fmt: skip
        yield gauge(
            f"gpuwarden_container_{name}",
            help_text,
            _NAME,
            (((each.container.name,), getattr(each, value)) for each in found),
        )
    yield gauge(
        "gpuwarden_container_gpu_utilization_ratio",
        "Share of the GPU's time that the container's processes used; 0 is measured, unknown is absent.",
        _ON_GPU,
        (((each.container.name, share.gpu), share.utilization_ratio) for each in found for share in each.shares),
    )
    yield gauge(
        "gpuwarden_container_gpu_attribution_missing",
        "1 while what the GPU does cannot be told apart, so that its container may do all or nothing of it; else 0.",
        _ON_GPU,
        (
            ((each.container.name, share.gpu), float(not share.attributed))
            for each in found
            for share in each.shares
            if share.attributed is not None
        ),
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_bytes",
        "GPU memory that the container's processes hold.",
        _ON_GPU,
        (((each.container.name, share.gpu), share.memory_bytes) for each in found for share in each.shares),
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_peak_bytes",
        "The most GPU memory that its processes were seen to hold, once a second, in this incarnation.",
        _ON_GPU,
        (((each.container.name, gpu), float(peak)) for each in found for gpu, peak in each.peak_bytes.items()),
    )
    yield from _tenancy(snapshot)
    yield from _mishaps(snapshot)
    yield counter(
        "gpuwarden_container_gpu_busy_seconds",
        "GPU time used by the container's processes since it was first seen, measured samples only.",
        _ON_GPU,
        (((each.container.name, gpu), seconds) for each in found for gpu, seconds in each.busy_s.items()),
    )
    yield counter(
        "gpuwarden_unknown_samples",
        "Samples in which something of a container was unknown, by what and why.",
        ("container", "what", "reason"),
        ((key, float(count)) for key, count in sorted(snapshot.unknown.items())),
    )


def _mishaps(snapshot: Snapshot) -> Iterable[Metric]:
    """What went wrong with each container in the eyes of the kernel and of who runs it."""
    found = snapshot.containers
    yield counter(
        "gpuwarden_container_oom_kills",
        "Processes of the container that the kernel has killed for want of memory, in this incarnation; a kill that "
        "ends the container is told by its restarts.",
        _NAME,
        (((each.container.name,), each.oom_kills) for each in found),
    )
    yield counter(
        "gpuwarden_container_restarts",
        "How often its engine, the kubelet or systemd has started the container again by itself; what a person "
        "restarts is not counted.",
        _NAME,
        (((each.container.name,), each.container.restarts) for each in found),
    )


def _tenancy(snapshot: Snapshot) -> Iterable[Metric]:
    """What each container may hold of a GPU's memory."""
    found = [each.container for each in snapshot.containers]
    yield gauge(
        "gpuwarden_container_gpu_memory_budget_bytes",
        "How much memory of each of its GPUs the container may hold, as its owner says.",
        _NAME,
        (((each.name,), each.tenancy.budget_bytes) for each in found),
    )
    yield gauge(
        "gpuwarden_container_recyclable",
        "1 for a container with a budget that may be stopped for its GPU memory's sake; 0 for a protected one, one "
        "that did not opt in, is paused, holds workers, or is removed when it ends.",
        _NAME,
        (
            ((each.container.name,), float(tenancy.may_go(each, snapshot)))
            for each in snapshot.containers
            if each.container.tenancy.budget_bytes is not None
        ),
    )
    yield gauge(
        "gpuwarden_container_gpu_memory_budget_invalid",
        "1 for a container whose budget cannot be read, by the reason: it has none.",
        ("container", "reason"),
        (((each.name, each.tenancy.invalid.reason), 1.0) for each in found if each.tenancy.invalid is not None),
    )
