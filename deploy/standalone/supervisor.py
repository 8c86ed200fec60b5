"""Restart parts that exit, and give up after too many exits.

`next_step` decides; `Supervisor` acts from its caller's loop. All parts must be children of one long-lived thread,
because a part ends with the thread that started it.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from deploy.standalone.stack import ChainError
from gpuwarden.errors import GpuwardenError


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """Limits of restarts."""

    exits_max: int = 5
    window_s: float = 600.0
    first_s: float = 1.0
    longest_s: float = 30.0


RESTART_LIMITS: Final = RestartLimits()


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Restart the part after a delay."""

    after_s: float
    exits: int


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Do not restart the part."""

    reason: str


class PartKeepsExiting(GpuwardenError):  # noqa: N818 - it reads as what happened
    """A part exited too often. The message has the reason and the log file."""


class Parts(Protocol):
    """Interface of supervised parts; see `deploy.standalone.stack.Chain`."""

    def ended(self) -> Mapping[str, int]:
        """Exit codes of parts that exited since their last start."""

    def start(self, name: str) -> None:
        """Start one part."""

    def log_file(self, name: str) -> Path:
        """Log file of one part."""

    def log_tail(self, name: str) -> str:
        """Last lines of its log."""


def next_step(ends: Sequence[float], *, limits: RestartLimits) -> Restart | GiveUp:
    """Decide about a part that has just exited; `ends` are the times of its exits, seconds, newest last."""
    recent = [end for end in ends if ends[-1] - end < limits.window_s]
    if len(recent) > limits.exits_max:
        return GiveUp(reason=f"{len(recent)} exits within {limits.window_s:g} s")
    return Restart(after_s=min(limits.first_s * 2 ** (len(recent) - 1), limits.longest_s), exits=len(recent))


class Supervisor:
    """Restarts parts and reports to `say`."""

    def __init__(self, parts: Parts, *, say: Callable[[str], None], limits: RestartLimits = RESTART_LIMITS) -> None:
        self._parts = parts
        self._say = say
        self._limits = limits
        self._ends: dict[str, list[float]] = {}
        self._due: dict[str, float] = {}

    def tick(self, now_s: float) -> None:
        """Schedule restarts of exited parts and perform due ones. Raises PartKeepsExiting."""
        ended = self._parts.ended()
        for name in self._due.keys() - ended.keys():
            del self._due[name]  # already restarted
        for name, code in ended.items():
            if name not in self._due:
                self._schedule(name, code, now_s)
        for name, due_s in sorted(self._due.items()):
            if due_s <= now_s:
                del self._due[name]
                try:
                    self._parts.start(name)
                except (OSError, ChainError) as error:
                    self._say(f"{name} cannot be started: {error}")
                else:
                    self._say(f"{name} restarted")

    def _schedule(self, name: str, code: int, now_s: float) -> None:
        kept = self._ends.get(name, [])[-self._limits.exits_max :]
        self._ends[name] = [*kept, now_s]
        step = next_step(self._ends[name], limits=self._limits)
        if isinstance(step, GiveUp):
            raise PartKeepsExiting(
                f"{name} keeps exiting ({_describe_exit(code)}; {step.reason}): all parts are stopped; "
                f"end of {self._parts.log_file(name)}:\n{self._parts.log_tail(name)}"
            )
        self._due[name] = now_s + step.after_s
        self._say(
            f"{name} exited ({_describe_exit(code)}): restart in {step.after_s:g} s "
            f"(exit {step.exits} of at most {self._limits.exits_max} in {self._limits.window_s:g} s); "
            f"see {self._parts.log_file(name)}"
        )


def _describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
