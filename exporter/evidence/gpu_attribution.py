"""Which GPUs a container uses, and how much of each, from what drivers list. Pure."""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from exporter.model.container import Container, GpuShare
from exporter.model.gpu import ALL_NODES, NODE, NUMBERED, RATIO_DIGITS, UNTOLD, WITH_NODES, Gpu, GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown

NO_GPU: Final = "no_gpu"
"""The reason of a container that was given no GPU: nothing to know rather than something unknown."""

HUNG: Final = "hung"
"""The reason of one on a GPU that its driver hangs about: it is left out, and nobody looks at it."""

ALL: Final = "all"
"""How a container asks for every GPU of NVIDIA's."""

OUTSIDE: Final = frozenset({"process", "systemd"})
"""Kinds of containers that no engine gives GPUs to: what runs in them sees all that the host has."""

_EVERY: Final = frozenset({ALL, ALL_NODES})
"""How a container asks for GPUs without naming one."""

_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|GPU-[0-9a-f]{16}")
"""A GPU's UUID as NVIDIA's driver and AMD's runtime write it; parts of one, and older names, are none."""

_UUID_BEGINS: Final = re.compile(r"GPU-[0-9a-f]{8}")
"""As much of a UUID as is never the beginning of another's, even of one that is missing by now."""

REQUESTS_MAX: Final = 256
"""Different requests for GPUs of which is remembered which names in them are nodes."""


class GpuUse(NamedTuple):
    """One container's GPUs at one moment: its shares, and the greatest utilisation or why it is unknown.

    `gpus` are UUIDs: of those that are read, and of those that it has and that are missing, as far as they are known.
    `nameless` are what others that are missing were given by: nobody knows their UUIDs. `there` are those of its GPUs
    that are no lost ones for sure. It `may_be_elsewhere` where it may be on further ones, which nobody has named: then
    more is unknown than what these leave open. It is `left_out` where it is, or may be, on one that nobody could look
    at: that hangs, or whose source fails while another one answers.
    """

    gpus: tuple[str, ...]
    shares: tuple[GpuShare, ...]
    utilization_ratio: float | None
    unknown: Unknown | None
    nameless: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    may_be_elsewhere: bool = False
    left_out: bool = False


NO_PIDS: Final = Unknown(reason="processes_unknown", because="the container's processes are unknown")

UNATTRIBUTED: Final = "unattributed"
"""The reason of one on a GPU that does more than the processes on its list, by more than idle."""


def gpu_use(
    container: Container,
    pids: frozenset[int] | None,
    readings: GpuReadings | None,
    thresholds: Thresholds,
    had: Sequence[str] = (),
    there: AbstractSet[str] | None = None,
) -> GpuUse:
    """Attribute GPU time and memory to a container by its processes.

    Utilisation is known only when every GPU assigned to the container is measured: its processes listed and each of its
    own measured. What a GPU does beyond the processes on its list could be anyone's, so more than idle of it vetoes.
    A GPU that lists a process of the container is its GPU too, whatever was asked for: indexes are numbered otherwise
    by CUDA than by the driver, and work seen on another GPU is no idleness. So are those that it `had`, by their UUIDs,
    until they are seen without it; and once such a one is lost it is missing, whatever was asked for. A GPU that is
    missing costs nothing of what is known of the others.

    `there` are the GPUs that have been seen there with it; where that is not told, each may have been. Who was given
    every GPU was not given one that was lost before, and is judged by what is left.
    """
    use = _use(container, pids, readings, thresholds, had, there)
    if readings is None:
        return use
    fails = readings.failed and use.unknown is not None and use.unknown.reason in ("gpu_missing", "source_failed")
    if fails or (readings.hung and _may_be_on_hung(use, readings)):
        return use._replace(left_out=True)
    return use


def _may_be_on_hung(use: GpuUse, readings: GpuReadings) -> bool:
    """Whether a container has a GPU that hangs, or may have: while one does, its instances are not there."""
    missing = use.unknown is not None and use.unknown.reason == "gpu_missing"
    own = readings.by_name.keys() - readings.hung
    return missing or use.may_be_elsewhere or not own.issuperset(use.gpus)


