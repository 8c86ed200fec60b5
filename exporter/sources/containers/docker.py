"""Containers of Docker, or of Podman, which has the same API."""

import contextlib
import grp
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from requests import RequestException

from exporter.evidence import demand_gate, server_health, vram_budgets
from exporter.model.container import Container, HealthCheck, Probe, Server
from exporter.model.on_demand import OnDemandTenant
from exporter.model.unknown import Unknown
from exporter.sources.containers.docker_events import Events
from exporter.sources.containers.poller import Listener, Listing
from gpuwarden import gpu_names, procfs

REFRESH_S: Final = 1.0

CALM_S: Final = 4.0
"""Seconds between two listings while events show no change. A daemon that hangs is noticed after this time."""

SWIFT_S: Final = 1.0
"""Longest listing before such a pause, seconds: it must stay fresh (`FRESH_S`) until the next one."""

TIMEOUT_S: Final = 5

INSPECT_S: Final = 1.5
"""Timeout of one inspection, seconds."""

INSPECTIONS_S: Final = 2.0
"""Time to inspect running containers in one listing, seconds, and again for the others."""

FRESH_S: Final = 10.0
"""Age up to which a listing counts, seconds."""

DOWN_MAX: Final = 64
"""Stopped containers that are inspected, once a second."""

HEALTH_DEFAULT_NS: Final = 30e9
"""Docker's default interval and timeout."""

DEVICE: Final = re.compile(r"/dev/(nvidia[0-9]+|dri|dri/renderD[0-9]+)")
"""GPUs in `docker run --device`."""


class EngineContainers(Listener):
    """Lists one engine. Mounts of `directory` (`$GPUWARDEN_RUNTIME_DIR`) show which container had a dead worker."""

    def __init__(self, base_url: str, directory: Path | None = None, *, kind: str = "docker") -> None:
        nothing = f"{kind.capitalize()} at {base_url} does not answer"
        super().__init__(kind, failure_prefix=nothing, refresh_s=REFRESH_S, fresh_s=FRESH_S)
        self._base_url = base_url
        self._kind = kind
        self._client: docker.APIClient | None = None
        self._directory = None if directory is None else os.path.realpath(directory)
        self._inspected: dict[str, tuple[int, int, Container]] = {}
        self._tried_s: dict[str, float] = {}
        # Podman reads its events from a file or journal, for each client.
        self._events = Events(lambda: _connect(base_url)) if kind == "docker" else None
        self._is_calm = False

    def close(self) -> None:
        """Stop listing and following."""
        self._closing.set()
        if self._events is not None:
            self._events.close()
        super().close()

    def pause(self) -> None:
        """Wait until the next listing is due."""
        if not self._closing.wait(REFRESH_S) and self._is_calm and self._events is not None:
            self._events.news.wait(CALM_S - REFRESH_S)

    def list_now(self) -> Listing:
        """List once. After a failure the next call uses a new connection.

        Raises:
            OSError: the engine does not answer.
            Exception: its answer is invalid.
        """
        started_s = time.monotonic()
        self._is_calm = False
        followed = self._events is not None and self._events.is_following()
        if self._events is not None:
            self._events.news.clear()  # the listing below includes what happened before
        try:
            client = self._client = self._client or _connect(self._base_url)
            rows = client.containers(all=True)
            taken_s = time.monotonic()
            containers = self._list(client, rows)
            until_s = min(time.monotonic() + INSPECTIONS_S, started_s + _listing_max_s())
            down = self._inspect_stopped(client, rows, until_s)
        except Exception:
            if self._client is not None:
                with contextlib.suppress(Exception):
                    self._client.close()
            self._client = None
            raise
        inspected = {full_id for full_id, tried_s in self._tried_s.items() if tried_s >= started_s}
        # Servers, and containers that failed, need another inspection.
        self._is_calm = followed and inspected <= down.keys() and time.monotonic() - started_s < SWIFT_S
        self._tried_s = {row["Id"]: self._tried_s.get(row["Id"], 0.0) for row in rows}
        return Listing(
            containers=containers,
            down=down,
            taken_s=taken_s,
            duration_s=time.monotonic() - started_s,
            ids=frozenset(row["Id"] for row in rows),
            unseen=tuple(_uninspected_names(rows, containers)),
            whole=all(row["Id"] in containers for row in rows if row.get("State", "running") in _UP),
            on_demand=tuple(_on_demand(rows, self._kind)),
        )

    def _list(self, client: docker.APIClient, rows: list[dict[str, Any]]) -> dict[str, Container]:
        """Inspect running containers that are new or changed, and servers, whose health and address change."""
        until_s = time.monotonic() + INSPECTIONS_S
        up = {row["Id"]: row for row in rows if row.get("State", "running") in _UP}
        known = {full_id: entry for full_id, entry in self._inspected.items() if full_id in up}
        # The longest waiting first, and new ones before all: one that hangs delays the others once per round.
        for full_id in sorted(up, key=lambda each: self._tried_s.get(each, 0.0)):
            before, names = known.pop(full_id, None), up[full_id]["Names"]
            if before is not None and (f"/{before[2].name}" not in names or _ticks(before[0]) != before[1]):
                before = None
            if before is None or before[2].server is not None:
                before = self._inspect_running(client, full_id, until_s, before)
            if before is not None:
                paused = up[full_id].get("State") == "paused"
                known[full_id] = (*before[:2], replace(before[2], paused=paused))
        self._inspected = known
        return {full_id: known[full_id][2] for full_id in up if full_id in known}

    def _inspect_running(
        self, client: docker.APIClient, full_id: str, until_s: float, before: tuple[int, int, Container] | None
    ) -> tuple[int, int, Container] | None:
        """Inspect a running container; returns its first pid with the start, and the container, or else `before`."""
        try:
            found = self._inspect(client, full_id, until_s)
            fresh = None if found is None else _container(found, self._directory, self._kind)
        except (LookupError, TypeError, ValueError):
            return before
        if fresh is None:
            return before
        if before is not None:
            return (*before[:2], fresh) if fresh.pid == before[0] else before
        ticks = _ticks(fresh.pid)
        return None if ticks is None else (fresh.pid, ticks, fresh)

    def _inspect(self, client: docker.APIClient, full_id: str, until_s: float) -> dict[str, Any] | None:
        """Inspect a container; `None` without a result in time."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return None
        self._tried_s[full_id] = time.monotonic()
        client.timeout = min(INSPECT_S, left_s)  # type: ignore[assignment]  # fractions of a second will do
        try:
            found: dict[str, Any] = client.inspect_container(full_id)
        except RequestException:  # an error, a timeout, or a broken connection
            return None
        finally:
            client.timeout = TIMEOUT_S
        return found

    def _inspect_stopped(
        self, client: docker.APIClient, rows: list[dict[str, Any]], until_s: float
    ) -> dict[str, Container]:
        """Inspect stopped containers with a worker's folder, every time: one may have run since."""
        holding = [
            row for row in rows if row.get("State", "running") not in _UP and _folders(row, self._directory)
        ]  # the newest first, as Docker lists them
        down: dict[str, Container] = {}
        for row in sorted(holding[:DOWN_MAX], key=lambda each: self._tried_s.get(each["Id"], 0.0)):
            try:
                found = self._inspect(client, row["Id"], until_s)
                if found is not None and not found["State"].get("Running"):
                    down[found["Id"]] = _identity(found, self._directory, self._kind)
            except (LookupError, TypeError):
                continue
        return down


