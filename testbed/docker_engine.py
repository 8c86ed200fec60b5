"""Chooses the engine that the tests and the demo use.

A reachable engine on this host is used as it is, and left as it is. Otherwise root gets a private one, from PATH or
`.parts`, that touches nothing of the system's and is gone afterwards, even when the caller is killed (see
`private_engine`). Otherwise there is none, and the answer says why. A Podman is always a private one.
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
        found = {program: debian_packages.find(program) for program in debian_packages.ENGINE_PROGRAMS}
    except debian_packages.PartMissing as missing:
        yield NoEngine(because=f"{reachable.because}, and a private engine cannot be started: {missing}")
        return
    places = private_engine.Places.of(work)
    with _private_engine(places, found["dockerd"], debian_packages.env_for_parts()) as started:
        yield started


@contextmanager
def podman_engine(work: Path) -> Iterator[Engine | NoEngine]:
    """As `docker_engine`, but a private Podman's service of Docker's API. Its log is `podman.log`."""
    if os.geteuid() != 0:
        yield NoEngine(because="only root may start a private Podman")
        return
    try:
        podman, conmon, runc = (debian_packages.find(program) for program in (*debian_packages.PODMAN_PROGRAMS, "runc"))
    except debian_packages.PartMissing as missing:
        yield NoEngine(because=f"a private Podman cannot be started: {missing}")
        return
    work.mkdir(parents=True, exist_ok=True)
    places = private_engine.Places.of(work, "podman")
    env = private_podman.environment(places, podman, runc, conmon)
    with _private_engine(places, podman, env) as started:
        yield replace(started, kind="podman") if isinstance(started, Engine) else started


@contextmanager
def _private_engine(places: private_engine.Places, program: Path, env: dict[str, str]) -> Iterator[Engine | NoEngine]:
    places.work.mkdir(parents=True, exist_ok=True)
    checkout = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, env.get("PYTHONPATH")]))
    with places.log.open("ab") as log:
        guardian = subprocess.Popen(
            [sys.executable, "-m", private_engine.__name__, str(places.work), places.program, str(program)],
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
            return NoEngine(because=f"the private engine ended at once: {_last_line(places.log)}")
        answer = engine_version(url)
        if not isinstance(answer, NoEngine):
            return Engine(base_url=url, private=True, version=answer["Version"])
        because = answer.because
        time.sleep(_POLL_S)
    return NoEngine(because=f"the private engine was not ready after {READY_TIMEOUT_S} s: {because}")


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
