"""What a DRM driver tells of one open file of a GPU in /proc/PID/fdinfo/FD, and how busy that makes it. Pure.

Lines of `key: value`, of which those that begin with `drm-` are the same for every driver (Documentation/gpu/
drm-usage-stats.rst of the kernel; drivers/gpu/drm/i915/i915_drm_client.c, xe/xe_drm_client.c and amd/amdgpu/
amdgpu_fdinfo.c say which of them each driver writes):

    drm-driver: i915                    who tells
    drm-client-id: 7                    one opening of the device, however many files and processes share it
    drm-pdev: 0000:03:00.0              of which device, as PCI numbers it
    drm-engine-render: 9288864723 ns    how long its work has run on this kind of engine; of amdgpu and i915
    drm-cycles-rcs: 28257900            the same in the engine's own cycles, and
    drm-total-cycles-rcs: 7655183225    those that have passed; of xe
    drm-engine-capacity-video: 2        how many engines of the kind there are, where there are several
    drm-resident-vram0: 23992 KiB       what it holds of a region of memory; bytes where no unit stands
    drm-memory-vram: 76 KiB             the same in older words; of amdgpu

Counters may fall behind what was told before, and catch up later: what was told first holds meanwhile.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LEAVES_OUT_UNUSED: Final = frozenset({"amdgpu"})
"""Drivers that write no line of an engine that the client has never used; of the others no line is no account."""

_LOCAL: Final = re.compile(r"(?:resident|memory)-((?:vram|local)[0-9]*)")
"""Regions of the GPU's own memory: `vram` of amdgpu, `vram0` of xe, `local0` of i915. The others are the host's RAM."""

_UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How long a client's work has run on one kind of engine: nanoseconds, or cycles of `total_cycles`."""

    used: int
    total_cycles: int | None = None
    capacity: int = 1


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client of a GPU. `engines` and `local_bytes`, memory of the GPU's own, are `None` where it is not told."""

    driver: str
    pci: str | None
    number: int
    engines: Mapping[str, Engine] | None
    local_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Meter:
    """How far a client's counters have been read, and when, monotonic seconds."""

    read_s: float
    engines: Mapping[str, Engine]


def parse(text: str) -> Client | None:
    """What one file says; `None` where its driver says nothing of the kind. A line that is no figure costs its own."""
    said: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("drm-"):
            key, _, value = line.partition(":")
            said[key[4:]] = value.strip()
    driver, number = said.get("driver"), said.get("client-id", "")
    if driver is None or not number.isdecimal():
        return None
    return Client(
        driver=driver,
        pci=said.get("pdev"),
        number=int(number),
        engines=_engines(said, driver),
        local_bytes=_local_bytes(said),
    )


def _engines(said: Mapping[str, str], driver: str) -> Mapping[str, Engine] | None:
    found: dict[str, Engine] = {}
    try:
        for key, value in said.items():
            kind, _, name = key.partition("-")
            if kind == "engine" and not name.startswith("capacity-"):
                number, unit = value.split()
                if unit != "ns":
                    return None
                found[name] = Engine(used=int(number), capacity=_capacity(said, name))
            elif kind == "cycles" and f"engine-{name}" not in said:
                total = int(said[f"total-cycles-{name}"])
                found[name] = Engine(used=int(value), total_cycles=total, capacity=_capacity(said, name))
    except (ValueError, KeyError):
        return None
    return found if found or driver in _LEAVES_OUT_UNUSED else None


def _capacity(said: Mapping[str, str], name: str) -> int:
    capacity = int(said.get(f"engine-capacity-{name}", "1"))
    if capacity < 1:
        raise ValueError(f"{name} has {capacity} engines")
    return capacity


def _local_bytes(said: Mapping[str, str]) -> int | None:
    regions: dict[str, int] = {}
    for key, value in said.items():
        region = _LOCAL.fullmatch(key)
        if region and (key.startswith("resident-") or region[1] not in regions):
            number, _, unit = value.partition(" ")
            if not number.isdecimal() or unit not in _UNITS:
                return None
            regions[region[1]] = int(number) * _UNITS[unit]
    return sum(regions.values()) if regions else None


def busy(
    before: Meter | None, engines: Mapping[str, Engine], *, now_s: float, looked_s: float | None
) -> Mapping[str, float] | None:
    """The share of its time that each kind of engine worked for a client since it was read last; `None` is unknown.

    Args:
        before: how far it had been read; `None` for one that is seen for the first time.
        engines: its counters now.
        now_s: the time of this look, monotonic seconds.
        looked_s: the time of the look before: a new client did all of its work since. `None` at the first look.
    """
    since_s = looked_s if before is None else before.read_s
    shares: dict[str, float] = {}
    for name, engine in engines.items():
        old = None if before is None else before.engines.get(name)
        worked = max(0, engine.used - (old.used if old else 0))
        if worked == 0:
            shares[name] = 0.0
            continue
        if engine.total_cycles is None:
            passed = 0.0 if since_s is None else (now_s - since_s) * 1e9
        else:
            passed = 0 if old is None or old.total_cycles is None else engine.total_cycles - old.total_cycles
        if passed <= 0:
            return None
        shares[name] = worked / passed / engine.capacity
    return shares


def read_on(before: Meter | None, engines: Mapping[str, Engine], *, now_s: float) -> Meter:
    """How far a client has been read after this look: no counter goes back."""
    old = {} if before is None else before.engines
    highest = {name: engine if name not in old or engine.used >= old[name].used else old[name]
               for name, engine in engines.items()}  # fmt: skip
    return Meter(read_s=now_s, engines={**old, **highest})
