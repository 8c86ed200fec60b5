"""Attribute GPUs to containers, by the GPUs' process lists. Pure."""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from exporter.model.container import Container, GpuShare
from exporter.model.gpu import (
    DRM_SOURCE,
    NO_ATTRIBUTION,
    NVIDIA_SOURCE,
    RATIO_DIGITS,
    Gpu,
    GpuReadings,
)
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from gpuwarden.gpu_names import ALL, ALL_NODES, NODE, is_known

NO_GPU: Final = "no_gpu"
"""Reason: the container has no GPU."""

HUNG: Final = "hung"
"""Reason: a driver call hangs."""

WITHOUT_ENGINE: Final = frozenset({"process", "systemd"})
"""Kinds without a container engine."""

_EVERY: Final = frozenset({ALL, ALL_NODES})

_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|GPU-[0-9a-f]{16}")

_UUID_BEGINS: Final = re.compile(r"GPU-[0-9a-f]{8}")
"""The shortest unique prefix of a UUID."""


class GpuAttribution(NamedTuple):
    """A container's GPUs in one sample.

    Attributes:
        gpus: UUIDs of its GPUs, including missing ones.
        nameless: requested names without a known GPU.
        present: UUIDs of its present GPUs.
        may_be_elsewhere: it may use a GPU that is not in `gpus`.
        may_use_unread_gpu: the container may use a hung GPU, or a GPU of a source that fails while another answers.
    """

    gpus: tuple[str, ...]
    shares: tuple[GpuShare, ...]
    utilization_ratio: float | None
    unknown: Unknown | None
    nameless: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    may_be_elsewhere: bool = False
    may_use_unread_gpu: bool = False


NO_PIDS: Final = Unknown(reason="processes_unknown", message="the container's processes are unknown")

UNREQUESTED: Final = "unrequested"
"""Name for the GPUs of a container that requests none and uses some."""

UNATTRIBUTED: Final = "unattributed"
"""Reason: the GPU is busy with processes that it does not list."""


def attribute_gpus(
    container: Container,
    pids: frozenset[int] | None,
    readings: GpuReadings | None,
    thresholds: Thresholds,
    earlier: Sequence[str] = (),
    seen_present: AbstractSet[str] | None = None,
) -> GpuAttribution:
    """Attribute GPU time and memory to a container by its processes.

    The utilisation is known only if each of its GPUs lists its processes, measures those of the container, and shows at
    most idle use by unlisted ones. A GPU that lists one of its processes is its GPU even without a request. Names of no
    known form mean only these GPUs.

    Args:
        container: the container.
        pids: its processes.
        readings: all GPUs; `None` if no source answers.
        thresholds: the host's limits.
        earlier: UUIDs of its GPUs in earlier samples.
        seen_present: UUIDs of GPUs that were present with the container.
    """
    use = _attribute(container, pids, readings, thresholds, earlier, seen_present)
    if readings is None:
        return use
    fails = readings.failed and use.unknown is not None and use.unknown.reason in ("gpu_missing", "source_failed")
    if fails or (readings.hung and _may_be_on_hung(use, readings)):
        return use._replace(may_use_unread_gpu=True)
    return use


def _may_be_on_hung(use: GpuAttribution, readings: GpuReadings) -> bool:
    # The MIG instances of a hung GPU are not listed.
    missing = use.unknown is not None and use.unknown.reason == "gpu_missing"
    own = readings.by_name.keys() - readings.hung
    return missing or use.may_be_elsewhere or not own.issuperset(use.gpus)


