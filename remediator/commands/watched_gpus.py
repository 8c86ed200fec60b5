"""Watched GPUs and the containers that hold their memory, as Prometheus or an exporter has them. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

NAMES: Final = (
    *("gpu_info", "gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_memory_size_bytes", "gpu_lost_seconds"),
    *("gpu_unlisted_memory_bytes", "gpu_uncontained_memory_bytes"),
    *("container_gpu_memory_bytes", "container_gpu_memory_budget_bytes"),
)
"""Series that are read, without `gpuwarden_`."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A container on a GPU. `budget_bytes` is `None` without a budget."""

    container: str
    memory_bytes: float
    budget_bytes: float | None

    @property
    def over_bytes(self) -> float:
        """Memory over the budget; 0 within it or without one."""
        return 0.0 if self.budget_bytes is None else max(0.0, self.memory_bytes - self.budget_bytes)


@dataclass(frozen=True, kw_only=True)
class WatchedGpu:
    """One GPU. `None` is unknown."""

    host: str
    gpu: str
    index: str
    name: str
    lost: bool
    busy_ratio: float | None
    memory_used_bytes: float | None
    memory_size_bytes: float | None
    other_bytes: float | None
    """Memory of processes outside of the listed containers."""
    tenants: Sequence[Tenant]


def read_gpus(result: Sequence[Mapping[str, Any]]) -> list[WatchedGpu]:
    """Read `data.result` of a query for these series. NaN is unknown."""
    found: dict[str, dict[tuple[str, str, str], float]] = {name: {} for name in NAMES}
    infos: dict[tuple[str, str], Mapping[str, str]] = {}
    for each in result:
        labels, value = each["metric"], float(each["value"][1])
        name, host = labels.get("__name__", "").removeprefix("gpuwarden_"), labels.get("host", "")
        if name == "gpu_info":
            infos[host, labels["gpu"]] = labels
        elif name in found and not math.isnan(value):
            found[name][host, labels.get("gpu", ""), labels.get("container", "")] = value
    return [_gpu(host, gpu, infos[host, gpu], found) for host, gpu in sorted(infos, key=lambda at: _order(at, infos))]


def _order(at: tuple[str, str], infos: Mapping[tuple[str, str], Mapping[str, str]]) -> tuple[str, int, str]:
    index = infos[at].get("index", "")
    return at[0], int(index) if index.isdecimal() else 0, at[1]


def _gpu(
    host: str, gpu: str, info: Mapping[str, str], found: Mapping[str, Mapping[tuple[str, str, str], float]]
) -> WatchedGpu:
    tenants = [
        Tenant(
            container=container,
            memory_bytes=held,
            budget_bytes=found["container_gpu_memory_budget_bytes"].get((host, "", container)),
        )
        for (its_host, its_gpu, container), held in found["container_gpu_memory_bytes"].items()
        if (its_host, its_gpu) == (host, gpu)
    ]

    def value(name: str) -> float | None:
        return found[name].get((host, gpu, ""))

    others = [value("gpu_unlisted_memory_bytes"), value("gpu_uncontained_memory_bytes")]
    return WatchedGpu(
        host=host,
        gpu=gpu,
        index=info.get("index", ""),
        name=info.get("name", ""),
        lost=bool(value("gpu_lost_seconds")),
        busy_ratio=value("gpu_utilization_ratio"),
        memory_used_bytes=value("gpu_memory_used_bytes"),
        memory_size_bytes=value("gpu_memory_size_bytes"),
        other_bytes=None if None in others else sum(max(0.0, each or 0.0) for each in others),
        tenants=sorted(tenants, key=lambda each: (-each.over_bytes, -each.memory_bytes, each.container)),
    )
