"""From one sample a second to durations: how long GPUs have been idle, RAM still, and processes without work.

A duration is published instead of raw samples so that a rule compares instants and works at any scrape interval. Each
counts only what was seen: it starts at the first sample, starts anew after a gap in the samples (a suspended machine, a
stalled exporter), and does not exist while anything it needs is unknown. Pure: times are arguments, CLOCK_BOOTTIME
seconds.
"""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from operator import is_not
from typing import Final, NamedTuple

from exporter.model.container import Container, ContainerEvidence, GpuShare
from exporter.model.gpu import ALL_NODES, NODE, NUMBERED, RATIO_DIGITS, UNTOLD, WITH_NODES, Gpu, GpuReadings, GpuTotals
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import Patience
from exporter.model.unknown import Unknown
from exporter.model.worker import CpuUse, ProcessWork, WorkerReadings, WorkerSighting
from gpuwarden.job import Phase
from gpuwarden.state_file import JobFile, Stamp

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

EXTREMES_MAX: Final = 14_400
"""Samples kept to tell for how long RAM is still; past them the oldest go, and the time told is too short."""

PAUSES_MAX: Final = 64
"""Pauses of a container that are remembered; past them the oldest go, and the steps they fell into count whole."""

WORK_WINDOW_S: Final = 10.0
"""Rates of work are averages over this long, seconds: what a worker does beside its job, such as its heartbeat and a
look at the queue, comes in bursts."""

STARTS_OFTEN: Final = 0.5
"""In which share of the looks of `WORK_WINDOW_S` processes may start of whose start nothing counts. A health check
makes two at most each time, of its shell and of what that runs, and is asked every 10 s (Kubernetes) or 30 s (Docker)
unless told otherwise; who has each item done by a process of its own, and does not wait for them, starts some in most.
Sources: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Probe,
https://docs.docker.com/reference/dockerfile/#healthcheck"""

REQUESTS_MAX: Final = 256
"""Different requests for GPUs of which is remembered which names in them are nodes."""

WORK_APART_S: Final = 3.0
"""How far apart looks at the work of a container are whose GPU is pegged or unknown and that worked within `WORKED_S`,
seconds: it is not still for long enough, and to read hundreds of processes a second would cost the most."""

BUSY_APART_S: Final = 10.0
"""And of one that is seen to use its GPU in part, seconds: no stillness of its processes is proof of anything then.
What begins and ends between two such looks is not seen, so that none is told: it counts from looks that are closer."""

UNTOLD_LOOKS: Final = 5
"""In how many looks it may be unknown whether a GPU is pegged that has not been seen to be in more than that."""

OUTAGE_S: Final = 1200.0
"""For how long nobody may have been able to look at a GPU before that is no driver any more that is loaded anew, or
built for a new kernel first, seconds. How long such a thing takes is no matter of the jobs, so it is no setting of
theirs."""

WORKED_S: Final = 30.0
"""Who worked within this time is not still for as long as any condition asks, seconds."""


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


_Inputs = tuple[Container, frozenset[int] | None, GpuReadings | None, tuple[str, ...], frozenset[str]]
"""What a container's use of its GPUs is told by: itself, its processes, the readings, its GPUs, those seen there."""


class RamUse(NamedTuple):
    """One container's RAM at one moment, bytes, or why it is unknown."""

    usage_bytes: int | None
    anon_bytes: int | None = None
    working_set_bytes: int | None = None
    oom_kills: int | None = None
    unknown: Unknown | None = None


@dataclass(frozen=True, kw_only=True)
class WorkUse:
    """What each process of one container has done up to now, by pid; `None`, or its I/O alone, where unknown."""

    processes: Mapping[int, ProcessWork] | None
    unknown: Unknown | None = None


def work_of(work: WorkUse, pids: AbstractSet[int]) -> WorkUse:
    """What some of a container's processes have done, by one look at all of them."""
    if work.processes is None:  # which `AS_IT_WAS` is too, and stays
        return work
    return replace(work, processes={pid: each for pid, each in work.processes.items() if pid in pids})


_NO_PIDS: Final = Unknown(reason="processes_unknown", because="the container's processes are unknown")

NOT_LOOKED_AT: Final = WorkUse(processes=None)

AS_IT_WAS: Final = WorkUse(processes=None)
"""Instead of a look at the work: it is not this look's turn, and what was told stands until it is."""

