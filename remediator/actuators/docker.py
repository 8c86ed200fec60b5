"""Containers of Docker or Podman, by full id. The label `gpuwarden.managed=true` opts in.

Podman answers the same API (`podman system service`). In both, `exited` means that a stop was requested; a container
that its restart policy is about to start is `stopped`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import docker
import requests
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import APIError, DockerException, NotFound

from gpuwarden import cgroup as cgroups
from remediator.actuators import ENGINES, ActuatorError
from remediator.plan import ContainerState

LABEL: Final = "gpuwarden.managed"
"""The owner sets this label to `true` to opt in."""

KEPT_UP: Final = frozenset({"always", "unless-stopped"})
"""Policies that restart a container after every exit, except a requested stop."""

_SHARED: Final = ("NetworkMode", "PidMode", "IpcMode")
"""Settings that may name another container."""

TIMEOUT_S: Final = 10
"""Timeout of an engine call, without the grace period of a stop, seconds."""

# The HTTP library changes environment variables while it looks for a proxy, so two threads must not connect at once.
_CONNECTING: Final = threading.Lock()


class DockerActuator:
    """Inspects, stops and starts containers of one engine in `ENGINES`."""

    def __init__(self, base_url: str, *, kind: str = "docker") -> None:
        self._base_url = base_url
        self._kind = kind
        self._name = ENGINES[kind]

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        """See `Actuator.look`."""
        with self._client(TIMEOUT_S) as client:
            found = _inspect(client.inspect_container, handle)
            if found is None:
                return self._left(handle, cgroup)
            state, host_config = found["State"], found.get("HostConfig") or {}
            running = bool(state.get("Running") or state.get("Restarting")) and bool(state.get("Pid"))
            managed = (found["Config"].get("Labels") or {}).get(LABEL) == "true"
            unstartable = _missing_for_start(client, found, host_config) if running and managed else ""
        group = self._group(state["Pid"], found["Id"]) if running else (Path(cgroup) if cgroup else None)
        return ContainerState(
            kind=self._kind,
            handle=found["Id"],
            name=found["Name"].removeprefix("/"),
            incarnation=f"{found['Id']}@{state['StartedAt']}",
            running=running,
            managed=managed,
            pids=frozenset() if group is None else _processes(handle, group),
            cgroup=None if group is None else str(group),
            paused=bool(state.get("Paused")),
            vanishes=bool(host_config.get("AutoRemove")),
            unstartable=unstartable,
            left_down=state.get("Status") == "exited"
            and (host_config.get("RestartPolicy") or {}).get("Name") in KEPT_UP,
        )

    def _left(self, handle: str, cgroup: str | None) -> ContainerState | None:

        pids = _processes(handle, Path(cgroup)) if cgroup else frozenset()
        if not pids:
            return None
        return ContainerState(
            kind=self._kind, handle=handle, name=handle[:12], incarnation="", running=False, managed=False, pids=pids,
            cgroup=cgroup,
        )  # fmt: skip

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`."""
        with self._client(TIMEOUT_S + grace_s) as client:
            client.stop(handle, timeout=round(grace_s))

    def start(self, handle: str) -> None:
        """See `Actuator.start`."""
        with self._client(TIMEOUT_S) as client:
            client.start(handle)

    @contextmanager
    def _client(self, timeout_s: float) -> Iterator[docker.APIClient]:
        client: docker.APIClient | None = None
        try:
            with _CONNECTING:
                client = docker.APIClient(
                    base_url=self._base_url, timeout=round(timeout_s), version=DEFAULT_DOCKER_API_VERSION
                )
            client.trust_env = False
            # Outside the lock: a hung engine must not block others.
            client._version = client.version(api_version=False)["ApiVersion"]  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
            yield client
        except APIError as error:
            raise ActuatorError(f"{self._name} refused: {error.explanation or error}") from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise ActuatorError(f"{self._name} at {self._base_url} is unreachable: {str(error)[:300]}") from error
        finally:
            if client is not None:
                client.close()

    def _group(self, pid: int, container: str) -> Path:

        try:
            group = cgroups.directory(pid, container)
        except OSError as error:
            raise ActuatorError(f"the cgroup of container {container} cannot be read: {error}") from error
        if group is None:
            reason = f"the container or {self._name} is stopping"
            raise ActuatorError(f"process {pid} is in no cgroup of container {container}: {reason}")
        return group


def _inspect(ask: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Inspect a container or image; `None` if it is gone, by a 404 that names it."""
    try:
        return ask(name)
    except NotFound as error:
        if name.removeprefix("sha256:") not in str(error.explanation):
            raise
        return None


def _missing_for_start(client: docker.APIClient, found: Mapping[str, Any], host_config: Mapping[str, Any]) -> str:
    """Say what a start of the container would miss."""
    for mode in _SHARED:
        kind, _, partner = (host_config.get(mode) or "").partition(":")
        if kind != "container":
            continue
        shared = f"container {partner[:12]}, whose {mode.removesuffix('Mode').lower()} it shares,"
        other = _inspect(client.inspect_container, partner)
        if other is None:
            return f"{shared} is gone"
        if not other["State"].get("Running"):
            return f"{shared} does not run"
    with suppress(APIError):  # a proxy may not allow images
        if _inspect(client.inspect_image, found["Image"]) is None:
            return f"its image {found['Config'].get('Image') or found['Image']} is gone"
    with suppress(OSError):
        # Fails if the engine has other files than this process.
        Path(found.get("HostnamePath") or "").lstat()
        for device in host_config.get("Devices") or ():
            if not os.path.lexists(device["PathOnHost"]):
                return f"device {device['PathOnHost']} is gone"
    return ""


def _processes(handle: str, group: Path) -> frozenset[int]:
    try:
        return cgroups.processes(group)
    except OSError as error:
        raise ActuatorError(f"the processes of container {handle} cannot be listed: {error}") from error
