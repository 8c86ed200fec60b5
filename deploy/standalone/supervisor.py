"""Keeps the parts of a running chain running: what ends by itself is started again, later each time, and not for ever.

`after_an_end` decides; `Supervisor` performs, one look at a time from its caller's loop, so that every part is a child
of the one thread that lives as long as we do (a part ends when the thread that started it ends).
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from deploy.standalone.stack import ChainError
from gpuwarden.errors import GpuwardenError


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often a part may end by itself, and how long it waits to be started again; units stand in the names."""

    ends_max: int = 5
    window_s: float = 600.0
    first_s: float = 1.0
    longest_s: float = 30.0


PATIENCE: Final = Patience()


@dataclass(frozen=True, kw_only=True)
class Again:
    """Start the part again, this long after it ended."""

    after_s: float
    ends: int


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Starting it again helps nothing."""

    because: str


class PartKeepsEnding(GpuwardenError):  # noqa: N818 - it reads as what happened
    """A part ended too often. The message says how it ended, and where its log is."""


class Parts(Protocol):
    """What is supervised; `deploy.standalone.stack.Chain` is."""

    def ended(self) -> Mapping[str, int]:
        """The parts that have ended since they were last started, with their exit codes."""

    def start(self, name: str) -> None:
        """Start one part."""

    def log_file(self, name: str) -> Path:
        """Where one part logs to."""

    def log_tail(self, name: str) -> str:
        """The end of what one part has logged."""


def after_an_end(ends: Sequence[float], *, patience: Patience) -> Again | GiveUp:
    """Choose what becomes of a part that has just ended; `ends` are the times of its ends, seconds, the newest last."""
    recent = [end for end in ends if ends[-1] - end < patience.window_s]
    if len(recent) > patience.ends_max:
        return GiveUp(because=f"it ended {len(recent)} times within {patience.window_s:g} s")
    return Again(after_s=min(patience.first_s * 2 ** (len(recent) - 1), patience.longest_s), ends=len(recent))


class Supervisor:
    """Looks after the parts; `say` is told what happens."""

    def __init__(self, parts: Parts, *, say: Callable[[str], None], patience: Patience = PATIENCE) -> None:
        self._parts = parts
        self._say = say
        self._patience = patience
        self._ends: dict[str, list[float]] = {}
        self._due: dict[str, float] = {}

    def look(self, now_s: float) -> None:
        """See who has ended, and start those whose time has come.

        Raises:
            PartKeepsEnding: a part ended too often.
        """
        ended = self._parts.ended()
        for name in self._due.keys() - ended.keys():
            del self._due[name]  # somebody else has started it meanwhile
        for name, code in ended.items():
            if name not in self._due:
                self._plan(name, code, now_s)
        for name, due_s in sorted(self._due.items()):
            if due_s <= now_s:
                del self._due[name]
                try:
                    self._parts.start(name)
                except (OSError, ChainError) as error:
                    self._say(f"{name} cannot be started: {error}")
                else:
                    self._say(f"{name} is started again")

    def _plan(self, name: str, code: int, now_s: float) -> None:
        kept = self._ends.get(name, [])[-self._patience.ends_max :]
        self._ends[name] = [*kept, now_s]
        step = after_an_end(self._ends[name], patience=self._patience)
        if isinstance(step, GiveUp):
            raise PartKeepsEnding(
                f"{name} does not stay up ({_how(code)}; {step.because}), so all of it is stopped; "
                f"{self._parts.log_file(name)} ends with:\n{self._parts.log_tail(name)}"
            )
        self._due[name] = now_s + step.after_s
        self._say(
            f"{name} ended by itself ({_how(code)}): it is started again in {step.after_s:g} s "
            f"({step.ends} of {self._patience.ends_max} times in {self._patience.window_s:g} s); "
            f"see {self._parts.log_file(name)}"
        )


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