def _use(
    container: Container,
    pids: frozenset[int] | None,
    readings: GpuReadings | None,
    thresholds: Thresholds,
    had: Sequence[str],
    there: AbstractSet[str] | None,
) -> GpuUse:
    asked = None if readings is None else _asked_for(container, readings)
    wanted = frozenset(container.gpu_request or ()) if asked is None else asked.wanted
    if not wanted:
        use = unknown_use((), NO_GPU, "no GPU is assigned")
        shares = _uninvited(pids, readings, thresholds)
        return use._replace(shares=shares, may_be_elsewhere=_may_be_on_any(pids, readings, thresholds))
    if readings is None or asked is None:
        return unknown_use((), "source_failed", "no GPU source answers")
    if there is not None and not wanted.isdisjoint(_EVERY):
        left = _without_lost(readings, wanted, there)
        if left is not readings:
            asked, readings = _resolved(wanted, left), left
    assigned = _assigned(asked, pids or frozenset(), readings)
    uuids = asked.uuids if assigned is asked.gpus else tuple(gpu.uuid for gpu in assigned)
    # Else each GPU that it was on is here, and is its own.
    before = had if had != uuids else ()
    not_here = [uuid for uuid in before if uuid not in readings.by_name] if before else []
    gone = [uuid for uuid in not_here if uuid in readings.dropped] if not_here else []
    missing = tuple(dict.fromkeys([*asked.missing, *gone])) if gone else asked.missing
    unread = _unread(before, assigned, pids, readings) if before else {}
    uuids = (*uuids, *unread) if unread else uuids
    shares, reasons = ((), []) if pids is None else _parts(assigned, pids, thresholds, wanted)
    elsewhere = _elsewhere(pids, readings) if ALL in wanted and container.kind in OUTSIDE else None
    if missing:
        named = {name: _uuid_of_missing(name, readings) for name in missing}
        its = tuple(dict.fromkeys([*uuids, *not_here, *filter(None, named.values())]))
        use = unknown_use(its, "gpu_missing", _why_missing(missing[0], readings))
        nameless = tuple(name for name, uuid in named.items() if uuid is None)
        seen = readings.those_there(its)
        if not readings.nodes_are_known and wanted == _nodes(wanted):
            shares = _uninvited(pids, readings, thresholds)
        return use._replace(shares=shares, nameless=nameless, there=seen, may_be_elsewhere=elsewhere is not None)
    if not assigned and not unread:
        return unknown_use((), "gpu_missing", "every GPU with a render node is assigned, and each was lost before")
    unknown = next(iter(unread.values()), None) or elsewhere
    if unknown is None:
        unknown = NO_PIDS if pids is None else next(filter(None, reasons), None)
    ratio = None if unknown else max([each for each in map(decisive, shares) if each is not None])
    return GpuUse(uuids, shares, ratio, unknown, (), readings.those_there(uuids), elsewhere is not None)


def _without_lost(readings: GpuReadings, wanted: AbstractSet[str], there: AbstractSet[str]) -> GpuReadings:
    """The readings less the GPUs that were lost before they were seen with who was given every GPU, and not by name."""
    gpus = [gpu for gpu in readings.gpus if not gpu.lost or gpu.uuid in there or not wanted.isdisjoint(gpu.names)]
    gone = {node: uuid for node, uuid in readings.gone.items() if uuid in there or node in wanted}
    if len(gpus) == len(readings.gpus) and len(gone) == len(readings.gone):
        return readings
    return replace(readings, gpus=tuple(gpus), gone=gone)


def _unread(
    had: Sequence[str], assigned: Sequence[Gpu], pids: frozenset[int] | None, readings: GpuReadings
) -> dict[str, Unknown]:
    """The GPUs that a container was on and that are none of its own, by UUID, and why it may be on them still.

    One that is not there may be of a source that fails. Or it goes by another name as long as its list cannot be read:
    one of AMD's has its UUID from the driver that lists who computes on it.
    """
    own = {gpu.uuid for gpu in assigned}
    elsewhere = [uuid for uuid in had if uuid not in own]
    found: dict[str, Unknown] = {}
    here = {gpu.uuid: gpu for gpu in readings.gpus} if elsewhere else {}
    for uuid in elsewhere:
        gpu = here.get(uuid)
        if gpu is None:
            if readings.failed:
                found[uuid] = Unknown(reason="source_failed", because=f"it was on {uuid}, whose source fails")
            elif any(each.processes is None for each in readings.gpus):
                because = f"it was on {uuid}, which is not there, and the processes of another cannot be listed"
                found[uuid] = Unknown(reason="not_listed", because=because)
        elif pids is None:
            found[uuid] = NO_PIDS
        elif _may_be_on(gpu, pids, readings):
            because = f"it was on {uuid}, whose processes are not all listed"
            found[uuid] = Unknown(reason=HUNG if gpu.hangs else "not_listed", because=because)
    return found


