"""Actuators inspect, stop and start containers, named by their full handle. They hold no policy."""

from typing import Final, Protocol, runtime_checkable

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import Condition
from remediator.plan import ContainerState

ENGINES: Final = {"docker": "Docker", "podman": "Podman"}
"""Engines with Docker's API, by kind of container."""


class ActuatorError(GpuwardenError):
    """The engine failed or refused. The action may still have happened."""


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
