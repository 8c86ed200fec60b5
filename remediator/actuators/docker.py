"""Containers of this host's own engine, by full id. The label `gpuwarden.managed=true` opts one in.

The engine is Docker, or Podman, which answers the same calls at a socket of its own (`podman system service`). What is
read here it tells in the same words: also there a container is `exited` only once it was told to stop, and what its
restart policy is about to bring back is `stopped`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
"""The label by which a container's owner opts in; its value must be `true`."""

KEPT_UP: Final = frozenset({"always", "unless-stopped"})
"""Restart policies under which an engine restarts what ends, however it ends, unless it was told to stop it."""

TIMEOUT_S: Final = 10
"""How long the engine may take to answer, beyond a stop's own grace, seconds."""

# To look for a proxy, the HTTP library below sets and unsets variables of the environment: two threads at it fail one
# another. A socket has no proxy, but a client asks for the engine's version before it can be told so.
_CONNECTING: Final = threading.Lock()


class DockerActuator:
    """Looks at, stops and starts containers of one engine, of a kind in `ENGINES`."""

    def __init__(self, base_url: str, *, kind: str = "docker") -> None:
        self._base_url = base_url
        self._kind = kind
        self._name = ENGINES[kind]

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        """See `Actuator.look`."""
        with self._client(TIMEOUT_S) as client:
            try:
                found: dict[str, Any] = client.inspect_container(handle)
            except NotFound:
                return self._left(handle, cgroup)
        state, host_config = found["State"], found.get("HostConfig") or {}
        running = bool(state.get("Running") or state.get("Restarting")) and bool(state.get("Pid"))
        group = self._group(state["Pid"], found["Id"]) if running else (Path(cgroup) if cgroup else None)
        return ContainerState(
            kind=self._kind,
            handle=found["Id"],
            name=found["Name"].removeprefix("/"),
            incarnation=f"{found['Id']}@{state['StartedAt']}",
            running=running,
            managed=(found["Config"].get("Labels") or {}).get(LABEL) == "true",
            pids=frozenset() if group is None else _processes(handle, group),
            cgroup=None if group is None else str(group),
            paused=bool(state.get("Paused")),
            vanishes=bool(host_config.get("AutoRemove")),
            left_down=state.get("Status") == "exited"
            and (host_config.get("RestartPolicy") or {}).get("Name") in KEPT_UP,
        )

    def _left(self, handle: str, cgroup: str | None) -> ContainerState | None:
        """What is left of a container that its engine has forgotten, as one does whose disk was emptied."""
        pids = _processes(handle, Path(cgroup)) if cgroup else frozenset()
        if not pids:
            return None
        return ContainerState(
            kind=self._kind, handle=handle, name=handle[:12], incarnation="", running=False, managed=False, pids=pids,
            cgroup=cgroup,
        )  # fmt: skip

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`. The engine's own restart policy leaves a container alone that was stopped so."""
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
            # Asked outside the lock: an engine that hangs holds up its own containers only.
            client._version = client.version(api_version=False)["ApiVersion"]  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
            yield client
        except NotFound as error:
            raise ActuatorError(f"the container is gone: {error.explanation}") from error
        except APIError as error:
            raise ActuatorError(f"{self._name} refused: {error.explanation or error}") from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise ActuatorError(f"{self._name} at {self._base_url} does not answer: {str(error)[:300]}") from error
        finally:
            if client is not None:
                client.close()

    def _group(self, pid: int, container: str) -> Path:
        """The cgroup of a container that runs; without it nobody can tell its processes, nor see it dead."""
        try:
            group = cgroups.directory(pid, container)
        except OSError as error:
            raise ActuatorError(f"the cgroup of container {container} cannot be read: {error}") from error
        if group is None:
            because = f"it is ending, or {self._name} is"
            raise ActuatorError(f"process {pid} is in no cgroup of container {container}: {because}")
        return group


def _processes(handle: str, group: Path) -> frozenset[int]:
    try:
        return cgroups.processes(group)
    except OSError as error:
        raise ActuatorError(f"the processes of container {handle} cannot be listed: {error}") from error