PAUSED: Final = Unknown(reason="paused", because="the container is paused")
"""What is paused shows no sign of life, and owes none: its durations start anew when it goes on."""


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
        use = _unknown_use((), NO_GPU, "no GPU is assigned")
        shares = _uninvited(pids, readings, thresholds)
        return use._replace(shares=shares, may_be_elsewhere=_may_be_on_any(pids, readings, thresholds))
    if readings is None or asked is None:
        return _unknown_use((), "source_failed", "no GPU source answers")
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
        use = _unknown_use(its, "gpu_missing", _why_missing(missing[0], readings))
        nameless = tuple(name for name, uuid in named.items() if uuid is None)
        seen = readings.those_there(its)
        if not readings.nodes_are_known and wanted == _nodes(wanted):
            shares = _uninvited(pids, readings, thresholds)
        return use._replace(shares=shares, nameless=nameless, there=seen, may_be_elsewhere=elsewhere is not None)
    if not assigned and not unread:
        return _unknown_use((), "gpu_missing", "every GPU with a render node is assigned, and each was lost before")
    unknown = next(iter(unread.values()), None) or elsewhere
    if unknown is None:
        unknown = _NO_PIDS if pids is None else next(filter(None, reasons), None)
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
            found[uuid] = _NO_PIDS
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
            return _NO_PIDS
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


class _Sign(StrEnum):
    """By what a job shows that it lives."""

    BEAT = "beat"
    PHASE = "phase"
    GPU = "GPU"
    RAM = "RAM"
    IO = "I/O"
    WORK = "work"


def quiet_s(
    job: JobFile,
    evidence: ContainerEvidence | None,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    apart: bool = False,
) -> float | None:
    """For how long an attempt has shown no sign of life, seconds; `None` while any that counts is unknown.

    `gpu_lost` asks for how long one of its GPUs was lost and each other one idle or lost too, instead of all idle.
    `apart` says that the evidence is of what one worker alone has done, of several that share a container.
    """
    known_s: list[float] = []
    for _, without_s in _signs(job, evidence, now=now, gpu_lost=gpu_lost, apart=apart):
        if without_s is None:
            return None
        known_s.append(without_s)
    return min(known_s)


def _signs(
    job: JobFile,
    evidence: ContainerEvidence | None,
    *,
    now: Stamp,
    gpu_lost: bool = False,
    apart: bool = False,
) -> Iterator[tuple[_Sign, float | None]]:
    """Each sign of life that counts, and for how long an attempt has been without it, seconds; `None` is unknown.

    The one definition of quiet, for the stall (A2 to A5) and for GPU health (A7). Beats count once there was one. All
    of it lies within one phase: what is life in one, such as the work of its processes, is none in another, and what
    was life in the phase before does not show in the durations of this one. Of a worker that is told `apart` I/O counts
    in each: a container's page cache is part of its RAM, but of nobody's in it.
    """
    if job.beat is not None:
        yield _Sign.BEAT, job.beat.age_s(now)
    yield _Sign.PHASE, job.phase_started.age_s(now)
    if evidence is None:
        yield _Sign.GPU, None
    else:
        yield _Sign.GPU, evidence.gpu_lost_s if gpu_lost else evidence.gpu_idle_s
        yield _Sign.RAM, evidence.ram_still_s
        if apart:
            yield _Sign.IO, evidence.io_still_s
        if job.phase.counts_work:
            yield _Sign.WORK, evidence.work_still_s


def suspicion(job: JobFile, evidence: ContainerEvidence | None, patience: Patience, *, now: Stamp) -> str | None:
    """Why a silent job is suspected of a stall but not accused (A4); `None` when it is not silent, or is wedged.

    What this sees as a sign of life restarts the silence by itself: the durations that the rule compares begin anew.
    """
    silence_s = patience.silence_s(job)
    if silence_s == 0 or job.beat is None:
        return None
    for sign, without_s in _signs(job, evidence, now=now):
        if without_s is None or without_s < silence_s:
            return None if sign is _Sign.BEAT else _shown(sign, without_s, evidence)
    return None


_SHOWN: Final = {
    _Sign.PHASE: "it went on to this phase",
    _Sign.GPU: "GPU was busy or unseen",
    _Sign.RAM: "RAM moved or was unseen",
    _Sign.WORK: "its processes worked or were unseen",
}


def _shown(sign: _Sign, without_s: float | None, evidence: ContainerEvidence | None) -> str:
    """The sign of life that a silent job shows, or may show, in words."""
    if without_s is not None:
        return f"{_SHOWN[sign]} {without_s:.0f} s ago"
    if evidence is None:
        return "its container is unknown"
    reasons = {
        _Sign.GPU: evidence.gpu_unknown,
        _Sign.RAM: evidence.ram_unknown,
        _Sign.WORK: evidence.work_unknown,
    }
    why = reasons.get(sign)
    return f"{sign} unknown: {why.because if why else 'not measured'}"


