"""What a driver's process lists and utilisation samples say about each process. Pure: answers in, figures out.

The driver keeps samples of the processes that did some work, and tells those that are newer than a timestamp (NVML,
nvmlDeviceGetProcessUtilization: "one utilization sample structure is returned per process running, that had some
non-zero utilization during the last sample period"). So, of a process on the list:

- a sample: its share of the time of the multiprocessors (SM), which is what the GPU's own utilisation is of; and the
  greatest figure of any engine, by which it is idle or not. Of several the greatest: idleness must hold for all;
- no sample: it did nothing, which is a measured 0. But not a client of MPS: its work may be booked to the MPS server;
- nothing but samples that no GPU can have given (over 100 %): unknown;
- a sample of the first answer: unknown. It speaks of all that the driver's buffer holds, however long ago.

R580 returns one sample for each process: the mean since that timestamp. The GPU's own utilisation must be of the same
time. Otherwise a load that comes and goes within a look seems hidden, and all on its GPU is unknown. So it is the mean
of the GPU's own samples since the look before (nvmlDeviceGetSamples), where the driver keeps them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from exporter.model.gpu import GpuProcess

PERCENT_MAX: Final = 100
PID_MAX: Final = 2**22
"""The greatest pid that Linux gives (proc_sys_kernel(5), pid_max)."""

SILENT_LOOKS_MAX: Final = 10
BUSY_RATIO: Final = 0.5
"""A GPU so busy for so many looks without one sample: the driver's clock was set back, and its samples seem old."""


class Listed(NamedTuple):
    """One entry of a list of running processes; `memory_bytes` is `None` where the driver does not say."""

    pid: int
    memory_bytes: int | None
    mps: bool = False


class Sample(NamedTuple):
    """What one process did up to `timestamp_us`, by the driver's clock, microseconds; figures in percent."""

    pid: int
    timestamp_us: int
    sm_percent: int
    memory_percent: int = 0
    encoder_percent: int = 0
    decoder_percent: int = 0


class GpuSample(NamedTuple):
    """How busy a whole GPU was in the sample period up to `timestamp_us`, by the driver's clock, microseconds."""

    timestamp_us: int
    percent: int


SAME_SAMPLE_US: Final = 50_000
"""A timestamp of a process's and one of the GPU's that are nearer than this are of one sample, microseconds."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """How far a GPU's samples have been read: the newest timestamp, `None` before the first answer."""

    seen_us: int | None = None
    silent_looks: int = 0


def merged(listed: Iterable[Listed]) -> Mapping[int, Listed] | None:
    """The lists as one, each pid once; `None` when an entry is of no process that can be, and so none can be trusted.

    A process that computes and draws is on two lists with the same memory, all of it: the greatest, not the sum.
    """
    found: dict[int, Listed] = {}
    for entry in listed:
        if not 0 < entry.pid <= PID_MAX:
            return None
        before = found.get(entry.pid)
        if before is None:
            found[entry.pid] = entry
            continue
        sizes = [size for size in (before.memory_bytes, entry.memory_bytes) if size is not None]
        found[entry.pid] = Listed(pid=entry.pid, memory_bytes=max(sizes, default=None), mps=before.mps or entry.mps)
    return found


def measured(listed: Mapping[int, Listed], samples: Sequence[Sample] | None, cursor: Cursor) -> tuple[GpuProcess, ...]:
    """Each listed process with its figures; `samples` is `None` where the driver told none for a reason of its own."""
    if samples is None:
        return tuple([GpuProcess(pid, None, entry.memory_bytes) for pid, entry in listed.items()])
    done = _done(samples, cursor.seen_us or 0)
    return tuple([_process(entry, pid in done, done.get(pid), cursor) for pid, entry in listed.items()])


def newest_us(whole: Sequence[GpuSample], cursor: Cursor) -> int | None:
    """The timestamp of the newest sample of the GPU since the look before; `None` where there is no new one."""
    return max((each.timestamp_us for each in _new(whole, cursor)), default=None)


