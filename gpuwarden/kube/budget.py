"""The VRAM budget that a pod declares, whole MiB. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

RESOURCE: Final = "gpuwarden/vram-mib"
"""Our extended resource."""

MIB_MAX: Final = 99_999_999

_QUANTITY: Final = re.compile(r"([0-9]{1,40})(|[kMGTPE]|[KMGTPE]i|e[0-9]{1,2})")
_FACTORS: Final[dict[str, int]] = {"": 1, "k": 1000} | {
    suffix: factor
    for power, letter in enumerate("KMGTPE", start=1)
    for suffix, factor in ((letter, 1000**power), (f"{letter}i", 1024**power))
}


@dataclass(frozen=True, kw_only=True)
class BudgetSources:
    """Names of budgets. The first that a pod has counts."""

    resources: tuple[str, ...] = (RESOURCE,)
    annotations: tuple[str, ...] = ()


def declared_mib(pod: Mapping[str, Any], sources: BudgetSources) -> int | None:
    """The budget of a pod (Pod v1), if any.

    Raises:
        ValueError: it is invalid.
    """
    for resource in sources.resources:
        mib = scheduled_mib(pod["spec"], resource)
        if mib is not None:
            return _checked(mib, str(mib), f"the limit of {resource}")
    annotations = pod["metadata"].get("annotations") or {}
    for name in sources.annotations:
        if name in annotations:
            return parse_mib(annotations[name], f"the annotation {name}")
    return None


def scheduled_mib(spec: Mapping[str, Any], resource: str) -> int | None:
    """What the scheduler counts for a pod (PodSpec v1), if a container declares it.

    The sum of containers and sidecars, or the largest init container with the sidecars before it; and the overhead.

    Raises:
        ValueError: a limit is not a whole number.
    """
    declares = False
    running = sidecars = largest = 0
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind) or []:
            resources = container.get("resources") or {}
            said = (resources.get("limits") or resources.get("requests") or {}).get(resource)
            if said is None:
                continue
            declares = True
            mib = _quantity(said, f"the limit of {resource}")
            if kind == "containers":
                running += mib
            elif container.get("restartPolicy") == "Always":
                sidecars += mib
            else:
                largest = max(largest, sidecars + mib)
    if not declares:
        return None
    overhead = _quantity((spec.get("overhead") or {}).get(resource, "0"), f"the overhead of {resource}")
    return max(running + sidecars, largest) + overhead


def parse_mib(said: str, what: str) -> int:
    """Parse a budget.

    Raises:
        ValueError: it is invalid.
    """
    return _checked(_quantity(said, what), said, what)


def _quantity(said: str, what: str) -> int:
    found = _QUANTITY.fullmatch(str(said))  # a manifest may have a number
    if found is None:
        raise _invalid(said, what)
    number, suffix = found.groups()
    factor: int = _FACTORS[suffix] if suffix in _FACTORS else 10 ** int(suffix[1:])
    return int(number) * factor


def _checked(mib: int, said: str, what: str) -> int:
    if 0 < mib <= MIB_MAX:
        return mib
    raise _invalid(said, what)


def _invalid(said: str, what: str) -> ValueError:
    return ValueError(f"{what} is {ascii(said)[:40]}; expected whole MiB, 1 to {MIB_MAX}")
