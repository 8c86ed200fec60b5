"""A figure that is not known, and why."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Why a figure does not exist: `reason` is a fixed word for a label, `because` a sentence for people."""

    reason: str
    because: str
