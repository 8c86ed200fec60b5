"""Deployments that opted in to the demand gate of this node."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from exporter.evidence import demand_gate
from exporter.model.on_demand import DEPLOYMENT, OnDemandTenant
from exporter.model.snapshot import SourceHealth
from gpuwarden.kube import api as kube
from gpuwarden.kube import pods

TIMEOUT_S: Final = 5.0
"""Timeout of a listing, seconds."""


class Deployments:
    """Lists the Deployments of some namespaces. `client` is a `kubernetes.client.ApiClient`.

    A failure costs only the tenants on demand.
    """

    def __init__(self, client: Any, *, node: str, namespaces: Sequence[str]) -> None:
        from kubernetes.client import AppsV1Api  # noqa: PLC0415 - slow, and only for this source

        self._apps = AppsV1Api(client)
        self._node = node
        self._namespaces = namespaces
        self._answered_unix_s: float | None = None

    def read(self, members: Mapping[str, frozenset[str]]) -> tuple[tuple[OnDemandTenant, ...], SourceHealth]:
        """List them once. `members` are the ids of running containers by NAMESPACE/DEPLOYMENT."""
        began_s, message = time.monotonic(), None
        found: list[OnDemandTenant] = []
        try:
            for namespace in self._namespaces:
                found += self._list(namespace, members)
            self._answered_unix_s = time.time()
        except Exception as error:  # noqa: BLE001 - an invalid answer must not cost the pods
            found, message = [], f"{type(error).__name__}: {error}"
        health = SourceHealth(
            source="deployments",
            success=message is None,
            duration_s=time.monotonic() - began_s,
            message=message,
            succeeded_unix_s=self._answered_unix_s,
        )
        return tuple(found), health

    def _list(self, namespace: str, members: Mapping[str, frozenset[str]]) -> Iterator[OnDemandTenant]:
        with kube.request(f"list the Deployments of {namespace}"):
            found = kube.read_json(
                # Version 0 is answered from the server's cache.
                self._apps.list_namespaced_deployment(
                    namespace, resource_version="0", _preload_content=False, _request_timeout=TIMEOUT_S
                )
            )
        for each in found["items"]:
            about = each["metadata"]
            demand = demand_gate.parse_annotations(about.get("annotations") or {}, node=self._node)
            if demand is not None:
                name = f"{about['namespace']}/{about['name']}"
                yield OnDemandTenant(
                    kind=DEPLOYMENT,
                    handle=name,
                    name=name,
                    on=each["spec"].get("replicas", 1) > 0,
                    demand=demand,
                    members=members.get(name, frozenset()),
                )


def deployment_of(metadata: Mapping[str, Any]) -> str | None:
    """The Deployment of a pod, by its ReplicaSet, which has the name of the Deployment and the pod's hash."""
    owner = pods.controller(metadata)
    version = (metadata.get("labels") or {}).get("pod-template-hash")
    if owner is None or owner[0] != "ReplicaSet" or not version or not owner[1].endswith(f"-{version}"):
        return None
    return owner[1].removesuffix(f"-{version}")
