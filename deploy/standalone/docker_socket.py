"""Find the Docker engine of this host by its Unix socket.

`testbed.docker_engine` starts a private one if there is none.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

SYSTEM_SOCKET = Path("/var/run/docker.sock")
_PROBE_TIMEOUT_S = 5


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A reachable engine. Containers of a private one have the network `none` or `host`."""

    base_url: str
    private: bool
    version: str
    kind: Literal["docker", "podman"] = "docker"


@dataclass(frozen=True, kw_only=True)
class NoEngine:
    """No engine was found, with the reason."""

    reason: str


def reachable_engine(env: Mapping[str, str], *, system_socket: Path = SYSTEM_SOCKET) -> Engine | NoEngine:
    """Return the engine of DOCKER_HOST or of the system, if it answers and shares this host's kernel.

    An engine over TCP is ignored: bind mounts, pids and control groups would not match.
    """
    url = env.get("DOCKER_HOST", "")
    if not url.startswith("unix://"):
        url = f"unix://{system_socket}"
    answer = engine_version(url)
    if isinstance(answer, NoEngine):
        return answer
    kernel = os.uname().release
    if answer["KernelVersion"] != kernel:
        return NoEngine(reason=f"the engine at {url} runs on kernel {answer['KernelVersion']}, this host on {kernel}")
    return Engine(base_url=url, private=False, version=answer["Version"])


def engine_version(url: str) -> Mapping[str, str] | NoEngine:
    """Return version and kernel of the engine at `url` (Docker Engine API, GET /version)."""
    path = url.removeprefix("unix://")
    if not Path(path).exists():
        return NoEngine(reason=f"no Docker engine listens at {path}")
    # The docker package's client would leave its socket open if the first answer fails.
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=_PROBE_TIMEOUT_S) as client:
            said = client.get("http://localhost/version").json()
        return {key: str(said[key]) for key in ("Version", "KernelVersion")}
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as problem:
        return NoEngine(reason=f"no valid answer from the Docker engine at {path}: {problem!r}")
