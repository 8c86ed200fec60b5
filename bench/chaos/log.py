"""The log in which jobs leave their side effects: it is no queue's, and what was written outlives its writer.

A line is a JSON object: `job`, `attempt`, `pid`, `step` (0 for its beginning), and `at_s`, by the clock that all
processes of the host share. Lines are appended whole; one that is read while it is written may lack its end.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A line of the log."""

    job: int
    attempt: int
    pid: int
    step: int
    at_s: float


def effects_of(log: Path) -> list[Effect]:
    """Every whole line of the log; none where nobody has left one."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="ascii").splitlines(keepends=True)
    return [Effect(**json.loads(line)) for line in lines if line.endswith("\n")]
