"""Container engine for tests and demo.

A reachable engine of this host is used unchanged. Otherwise root gets a private engine, from PATH or `.parts`. It is
removed afterwards, even if the caller is killed (see `private_engine`). Podman is always private.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deploy.standalone import debian_packages
from deploy.standalone.docker_socket import Engine, NoEngine, engine_version, reachable_engine
from testbed import private_engine, private_podman

__all__ = ["Engine", "EngineNotStopped", "NoEngine", "docker_engine", "podman_engine", "reachable_engine"]

READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = private_engine.SWEEP_TIMEOUT_S + 10
_POLL_S = 0.02


class EngineNotStopped(Exception):  # noqa: N818 - it reads as what happened
    """A private engine was not removed completely. The message names the rest."""


@contextmanager
def docker_engine(work: Path) -> Iterator[Engine | NoEngine]:
    """Yield a Docker engine, or the reason why there is none.

    `work` holds the private engine's data (removed) and log (`dockerd.log`, kept). One engine runs in it at a time, and
    leftovers of a killed one are removed first. Raises EngineNotStopped if something is left at the end.
    """
    reachable = reachable_engine(os.environ)
    if isinstance(reachable, Engine):
        yield reachable
        return
    if os.geteuid() != 0:
        yield NoEngine(reason=f"{reachable.reason}, and only root may start a private engine")
        return
    try:
        found = {program: debian_packages.find(program) for program in debian_packages.ENGINE_PROGRAMS}
    except debian_packages.PartMissing as missing:
        yield NoEngine(reason=f"{reachable.reason}, and a private engine cannot be started: {missing}")
        return
    paths = private_engine.EnginePaths.of(work)
    with _private_engine(paths, found["dockerd"], debian_packages.env_for_parts()) as started:
        yield started


@contextmanager
def podman_engine(work: Path) -> Iterator[Engine | NoEngine]:
    """As `docker_engine`, but with a private Podman's Docker API. Its log is `podman.log`."""
    if os.geteuid() != 0:
        yield NoEngine(reason="only root may start a private Podman")
        return
    try:
        podman, conmon, runc = (debian_packages.find(program) for program in (*debian_packages.PODMAN_PROGRAMS, "runc"))
    except debian_packages.PartMissing as missing:
        yield NoEngine(reason=f"a private Podman cannot be started: {missing}")
        return
    work.mkdir(parents=True, exist_ok=True)
    paths = private_engine.EnginePaths.of(work, "podman")
    env = private_podman.environment(paths, podman, runc, conmon)
    with _private_engine(paths, podman, env) as started:
        yield replace(started, kind="podman") if isinstance(started, Engine) else started


@contextmanager
def _private_engine(
    paths: private_engine.EnginePaths, program: Path, env: dict[str, str]
) -> Iterator[Engine | NoEngine]:
    paths.work.mkdir(parents=True, exist_ok=True)
    checkout = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, env.get("PYTHONPATH")]))
    with paths.log.open("ab") as log:
        guardian = subprocess.Popen(
            [sys.executable, "-m", private_engine.__name__, str(paths.work), paths.program, str(program)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # Ctrl-C reaches only this process, which then stops the guardian.
            start_new_session=True,
        )
    try:
        yield _wait_until_ready(guardian, paths)
    finally:
        _stop(guardian, paths)


def _wait_until_ready(guardian: subprocess.Popen[bytes], paths: private_engine.EnginePaths) -> Engine | NoEngine:
    url = f"unix://{paths.socket}"
    give_up = time.monotonic() + READY_TIMEOUT_S
    reason = "the guardian is still busy"
    # Before the guardian has started its dockerd, another run may answer at this socket.
    began = _first_line(guardian, READY_TIMEOUT_S)
    while time.monotonic() < give_up:
        if began == b"" or guardian.poll() is not None:
            return NoEngine(reason=f"the private engine exited: {_last_line(paths.log)}")
        answer = engine_version(url)
        if not isinstance(answer, NoEngine):
            return Engine(base_url=url, private=True, version=answer["Version"])
        reason = answer.reason
        time.sleep(_POLL_S)
    return NoEngine(reason=f"the private engine was not ready after {READY_TIMEOUT_S} s: {reason}")


def _first_line(guardian: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """First line of the guardian; empty if it ended, None after the timeout."""
    said = guardian.stdout
    return said.readline() if said and select.select([said], [], [], timeout_s)[0] else None


def _stop(guardian: subprocess.Popen[bytes], paths: private_engine.EnginePaths) -> None:
    """End the guardian's standard input and wait for its cleanup."""
    try:
        # A line, because a forked child may hold the pipe open and so hide its end.
        guardian.communicate(b"stop\n", timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.communicate()
        raise EngineNotStopped(
            f"the private engine's guardian did not finish in {STOP_TIMEOUT_S} s and was killed; data is left in "
            f"{paths.data} and {paths.run}, and the next engine in {paths.work} removes them"
        ) from None
    if guardian.returncode == private_engine.SWEEP_FAILED:
        raise EngineNotStopped(f"the private engine was not removed completely: {_last_line(paths.log)}")
    if guardian.returncode < 0:
        raise EngineNotStopped(
            f"the private engine's guardian was killed by signal {-guardian.returncode}; the next engine in "
            f"{paths.work} removes the rest"
        )


def _last_line(log: Path) -> str:
    """Last line of dockerd's log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else f"{log} is empty"