def _attribute(
    container: Container,
    pids: frozenset[int] | None,
    readings: GpuReadings | None,
    thresholds: Thresholds,
    earlier: Sequence[str],
    seen_present: AbstractSet[str] | None,
) -> GpuAttribution:
    asked = None if readings is None else _resolve_request(container, readings)
    wanted = frozenset(container.gpu_request or ()) if asked is None else asked.wanted
    uses_any = bool(pids and readings and not readings.by_pid.keys().isdisjoint(pids))
    if not wanted and not uses_any:
        use = unknown_attribution((), NO_GPU, "no GPU is assigned")
        shares = _unassigned_shares(pids, readings, thresholds)
        return use._replace(shares=shares, may_be_elsewhere=_may_be_on_any(pids, readings, thresholds))
    if readings is None or asked is None:
        return unknown_attribution((), "source_failed", "no GPU source answers")
    unnamed = asked.unnamed if wanted else (UNREQUESTED,)
    if seen_present is not None and not wanted.isdisjoint(_EVERY):
        readings = _drop_lost(readings, wanted, seen_present)
        asked = _resolve_names(wanted, readings)
    assigned = _assigned_gpus(asked, pids or frozenset(), readings)
    uuids = tuple(gpu.uuid for gpu in assigned)
    not_here = [uuid for uuid in earlier if uuid not in readings.by_name]
    missing = tuple(dict.fromkeys([*asked.missing, *(uuid for uuid in not_here if uuid in readings.dropped)]))
    unread = _unreadable_earlier_gpus(earlier, assigned, pids, readings)
    uuids = (*uuids, *unread)
    shares, reasons = ((), []) if pids is None else _shares(assigned, pids, thresholds, wanted)
    elsewhere = None
    if unnamed:
        elsewhere = _why_may_be_anywhere(unnamed[0], pids, readings, thresholds)
    elif ALL in wanted and container.kind in WITHOUT_ENGINE:
        elsewhere = _why_may_be_elsewhere(pids, readings)
    unplaced = unnamed if elsewhere else ()
    if missing:
        named = {name: _uuid_of_missing(name, readings) for name in missing}
        its = tuple(dict.fromkeys([*uuids, *not_here, *filter(None, named.values())]))
        use = unknown_attribution(its, "gpu_missing", _why_missing(missing[0], readings))
        nameless = (*(name for name, uuid in named.items() if uuid is None), *unplaced)
        seen = readings.filter_present(its)
        if not readings.nodes_are_known and wanted == _nodes(wanted):
            shares = _unassigned_shares(pids, readings, thresholds)
        return use._replace(shares=shares, nameless=nameless, present=seen, may_be_elsewhere=elsewhere is not None)
    if not assigned and not unread and not unnamed:
        return unknown_attribution(
            (),
            "gpu_missing",
            "the container requests every AMD and Intel GPU, and each was lost before the container started",
        )
    unknown = next(iter(unread.values()), None) or elsewhere
    if unknown is None:
        unknown = NO_PIDS if pids is None else next(filter(None, reasons), None)
    ratios = [each for each in map(busiest_engine_ratio, shares) if each is not None]
    ratio = None if unknown else max(ratios, default=0.0)
    present = readings.filter_present(uuids)
    return GpuAttribution(uuids, shares, ratio, unknown, unplaced, present, elsewhere is not None)


def _drop_lost(readings: GpuReadings, wanted: AbstractSet[str], seen_present: AbstractSet[str]) -> GpuReadings:
    gpus = [
        gpu for gpu in readings.gpus if not gpu.lost or gpu.uuid in seen_present or not wanted.isdisjoint(gpu.names)
    ]
    gone = {node: uuid for node, uuid in readings.gone.items() if uuid in seen_present or node in wanted}
    return replace(readings, gpus=tuple(gpus), gone=gone)


def _unreadable_earlier_gpus(
    earlier: Sequence[str], assigned: Sequence[Gpu], pids: frozenset[int] | None, readings: GpuReadings
) -> dict[str, Unknown]:
    """Return the earlier GPUs that a container may still use, with the reason.

    While an AMD driver cannot be read, its GPU has another UUID and no process list.
    """
    own = {gpu.uuid for gpu in assigned}
    elsewhere = [uuid for uuid in earlier if uuid not in own]
    found: dict[str, Unknown] = {}
    here = {gpu.uuid: gpu for gpu in readings.gpus} if elsewhere else {}
    for uuid in elsewhere:
        gpu = here.get(uuid)
        if gpu is None:
            if readings.failed:
                found[uuid] = Unknown(reason="source_failed", message=f"the container used {uuid}, whose source fails")
            elif any(each.processes is None for each in readings.gpus):
                message = f"the container used {uuid}, which is missing, and another GPU does not list its processes"
                found[uuid] = Unknown(reason="not_listed", message=message)
        elif pids is None:
            found[uuid] = NO_PIDS
        elif _may_be_on(gpu, pids, readings):
            message = f"the container used {uuid}, which does not list all its processes"
            found[uuid] = Unknown(reason=HUNG if gpu.is_hung else "not_listed", message=message)
    return found


