"""Utilisation of processes from the driver's lists and samples. Pure.

The driver returns samples of processes that did work after a timestamp (NVML, nvmlDeviceGetProcessUtilization). So, for
a listed process:

- a sample: its share of the multiprocessors' time (SM), and the greatest of any engine;
- no sample: 0, but unknown for an MPS client, whose work may count for the MPS server;
- only impossible samples (over 100 %): unknown;
- a sample of the first answer: unknown, because it may be old.

R580 returns one sample per process: the mean since that timestamp. The GPU's utilisation must cover the same time, or
short loads would look unattributed. So it is the mean of the GPU's own samples (nvmlDeviceGetSamples), if available.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from exporter.model.gpu import GpuProcess

PERCENT_MAX: Final = 100
PID_MAX: Final = 2**22

SILENT_LOOKS_MAX: Final = 10
BUSY_RATIO: Final = 0.5
"""A GPU that busy without samples in so many reads: the driver's clock was set back."""


class Listed(NamedTuple):
    """One entry of a process list."""

    pid: int
    memory_bytes: int | None
    mps: bool = False


class Sample(NamedTuple):
    """One process's work up to `timestamp_us` of the driver's clock, microseconds; percent."""

    pid: int
    timestamp_us: int
    sm_percent: int
    memory_percent: int = 0
    encoder_percent: int = 0
    decoder_percent: int = 0


class GpuSample(NamedTuple):
    """A GPU's utilisation in the sample period up to `timestamp_us` of the driver's clock, microseconds."""

    timestamp_us: int
    percent: int


SAME_SAMPLE_US: Final = 50_000
"""Timestamps of a process and of the GPU that are closer belong to one sample, microseconds."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The newest timestamp that was read; `None` before the first answer."""

    seen_us: int | None = None
    silent_looks: int = 0


def merge(listed: Iterable[Listed]) -> Mapping[int, Listed] | None:
    """Join the lists; `None` for an impossible pid. Memory on two lists counts once."""
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


def measure(listed: Mapping[int, Listed], samples: Sequence[Sample] | None, cursor: Cursor) -> tuple[GpuProcess, ...]:
    """Attribute samples to listed processes."""
    if samples is None:
        return tuple([GpuProcess(pid, None, entry.memory_bytes) for pid, entry in listed.items()])
    done = _done(samples, cursor.seen_us or 0)
    return tuple([_process(entry, pid in done, done.get(pid), cursor) for pid, entry in listed.items()])


def newest_us(whole: Sequence[GpuSample], cursor: Cursor) -> int | None:
    """Newest timestamp."""
    return max((each.timestamp_us for each in _new(whole, cursor)), default=None)


def mean_ratio(whole: Sequence[GpuSample], cursor: Cursor) -> float | None:
    """The GPU's mean utilisation since the last read; `None` if unknown."""
    new = _new(whole, cursor)
    if cursor.seen_us is None or not new:
        return None
    return sum(each.percent for each in new) / len(new) / PERCENT_MAX


def _new(whole: Sequence[GpuSample], cursor: Cursor) -> list[GpuSample]:
    seen_us = cursor.seen_us or 0
    return [each for each in whole if each.timestamp_us > seen_us and each.percent <= PERCENT_MAX]


def are_newer(samples: Sequence[Sample], gpu_us: int | None) -> bool:
    """Whether the processes have a newer sample than the GPU's own, up to `gpu_us`."""
    return gpu_us is not None and any(each.timestamp_us > gpu_us + SAME_SAMPLE_US for each in samples)


def advance(
    cursor: Cursor,
    listed: Mapping[int, Listed],
    samples: Sequence[Sample],
    *,
    gpu_ratio: float | None,
    gpu_us: int | None = None,
) -> Cursor:
    """Return the next cursor. `gpu_us`, the newest of the GPU's own samples, sets it if known."""
    if gpu_us is not None:
        same = [each.timestamp_us for each in samples if abs(each.timestamp_us - gpu_us) <= SAME_SAMPLE_US]
        return Cursor(seen_us=max([gpu_us, *same]))
    if not samples:
        silent_looks = cursor.silent_looks + 1 if (gpu_ratio or 0.0) >= BUSY_RATIO else 0
        if silent_looks >= SILENT_LOOKS_MAX:
            return Cursor()
        return Cursor(seen_us=cursor.seen_us or 0, silent_looks=silent_looks)
    # Only trusted samples count: an invented timestamp would hide the earlier ones.
    seen_us = cursor.seen_us or 0
    trusted = [
        each.timestamp_us
        for each in samples
        if each.timestamp_us > seen_us and each.sm_percent <= PERCENT_MAX and each.pid in listed
    ]
    return Cursor(seen_us=max(trusted, default=cursor.seen_us))


def _done(samples: Sequence[Sample], seen_us: int) -> dict[int, tuple[int, int] | None]:
    # The greatest shares of SM time and of any engine, percent, by pid: copies and video are work without SM time.
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
