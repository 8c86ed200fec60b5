"""A series of the remediator's, as it is published and as it is documented."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Series:
    """One family."""

    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    unit: str
    meaning: str
    absent: str
