"""GPUs as a whole, and what on them no listed process accounts for: the parts add up."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from exporter import evidence
from exporter.collectors.family import gauge
from exporter.readings import Snapshot

_GPU = ("gpu",)


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by GPU UUID; where the figures come from stands on the info series."""
    readings = snapshot.gpus
    if readings is None:
        return
    gpus = readings.gpus
    yield gauge(
        "gpuwarden_gpu_info",
        "A GPU's identity and the source of its figures; always 1. Source `simulated` is no real GPU. Attribution is "
        "`process`, or `device` where nobody tells what each process computes on it.",
        ("gpu", "index", "name", "source", "attribution"),
        (((gpu.uuid, str(gpu.index), gpu.name, gpu.source or readings.source, gpu.attribution), 1.0) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_utilization_ratio",
        "Share of its time that the GPU was busy.",
        _GPU,
        (((gpu.uuid,), gpu.utilization_ratio) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_memory_used_bytes",
        "GPU memory in use by anyone.",
        _GPU,
        (((gpu.uuid,), gpu.memory_used_bytes) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_memory_size_bytes",
        "GPU memory there is.",
        _GPU,
        (((gpu.uuid,), gpu.memory_size_bytes) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_memory_free_bytes",
        "GPU memory that anyone can still have, as the driver tells it.",
        _GPU,
        (((gpu.uuid,), gpu.memory_free_bytes) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_memory_floor_bytes",
        "Less free memory of a GPU than this is too little.",
        _GPU,
        (((gpu.uuid,), float(snapshot.vram_floor_bytes)) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_memory_tie_bytes",
        "Two containers over their budgets by amounts this close are level.",
        _GPU,
        (((gpu.uuid,), float(snapshot.vram_tie_bytes)) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_unattributed_utilization_ratio",
        "Share of the GPU's time used by no process on its list; over the idle ratio it vetoes idle.",
        _GPU,
        (((gpu.uuid,), evidence.unattributed_ratio(gpu)) for gpu in gpus),
    )
    yield gauge(
        "gpuwarden_gpu_unattributed_memory_bytes",
        "GPU memory held by no process on its list.",
        _GPU,
        (((gpu.uuid,), evidence.unattributed_bytes(gpu)) for gpu in gpus),
    )