def _listing_max_s() -> float:
    """Longest listing, seconds: two of them and a pause stay within `FRESH_S`."""
    return (FRESH_S - REFRESH_S) / 2


_UP: Final = frozenset({"running", "paused"})
"""The engine's states of a container with processes."""


def _uninspected_names(rows: list[dict[str, Any]], seen: Mapping[str, Container]) -> Iterator[str]:
    """Names of running containers with a VRAM budget that could not be inspected."""
    for row in rows:
        runs = row.get("State", "running") == "running"  # a paused container is not recycled
        if (
            runs
            and row["Id"] not in seen
            and vram_budgets.is_recycle_candidate(vram_budgets.parse_budget(row.get("Labels") or {}))
        ):
            yield next(iter(row["Names"] or ()), row["Id"]).removeprefix("/")


def _on_demand(rows: list[dict[str, Any]], kind: str) -> Iterator[OnDemandTenant]:
    """Containers, running or not, that opted in to the demand gate."""
    for row in rows:
        demand = demand_gate.parse_labels(row.get("Labels") or {})
        if demand is not None:
            yield OnDemandTenant(
                kind=kind,
                handle=row["Id"],
                name=next(iter(row["Names"] or ()), row["Id"]).removeprefix("/"),
                on=row.get("State", "running") in {*_UP, "restarting"},
                demand=demand,
                members=frozenset({row["Id"]}),
            )


def _connect(base_url: str) -> docker.APIClient:
    """Connect with the daemon's API version.

    docker-py leaks a socket if the daemon refuses it or does not send its version. So both are tried before.
    """
    if base_url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(TIMEOUT_S)
            path = base_url.removeprefix("unix://")
            try:
                probe.connect(path)
            except PermissionError as error:
                hint = f"run the exporter as root{_group_hint(path)}"
                raise PermissionError(error.errno, f"{error.strerror} to open the socket: {hint}") from None
    first = docker.APIClient(base_url=base_url, timeout=TIMEOUT_S, version=DEFAULT_DOCKER_API_VERSION)
    try:
        version: str = first.version(api_version=False)["ApiVersion"]
    finally:
        first.close()
    client = docker.APIClient(base_url=base_url, timeout=TIMEOUT_S, version=version)
    # Otherwise each call looks for a proxy and ~/.netrc.
    client.trust_env = not base_url.startswith("unix://")
    return client


def _group_hint(path: str) -> str:
    """Name the group that may open a socket, such as `docker`."""
    try:
        found = Path(path).stat()
        group = grp.getgrgid(found.st_gid).gr_name
    except (OSError, KeyError):
        return ""
    return f", or as one of the group {group}" if found.st_mode & stat.S_IWGRP and found.st_gid else ""