def without_figures(container: Container) -> ContainerEvidence:
    """What is known of a container that does not run: who it is."""
    because = "the container does not run"
    down = Unknown(reason="down", because=because)
    return ContainerEvidence(
        container=container, shares=(), gpus=(), gpu_idle_s=None, gpu_unknown=down, busy_s={}, ram_bytes=None,
        ram_anon_bytes=None, ram_working_set_bytes=None, ram_still_s=None, ram_unknown=down, work_unknown=down,
    )  # fmt: skip


def is_dead(sighting: WorkerSighting, cpu_still_s: float | None, *, now: Stamp, dead_after_s: float) -> bool:
    """Whether a worker owns a job and lives, but has had no heartbeat and no CPU time for `dead_after_s` (A14).

    Without a heartbeat alone it may well work: a native call that holds the interpreter lets no other thread beat.
    """
    heartbeat_age_s = sighting.worker.heartbeat.age_s(now)
    if sighting.job is None or not sighting.alive or heartbeat_age_s is None or cpu_still_s is None:
        return False
    return min(heartbeat_age_s, cpu_still_s) >= dead_after_s


def may_hold_others(container: Container, workers: WorkerReadings, containers: Iterable[Container]) -> bool:
    """Whether workers may live in a container beside those that are known to.

    One that cannot be placed, or whose lock cannot be tested, may be in what has its folder; where nothing has it, in
    whatever has no folder of its own. A worker file that cannot be read counts for the containers with its folder.
    """
    if not workers.unread.isdisjoint(container.folders):
        return True
    known = list(containers)
    mounted = {folder for each in known for folder in each.folders}
    if container.kind == "systemd" and workers.unread - mounted:
        return True  # a service has no folder mounted: the file may be of one in it
    trees = {each.pid for each in known if each.kind == "process"}
    for each in workers.workers:
        if each.alive is None:
            placed = False
        elif each.alive:
            placed = each.container_id is not None or each.pid in trees
        else:  # the dead are in nobody's way
            placed = True
        if not placed and each.folder in (container.folders or {each.folder} - mounted):
            return True
    return False


def workers_of(container: Container, workers: WorkerReadings, running: Iterable[Container]) -> int | None:
    """How many workers are its own, dead ones included; `None` where there may be others than those that are known."""
    count = sum(each.container_id == container.id for each in workers.workers)
    return count if count or not may_hold_others(container, workers, running) else None


class DeathHistory:
    """Of one dead worker: since when its lock has been seen free, in one incarnation of its container, without a gap.

    A container that was started since may bring its worker back by itself: it is given the whole time anew. So is a
    worker whose heartbeat moves: it lost its lock, or holds it in another kernel than ours, and lives.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._seen: tuple[str | None, Stamp] | None = None

    def observe(self, place: str | None, heartbeat: Stamp, *, now_s: float) -> float:
        """Take in one look, with the container's incarnation where known; returns the time so far, seconds."""
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or (place, heartbeat) != self._seen:
            self._since_s = now_s
        self._last_s = now_s
        self._seen = place, heartbeat
        return now_s - self._since_s


STORES: Final = frozenset({Phase.LOAD, Phase.SAVE, Phase.CHECKPOINT})
"""The phases of a job that waits for storage: how long it may is its patience in them, which the stall rules know."""


