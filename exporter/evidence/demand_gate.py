"""Demand gate: for how long a tenant on demand has had room, or its GPU too little free memory (C7). Pure.

    container label               annotation of a Deployment
    gpuwarden.demand-gate         gpuwarden/demand-gate        whole MiB that it needs
    gpuwarden.demand-gate-gpu     gpuwarden/demand-gate-gpu    UUID of its GPU
                                  gpuwarden/demand-gate-node   its node, instead of the GPU

A tenant has room if each GPU that it may use has: free memory, less what ended processes return, less what other
tenants that are on still need, is at least its need and the floor. Times: CLOCK_BOOTTIME seconds.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from exporter.evidence import vram_budgets
from exporter.evidence.gpu_attribution import NO_GPU
from exporter.model.container import ContainerEvidence
from exporter.model.gpu import Gpu, GpuReadings
from exporter.model.on_demand import Demand, OnDemandTenant
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from gpuwarden import conditions
from gpuwarden.evidence import OnDemandFacts, OnDemandGpuFacts
from gpuwarden.kube.budget import MIB_MAX

LABEL: Final = "gpuwarden.demand-gate"
GPU_LABEL: Final = "gpuwarden.demand-gate-gpu"
ANNOTATION: Final = "gpuwarden/demand-gate"
GPU_ANNOTATION: Final = "gpuwarden/demand-gate-gpu"
NODE_ANNOTATION: Final = "gpuwarden/demand-gate-node"

_MIB = re.compile(r"[1-9][0-9]{0,7}")


def parse_labels(labels: Mapping[str, str]) -> Demand | Unknown | None:
    """Parse a container's labels; `None` if it did not opt in."""
    if LABEL not in labels:
        return None
    if not vram_budgets.is_managed(labels):
        return Unknown(reason="not_managed", message=f"set the label {vram_budgets.MANAGED_LABEL}=true too")
    return _parse(labels[LABEL], LABEL, labels.get(GPU_LABEL))


def parse_annotations(annotations: Mapping[str, str], *, node: str) -> Demand | Unknown | None:
    """Parse a Deployment's annotations; `None` if it did not opt in, or names another node."""
    if ANNOTATION not in annotations:
        return None
    gpu, its = annotations.get(GPU_ANNOTATION), annotations.get(NODE_ANNOTATION)
    if gpu is None and its is None:
        return Unknown(reason="no_place", message=f"set the annotation {NODE_ANNOTATION} or {GPU_ANNOTATION} too")
    return _parse(annotations[ANNOTATION], ANNOTATION, gpu) if its in (None, node) else None


def _parse(said: str, name: str, gpu: str | None) -> Demand | Unknown:
    if not _MIB.fullmatch(said):
        message = f"{name} is {ascii(said)[:40]}; expected whole MiB, 1 to {MIB_MAX}"
        return Unknown(reason="bad_demand", message=message)
    return Demand(needed_bytes=int(said) * 2**20, gpu=gpu)


@dataclass(kw_only=True)
class _History:
    """Since when a tenant has been on or off, has had room, and its GPU too little free memory."""

    on: bool
    state_since_s: float
    seen_s: float
    room_since_s: float | None = None
    short_since_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Use:
    """What a tenant that is on holds, by GPU, and how long it has been idle; `None` is unknown."""

    gpus: Mapping[str, int | None] = field(default_factory=dict)
    idle_s: float | None = None