def _elsewhere(pids: frozenset[int] | None, readings: GpuReadings) -> Unknown | None:
    """Why what runs outside of any engine and names no GPU may be on one of AMD's or Intel's; `None` where it is not.

    It sees those beside NVIDIA's, and is known to be on none of them by their lists alone.
    """
    if WITH_NODES in readings.failed:
        because = "it names no GPU, so that it may be on one of AMD's or Intel's, whose source fails"
        return Unknown(reason="source_failed", because=because)
    for gpu in readings.gpus:
        if gpu.node is None:
            continue
        if pids is None:
            return NO_PIDS
        if _may_be_on(gpu, pids, readings):
            because = f"it names no GPU, so that it may be on {gpu.uuid}, whose processes are not all listed"
            return Unknown(reason="not_listed", because=because)
    return None


def _may_be_on_any(pids: frozenset[int] | None, readings: GpuReadings | None, thresholds: Thresholds) -> bool:
    """Whether one that was given no GPU may be on one that does not list it.

    One is not read, its processes are not all listed, or it may do more than those on its list do: unknown is not idle.
    One that can never be measured, such as a GPU in MIG mode or a lost one, leaves that open for as long as it is so.
    """
    if pids is None or readings is None or readings.failed or readings.nvidia_unread or readings.gone:
        return True
    return any(_may_be_on(gpu, pids, readings) or _may_work(gpu, thresholds) for gpu in readings.gpus)


def _beyond_at_most(gpu: Gpu) -> float | None:
    """How much a GPU does beyond the processes on its list at most; `None` where its own utilisation is unknown.

    Where it is not known of one of them what it does, that may be as much as the whole GPU does.
    """
    return gpu.utilization_ratio if gpu.hidden_ratio is None else gpu.hidden_ratio


def _may_be_on(gpu: Gpu, pids: frozenset[int], readings: GpuReadings) -> bool:
    """Whether some of these processes may be on a GPU and not on its list."""
    if gpu.processes is None:
        return True
    return gpu.node is not None and (readings.unlisted is None or not pids.isdisjoint(readings.unlisted))


def _parts(
    gpus: Sequence[Gpu], pids: frozenset[int], thresholds: Thresholds, wanted: frozenset[str] = frozenset()
) -> tuple[tuple[GpuShare, ...], list[Unknown | None]]:
    """The part that these processes have in each of these GPUs, and why it cannot be told how busy that is.

    Where nobody tells what is done on a GPU at all, nothing of it can be told apart. Of one that is cut into instances
    that is said of those that are among these GPUs, and else of the whole; but not of one that has none of these
    processes and is not `wanted` by name: to be given all is not to be on it.
    """
    shares: list[GpuShare] = []
    reasons: list[Unknown | None] = []
    for gpu in gpus:
        told = gpu.attribution != UNTOLD or any(each.mig is not None and each.mig.parent == gpu.uuid for each in gpus)
        if not told:
            told = gpu.processes is not None and gpu.by_pid.keys().isdisjoint(pids) and wanted.isdisjoint(gpu.names)
        share, reason = _part(gpu, pids, thresholds, told=told)
        shares.append(share)
        reasons.append(reason)
    return tuple(shares), reasons


def _uninvited(
    pids: frozenset[int] | None, readings: GpuReadings | None, thresholds: Thresholds
) -> tuple[GpuShare, ...]:
    """The part in each GPU of a container that was given none by its engine, and is on it all the same (C8).

    Where its processes are unknown it may be on any, with nobody knows how much.
    """
    found = () if readings is None else readings.gpus
    if pids is None:
        return tuple(GpuShare(gpu=gpu.uuid, utilization_ratio=None, memory_bytes=None) for gpu in found)
    on = [gpu for gpu in found if not gpu.by_pid.keys().isdisjoint(pids)]
    return _parts(on, pids, thresholds)[0]


