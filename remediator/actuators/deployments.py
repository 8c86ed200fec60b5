"""Deployments, scaled between 0 and 1 by their scale subresource. The handle is NAMESPACE/NAME.

GET   namespaces/NAMESPACE/deployments/NAME/scale
PATCH namespaces/NAMESPACE/deployments/NAME/scale   with the version that was read: nothing changed since
"""

from collections.abc import Callable, Collection
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from kubernetes.client import AppsV1Api

from gpuwarden.kube import api, pods
from gpuwarden.kube.api import KubeError
from remediator.actuators import ActuatorError, NotAllowedError
from remediator.plan import ContainerState
from remediator.reasons import Reason

KIND: Final = "deployment"
"""Kind of a Deployment on demand."""


class DeploymentActuator:
    """Reads and scales the Deployments of some namespaces. `connection` is from `gpuwarden.kube.api.connect`."""

    def __init__(self, connection: Any, *, namespaces: Collection[str]) -> None:
        self._apps = AppsV1Api(connection)
        self._namespaces = frozenset(namespaces)

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:  # noqa: ARG002 - of the protocol
        """See `Actuator.look`. It runs if it wants a replica. Raises NotAllowedError without the right."""
        namespace, name = self._parse(handle)
        try:
            found = self._ask(f"read the scale of Deployment {handle}", self._apps.read_namespaced_deployment_scale,
                              name, namespace)  # fmt: skip
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND and f'"{name}"' in str(error):
                return None
            raise
        replicas = found["spec"].get("replicas", 0)  # the API leaves out 0
        return ContainerState(
            kind=KIND,
            handle=handle,
            name=handle,
            incarnation=str(found["metadata"]["resourceVersion"]),
            running=replicas > 0,
            managed=replicas <= 1,
            refusal=f"it wants {replicas} replicas, and the demand gate only knows 0 and 1",
            pids=frozenset(),
            cgroup=None,
        )

    def stop(self, handle: str, *, grace_s: float) -> None:  # noqa: ARG002 - of the protocol
        """See `Actuator.stop`. The Deployment's own grace period counts."""
        api.retry_conflicts(partial(self._scale, handle, 0))

    def start(self, handle: str) -> None:
        """See `Actuator.start`."""
        api.retry_conflicts(partial(self._scale, handle, 1))

    def _scale(self, handle: str, replicas: int) -> None:
        namespace, name = self._parse(handle)
        before = self.look(handle)
        if before is None:
            raise ActuatorError(f"Deployment {handle} is gone")
        if not before.managed:
            raise ActuatorError(f"Deployment {handle} is not scaled: {before.refusal}")
        if before.running is bool(replicas):
            return
        body = {"metadata": {"resourceVersion": before.incarnation}, "spec": {"replicas": replicas}}
        self._ask(f"scale Deployment {handle} to {replicas}", self._apps.patch_namespaced_deployment_scale,
                  name, namespace, body, _content_type="application/merge-patch+json")  # fmt: skip

    def _parse(self, handle: str) -> tuple[str, str]:
        namespace, _, name = handle.partition("/")
        if not pods.NAME.fullmatch(name) or namespace not in self._namespaces:
            raise ActuatorError(f"{ascii(handle)[:200]} is no Deployment of --demand-gate-namespaces")
        return namespace, name

    def _ask(self, action: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            with api.request(action):
                found = api.read_json(call(*arguments, _preload_content=False, **options))
            return {"metadata": dict(found["metadata"]), "spec": dict(found.get("spec") or {})}
        except KubeError as error:
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise NotAllowedError(Reason.SCALE_FORBIDDEN, str(error)) from None
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise ActuatorError(f"cannot {action}: invalid answer of the Kubernetes API: {error!r}") from None