def _why_may_be_elsewhere(pids: frozenset[int] | None, readings: GpuReadings) -> Unknown | None:
    """Why a worker without a container engine may use an AMD or Intel GPU that it does not request."""
    if DRM_SOURCE in readings.failed:
        message = "the worker names no GPU, so it may use an AMD or Intel GPU, whose source fails"
        return Unknown(reason="source_failed", message=message)
    for gpu in readings.gpus:
        if gpu.node is None:
            continue
        if pids is None:
            return NO_PIDS
        if _may_be_on(gpu, pids, readings):
            message = f"the worker names no GPU, so it may use {gpu.uuid}, which does not list all its processes"
            return Unknown(reason="not_listed", message=message)
    return None


def _why_may_be_anywhere(
    name: str, pids: frozenset[int] | None, readings: GpuReadings, thresholds: Thresholds
) -> Unknown | None:
    """Why a container may use a GPU that does not list its processes. `name` is its request."""
    if pids is None:
        return NO_PIDS
    message = f"no GPU is named {name}, and "
    if readings.failed or readings.nvidia_unread:
        return Unknown(reason="source_failed", message=f"{message}a GPU source fails")
    parents = {gpu.mig.parent for gpu in readings.gpus if gpu.mig is not None}
    for gpu in readings.gpus:
        if gpu.lost or gpu.uuid in parents or not gpu.by_pid.keys().isdisjoint(pids):
            continue
        if _may_be_on(gpu, pids, readings) or (gpu.hidden_ratio or 0.0) > thresholds.gpu_idle_ratio:
            reason = HUNG if gpu.is_hung else "not_listed"
            return Unknown(reason=reason, message=f"{message}{gpu.uuid} does not list all its processes")
    return None


def _may_be_on_any(pids: frozenset[int] | None, readings: GpuReadings | None, thresholds: Thresholds) -> bool:
    """Whether a container without an assigned GPU may use one. True if this is unknown."""
    if pids is None or readings is None or readings.failed or readings.nvidia_unread or readings.gone:
        return True
    return any(_may_be_on(gpu, pids, readings) or _may_work(gpu, thresholds) for gpu in readings.gpus)


def _max_unlisted_ratio(gpu: Gpu) -> float | None:
    return gpu.utilization_ratio if gpu.hidden_ratio is None else gpu.hidden_ratio


def _may_be_on(gpu: Gpu, pids: frozenset[int], readings: GpuReadings) -> bool:
    """Whether these processes may use a GPU that does not list them."""
    if gpu.processes is None:
        return True
    return gpu.node is not None and (readings.unlisted is None or not pids.isdisjoint(readings.unlisted))


def _shares(
    gpus: Sequence[Gpu], pids: frozenset[int], thresholds: Thresholds, wanted: frozenset[str] = frozenset()
) -> tuple[tuple[GpuShare, ...], list[Unknown | None]]:
    # A GPU with MIG instances lists no processes itself: its instances attribute the work.
    shares: list[GpuShare] = []
    reasons: list[Unknown | None] = []
    for gpu in gpus:
        has_attribution = gpu.attribution != NO_ATTRIBUTION or any(
            each.mig is not None and each.mig.parent == gpu.uuid for each in gpus
        )
        if not has_attribution:
            has_attribution = (
                gpu.processes is not None and gpu.by_pid.keys().isdisjoint(pids) and wanted.isdisjoint(gpu.names)
            )
        share, reason = _share(gpu, pids, thresholds, has_attribution=has_attribution)
        shares.append(share)
        reasons.append(reason)
    return tuple(shares), reasons


def _unassigned_shares(
    pids: frozenset[int] | None, readings: GpuReadings | None, thresholds: Thresholds
) -> tuple[GpuShare, ...]:
    """Shares of a container in GPUs that were not assigned to it (C8)."""
    found = () if readings is None else readings.gpus
    if pids is None:
        return tuple(GpuShare(gpu=gpu.uuid, utilization_ratio=None, memory_bytes=None) for gpu in found)
    on = [gpu for gpu in found if not gpu.by_pid.keys().isdisjoint(pids)]
    return _shares(on, pids, thresholds)[0]


def unplaced(gpu: Gpu, placed: AbstractSet[int]) -> GpuShare:
    """The share of a GPU's listed processes that are not `placed` in any container."""
    ratio, size, _ = _sum_use(gpu, gpu.by_pid.keys() - placed)
    return GpuShare(gpu=gpu.uuid, utilization_ratio=ratio, memory_bytes=size)