def unplaced(gpu: Gpu, placed: AbstractSet[int]) -> GpuShare:
    """The part of all the processes on a GPU's list that are in no container, where `placed` are those that are in one.

    With it, what the containers have and what no listed process has, a GPU adds up.
    """
    ratio, size, _ = _sums(gpu, gpu.by_pid.keys() - placed)
    return GpuShare(gpu=gpu.uuid, utilization_ratio=ratio, memory_bytes=size)


def unattributed_bytes(gpu: Gpu) -> int | None:
    """GPU memory used beyond the processes on its list, so that with theirs it adds up; `None` when either is unknown.

    Less than 0 where its driver tells more of them together than is in use: memory that they share counts for each.
    """
    if gpu.memory_used_bytes is None or gpu.listed_bytes is None or (gpu.mig is not None and gpu.mig.shares_memory):
        return None
    return gpu.memory_used_bytes - gpu.listed_bytes


def unknown_use(gpus: tuple[str, ...], reason: str, because: str) -> GpuUse:
    """Build the use of a container whose share is unknown."""
    return GpuUse(gpus=gpus, shares=(), utilization_ratio=None, unknown=Unknown(reason=reason, because=because))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a request comes to by these readings: names in full, the GPUs that bear them, what is missing."""

    wanted: frozenset[str]
    places: frozenset[int]
    gpus: tuple[Gpu, ...]
    uuids: tuple[str, ...]
    missing: tuple[str, ...]


def _asked_for(container: Container, readings: GpuReadings) -> _Asked:
    """Worked out once a look for all that ask alike: a full host has hundreds of containers, and a few requests."""
    key = container.gpu_request or (), container.kind in OUTSIDE
    found = readings.asked.get(key)
    if not isinstance(found, _Asked):
        found = readings.asked[key] = _resolved(_wanted(*key, readings), readings)
    return found


def _resolved(wanted: frozenset[str], readings: GpuReadings) -> _Asked:
    """`all` and indexes are NVIDIA's names. GPUs with a render node go by it, or by their UUID."""
    every = readings.numbered if ALL in wanted else frozenset[str]()
    places = frozenset(
        place
        for place, gpu in enumerate(readings.gpus)
        if gpu.uuid in every or (gpu.node is not None and ALL_NODES in wanted) or not wanted.isdisjoint(gpu.names)
    )
    gpus = tuple(readings.gpus[place] for place in sorted(places))
    return _Asked(
        wanted=wanted,
        places=places,
        gpus=gpus,
        uuids=tuple(gpu.uuid for gpu in gpus),
        missing=tuple(_missing(wanted, readings)),
    )


def _wanted(request: tuple[str, ...], outside: bool, readings: GpuReadings) -> frozenset[str]:
    """What a container asked for; less render nodes where no GPU that was ever read has one: they are of other GPUs.

    But not those that it was given by name, and nothing else: one may be of a GPU that went before the exporter began.

    What runs outside of any engine and names no GPU sees them all, and what was given some GPU, nobody tells which, may
    have any. Those are NVIDIA's, and on a host that has nothing of NVIDIA's those with a render node.
    """
    wanted = frozenset(_in_full(name, readings) for name in request)
    if not readings.nodes_are_known:
        return wanted - {ALL_NODES} if wanted == _nodes(wanted) else wanted - _nodes(wanted)
    without_nvidia = not (readings.numbered or readings.nvidia_unread or NUMBERED in readings.failed)
    if ALL in wanted and without_nvidia and (outside or ALL_NODES in wanted):
        return wanted - {ALL} | {ALL_NODES}
    return wanted


def _in_full(name: str, readings: GpuReadings) -> str:
    """The UUID that a name is the beginning of, where it is that of one GPU of NVIDIA's alone; else the name as it is.

    CUDA and NVIDIA's container runtime take the first few characters of a UUID for all of it.
    Source: https://docs.nvidia.com/deploy/topics/topic_5_2_1.html
    """
    if name in readings.by_name or not _UUID_BEGINS.match(name):
        return name
    found = [gpu.uuid for gpu in readings.gpus if gpu.node is None and gpu.uuid.startswith(name)]
    return found[0] if len(found) == 1 else name


