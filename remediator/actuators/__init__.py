"""Hands on the things that are freed: look, stop, start. No policy here; every target is named by its full handle.

An actuator touches only what opted in, and the remedy has checked that from `ContainerState.managed` before it asks.
"""

from typing import Final, Protocol

from gpuwarden.errors import GpuwardenError
from remediator.plan import ContainerState

ENGINES: Final = {"docker": "Docker", "podman": "Podman"}
"""The kinds of container that an engine with Docker's API has, and what people call the engine."""


class ActuatorError(GpuwardenError):
    """The engine did not answer, or refused; what was asked may or may not have happened, so look again."""


class Actuator(Protocol):
    """One kind of container."""

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        """The container as it is now; `None` when it is gone for good, and nothing is left in `cgroup`.

        That is where its processes were. While one is left of what its engine does not have any more, it has no
        incarnation.

        Raises:
            ActuatorError: it cannot be told.
        """

    def stop(self, handle: str, *, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`. Returns when it is down; does nothing to one that is.

        Raises:
            ActuatorError: it may still run.
        """

    def start(self, handle: str) -> None:
        """Start it again; does nothing to one that runs.

        Raises:
            ActuatorError: it may not run.
        """