class CpuHistory:
    """Of one process: since when its CPU time has not moved, as far as it was looked at without a gap."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._used_ticks = 0

    def observe(self, use: CpuUse, *, now_s: float, stores: bool = False) -> float:
        """Take in one sample; returns for how long the process has used no CPU time, seconds.

        A process that slept with its machine has used none either, so a gap starts the duration anew. So does a wait
        for storage where its job `stores`: to close a file on NFS waits for the server, and who does that with the
        interpreter held, as PyTorch ends an archive, neither beats nor computes meanwhile.
        """
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or use.used_ticks != self._used_ticks or (stores and use.uninterruptible):
            self._since_s = now_s
        self._last_s = now_s
        self._used_ticks = use.used_ticks
        return now_s - self._since_s


class ContainerHistory:
    """What has been seen of one container incarnation, one sample after another.

    `gpus` are its GPUs, by UUID, at the last look at which any was known; `there` each that was seen there while it was
    its own. `kind` is the container's, once it was seen.
    `asks` says whether there is any source of GPUs on this host: where none is, none fails. It was `found` where it ran
    already as the exporter began to look: what it was given by name it is then taken to have had.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        asks: bool = True,
        found: bool = False,
    ) -> None:
        self.gpus: tuple[str, ...] = ()
        self.there: frozenset[str] = frozenset()
        self.kind = ""
        self._thresholds = thresholds
        self._found = found
        self._used: tuple[_Inputs, GpuUse] | None = None
        self._last_s: float | None = None
        self._idle_since_s: float | None = None
        self._pegged_since_s: float | None = None
        self._pegged_seen_s = 0.0
        self._pegged_looks = [0, 0]
        self._pegged: frozenset[str] = frozenset()
        self._seen_busy_s: float | None = None
        self._asked_s = 0.0
        self._asks = asks
        self._outage_s: tuple[float, float] | None = None
        self._ram = _StillWindow(thresholds.ram_delta_bytes)
        self._busy_s: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}
        self._lost_s: tuple[float, float] | None = None
        self._frozen_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_MAX)
        self._work: Mapping[int, ProcessWork] | None = None
        self._work_looked_s: float | None = None
        self._work_told: tuple[tuple[float | None, float | None, float | None], Unknown | None] = (
            (None, None, None),
            None,
        )
        self._starts = _Starts()
        self._io = _StillRate(thresholds.io_still_bytes_per_s)
        self._faults = _StillRate(thresholds.faults_still_per_s)
        self._cpu = _StillRate(thresholds.cpu_still_ratio)

    def use(self, container: Container, pids: frozenset[int] | None, readings: GpuReadings | None) -> GpuUse:
        """`gpu_use` with what has been seen of it so far. Of the very same as at the last look it is the very same.

        On GPUs at rest that is what most looks come to.
        """
        asked = container, pids, readings, self.gpus, self.there
        if self._used is None or any(map(is_not, asked, self._used[0])):
            self._used = asked, gpu_use(container, pids, readings, self._thresholds, self.gpus, self.there)
        return self._used[1]

    def wants_work(self, gpu: GpuUse, *, now_s: float, lost: Collection[str] = ()) -> bool:
        """Whether this look is to read what the processes have done; else `observe` is given `AS_IT_WAS`.

        Each look is, while their stillness may count, to the second: while the GPUs are idle or there are none, or one
        is lost, and, while they are pegged or unknown, of who has done no I/O and touched no memory for a while.
        """
        last_s, ratio, limits = self._work_looked_s, gpu.utilization_ratio, self._thresholds
        if last_s is None or not 0 <= now_s - last_s < BUSY_APART_S:
            return True
        if ratio is None and gpu.unknown is not None and gpu.unknown.reason == NO_GPU:
            return True
        if lost and not set(lost).isdisjoint(gpu.gpus):
            return True
        if ratio is not None and ratio < limits.pegged_ratio:
            return ratio <= limits.idle_ratio
        (io_still_s, fault_still_s, _), _ = self._work_told
        return now_s - last_s >= WORK_APART_S or min(io_still_s or 0.0, fault_still_s or 0.0) >= WORKED_S

    def observe(
        self,
        container: Container,
        gpu: GpuUse,
        ram: RamUse,
        work: WorkUse = NOT_LOOKED_AT,
        *,
        now_s: float,
        lost: Collection[str] = (),
        frozen_s: float | None = None,
    ) -> ContainerEvidence:
        """Take in one sample and return the evidence as it stands now.

        `lost` are the host's GPUs that are; it has lost only those of them that it was seen to have, or was found with.
        `frozen_s` is when the kernel said at this look that all of it is frozen; `None` where it is not, or unasked.
        """
        if frozen_s is not None or self._frozen_s is not None:
            self._pause(frozen_s)
        if gpu.gpus and gpu.gpus != self.gpus:  # else the very same stay, by which `use` knows them
            self.gpus = gpu.gpus
        if not self.there.issuperset(gpu.there):
            self.there = self.there.union(gpu.there)
        if lost:  # who was given every GPU has none among its own that was lost before
            lost = (self.there.union(gpu.gpus) if self._found else self.there).intersection(lost)
        self.kind = container.kind
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._thresholds.gap_max_s:
            gap_s = 0.0
            self._idle_since_s = self._pegged_since_s = self._seen_busy_s = self._outage_s = None
            self._ram.forget()
            self._forget_work()
        self._count(gpu.shares, gap_s)
        unknown = PAUSED if container.paused else None
        idle_s = self._idle(None if unknown else gpu.utilization_ratio, now_s)
        still_s = None
        if unknown or ram.usage_bytes is None:
            self._ram.forget()
        else:
            still_s = self._ram.add(now_s, ram.usage_bytes)
        if unknown or work is not AS_IT_WAS:
            self._work_told = self._work_still(NOT_LOOKED_AT if unknown else work, now_s), work.unknown
        (io_still_s, fault_still_s, cpu_still_s), work_unknown = self._work_told
        return ContainerEvidence(
            container=container,
            shares=gpu.shares,
            gpus=gpu.gpus,
            nameless=gpu.nameless,
            gpu_idle_s=idle_s,
            gpu_pegged_s=self._pegged_for(None if unknown else gpu, lost, now_s),
            gpu_not_seen_busy_s=self._not_seen_busy(None if unknown else gpu, now_s),
            gpu_unknown=gpu.unknown or unknown,
            busy_s=self._busy_s,
            ram_bytes=ram.usage_bytes,
            ram_anon_bytes=ram.anon_bytes,
            ram_working_set_bytes=ram.working_set_bytes,
            ram_still_s=still_s,
            ram_unknown=ram.unknown or unknown,
            io_still_s=io_still_s,
            fault_still_s=fault_still_s,
            cpu_still_s=cpu_still_s,
            work_unknown=work_unknown or unknown,
            peak_bytes=self._peak_bytes,
            oom_kills=ram.oom_kills,
            lost_gpus=tuple(uuid for uuid in gpu.gpus if uuid in lost) if lost else (),
            gpu_lost_s=self._lost(container, gpu, lost, now_s),
            pauses=tuple(self._pauses) if self._pauses else (),
        )

    def _count(self, shares: Sequence[GpuShare], gap_s: float) -> None:
        """Add up how long each GPU was busy, and note the most memory.

        What was told of the looks before is another dictionary, but where nothing has changed since.
        """
        busy_s, peak_bytes = self._busy_s, self._peak_bytes
        for gpu, ratio, size, _, _ in shares:
            # From 0 at the first sample: a counter that is born later hides its first increase from `increase()`.
            if ratio is not None and ((added_s := gap_s * ratio) or gpu not in busy_s):
                if busy_s is self._busy_s:
                    busy_s = busy_s.copy()
                busy_s[gpu] = busy_s.get(gpu, 0.0) + added_s
            if size is not None and size > peak_bytes.get(gpu, -1):
                peak_bytes = {**peak_bytes, gpu: size}
        self._busy_s, self._peak_bytes = busy_s, peak_bytes

    def _pause(self, frozen_s: float | None) -> None:
        """A pause is as long as it was seen for sure: from one look that saw all of it frozen to the next."""
        before_s, self._frozen_s = self._frozen_s, frozen_s
        if frozen_s is None or before_s is None or not 0 < frozen_s - before_s <= self._thresholds.gap_max_s:
            return
        goes_on = self._pauses and self._pauses[-1][1] == before_s
        self._pauses.append((self._pauses.pop()[0] if goes_on else before_s, frozen_s))

    def _lost(self, container: Container, gpu: GpuUse, lost: Collection[str], now_s: float) -> float | None:
        """For how long one of its GPUs has been lost and each other one idle or lost.

        A look that cannot tell breaks it off no sooner than a gap does.
        """
        if not lost and self._lost_s is None:
            return None
        others = [share for share in gpu.shares if share.gpu not in lost]
        attributed = {share.gpu for share in others if share.attributed}
        told = not gpu.may_be_elsewhere and set(gpu.gpus) - set(lost) <= attributed
        busy = any((decisive(share) or 0.0) > self._thresholds.idle_ratio for share in others)
        if container.paused or busy or gpu.unknown is None:
            self._lost_s = None
        if container.paused or not told or set(lost).isdisjoint(gpu.gpus):
            return None
        if busy:
            return 0.0
        if self._lost_s is None or now_s - self._lost_s[1] > self._thresholds.gap_max_s:
            self._lost_s = now_s, now_s
        self._lost_s = self._lost_s[0], now_s
        return now_s - self._lost_s[0]

    def _work_still(self, work: WorkUse, now_s: float) -> tuple[float | None, float | None, float | None]:
        """For how long I/O, page faults and CPU time have been still; what processes do as they start is left out."""
        if work.processes is None:
            self._forget_work()
            return None, None, None
        before, self._work = self._work if self._work is not None else work.processes, work.processes
        seen = self._work_looked_s is None or now_s - self._work_looked_s <= self._thresholds.gap_max_s
        self._work_looked_s = now_s
        if before is work.processes and work.unknown is None:  # none of them has run since
            self._starts.left_out(frozenset(), now_s)
            return (
                self._io.add(now_s, 0.0, seen=seen),
                self._faults.add(now_s, 0.0, seen=seen),
                self._cpu.add(now_s, 0.0, seen=seen),
            )
        new = frozenset(pid for pid, process in work.processes.items() if _is_new(before.get(pid), process))
        starting = self._starts.left_out(new, now_s)
        done = [
            _nothing_of(process) if pid in starting else _work_since(before.get(pid), process)
            for pid, process in work.processes.items()
        ]
        faults_still_s = self._faults.add(now_s, sum(each.faults for each in done), seen=seen)
        cpu_still_s = self._cpu.add(now_s, sum(each.cpu_s for each in done), seen=seen)
        sizes = [each.io_bytes for each in done]
        if None in sizes:
            self._io.forget()
            return None, faults_still_s, cpu_still_s
        return self._io.add(now_s, sum(size or 0 for size in sizes), seen=seen), faults_still_s, cpu_still_s

    def _forget_work(self) -> None:
        self._work = self._work_looked_s = None
        self._starts = _Starts()
        for rate in (self._io, self._faults, self._cpu):
            rate.forget()

    def _idle(self, utilization_ratio: float | None, now_s: float) -> float | None:
        if utilization_ratio is None:
            self._idle_since_s = None
            return None
        if utilization_ratio > self._thresholds.idle_ratio:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s

    def _pegged_for(self, gpu: GpuUse | None, lost: Collection[str], now_s: float) -> float | None:
        """For how long the same GPUs of it have been fully taken, and the others idle; `None` where any is unknown.

        One that is `lost` does nothing for it any more: who waits in a collective for the rank on it spins for ever.
        What computes pauses now and then, and one that is pegged and then idle has done something: both start it anew.
        A look that cannot tell breaks it off no sooner than a gap does, unless what it can tell says otherwise, or most
        of the looks so far could not tell.
        """
        limits = self._thresholds
        if gpu is None:
            self._pegged_since_s = None
            return None
        known: list[str] = []
        full_ones: list[str] = []
        in_part = False
        for uuid, ratio, _, _, busiest in gpu.shares:
            if busiest is not None:
                ratio = busiest  # noqa: PLW2901 - by which it is idle or not
            if ratio is not None:
                known.append(uuid)
                if ratio >= limits.pegged_ratio:
                    full_ones.append(uuid)
                elif ratio > limits.idle_ratio:
                    in_part = True
        whole = gpu.unknown is None and len(known) == len(gpu.shares)
        if lost and known and not gpu.nameless and not gpu.may_be_elsewhere:
            whole = set(gpu.gpus) - set(lost) <= {share.gpu for share in gpu.shares if share.attributed}
        full = frozenset(full_ones)
        if in_part or full != (self._pegged if whole else self._pegged.intersection(known)):
            self._pegged_since_s = None
        if not whole:
            self._pegged_looks[1] += 1
            return None
        self._pegged = full
        if not full:
            return 0.0
        told, untold = self._pegged_looks
        if (
            self._pegged_since_s is None
            or now_s - self._pegged_seen_s > limits.gap_max_s
            or untold > max(told, UNTOLD_LOOKS)
        ):
            self._pegged_since_s = now_s
            self._pegged_looks = [0, 0]
        self._pegged_seen_s = now_s
        self._pegged_looks[0] += 1
        return now_s - self._pegged_since_s

    def _not_seen_busy(self, gpu: GpuUse | None, now_s: float) -> float | None:
        """For how long no GPU was measured to do anything for it: each was idle, or unknown.

        Of one that was given none it is told while it is known to be on none. Not while nobody could look at one of its
        own, for its source does not answer or it hangs, which starts it anew once that lasts longer than a gap may. But
        what lasts for `OUTAGE_S` without a break is unknown like any other, from its begin.
        """
        without = gpu is not None and gpu.unknown is not None and gpu.unknown.reason == NO_GPU
        if gpu is None or (without and not gpu.shares and gpu.may_be_elsewhere):
            self._seen_busy_s = self._outage_s = None
            return None
        idle_ratio, since_s, busy = self._thresholds.idle_ratio, self._seen_busy_s, False
        for _, ratio, _, _, busiest in gpu.shares:
            if (busiest if busiest is not None else ratio or 0.0) > idle_ratio:
                self._seen_busy_s, since_s, busy = None, None, True
        if gpu.left_out or (gpu.unknown is not None and gpu.unknown.reason == "source_failed" and not gpu.shares):
            return self._not_seen_for_an_outage(now_s, busy=busy)
        self._outage_s = None
        if now_s - self._asked_s > self._thresholds.gap_max_s:
            since_s = None
        self._asked_s = now_s
        self._seen_busy_s = since_s = now_s if since_s is None else since_s
        return now_s - since_s

    def _not_seen_for_an_outage(self, now_s: float, *, busy: bool) -> float | None:
        """Since it began, or since another GPU of it was seen busy in it; `None` while it may be over soon."""
        began_s, since_s = self._outage_s or (now_s, now_s)
        self._outage_s = began_s, now_s if busy else since_s
        return now_s - self._outage_s[1] if self._asks and now_s - began_s >= OUTAGE_S else None


