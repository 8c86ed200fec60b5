"""GPUs and RAM: who uses them, for how long they have shown no sign of life, and what nobody accounts for."""

from typing import Final

from dashboards.expressions import CONTAINER, GPU, HOST, SHARE, each, on_gpu
from dashboards.panels import Panel, Query

_BY_CONTAINER: Final = "{{host}}/{{container}}"
_BY_GPU: Final = "{{host}} GPU {{index}} ({{source}})"
_BY_SHARE: Final = f"{_BY_CONTAINER} GPU {{{{index}}}} ({{{{source}}}})"

PANELS: Final = (
    Panel(
        title="GPU utilisation by container",
        reads="Share of each GPU's time that a container's processes used, and the time of a busier engine, such as "
        "for video, where there is one: that counts for idle then. Dashed the ratio at or under which it is idle. "
        "0 is measured; a gap is unknown.",
        unit="percentunit",
        queries=(
            Query(
                expr=on_gpu(each("max", SHARE, "gpuwarden_container_gpu_utilization_ratio", where=HOST)),
                legend=_BY_SHARE,
            ),
            Query(
                expr=on_gpu(each("max", SHARE, "gpuwarden_container_gpu_busiest_engine_ratio", where=HOST)),
                legend=f"{_BY_SHARE} busiest engine",
            ),
            Query(
                expr=each("max", ("host",), "gpuwarden_gpu_idle_threshold_ratio", where=HOST),
                legend="{{host}} idle ratio",
                limit=True,
            ),
        ),
        top=1,
    ),
    Panel(
        title="GPU utilisation",
        reads="Share of its time that each GPU was busy, whoever used it.",
        unit="percentunit",
        queries=(Query(expr=on_gpu(each("max", GPU, "gpuwarden_gpu_utilization_ratio", where=HOST)), legend=_BY_GPU),),
        top=1,
    ),
    Panel(
        title="Unattributed GPU utilisation",
        reads="Share of each GPU's time used by no process on its list. Over the idle ratio it vetoes idle for "
        "every container of that GPU: their idle time is then unknown and nothing trips. Under 0 its processes are "
        "told to do more than the GPU itself. A gap is a GPU that could not say.",
        unit="percentunit",
        queries=(
            Query(
                expr=on_gpu(each("max", GPU, "gpuwarden_gpu_unattributed_utilization_ratio", where=HOST)),
                legend=_BY_GPU,
            ),
        ),
        top=1,
    ),
    Panel(
        title="GPU memory by container",
        reads="GPU memory that each container's processes hold.",
        unit="bytes",
        queries=(
            Query(
                expr=on_gpu(each("max", SHARE, "gpuwarden_container_gpu_memory_bytes", where=HOST)),
                legend=_BY_SHARE,
            ),
        ),
    ),
    Panel(
        title="GPU memory",
        reads="Memory of each GPU in use by anyone, and dashed how much there is.",
        unit="bytes",
        queries=(
            Query(
                expr=on_gpu(each("max", GPU, "gpuwarden_gpu_memory_used_bytes", where=HOST)), legend=f"{_BY_GPU} used"
            ),
            Query(
                expr=on_gpu(each("max", GPU, "gpuwarden_gpu_memory_size_bytes", where=HOST)),
                legend=f"{_BY_GPU} size",
                limit=True,
            ),
        ),
    ),
    Panel(
        title="GPU memory of no container",
        reads="GPU memory held by no process on the GPU's list, which is the driver's own share, or a tenant that it "
        "hides; and by processes on the list that are in no container. With the containers' it is all that is in use: "
        "below 0 is by how much its processes are told to hold more.",
        unit="bytes",
        queries=(
            Query(
                expr=on_gpu(each("max", GPU, "gpuwarden_gpu_unattributed_memory_bytes", where=HOST)),
                legend=f"{_BY_GPU} of no process",
            ),
            Query(
                expr=on_gpu(each("max", GPU, "gpuwarden_gpu_unplaced_memory_bytes", where=HOST)),
                legend=f"{_BY_GPU} in no container",
            ),
        ),
    ),
    Panel(
        title="GPU idle for",
        reads="For how long every GPU of each container has been measured idle. A gap is one that is "
        "unknown; a job cannot trip on stall then.",
        unit="s",
        queries=(
            Query(
                expr=each("min", CONTAINER, "gpuwarden_container_gpu_idle_seconds", where=HOST), legend=_BY_CONTAINER
            ),
        ),
    ),
    Panel(
        title="RAM still for",
        reads="For how long each container's RAM has moved by no more than the delta. A load or a decode keeps it low.",
        unit="s",
        queries=(
            Query(
                expr=each("min", CONTAINER, "gpuwarden_container_ram_still_seconds", where=HOST), legend=_BY_CONTAINER
            ),
        ),
    ),
    Panel(
        title="GPUs kept busy",
        reads="GPU time used in each second: 1 is one GPU kept wholly busy, 2 is two. Measured samples only, so "
        "a container whose use is unknown reads low.",
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
        reads="RAM charged to each container, page cache included: the figure that the still time watches. Of a worker "
        "in no container what its processes hold, of which shared pages count once for each.",
        unit="bytes",
        queries=(
            Query(expr=each("max", CONTAINER, "gpuwarden_container_memory_bytes", where=HOST), legend=_BY_CONTAINER),
        ),
        width=12,
    ),
    Panel(
        title="Container RAM without cache",
        reads="Anonymous RAM, and the working set: RAM less its inactive page cache. What a container really needs.",
        unit="bytes",
        queries=(
            Query(
                expr=each("max", CONTAINER, "gpuwarden_container_memory_anon_bytes", where=HOST),
                legend=f"{_BY_CONTAINER} anonymous",
            ),
            Query(
                expr=each("max", CONTAINER, "gpuwarden_container_memory_working_set_bytes", where=HOST),
                legend=f"{_BY_CONTAINER} working set",
            ),
        ),
        width=12,
    ),
    Panel(
        title="Servers unanswered for",
        reads="For how long each server has been asked without an answer, and dashed how long its owner allows. 0 is "
        "an answer; a gap is one that was not asked. Idle GPU and still RAM have to last as long before it is freed.",
        unit="s",
        queries=(
            Query(expr=each("min", CONTAINER, "gpuwarden_server_unanswered_seconds", where=HOST), legend=_BY_CONTAINER),
            Query(
                expr=each("max", CONTAINER, "gpuwarden_server_silence_allowed_seconds", where=HOST),
                legend=f"{_BY_CONTAINER} allowed",
                limit=True,
            ),
        ),
        width=24,
    ),
)
