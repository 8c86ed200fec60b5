"""Tenants on demand: whether they are on, what they need, and for how long they have had room or been idle."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge, or_nan
from exporter.model.snapshot import Snapshot

_TENANT: Final = ("tenant",)
_SOURCE: Final = "label `gpuwarden.demand-gate` of a container, or annotation `gpuwarden/demand-gate` of a Deployment"
_NONE: Final = "no tenant opted in, its GPU is not on this host, or its engine does not answer"
_SINCE: Final = "the exporter itself, since its start at most"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by tenant: the container's name, or NAMESPACE/DEPLOYMENT."""
    found = snapshot.on_demand
    yield gauge(
        "gpuwarden_on_demand_on",
        "1 if a tenant on demand runs, or its Deployment wants a replica, else 0.",
        ("tenant", "kind"),
        (((each.tenant, each.kind), float(each.on)) for each in found),
        source=_SOURCE,
        absent=_NONE,
    )
    yield gauge(
        "gpuwarden_on_demand_invalid",
        "1 if the label or annotation of a tenant on demand is invalid, else 0. It is not scaled then.",
        _TENANT,
        (((each.tenant,), float(each.invalid is not None)) for each in found),
        source=_SOURCE,
        absent=_NONE,
    )
    yield gauge(
        "gpuwarden_on_demand_needed_bytes",
        "GPU memory that a tenant on demand needs.",
        _TENANT,
        (((each.tenant,), each.needed_bytes) for each in found),
        source=_SOURCE,
        absent=f"{_NONE}, or the label is invalid",
    )
    yield gauge(
        "gpuwarden_on_demand_room_bytes",
        "Free memory of a GPU, less memory of ended processes, less what other tenants that are on still need.",
        ("tenant", "gpu"),
        (((each.tenant, card.gpu), or_nan(card.room_bytes)) for each in found for card in each.cards),
        source="`gpuwarden_gpu_memory_free_bytes`, `gpuwarden_gpu_memory_reclaiming_bytes`, and the memory of tenants",
        absent=f"{_NONE}; NaN while unknown",
    )
    yield gauge(
        "gpuwarden_on_demand_state_seconds",
        "Time that a tenant on demand has been on, or off.",
        _TENANT,
        (((each.tenant,), each.state_s) for each in found),
        source=_SINCE,
        absent=_NONE,
    )
    yield gauge(
        "gpuwarden_on_demand_room_seconds",
        "Time that the room on each of its GPUs has been at least its need and the floor.",
        _TENANT,
        (((each.tenant,), or_nan(each.room_s)) for each in found),
        source=_SINCE,
        absent=f"{_NONE}; NaN while the free memory of a GPU is unknown",
    )
    yield gauge(
        "gpuwarden_on_demand_short_seconds",
        "Time that a GPU of the tenant has been under its floor.",
        _TENANT,
        (((each.tenant,), or_nan(each.short_s)) for each in found),
        source=_SINCE,
        absent=f"{_NONE}; NaN while the free memory of a GPU is unknown",
    )
    yield gauge(
        "gpuwarden_on_demand_idle_seconds",
        "Time that the containers of a tenant on demand have not used their GPUs.",
        _TENANT,
        (((each.tenant,), or_nan(each.idle_s)) for each in found),
        source="as `gpuwarden_container_gpu_idle_seconds`, the least of its containers",
        absent=f"{_NONE}; NaN while it is off or the use is unknown",
    )
