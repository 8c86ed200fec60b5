"""Which containers run: Docker's, asked by a thread of its own so that a hung daemon holds up nothing else."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import APIError

from exporter.readings import Container
from gpuwarden import cgroup

REFRESH_S: Final = 1.0
"""How often the daemon is asked for its running containers, seconds."""

TIMEOUT_S: Final = 5
"""How long the daemon may take to answer, seconds."""

FRESH_S: Final = 10.0
"""A listing older than this is no longer believed, seconds."""

CDI_GPU: Final = "nvidia.com/gpu="
"""How `docker run --device` names a GPU, before its index, UUID or `all` (Container Device Interface)."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The running containers at one moment, by full id."""

    containers: dict[str, Container]
    taken_s: float
    duration_s: float


class DockerContainers:
    """Keeps a recent listing of one Docker daemon's running containers."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._listing: Listing | None = None
        self._because = "not asked yet"
        self._known: dict[str, tuple[int, int, Container]] = {}
        self._asked = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._refresh_on, name="docker", daemon=True)

    def start(self) -> None:
        """Begin to ask; returns with the first answer, or after a second without one."""
        self._thread.start()
        self._asked.wait(REFRESH_S)

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        self._thread.join(timeout=TIMEOUT_S)

    def latest(self) -> Listing:
        """The newest listing.

        Raises:
            OSError: there is none, or it is too old to believe; the message says why.
        """
        listing = self._listing
        if listing is None or time.monotonic() - listing.taken_s > FRESH_S:
            raise OSError(f"Docker at {self._base_url} does not answer: {self._because}")
        return listing

    def _refresh_on(self) -> None:
        client: docker.APIClient | None = None
        while not self._closing.is_set():
            started_s = time.monotonic()
            try:
                if client is None:
                    client = _connect(self._base_url)
                containers = self._list(client)
                taken_s = time.monotonic()
                self._listing = Listing(containers=containers, taken_s=taken_s, duration_s=taken_s - started_s)
            except Exception as error:  # noqa: BLE001 - an answer that makes no sense must not end the thread for good
                self._because = f"{type(error).__name__}: {error}"[:300]
                if client is not None:
                    with contextlib.suppress(Exception):
                        client.close()
                client = None
            self._asked.set()
            self._closing.wait(REFRESH_S)

    def _list(self, client: docker.APIClient) -> dict[str, Container]:
        """A container whose name and first process are unchanged is not inspected again; one that fails is left out."""
        known: dict[str, tuple[int, int, Container]] = {}
        for row in client.containers():
            full_id: str = row["Id"]
            before = self._known.get(full_id)
            if before is None or f"/{before[2].name}" not in row["Names"] or _ticks(before[0]) != before[1]:
                try:
                    fresh = _container(client.inspect_container(full_id))
                except (APIError, LookupError, TypeError):
                    continue
                ticks = None if fresh is None else _ticks(fresh.pid)
                if fresh is None or ticks is None:
                    continue
                before = (fresh.pid, ticks, fresh)
            known[full_id] = before
        self._known = known
        return {full_id: entry[2] for full_id, entry in known.items()}


def _connect(base_url: str) -> docker.APIClient:
    """A client that speaks the daemon's own version of its API.

    The package's client leaves its socket open when the daemon refuses it, and when it is to find the version by itself
    and gets no answer: once a second for as long as the daemon is away. So both are tried by what is surely closed.
    """
    if base_url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(TIMEOUT_S)
            probe.connect(base_url.removeprefix("unix://"))
    first = docker.APIClient(base_url=base_url, timeout=TIMEOUT_S, version=DEFAULT_DOCKER_API_VERSION)
    try:
        version: str = first.version(api_version=False)["ApiVersion"]
    finally:
        first.close()
    return docker.APIClient(base_url=base_url, timeout=TIMEOUT_S, version=version)


def _ticks(pid: int) -> int | None:
    try:
        return cgroup.start_ticks(pid)
    except OSError:
        return None


def _container(found: dict[str, Any]) -> Container | None:
    state = found["State"]
    if not state.get("Running") or not state.get("Pid"):
        return None
    return Container(
        kind="docker",
        id=found["Id"],
        name=found["Name"].removeprefix("/"),
        incarnation=f"{found['Id']}@{state['StartedAt']}",
        pid=state["Pid"],
        gpu_request=_gpu_request(found),
        image=found["Config"].get("Image"),
    )


def _gpu_request(found: dict[str, Any]) -> tuple[str, ...] | None:
    """Which GPUs Docker was asked to give: --gpus or --device (device requests), else what the NVIDIA runtime reads."""
    for request in found["HostConfig"].get("DeviceRequests") or []:
        ids = request.get("DeviceIDs") or []
        by_cdi = tuple(name.removeprefix(CDI_GPU) for name in ids if name.startswith(CDI_GPU))
        if by_cdi:
            return by_cdi
        if any("gpu" in group for group in request.get("Capabilities") or []):
            return tuple(ids) or ("all",)
    for entry in found["Config"].get("Env") or []:
        name, _, value = entry.partition("=")
        if name == "NVIDIA_VISIBLE_DEVICES":
            return visible_devices(value)
    return None


def visible_devices(value: str) -> tuple[str, ...] | None:
    """NVIDIA_VISIBLE_DEVICES as the NVIDIA container runtime reads it: a list, `all`, or `none`, `void` and empty."""
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    return None if not names or names in (("none",), ("void",)) else names
