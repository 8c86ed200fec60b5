"""Unknown values."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Why a value is unknown: label value and sentence."""

    reason: str
    message: str