class GpuHistory:
    """What has been counted of every GPU of this host, one look after another."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._busy_s: dict[str, float] = {}
        self._unknown: dict[str, Counter[tuple[str, str]]] = {}

    def observe(
        self, readings: GpuReadings | None, *, now_s: float, returning_unknown: Mapping[str, str] | None = None
    ) -> Mapping[str, GpuTotals]:
        """Take in one look; returns what has been counted so far of the GPUs that are there, by UUID.

        `returning_unknown` is why it is unknown what of a GPU's memory is on its way back, by UUID.

        A look that measured a GPU stands for the time since the look before it; one that did not, or that comes after a
        gap, adds nothing.
        """
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._gap_max_s:
            gap_s = 0.0
        if readings is None:
            return {}
        if not readings.failed:  # otherwise those that are missing may be of a source that does not answer
            there = {gpu.uuid for gpu in readings.gpus}
            # Instances are made and unmade under new names for ever.
            self._busy_s = {uuid: busy_s for uuid, busy_s in self._busy_s.items() if uuid in there}
            self._unknown = {uuid: counts for uuid, counts in self._unknown.items() if uuid in there}
        for gpu in readings.gpus:
            if gpu.utilization_ratio is not None:
                # From 0 at the first look: a counter that is born later hides its first increase from `increase()`.
                added_s = gap_s * gpu.utilization_ratio if gpu.uuid in self._busy_s else 0.0
                self._busy_s[gpu.uuid] = self._busy_s.get(gpu.uuid, 0.0) + added_s
            self._unknown.setdefault(gpu.uuid, Counter()).update(gpu.figures.unknown.items())
            if returning_unknown and gpu.uuid in returning_unknown:
                self._unknown[gpu.uuid]["memory_returning_bytes", returning_unknown[gpu.uuid]] += 1
        return {
            gpu.uuid: GpuTotals(busy_s=self._busy_s.get(gpu.uuid), unknown=dict(self._unknown[gpu.uuid]))
            for gpu in readings.gpus
        }


@dataclass(slots=True)
class _Extreme:
    """A sample that is the greatest or least from its time on, and when the sample after it was taken."""

    at_s: float
    value: int
    next_s: float


class _StillWindow:
    """The longest time up to now within which the values lie at most `delta` apart: greatest less least.

    Two monotonic queues hold the window's greatest and least, so that a sample costs constant time on average and a
    still container costs a handful of entries, whatever the window's length.
    """

    def __init__(self, delta: int) -> None:
        self._delta = delta
        self.forget()

    def forget(self) -> None:
        self._start_s: float | None = None
        self._value: int | None = None
        self._greatest: deque[_Extreme] = deque()
        self._least: deque[_Extreme] = deque()

    def add(self, now_s: float, value: int) -> float:
        """Take in one value; returns the window's length, seconds."""
        if self._start_s is not None and value == self._value:
            # The same as the sample before, which stands for both.
            return now_s - self._start_s
        self._value = value
        for queue in (self._greatest, self._least):
            if queue:
                queue[-1].next_s = now_s
        start_s = now_s if self._start_s is None else self._start_s
        while self._greatest and self._greatest[-1].value <= value:
            self._greatest.pop()
        while self._least and self._least[-1].value >= value:
            self._least.pop()
        self._greatest.append(_Extreme(now_s, value, now_s))
        self._least.append(_Extreme(now_s, value, now_s))
        while self._greatest[0].value - self._least[0].value > self._delta:
            older = self._greatest if self._greatest[0].at_s < self._least[0].at_s else self._least
            start_s = max(start_s, older.popleft().next_s)
        for queue in (self._greatest, self._least):
            if len(queue) > EXTREMES_MAX:  # RAM that creeps the same way at every sample
                start_s = max(start_s, queue.popleft().next_s)
        self._start_s = start_s
        return now_s - start_s


