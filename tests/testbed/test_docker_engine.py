"""The choice of a Docker engine; a private one leaves no trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from testbed import private_engine, worker_image
from testbed.docker_engine import Engine, NoEngine, docker_engine, podman_engine, reachable_engine
from testbed.private_engine import EnginePaths

pytestmark = pytest.mark.slow

CHECKOUT = Path(worker_image.__file__).resolve().parent.parent
GONE_TIMEOUT_S = 20
HOLD_AN_ENGINE = """
import sys, time, docker
from pathlib import Path
from testbed import worker_image
from testbed.docker_engine import docker_engine

with docker_engine(Path(sys.argv[1])) as engine:
    client = docker.DockerClient(base_url=engine.base_url)
    name = worker_image.worker_image(client, extra={})
    ignores_signals = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    client.containers.run(name, ["python3", "-c", ignores_signals], detach=True, network_mode="none",
                          restart_policy={"Name": "always"})
    client.close()
    print("holding", flush=True)
    time.sleep(600)
"""

private = pytest.mark.usefixtures("no_reachable_engine")


def hold_an_engine(work: Path) -> subprocess.Popen[str]:
    """Start a process with a private engine, whose container ignores SIGTERM and always restarts."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_AN_ENGINE, str(work)],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stdout.readline() == "holding\n", (work / "dockerd.log").read_text()
    return holder


def traces(work: Path) -> list[str]:
    """Processes, mounts, cgroups and files of the private engine in `work`."""
    places = EnginePaths.of(work)
    ids = private_engine._container_ids(places)
    cgroups = [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if any(one in folder for one in ids)]
    return [
        *(f"process {pid}" for pid in [*private_engine._engine_pids(places), *private_engine._container_pids(ids)]),
        *(f"mounted {mount}" for mount in private_engine._mounts_below(places.data, places.run)),
        *(f"cgroup {folder}" for folder in cgroups),
        *(f"file {folder}" for folder in (places.data, places.run) if folder.exists()),
    ]


def kinds(found: list[str]) -> set[str]:
    return {trace.split()[0] for trace in found}


def wait_until_gone(work: Path) -> None:
    give_up = time.monotonic() + GONE_TIMEOUT_S
    while found := traces(work):
        assert time.monotonic() < give_up, found
        time.sleep(0.05)


def finish(holder: subprocess.Popen[str]) -> None:
    holder.wait(GONE_TIMEOUT_S)
    assert holder.stdout
    holder.stdout.close()


@pytest.mark.needs_docker
def test_engine_over_tcp_is_ignored(engine: Engine) -> None:
    socket = Path(engine.base_url.removeprefix("unix://"))

    found = reachable_engine({"DOCKER_HOST": "tcp://127.0.0.1:2375"}, system_socket=socket)

    assert found == Engine(base_url=engine.base_url, private=False, version=engine.version)


def test_missing_engine_reason_names_the_socket(tmp_path: Path) -> None:
    found = reachable_engine({}, system_socket=tmp_path / "docker.sock")

    assert found == NoEngine(reason=f"no Docker engine listens at {tmp_path}/docker.sock")


def test_dead_socket_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "docker.sock").touch()

    found = reachable_engine({"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"})

    assert isinstance(found, NoEngine)
    assert f"no valid answer from the Docker engine at {tmp_path}/docker.sock" in found.reason


@pytest.mark.needs_docker
@private
def test_private_engine_runs_in_a_deep_folder_and_leaves_no_trace(tmp_path: Path) -> None:
    work = tmp_path / ("deep" * 20) / ("deeper" * 20)

    with docker_engine(work) as found:
        assert isinstance(found, Engine), found
        during = traces(work)

    assert found.private
    assert {"process", "mounted", "file"} <= kinds(during)
    assert traces(work) == []
    assert "API listen on" in (work / "dockerd.log").read_text()


@pytest.mark.needs_podman
def test_private_podman_leaves_no_trace(tmp_path: Path) -> None:
    with podman_engine(tmp_path) as found:
        assert isinstance(found, Engine), found
        client = docker.DockerClient(base_url=found.base_url)
        name = worker_image.worker_image(client, extra={})
        policy: Any = {"Name": "always"}
        client.containers.run(name, ["sleep", "600"], detach=True, network_mode="none", restart_policy=policy)
        client.close()
        during = traces(tmp_path)

    assert (found.kind, found.private) == ("podman", True)
    assert {"process", "mounted", "cgroup", "file"} <= kinds(during)
    assert traces(tmp_path) == []


@pytest.mark.needs_docker
@private
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_private_engine_ends_after_its_holder_is_ended_by(number: signal.Signals, tmp_path: Path) -> None:
    holder = hold_an_engine(tmp_path)
    assert kinds(traces(tmp_path)) == {"process", "mounted", "cgroup", "file"}

    holder.send_signal(number)
    finish(holder)

    wait_until_gone(tmp_path)


@pytest.mark.needs_docker
@private
def test_second_engine_works_after_a_killed_engine_and_guardian(tmp_path: Path) -> None:
    holder = hold_an_engine(tmp_path)
    guardian = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
    daemons = list(private_engine._engine_pids(EnginePaths.of(tmp_path)))
    for pid in (guardian, holder.pid, *daemons):
        os.kill(pid, signal.SIGKILL)
    finish(holder)
    assert {"process", "mounted", "cgroup", "file"} & kinds(traces(tmp_path)), "the test needs a leftover"

    with docker_engine(tmp_path) as found:
        assert isinstance(found, Engine), found
        client = docker.DockerClient(base_url=found.base_url)
        containers = client.containers.list(all=True)
        client.close()

    assert containers == []
    assert traces(tmp_path) == []


@pytest.mark.needs_docker
@private
def test_failed_engine_reports_the_reason_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin/dockerd"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'failed to start daemon: no cgroups here'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")

    with docker_engine(tmp_path / "work") as found:
        pass

    assert found == NoEngine(reason="the private engine exited: failed to start daemon: no cgroups here")
    assert traces(tmp_path / "work") == []