def mean_ratio(whole: Sequence[GpuSample], cursor: Cursor) -> float | None:
    """How busy the GPU was since the look before; `None` where its samples do not say."""
    new = _new(whole, cursor)
    if cursor.seen_us is None or not new:
        return None
    return sum(each.percent for each in new) / len(new) / PERCENT_MAX


def _new(whole: Sequence[GpuSample], cursor: Cursor) -> list[GpuSample]:
    seen_us = cursor.seen_us or 0
    return [each for each in whole if each.timestamp_us > seen_us and each.percent <= PERCENT_MAX]


def are_newer(samples: Sequence[Sample], gpu_us: int | None) -> bool:
    """Whether the processes have a sample that the GPU's own, up to `gpu_us`, do not have yet."""
    return gpu_us is not None and any(each.timestamp_us > gpu_us + SAME_SAMPLE_US for each in samples)


def read_on(
    cursor: Cursor,
    listed: Mapping[int, Listed],
    samples: Sequence[Sample],
    *,
    gpu_ratio: float | None,
    gpu_us: int | None = None,
) -> Cursor:
    """The cursor for the next look, after this answer.

    Args:
        cursor: the one that was asked with.
        listed: the processes on the GPU.
        samples: theirs.
        gpu_ratio: what the whole GPU did meanwhile.
        gpu_us: the newest of the GPU's own samples; processes and GPU are read on from there together.
    """
    if gpu_us is not None:
        same = [each.timestamp_us for each in samples if abs(each.timestamp_us - gpu_us) <= SAME_SAMPLE_US]
        return Cursor(seen_us=max([gpu_us, *same]))
    if not samples:
        silent_looks = cursor.silent_looks + 1 if (gpu_ratio or 0.0) >= BUSY_RATIO else 0
        if silent_looks >= SILENT_LOOKS_MAX:
            return Cursor()
        return Cursor(seen_us=cursor.seen_us or 0, silent_looks=silent_looks)
    # Only what is trusted moves on: a made-up timestamp would hide all that comes before it.
    seen_us = cursor.seen_us or 0
    trusted = [
        each.timestamp_us
        for each in samples
        if each.timestamp_us > seen_us and each.sm_percent <= PERCENT_MAX and each.pid in listed
    ]
    return Cursor(seen_us=max(trusted, default=cursor.seen_us))


def _done(samples: Sequence[Sample], seen_us: int) -> dict[int, tuple[int, int] | None]:
    """By pid, the greatest share of the multiprocessors' time and of any engine's, percent, of the new samples.

    `None` for who has none but such as no GPU can have given. A process that only copies, encodes or decodes runs no
    kernel, and works; of an engine that a GPU lacks it tells what is no share. A full host has hundreds each second.
    """
    found: dict[int, tuple[int, int] | None] = {}
    for pid, timestamp_us, own, memory, encoder, decoder in samples:
        if timestamp_us <= seen_us:
            continue
        if own > PERCENT_MAX:
            found.setdefault(pid, None)
            continue
        busiest = own
        for percent in (memory, encoder, decoder):
            if busiest < percent <= PERCENT_MAX:
                busiest = percent
        before = found.get(pid)
        found[pid] = (own, busiest) if before is None else (max(own, before[0]), max(busiest, before[1]))
    return found


def _process(entry: Listed, sampled: bool, done: tuple[int, int] | None, cursor: Cursor) -> GpuProcess:
    if not sampled:
        return GpuProcess(entry.pid, None if entry.mps else 0.0, entry.memory_bytes)
    if done is None or cursor.seen_us is None:
        return GpuProcess(entry.pid, None, entry.memory_bytes)
    own, busiest = done
    beyond = busiest / PERCENT_MAX if busiest > own else None
    return GpuProcess(entry.pid, own / PERCENT_MAX, entry.memory_bytes, beyond)