class _StillRate:
    """Since when something has been done at no more than a rate, on average over any `WORK_WINDOW_S`.

    Once the average is within the rate again, it has been kept since the last look that was over it, and not only since
    that is known.
    """

    def __init__(self, rate_max: float) -> None:
        self._rate_max = rate_max
        self.forget()

    def forget(self) -> None:
        self._totals: deque[tuple[float, float]] = deque()
        self._since_s = self._over_s = 0.0
        self._exceeded = False

    def add(self, now_s: float, amount: float, *, seen: bool) -> float:
        """Take in what was done since the last sample; returns for how long the rate has been kept, seconds.

        Where the time since then was not `seen` there may have been more: it is kept from now on at the soonest.
        """
        if not self._totals:
            self._totals.append((now_s, 0.0))
            self._since_s = self._over_s = now_s
            return 0.0
        before_s, before = self._totals[-1]
        total = before + amount
        if not seen or amount > self._rate_max * (now_s - before_s):
            self._over_s = now_s
        if len(self._totals) > 1 and total == self._totals[-2][1]:
            self._totals[-1] = now_s, total  # as long as nothing is done its begin and its end say all
        else:
            self._totals.append((now_s, total))
        while now_s - self._totals[1][0] >= WORK_WINDOW_S:
            self._totals.popleft()
        first_s, first = self._totals[0]
        # Looks that are seconds apart make it longer than that, in which a greater burst would be none.
        if not seen or total - first > self._rate_max * min(now_s - first_s, WORK_WINDOW_S):
            self._since_s, self._exceeded = now_s, True
            if self._over_s <= first_s:
                self._over_s = now_s  # no look of these was over it, and all were together
        elif self._exceeded:
            self._since_s, self._exceeded = self._over_s, False  # each look since then was within the rate
        return now_s - self._since_s


