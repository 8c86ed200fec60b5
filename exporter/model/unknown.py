"""An unknown value and why."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Why a value is unknown: a label value and a sentence."""

    reason: str
    because: str