@lru_cache(maxsize=REQUESTS_MAX)
def _nodes(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name == ALL_NODES or NODE.fullmatch(name))


def _assigned(asked: _Asked, pids: frozenset[int], readings: GpuReadings) -> Sequence[Gpu]:
    """The GPUs that a request names, or that list one of the pids."""
    by_pid = readings.by_pid
    more = {place for pid in pids if pid in by_pid for place in by_pid[pid]} - asked.places
    return [readings.gpus[place] for place in sorted(asked.places | more)] if more else asked.gpus


def _missing(wanted: frozenset[str], readings: GpuReadings) -> list[str]:
    """What a request names and is not read, in order.

    A container that has GPUs of NVIDIA's has their render nodes too, which are nowhere listed. So beside them a node
    is missed only where it was a GPU that is read, or where the source of those fails, and it may be one.
    """
    names = readings.by_name.keys()
    nodes, failed = _nodes(wanted), WITH_NODES in readings.failed
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
        driver = ", though its hardware or its driver is there" if readings.nvidia_unread else ""
        return f"every GPU of NVIDIA's is assigned, and none is reported{driver}"
    if name == ALL_NODES:
        return "every GPU with a render node is assigned, and their source fails"
    return f"assigned GPU {name} is not reported"


def _part(gpu: Gpu, pids: frozenset[int], thresholds: Thresholds, *, told: bool) -> tuple[GpuShare, Unknown | None]:
    """The share that a container has by its processes, and why it cannot be told for sure.

    Of a GPU of which nobody has `told` what is done on it, nothing can be told apart. Where that is so, what is
    measured is told and a 0 is not.
    """
    ratio, size, busiest = _sums(gpu, pids)
    reason = _why_unknown(gpu, ratio, thresholds)
    attributed = False if not told else None if gpu.utilization_ratio is None else reason is None
    if attributed is not True:  # a 0 would say that it does nothing, which is what nobody knows
        ratio = ratio or None
        hidden = _may_work(gpu, thresholds) if told else reason is not None and reason.reason == UNATTRIBUTED
        if not size and hidden and _may_be_held(gpu, thresholds):
            size = None  # who does that work holds memory, and is on no list
    return GpuShare(gpu.uuid, ratio, size, attributed, None if busiest == ratio else busiest), reason


def _may_work(gpu: Gpu, thresholds: Thresholds) -> bool:
    """Whether a GPU may do more than idle for somebody on no list, as at a first look, which has nothing to compare."""
    beyond = _beyond_at_most(gpu)
    return beyond is None or beyond > thresholds.idle_ratio


def _may_be_held(gpu: Gpu, thresholds: Thresholds) -> bool:
    """Whether somebody on no list may hold memory of a GPU that makes a difference: less than a tie makes none."""
    beyond = unattributed_bytes(gpu)
    return beyond is None or beyond > thresholds.vram_tie_bytes


def decisive(share: GpuShare) -> float | None:
    """By what a container is idle on a GPU, or busy: the most that any engine did for it."""
    return share.utilization_ratio if share.busiest_ratio is None else share.busiest_ratio


def _sums(gpu: Gpu, pids: AbstractSet[int]) -> tuple[float | None, int | None, float | None]:
    """What these processes use of a GPU's time and hold of its memory, and the most that any engine did for them.

    The first is all that the driver tells of them, be it more than the GPU's own time, and so adds up. Unknown is
    `None`.
    """
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
        because = gpu.unknown or "its processes cannot be listed"
        return Unknown(reason=HUNG if gpu.hangs else "not_listed", because=f"{gpu.uuid}: {because}")
    if ratio is None:
        because = gpu.unknown or "a process of the container is not measured"
        return Unknown(reason="not_measured", because=f"{gpu.uuid}: {because}")
    beyond = gpu.hidden_ratio
    if beyond is None:
        return Unknown(reason="not_measured", because=f"{gpu.uuid}: {gpu.unknown or 'a process is not measured'}")
    if beyond > thresholds.idle_ratio:
        return Unknown(reason=UNATTRIBUTED, because=f"{gpu.uuid}: {beyond:.0%} of it is used by no listed process")
    return None
