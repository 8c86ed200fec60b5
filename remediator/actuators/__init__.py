"""Actuators inspect, stop and start containers, named by their full handle. They hold no policy."""

from collections.abc import Collection
from typing import Final, Protocol, runtime_checkable

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import Condition
from remediator.plan import ContainerState
from remediator.reasons import Reason

ENGINES: Final = {"docker": "Docker", "podman": "Podman"}
"""Engines with Docker's API, by kind of container."""


class ActuatorError(GpuwardenError):
    """The engine failed or refused. The action may still have happened."""


class NotAllowedError(ActuatorError):
    """The engine does not allow the action now. Nothing happened."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Actuator(Protocol):
    """One kind of container."""

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        """Read its state; `None` if it is gone and no process is left in `cgroup`.

        If only processes are left, the incarnation is empty. Raises ActuatorError if unknown.
        """

    def stop(self, handle: str, *, grace_s: float) -> None:
        """Stop it, and kill it after `grace_s` seconds. Raises ActuatorError if it may still run."""

    def start(self, handle: str) -> None:
        """Start it, unless it runs. Raises ActuatorError if it may not run."""


@runtime_checkable
class Announces(Protocol):
    """Containers that learn why they are stopped."""

    def announce(self, handle: str, *, condition: Condition, acts: bool, message: str) -> None:
        """Say why it is stopped, or in dry run would be. Raises ActuatorError if that cannot be said."""


@runtime_checkable
class Evicts(Protocol):
    """Containers that end for ever when they are stopped. A controller creates the next one."""

    def check_stop(self, handle: str) -> None:
        """Ask whether a stop is allowed now. Raises NotAllowedError if not, ActuatorError if unknown."""

    def list_others(self, handle: str) -> frozenset[str] | None:
        """List the other containers of its controller now; `None` without a controller.

        Raises ActuatorError if unknown.
        """

    def list_pids(self, handle: str) -> frozenset[int]:
        """List all processes that a stop ends. Raises ActuatorError if unknown."""

    def find_successor(self, handle: str, *, others: Collection[str]) -> ContainerState | None:
        """Find the container that replaces it and is none of `others`. Raises ActuatorError if unknown."""