def unattributed_bytes(gpu: Gpu) -> int | None:
    """Bytes that no listed process uses; negative if the driver counts shared memory several times."""
    if gpu.memory_used_bytes is None or gpu.listed_bytes is None or (gpu.mig is not None and gpu.mig.shares_memory):
        return None
    return gpu.memory_used_bytes - gpu.listed_bytes


def unknown_attribution(gpus: tuple[str, ...], reason: str, message: str) -> GpuAttribution:
    """Build an attribution without shares."""
    return GpuAttribution(gpus=gpus, shares=(), utilization_ratio=None, unknown=Unknown(reason=reason, message=message))


@dataclass(frozen=True, kw_only=True)
class _Request:
    wanted: frozenset[str]
    positions: frozenset[int]
    missing: tuple[str, ...]
    unnamed: tuple[str, ...]


def _resolve_request(container: Container, readings: GpuReadings) -> _Request:
    return _resolve_names(
        _complete_names(container.gpu_request or (), container.kind in WITHOUT_ENGINE, readings), readings
    )


def _resolve_names(wanted: frozenset[str], readings: GpuReadings) -> _Request:
    # A request for all NVIDIA GPUs does not include AMD and Intel GPUs.
    every = readings.numbered if ALL in wanted else frozenset[str]()
    positions = frozenset(
        position
        for position, gpu in enumerate(readings.gpus)
        if gpu.uuid in every or (gpu.node is not None and ALL_NODES in wanted) or not wanted.isdisjoint(gpu.names)
    )
    unnamed = _unnamed(wanted, readings)
    missing = tuple(_missing_names(wanted - unnamed, readings))
    return _Request(wanted=wanted, positions=positions, missing=missing, unnamed=tuple(sorted(unnamed)))


def _unnamed(wanted: frozenset[str], readings: GpuReadings) -> frozenset[str]:
    """The names that show no GPU: those of no known form, and numbers on a host without NVIDIA hardware."""
    without_nvidia = readings.nodes_are_known and not _may_have_nvidia(readings)
    others = wanted - readings.by_name.keys()
    return frozenset(each for each in others if not is_known(each) or (without_nvidia and each.isdecimal()))


def _may_have_nvidia(readings: GpuReadings) -> bool:
    return bool(readings.numbered or readings.nvidia_unread or NVIDIA_SOURCE in readings.failed)


def _complete_names(request: tuple[str, ...], outside: bool, readings: GpuReadings) -> frozenset[str]:
    """Complete the names of a request, and drop the names that mean no GPU on this host.

    Nodes with other names are dropped: NVIDIA containers have them too. A request of nodes only stays, as their GPU
    may be lost.
    """
    wanted = frozenset(_complete_uuid(name, readings) for name in request)
    if not readings.nodes_are_known:
        return wanted - {ALL_NODES} if wanted == _nodes(wanted) else wanted - _nodes(wanted)
    if ALL in wanted and not _may_have_nvidia(readings) and (outside or ALL_NODES in wanted):
        return wanted - {ALL} | {ALL_NODES}
    return wanted


def _complete_uuid(name: str, readings: GpuReadings) -> str:
    """Complete a UUID prefix that exactly one NVIDIA GPU has.

    Source: https://docs.nvidia.com/deploy/topics/topic_5_2_1.html
    """
    if name in readings.by_name or not _UUID_BEGINS.match(name):
        return name
    found = [gpu.uuid for gpu in readings.gpus if gpu.node is None and gpu.uuid.startswith(name)]
    return found[0] if len(found) == 1 else name


def _nodes(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name == ALL_NODES or NODE.fullmatch(name))


def _assigned_gpus(asked: _Request, pids: frozenset[int], readings: GpuReadings) -> Sequence[Gpu]:
    positions = {position for pid in pids for position in readings.by_pid.get(pid, ())}
    return [readings.gpus[position] for position in sorted(asked.positions | positions)]


