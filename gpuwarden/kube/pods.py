"""Names of containers in pods, and which pods may be evicted. Pure.

Labels of a pod:

    gpuwarden/managed              `true`: it may be evicted
    gpuwarden/vram-protected       any value but `false`: never for its memory
    gpuwarden/without-controller   `true`: also without a controller
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, Self

KIND: Final = "kubernetes"
"""Kind of a pod's container."""

MANAGED_LABEL: Final = "gpuwarden/managed"
PROTECTED_LABEL: Final = "gpuwarden/vram-protected"
ALONE_LABEL: Final = "gpuwarden/without-controller"

MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""On static pods."""

NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""As in RFC 1123."""

_HANDLE: Final = re.compile(r"([^ /]+)/([A-Za-z0-9]+)/([^ /]+) ([^ /]+) ([^ /]+) ([^ /]+)")
_NO_CONTROLLER: Final = "Pod"


class Handle(NamedTuple):
    """A container of one pod, as `NAMESPACE/KIND/CONTROLLER POD UID CONTAINER`. Its first word survives an eviction."""

    namespace: str
    kind: str
    owner: str
    pod: str
    uid: str
    container: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.kind}/{self.owner} {self.pod} {self.uid} {self.container}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a valid handle."""
        found = _HANDLE.fullmatch(text)
        if found is None or not all(NAME.fullmatch(found[each]) for each in (1, 3, 4, 5, 6)):
            return None
        return cls(*found.groups())

    @classmethod
    def of(cls, container: str, incarnation: str) -> Self | None:
        """The handle of a container, as the exporter names it, if it is in a pod."""
        namespace, _, rest = container.partition("/")
        pod, _, name = rest.partition("/")
        uid = incarnation.partition("@")[0]
        return cls.parse(f"{namespace}/{_NO_CONTROLLER}/{pod} {pod} {uid} {name}")

    @property
    def name(self) -> str:
        """The container's name."""
        return container_name(self.namespace, self.pod, self.container)

    @property
    def is_alone(self) -> bool:
        """Whether no controller is known."""
        return self.kind == _NO_CONTROLLER


def container_name(namespace: str, pod: str, container: str) -> str:
    """Join the names."""
    return f"{namespace}/{pod}/{container}"


def incarnation(uid: str, container_id: str, restarts: int) -> str:
    """Join the ids."""
    return f"{uid}@{container_id}@{restarts}"


def controller(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Its kind and name."""
    for each in metadata.get("ownerReferences") or ():
        if each.get("controller"):
            return each["kind"], each["name"]
    return None


def refusal(metadata: Mapping[str, Any], namespaces: Collection[str]) -> str:
    """Why a pod may not be evicted, by its ObjectMeta; or ""."""
    labels, owner = metadata.get("labels") or {}, controller(metadata)
    if MIRROR_ANNOTATION in (metadata.get("annotations") or {}) or (owner is not None and owner[0] == "Node"):
        return "it is a static pod, which only its kubelet can end"
    if labels.get(MANAGED_LABEL) != "true":
        return f"its label {MANAGED_LABEL} is not true"
    if metadata["namespace"] not in namespaces:
        return f"--pod-namespaces does not list its namespace {metadata['namespace']}"
    if owner is None and labels.get(ALONE_LABEL) != "true":
        return f"no controller would replace it; the label {ALONE_LABEL}=true allows its eviction"
    return ""


def is_protected(metadata: Mapping[str, Any]) -> bool:
    """Whether a pod is never evicted for its memory."""
    labels: Mapping[str, str] = metadata.get("labels") or {}
    return labels.get(PROTECTED_LABEL, "false") != "false"