class _Starts:
    """Which processes of one container start, up to the second look at each: nothing that they do until then counts.

    A container's health check is none of its job's work, and to link and import what it asks with costs it 600 page
    faults (curl) to thousands (Python). Its engine starts it and waits for it, from outside. Whoever starts processes
    for the job itself waits for them, and then all that they did is in his own figures (proc_pid_stat(5): cutime).
    Where some start in a greater share of the looks than `STARTS_OFTEN` nobody may wait for them, and all counts.
    """

    def __init__(self) -> None:
        self._new: frozenset[int] = frozenset()
        self._looks: deque[tuple[float, bool]] = deque()

    def left_out(self, new: frozenset[int], now_s: float) -> frozenset[int]:
        """Those of whom nothing counts that they have done by this look, of which some are `new`."""
        starting, self._new = (self._new | new if new else self._new), new
        self._looks.append((now_s, bool(new)))
        while now_s - self._looks[0][0] >= WORK_WINDOW_S:
            self._looks.popleft()
        often = sum(some for _, some in self._looks) > STARTS_OFTEN * max(len(self._looks), LOOKS_MIN)
        return frozenset() if often else starting


LOOKS_MIN: Final = 3
"""Where there were fewer, the share is that of so many: one look with a start, of two, may be a health check's."""