def _missing_names(wanted: frozenset[str], readings: GpuReadings) -> list[str]:
    """Requested names without a GPU in the readings."""
    names = readings.by_name.keys()
    nodes, failed = _nodes(wanted), DRM_SOURCE in readings.failed
    missed = wanted - nodes - names - {ALL}
    if ALL in wanted and not readings.numbered:
        missed |= {ALL}
    if ALL_NODES in wanted:
        gone = {node for node, uuid in readings.gone.items() if uuid not in names}
        missed |= gone or ({ALL_NODES} if failed else set())
    alone = nodes == wanted
    missed |= {node for node in nodes - names - {ALL_NODES} if alone or failed or node in readings.gone}
    return sorted(missed)


def _uuid_of_missing(name: str, readings: GpuReadings) -> str | None:
    if name in readings.dropped or _UUID.fullmatch(name):
        return name
    return readings.gone.get(name)


def _why_missing(name: str, readings: GpuReadings) -> str:
    if name == ALL:
        driver = ", though NVIDIA hardware or its driver is present" if readings.nvidia_unread else ""
        return f"the container requests every NVIDIA GPU, and none is reported{driver}"
    if name == ALL_NODES:
        return "the container requests every AMD and Intel GPU, and their source fails"
    return f"assigned GPU {name} is not reported"


def _share(
    gpu: Gpu, pids: frozenset[int], thresholds: Thresholds, *, has_attribution: bool
) -> tuple[GpuShare, Unknown | None]:
    """The share of these processes, or why it is unknown. A ratio of 0 requires full attribution."""
    ratio, size, busiest = _sum_use(gpu, pids)
    reason = _why_unknown(gpu, ratio, thresholds)
    attributed = False if not has_attribution else None if gpu.utilization_ratio is None else reason is None
    if attributed is not True:
        ratio = ratio or None
        hidden = _may_work(gpu, thresholds) if has_attribution else reason is not None and reason.reason == UNATTRIBUTED
        if not size and hidden and _may_be_held(gpu, thresholds):
            size = None  # an unlisted process works on the GPU, so it also holds memory
    return GpuShare(gpu.uuid, ratio, size, attributed, None if busiest == ratio else busiest), reason


def _may_work(gpu: Gpu, thresholds: Thresholds) -> bool:
    beyond = _max_unlisted_ratio(gpu)
    return beyond is None or beyond > thresholds.gpu_idle_ratio


def _may_be_held(gpu: Gpu, thresholds: Thresholds) -> bool:
    beyond = unattributed_bytes(gpu)
    return beyond is None or beyond > thresholds.vram_tie_bytes


def busiest_engine_ratio(share: GpuShare) -> float | None:
    """The ratio that decides whether a container is idle: that of its busiest engine."""
    return share.utilization_ratio if share.busiest_ratio is None else share.busiest_ratio


def _sum_use(gpu: Gpu, pids: AbstractSet[int]) -> tuple[float | None, int | None, float | None]:
    """Return the time ratio (may exceed 1), bytes, and busiest engine's ratio of these processes."""
    if gpu.processes is None:
        return None, None, None
    ratio: float | None = 0.0
    beyond = 0.0
    size: int | None = 0
    by_pid = gpu.by_pid
    for pid in pids:
        for _, used, held, most in by_pid.get(pid, ()):
            ratio = None if ratio is None or used is None else ratio + used
            if most is not None:
                beyond += most - (used or 0.0)
            size = None if size is None or held is None else size + held
    if ratio is None:
        return None, size, None
    ratio = round(ratio, RATIO_DIGITS)
    return ratio, size, min(1.0, round(ratio + beyond, RATIO_DIGITS) if beyond else ratio)


def _why_unknown(gpu: Gpu, ratio: float | None, thresholds: Thresholds) -> Unknown | None:
    if gpu.processes is None:
        message = gpu.unknown or "its processes cannot be listed"
        return Unknown(reason=HUNG if gpu.is_hung else "not_listed", message=f"{gpu.uuid}: {message}")
    if ratio is None:
        message = gpu.unknown or "a process of the container is not measured"
        return Unknown(reason="not_measured", message=f"{gpu.uuid}: {message}")
    beyond = gpu.hidden_ratio
    if beyond is None:
        return Unknown(reason="not_measured", message=f"{gpu.uuid}: {gpu.unknown or 'a process is not measured'}")
    if beyond > thresholds.gpu_idle_ratio:
        return Unknown(
            reason=UNATTRIBUTED, message=f"{gpu.uuid}: no listed process explains {beyond:.0%} of its utilisation"
        )
    return None
