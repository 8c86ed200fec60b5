"""GPUs and RAM by host and container: use, idle time and unassigned use."""

from typing import Final

from dashboards.expressions import CONTAINER, GPU, HOST, SHARE, aggregate, on_gpu, or_none
from dashboards.panels import Panel, Query

_BY_CONTAINER: Final = "{{host}}/{{container}}"
_BY_GPU: Final = "{{host}} GPU {{index}} ({{source}})"
_BY_SHARE: Final = f"{_BY_CONTAINER} GPU {{{{index}}}} ({{{{source}}}})"

PANELS: Final = (
    Panel(
        title="GPU utilisation by container",
        description="Share of each GPU's time used by a container's processes, and by its busiest engine (such as "
        "video) if that is higher: the idle check uses the higher value. Dashed: the idle threshold. 0 is "
        "a measured value; a gap is unknown.",
        unit="percentunit",
        queries=(
            Query(
                expr=on_gpu(aggregate("max", SHARE, "gpuwarden_container_gpu_utilization_ratio", where=HOST)),
                legend=_BY_SHARE,
            ),
            Query(
                expr=on_gpu(aggregate("max", SHARE, "gpuwarden_container_gpu_busiest_engine_ratio", where=HOST)),
                legend=f"{_BY_SHARE} busiest engine",
            ),
            Query(
                expr=aggregate("max", ("host",), "gpuwarden_gpu_idle_threshold_ratio", where=HOST),
                legend="{{host}} idle ratio",
                limit=True,
            ),
        ),
        top=1,
    ),
    Panel(
        title="GPU utilisation",
        description="Share of time that each GPU was busy, all processes together.",
        unit="percentunit",
        queries=(
            Query(expr=on_gpu(aggregate("max", GPU, "gpuwarden_gpu_utilization_ratio", where=HOST)), legend=_BY_GPU),
        ),
        top=1,
    ),
    Panel(
        title="Unattributed GPU utilisation",
        description="Share of each GPU's time that no listed process used. Above the idle threshold, idle time is "
        "unknown for every container on the GPU and no stall is detected. Below 0, the processes report "
        "more use than the GPU. A gap is unknown.",
        unit="percentunit",
        queries=(
            Query(
                expr=on_gpu(aggregate("max", GPU, "gpuwarden_gpu_unlisted_utilization_ratio", where=HOST)),
                legend=_BY_GPU,
            ),
        ),
        top=1,
    ),
    Panel(
        title="GPU memory by container",
        description="GPU memory held by the processes of each container.",
        unit="bytes",
        queries=(
            Query(
                expr=on_gpu(aggregate("max", SHARE, "gpuwarden_container_gpu_memory_bytes", where=HOST)),
                legend=_BY_SHARE,
            ),
        ),
    ),
    Panel(
        title="GPU memory",
        description="Memory in use on each GPU. Dashed: its size.",
        unit="bytes",
        queries=(
            Query(
                expr=on_gpu(aggregate("max", GPU, "gpuwarden_gpu_memory_used_bytes", where=HOST)),
                legend=f"{_BY_GPU} used",
            ),
            Query(
                expr=on_gpu(aggregate("max", GPU, "gpuwarden_gpu_memory_size_bytes", where=HOST)),
                legend=f"{_BY_GPU} size",
                limit=True,
            ),
        ),
    ),
    Panel(
        title="GPU memory of no container",
        description="GPU memory that no listed process holds (the driver, or a hidden container), and memory of "
        "listed processes outside all containers. With the memory of all containers it adds up to the "
        "memory in use. Below 0, the processes report more than the GPU.",
        unit="bytes",
        queries=(
            Query(
                expr=on_gpu(aggregate("max", GPU, "gpuwarden_gpu_unlisted_memory_bytes", where=HOST)),
                legend=f"{_BY_GPU} of no process",
            ),
            Query(
                expr=on_gpu(aggregate("max", GPU, "gpuwarden_gpu_uncontained_memory_bytes", where=HOST)),
                legend=f"{_BY_GPU} in no container",
            ),
        ),
    ),
    Panel(
        title="GPU idle for",
        description="Time for which all GPUs of a container have been idle. A gap is unknown: no stall is detected "
        "then.",
        unit="s",
        queries=(
            Query(
                expr=aggregate("min", CONTAINER, "gpuwarden_container_gpu_idle_seconds", where=HOST),
                legend=_BY_CONTAINER,
            ),
        ),
    ),
    Panel(
        title="RAM idle for",
        description="Time for which the RAM of a container has stayed within the delta. Loading and decoding keep it "
        "low.",
        unit="s",
        queries=(
            Query(
                expr=aggregate("min", CONTAINER, "gpuwarden_container_ram_idle_seconds", where=HOST),
                legend=_BY_CONTAINER,
            ),
        ),
    ),
    Panel(
        title="GPUs kept busy",
        description="GPU time used per second: 1 is one fully busy GPU, 2 is two. Only measured samples count, so a "
        "container with unknown use reads too low.",
        unit="short",
        queries=(
            Query(
                # max before sum: a host scraped twice counts once.
                expr="sum by (host, container) (max by (host, container, gpu) "
                f"(rate(gpuwarden_container_gpu_busy_seconds_total{{{HOST}}}[$__rate_interval])))",
                legend=_BY_CONTAINER,
            ),
        ),
    ),
    Panel(
        title="Container RAM",
        description="RAM charged to each container with page cache: the value that the RAM delta is compared with. "
        "For a worker outside containers, the RAM of its processes; shared pages count once per process.",
        unit="bytes",
        queries=(
            Query(
                expr=aggregate("max", CONTAINER, "gpuwarden_container_memory_bytes", where=HOST), legend=_BY_CONTAINER
            ),
        ),
        width=12,
    ),
    Panel(
        title="Container RAM without cache",
        description="Anonymous RAM, and the working set: RAM without inactive page cache. This is what a container "
        "needs.",
        unit="bytes",
        queries=(
            Query(
                expr=aggregate("max", CONTAINER, "gpuwarden_container_memory_anon_bytes", where=HOST),
                legend=f"{_BY_CONTAINER} anonymous",
            ),
            Query(
                expr=aggregate("max", CONTAINER, "gpuwarden_container_memory_working_set_bytes", where=HOST),
                legend=f"{_BY_CONTAINER} working set",
            ),
        ),
        width=12,
    ),
    Panel(
        title="Pods that wait for GPU memory",
        description="GPU memory that each Pending pod wants, while no node has that much of its advertised memory "
        "free. A gap: `remediator serve --pending-pods` does not run, or the Kubernetes API does not answer.",
        unit="bytes",
        queries=(
            Query(
                expr=or_none(
                    aggregate("max", ("pod_namespace", "pod_name"), "gpuwarden_pod_pending_wanted_bytes", where=HOST),
                    f"max(gpuwarden_pending_pods{{{HOST}}})",
                    "pod_namespace",
                    "pod_name",
                ),
                legend="{{pod_namespace}}/{{pod_name}}",
            ),
        ),
        width=24,
    ),
    Panel(
        title="Server probe failing for",
        description="Time for which the probe of each server has failed. Dashed: the limit set by its owner. 0 is an "
        "answer; a gap means no probe. A restart also needs an idle GPU and unchanged RAM for that time.",
        unit="s",
        queries=(
            Query(
                expr=aggregate("min", CONTAINER, "gpuwarden_server_probe_failing_seconds", where=HOST),
                legend=_BY_CONTAINER,
            ),
            Query(
                expr=aggregate("max", CONTAINER, "gpuwarden_server_restart_after_seconds", where=HOST),
                legend=f"{_BY_CONTAINER} allowed",
                limit=True,
            ),
        ),
        width=24,
    ),
)