def _ticks(pid: int) -> int | None:
    try:
        return procfs.start_ticks(pid)
    except OSError:
        return None


def _container(found: dict[str, Any], directory: str | None = None, kind: str = "docker") -> Container | None:
    state = found["State"]
    return _identity(found, directory, kind) if state.get("Running") and state.get("Pid") else None


def _identity(found: dict[str, Any], directory: str | None, kind: str) -> Container:
    state, labels = found["State"], found["Config"].get("Labels") or {}
    return Container(
        kind=kind,
        id=found["Id"],
        name=found["Name"].removeprefix("/"),
        incarnation=f"{found['Id']}@{state['StartedAt']}",
        pid=state.get("Pid") or 0,
        gpu_request=_gpu_request(found),
        image=found["Config"].get("Image"),
        folders=_folders(found, directory),
        server=_server(found),
        paused=bool(state.get("Paused")),
        managed=vram_budgets.is_managed(labels),
        vram_budget=vram_budgets.parse_budget(labels, vanishes=bool(found["HostConfig"].get("AutoRemove"))),
    )


def _server(found: dict[str, Any]) -> Server | None:
    """Parse a container's probe labels, and find its health check and address."""
    probe = server_health.parse_probe_labels(found["Config"].get("Labels") or {})
    if probe is None:
        return None
    health, address = _health(found), _address(found)
    if isinstance(probe, Probe) and probe.kind == "docker" and health is None:
        message = "no health check, or it is disabled: set HEALTHCHECK or --health-cmd"
        probe = Unknown(reason="no_health_check", message=message)
    if isinstance(probe, Probe) and probe.kind == "http" and address is None:
        message = "no address: its network is none or another container's; use gpuwarden.probe=docker"
        probe = Unknown(reason="no_address", message=message)
    return Server(probe=probe, address=address, health=health)


def _address(found: dict[str, Any]) -> str | None:
    """The container's address from its host: its first network's, or loopback in the host's network."""
    if found["HostConfig"].get("NetworkMode") == "host":
        return "127.0.0.1"
    networks = (found.get("NetworkSettings") or {}).get("Networks") or {}
    for _, network in sorted(networks.items()):
        address: str = network.get("IPAddress") or network.get("GlobalIPv6Address") or ""
        if address:
            return address
    return None


def _health(found: dict[str, Any]) -> HealthCheck | None:
    """The last health check result (Docker Engine API, ContainerInspect: State.Health, Config.Healthcheck)."""
    health = found["State"].get("Health") or {}
    status: str = health.get("Status") or "none"
    if status == "none":
        return None
    check = found["Config"].get("Healthcheck") or {}
    each_s = sum((check.get(name) or HEALTH_DEFAULT_NS) / 1e9 for name in ("Interval", "Timeout"))
    log = health.get("Log") or []
    return HealthCheck(
        status=status,
        failing_streak=int(health.get("FailingStreak") or 0),
        newest=str(log[-1]["Start"]) if log else "",
        passed=bool(log) and log[-1]["ExitCode"] == 0,
        fresh_s=2 * each_s + FRESH_S,
    )


def _folders(found: dict[str, Any], directory: str | None) -> tuple[str, ...]:
    """The subdirectories of `$GPUWARDEN_RUNTIME_DIR` that a container mounts."""
    if directory is None:
        return ()
    sources = (os.path.realpath(mount["Source"]) for mount in found.get("Mounts") or [] if mount.get("Source"))
    return tuple(
        os.path.basename(source)  # noqa: PTH119 - paths of the host, as text
        for source in sources
        if os.path.dirname(source) == directory  # noqa: PTH120
    )


def _gpu_request(found: dict[str, Any]) -> tuple[str, ...] | None:
    """The requested GPUs: device requests, or else variables and mounts, and devices (ContainerInspect)."""
    config = found["HostConfig"]
    requests = config.get("DeviceRequests") or []
    paths = [device.get("PathOnHost", "") for device in config.get("Devices") or []]
    devices = [gpu_names.read(path) for path in paths if DEVICE.fullmatch(path)]
    names = [name for request in requests for name in _device_request(request)]
    if not names:
        env = dict(entry.partition("=")[::2] for entry in found["Config"].get("Env") or [])
        mounts = [mount.get("Destination", "") for mount in found.get("Mounts") or []]
        names = list(gpu_names.of_container(env, mounts) or ())
        if names == [gpu_names.ALL] and any(name.isdecimal() for name in devices):
            names = []  # NVIDIA's images set the variable
    return tuple(dict.fromkeys([*names, *devices])) or None


def _device_request(request: dict[str, Any]) -> list[str]:
    """The GPUs of one request. Docker gives the first ones for a count (moby, daemon/nvidia_linux.go)."""
    ids = request.get("DeviceIDs") or []
    by_cdi = [name for each in ids if (name := gpu_names.read_cdi(each))]
    if by_cdi or not any("gpu" in group for group in request.get("Capabilities") or []):
        return by_cdi
    count = request.get("Count") or 0
    return [gpu_names.read(each) for each in ids] or ([gpu_names.ALL] if count < 0 else [str(n) for n in range(count)])
