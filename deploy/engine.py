"""Chooses the Docker engine that the tests and the demo use.

A reachable engine on this host is used as it is, and left as it is. Otherwise root gets a private one, from PATH or
`.parts`, that touches nothing of the system's and is gone afterwards, even when the caller is killed (see
`private_engine`). Otherwise there is none, and the answer says why.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from deploy import parts, private_engine

READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = private_engine.SWEEP_TIMEOUT_S + 10
SYSTEM_SOCKET = Path("/var/run/docker.sock")
_PROBE_TIMEOUT_S = 5
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A Docker engine that answers. On a private one, containers have the network `none` or `host`."""

    base_url: str
    private: bool
    version: str


@dataclass(frozen=True, kw_only=True)
class NoEngine:
    """There is no engine to be had, and why."""

    because: str


class EngineNotStopped(Exception):  # noqa: N818 - it reads as what happened
    """A private engine could not be removed altogether. The message says what is left."""


@contextmanager
def docker_engine(work: Path) -> Iterator[Engine | NoEngine]:
    """A Docker engine on this host for the time of the block, or the reason there is none.

    `work` is a folder for the private engine's data (removed) and log (`dockerd.log`, kept); one engine at a time runs
    in it, and what a killed one left there is swept first. Raises EngineNotStopped on leaving when something stays.
    """
    reachable = reachable_engine(os.environ)
    if isinstance(reachable, Engine):
        yield reachable
        return
    if os.geteuid() != 0:
        yield NoEngine(because=f"{reachable.because}, and only root may start a private engine")
        return
    try:
        found = {program: parts.find(program) for program in parts.ENGINE_PROGRAMS}
    except parts.PartMissing as missing:
        yield NoEngine(because=f"{reachable.because}, and a private engine cannot be started: {missing}")
        return
    with _private_engine(work, found["dockerd"]) as started:
        yield started


def reachable_engine(env: Mapping[str, str], *, system_socket: Path = SYSTEM_SOCKET) -> Engine | NoEngine:
    """The engine that DOCKER_HOST names or the system runs, if it answers and shares this host's kernel.

    Bind mounts, pids and control groups mean the same on both sides only then, so an engine over TCP is passed by.
    """
    url = env.get("DOCKER_HOST", "")
    if not url.startswith("unix://"):
        url = f"unix://{system_socket}"
    answer = _ask(url)
    if isinstance(answer, NoEngine):
        return answer
    kernel = os.uname().release
    if answer["KernelVersion"] != kernel:
        return NoEngine(
            because=f"the engine at {url} runs on the kernel {answer['KernelVersion']}, not on this one, {kernel}"
        )
    return Engine(base_url=url, private=False, version=answer["Version"])


def _ask(url: str) -> Mapping[str, str] | NoEngine:
    """What the engine at `url` says of its version (Docker Engine API, GET /version)."""
    path = url.removeprefix("unix://")
    if not Path(path).exists():
        return NoEngine(because=f"no Docker engine listens at {path}")
    # Not the docker package's client, which leaves its socket open when the first answer fails.
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/version")
        said = json.load(connection.getresponse())
        return {key: str(said[key]) for key in ("Version", "KernelVersion")}
    except (OSError, HTTPException, ValueError, TypeError, KeyError) as problem:
        return NoEngine(because=f"the Docker engine at {path} does not answer as one: {problem!r}")
    finally:
        connection.close()


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_PROBE_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextmanager
def _private_engine(work: Path, dockerd: Path) -> Iterator[Engine | NoEngine]:
    work.mkdir(parents=True, exist_ok=True)
    places = private_engine.Places.of(work)
    env = parts.env_for_parts()
    checkout = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, env.get("PYTHONPATH")]))
    with places.log.open("ab") as log:
        guardian = subprocess.Popen(
            [sys.executable, "-m", private_engine.__name__, str(places.work), str(dockerd)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C reaches this process alone, which then tells the guardian in good order.
            start_new_session=True,
        )
    try:
        yield _wait_until_ready(guardian, places)
    finally:
        _stop(guardian, places)


def _wait_until_ready(guardian: subprocess.Popen[bytes], places: private_engine.Places) -> Engine | NoEngine:
    url = f"unix://{places.socket}"
    give_up = time.monotonic() + READY_TIMEOUT_S
    because = "its guardian is still sweeping or waiting"
    # Until the guardian has started its own dockerd, what answers at this socket may be another run's.
    began = _first_line(guardian, READY_TIMEOUT_S)
    while time.monotonic() < give_up:
        if began == b"" or guardian.poll() is not None:
            return NoEngine(because=f"the private Docker engine ended at once: {_last_line(places.log)}")
        answer = _ask(url)
        if not isinstance(answer, NoEngine):
            return Engine(base_url=url, private=True, version=answer["Version"])
        because = answer.because
        time.sleep(_POLL_S)
    return NoEngine(because=f"the private Docker engine was not ready after {READY_TIMEOUT_S} s: {because}")


def _first_line(guardian: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """What the guardian says first: a line, nothing when it ended, None when it keeps silent."""
    said = guardian.stdout
    return said.readline() if said and select.select([said], [], [], timeout_s)[0] else None


def _stop(guardian: subprocess.Popen[bytes], places: private_engine.Places) -> None:
    """Tell the guardian to go by ending its standard input, and wait until it has swept."""
    try:
        # A line, because a forked child of ours may hold the pipe open too: its end alone would not be heard.
        guardian.communicate(b"stop\n", timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.communicate()
        raise EngineNotStopped(
            f"the private engine's guardian was still busy after {STOP_TIMEOUT_S} s and was killed; its data is in "
            f"{places.data} and {places.run}, and the next engine in {places.work} sweeps them"
        ) from None
    if guardian.returncode == private_engine.SWEEP_FAILED:
        raise EngineNotStopped(f"the private engine left something behind: {_last_line(places.log)}")
    if guardian.returncode < 0:
        raise EngineNotStopped(
            f"the private engine's guardian was killed by signal {-guardian.returncode}; the next engine in "
            f"{places.work} sweeps what it left"
        )


def _last_line(log: Path) -> str:
    """The last line of dockerd's log, or that there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else f"{log} is empty"