class DemandWatch:
    """Keeps the history of each tenant on demand. A gap between two samples, or a missing listing, restarts it."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._histories: dict[tuple[str, str], _History] = {}

    def observe(
        self,
        tenants: Iterable[OnDemandTenant],
        containers: Sequence[ContainerEvidence],
        gpus: GpuReadings | None,
        reclaiming_bytes: Mapping[str, int],
        *,
        host: str,
        now_s: float,
    ) -> tuple[OnDemandFacts, ...]:
        """Add one sample; returns the facts about each tenant. A tenant of a GPU that is not here is left out."""
        cards = {} if gpus is None else {gpu.uuid: gpu for gpu in gpus.gpus}
        here = [each for each in tenants if isinstance(each.demand, Unknown) or each.demand.gpu in (None, *cards)]
        uses = {each.name: _use(each, containers) for each in here if each.on}
        found = []
        histories: dict[tuple[str, str], _History] = {}
        for each in here:
            on_gpus = _gpus_of(each, uses, cards)
            judged = [
                self._judge(cards[gpu], reclaiming_bytes.get(gpu), _reserved(gpu, each, here, uses, cards))
                for gpu in sorted(on_gpus)
            ]
            history = self._history(each, now_s)
            histories[each.kind, each.handle] = history
            needed = None if isinstance(each.demand, Unknown) else each.demand.needed_bytes
            room, short = _has_room(judged, needed), _is_short(judged)
            history.room_since_s = _since(history.room_since_s, room, now_s)
            history.short_since_s = _since(history.short_since_s, short, now_s)
            use = uses.get(each.name)
            found.append(
                OnDemandFacts(
                    host=host,
                    sample_age_s=0.0,
                    tenant=each.name,
                    kind=each.kind,
                    handle=each.handle,
                    on=each.on,
                    needed_bytes=needed,
                    invalid=each.demand.message if isinstance(each.demand, Unknown) else None,
                    state_s=now_s - history.state_since_s,
                    room_s=None if room is None else _for_s(history.room_since_s, now_s),
                    short_s=None if short is None else _for_s(history.short_since_s, now_s),
                    idle_s=None if use is None else use.idle_s,
                    cards=judged,
                    after_s=self._thresholds.demand_gate_after_s,
                    idle_after_s=self._thresholds.demand_gate_idle_s,
                    min_s=self._thresholds.demand_gate_min_s,
                )
            )
        self._histories = histories
        return tuple(found)

    def _history(self, tenant: OnDemandTenant, now_s: float) -> _History:
        known = self._histories.get((tenant.kind, tenant.handle))
        if known is None or now_s - known.seen_s > self._thresholds.gap_max_s:
            known = _History(on=tenant.on, state_since_s=now_s, seen_s=now_s)
        if known.on is not tenant.on:
            known.on, known.state_since_s = tenant.on, now_s
        known.seen_s = now_s
        return known

    def _judge(self, gpu: Gpu, reclaiming_bytes: int | None, reserved_bytes: int) -> OnDemandGpuFacts:
        floor_bytes = self._thresholds.vram_floor_bytes
        # MIG instances that share memory each show the same free bytes.
        judged = vram_budgets.has_floor(gpu, floor_bytes) and not (gpu.mig is not None and gpu.mig.shares_memory)
        return OnDemandGpuFacts(
            gpu=gpu.uuid,
            free_bytes=gpu.memory_free_bytes if judged else None,
            reclaiming_bytes=reclaiming_bytes,
            reserved_bytes=reserved_bytes,
            floor_bytes=floor_bytes,
        )


def _use(tenant: OnDemandTenant, containers: Sequence[ContainerEvidence]) -> _Use:
    members = [each for each in containers if each.container.id in tenant.members]
    held: dict[str, int | None] = {}
    for each in members:
        for share in each.shares:
            so_far = held.get(share.gpu, 0)
            known = so_far is not None and share.memory_bytes is not None
            held[share.gpu] = (so_far or 0) + (share.memory_bytes or 0) if known else None
    idle = [each.gpu_idle_s for each in members if each.gpu_unknown is None or each.gpu_unknown.reason != NO_GPU]
    all_seen = bool(idle) and len(members) == len(tenant.members)
    return _Use(gpus=held, idle_s=conditions.least(*idle) if all_seen else None)


def _gpus_of(tenant: OnDemandTenant, uses: Mapping[str, _Use], cards: Mapping[str, Gpu]) -> list[str]:
    """The GPUs that it holds memory on, or else those that it may use."""
    held = [gpu for gpu, size in uses.get(tenant.name, _Use()).gpus.items() if size and gpu in cards]
    named = None if isinstance(tenant.demand, Unknown) else tenant.demand.gpu
    return held or (list(cards) if named is None else [named])


def _reserved(
    gpu: str,
    tenant: OnDemandTenant,
    tenants: Sequence[OnDemandTenant],
    uses: Mapping[str, _Use],
    cards: Mapping[str, Gpu],
) -> int:
    """What other tenants that are on still need of a GPU: one that loads does not hold its memory yet."""
    reserved = 0
    for each in tenants:
        if each is tenant or not each.on or isinstance(each.demand, Unknown) or gpu not in _gpus_of(each, uses, cards):
            continue
        reserved += max(0, each.demand.needed_bytes - (uses[each.name].gpus.get(gpu) or 0))
    return reserved


def _has_room(cards: Sequence[OnDemandGpuFacts], needed_bytes: int | None) -> bool | None:
    rooms = [card.room_bytes for card in cards]
    known = [room for room in rooms if room is not None]
    if not cards or needed_bytes is None or len(known) < len(rooms):
        return None
    return all(room >= needed_bytes + card.floor_bytes for room, card in zip(known, cards, strict=True))


def _is_short(cards: Sequence[OnDemandGpuFacts]) -> bool | None:
    judged = [card.is_short for card in cards]
    if any(judged):
        return True
    return None if None in judged or not cards else False


def _since(before_s: float | None, holds: bool | None, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s


def _for_s(since_s: float | None, now_s: float) -> float:
    return 0.0 if since_s is None else now_s - since_s
