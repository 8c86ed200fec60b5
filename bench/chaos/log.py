"""The log of the jobs' side effects, outside of the queue.

A line is a JSON object: `job`, `attempt`, `pid`, `step` (0 is the start), and `at_s`, monotonic seconds of the host.
A line that is read during its write may lack its end.
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
    """Every complete line of the log; none before the first."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="ascii").splitlines(keepends=True)
    return [Effect(**json.loads(line)) for line in lines if line.endswith("\n")]
