"""Which Docker engine this host runs already, asked over its Unix socket.

Nothing is started here; `testbed.docker_engine` starts a private one for the tests and the demo where there is none.
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
    """An engine that answers as Docker. On a private one, containers have the network `none` or `host`."""

    base_url: str
    private: bool
    version: str
    kind: Literal["docker", "podman"] = "docker"


@dataclass(frozen=True, kw_only=True)
class NoEngine:
    """There is no engine to be had, and why."""

    because: str


def reachable_engine(env: Mapping[str, str], *, system_socket: Path = SYSTEM_SOCKET) -> Engine | NoEngine:
    """The engine that DOCKER_HOST names or the system runs, if it answers and shares this host's kernel.

    Bind mounts, pids and control groups mean the same on both sides only then, so an engine over TCP is passed by.
    """
    url = env.get("DOCKER_HOST", "")
    if not url.startswith("unix://"):
        url = f"unix://{system_socket}"
    answer = ask(url)
    if isinstance(answer, NoEngine):
        return answer
    kernel = os.uname().release
    if answer["KernelVersion"] != kernel:
        return NoEngine(
            because=f"the engine at {url} runs on the kernel {answer['KernelVersion']}, not on this one, {kernel}"
        )
    return Engine(base_url=url, private=False, version=answer["Version"])


def ask(url: str) -> Mapping[str, str] | NoEngine:
    """What the engine at `url` says of its version (Docker Engine API, GET /version)."""
    path = url.removeprefix("unix://")
    if not Path(path).exists():
        return NoEngine(because=f"no Docker engine listens at {path}")
    # Not the docker package's client, which leaves its socket open when the first answer fails.
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=_PROBE_TIMEOUT_S) as client:
            said = client.get("http://localhost/version").json()
        return {key: str(said[key]) for key in ("Version", "KernelVersion")}
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as problem:
        return NoEngine(because=f"the Docker engine at {path} does not answer as one: {problem!r}")