_NOTHING: Final = ProcessWork(start_ticks=0, io_bytes=0, faults=0, cpu_s=0.0)


def _is_new(before: ProcessWork | None, now: ProcessWork) -> bool:
    return before is None or before.start_ticks != now.start_ticks


def _nothing_of(now: ProcessWork) -> ProcessWork:
    """As if it had done nothing; what is unknown stays so."""
    return _NOTHING if now.io_bytes is not None else replace(_NOTHING, io_bytes=None)


def _work_since(before: ProcessWork | None, now: ProcessWork) -> ProcessWork:
    """What a process has done since it was last looked at; one that was not there then has done all of it since."""
    if before is now and now.io_bytes is not None:
        return _NOTHING
    if before is None or before.start_ticks != now.start_ticks:
        return now
    unknown = now.io_bytes is None or before.io_bytes is None
    return ProcessWork(
        start_ticks=now.start_ticks,
        io_bytes=None if unknown else max(0, (now.io_bytes or 0) - (before.io_bytes or 0)),
        faults=max(0, now.faults - before.faults),
        cpu_s=max(0.0, now.cpu_s - before.cpu_s),
    )


def _unknown_use(gpus: tuple[str, ...], reason: str, because: str) -> GpuUse:
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
        if len(readings.asked) >= REQUESTS_MAX:  # readings that do not change are kept, while containers come and go
            readings.asked.clear()
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
