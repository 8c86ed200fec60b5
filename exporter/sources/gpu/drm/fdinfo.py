"""Read /proc/PID/fdinfo/FD of a DRM device, and compute utilisation. Pure.

Lines with `drm-` are common to all drivers (Documentation/gpu/drm-usage-stats.rst of the kernel; i915_drm_client.c,
xe_drm_client.c, amdgpu_fdinfo.c).

    drm-driver: i915                    the driver
    drm-client-id: 7                    one opening of the device, which files and processes may share
    drm-pdev: 0000:03:00.0              PCI address
    drm-engine-render: 9288864723 ns    run time on this kind of engine (amdgpu, i915)
    drm-cycles-rcs: 28257900            the same in cycles (xe)
    drm-total-cycles-rcs: 7655183225    cycles that have passed (xe)
    drm-engine-capacity-video: 2        engines of this kind
    drm-resident-vram0: 23992 KiB       memory of a region; bytes without a unit
    drm-memory-vram: 76 KiB             the same (older amdgpu)

A counter may go back for a while; the greatest value counts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LEAVES_OUT_UNUSED: Final = frozenset({"amdgpu"})
"""Drivers that omit engines without use. For others, no line means unknown."""

_LOCAL: Final = re.compile(r"(?:resident|memory)-((?:vram|local)[0-9]*)")
"""GPU memory: `vram` (amdgpu), `vram0` (xe), `local0` (i915). Other regions are RAM."""

_UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Run time on one kind of engine: nanoseconds, or cycles of `total_cycles`."""

    used: int
    total_cycles: int | None = None
    capacity: int = 1


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client of a GPU; `None` is unknown."""

    driver: str
    pci: str | None
    number: int
    engines: Mapping[str, Engine] | None
    local_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Meter:
    """A client's counters, and when they were read, monotonic seconds."""

    read_s: float
    engines: Mapping[str, Engine]


def parse(text: str) -> Client | None:
    """Parse one file; `None` if it has no client."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("drm-"):
            key, _, value = line.partition(":")
            values[key[4:]] = value.strip()
    driver, number = values.get("driver"), values.get("client-id", "")
    if driver is None or not number.isdecimal():
        return None
    return Client(
        driver=driver,
        pci=values.get("pdev"),
        number=int(number),
        engines=_engines(values, driver),
        local_bytes=_local_bytes(values),
    )


def _engines(values: Mapping[str, str], driver: str) -> Mapping[str, Engine] | None:
    found: dict[str, Engine] = {}
    try:
        for key, value in values.items():
            kind, _, name = key.partition("-")
            if kind == "engine" and not name.startswith("capacity-"):
                number, unit = value.split()
                if unit != "ns":
                    return None
                found[name] = Engine(used=int(number), capacity=_capacity(values, name))
            elif kind == "cycles" and f"engine-{name}" not in values:
                total = int(values[f"total-cycles-{name}"])
                found[name] = Engine(used=int(value), total_cycles=total, capacity=_capacity(values, name))
    except (ValueError, KeyError):
        return None
    return found if found or driver in _LEAVES_OUT_UNUSED else None


def _capacity(values: Mapping[str, str], name: str) -> int:
    capacity = int(values.get(f"engine-capacity-{name}", "1"))
    if capacity < 1:
        raise ValueError(f"{name} has {capacity} engines")
    return capacity


def _local_bytes(values: Mapping[str, str]) -> int | None:
    regions: dict[str, int] = {}
    for key, value in values.items():
        region = _LOCAL.fullmatch(key)
        if region and (key.startswith("resident-") or region[1] not in regions):
            number, _, unit = value.partition(" ")
            if not number.isdecimal() or unit not in _UNITS:
                return None
            regions[region[1]] = int(number) * _UNITS[unit]
    return sum(regions.values()) if regions else None


def utilization(
    before: Meter | None, engines: Mapping[str, Engine], *, now_s: float, looked_s: float | None
) -> Mapping[str, float] | None:
    """The utilisation of each kind of engine by a client since its counters `before`, or, if new, since `looked_s`."""
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


def advance(before: Meter | None, engines: Mapping[str, Engine], *, now_s: float) -> Meter:
    """Update the counters; none goes back."""
    old = {} if before is None else before.engines
    highest = {name: engine if name not in old or engine.used >= old[name].used else old[name]
               for name, engine in engines.items()}  # fmt: skip
    return Meter(read_s=now_s, engines={**old, **highest})
