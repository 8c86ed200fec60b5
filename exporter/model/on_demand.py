"""Tenants on demand: Deployments and containers that opted in to the demand gate. Pure."""

from dataclasses import dataclass
from typing import Final

from exporter.model.unknown import Unknown

DEPLOYMENT: Final = "deployment"
"""Kind of a Deployment."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The GPU memory that a tenant needs, and where. Without `gpu`, any GPU of the host."""

    needed_bytes: int
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class OnDemandTenant:
    """A Deployment or container that opted in.

    Attributes:
        kind: docker, podman or deployment.
        handle: the container's id, or NAMESPACE/DEPLOYMENT.
        on: a replica is wanted, or the container runs.
        demand: or why it is invalid.
        members: ids of its running containers.
    """

    kind: str
    handle: str
    name: str
    on: bool
    demand: Demand | Unknown
    members: frozenset[str]
