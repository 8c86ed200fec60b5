"""`gpuwarden run` as the entry point of a container: process 1, which gets the signal of `docker stop`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import docker
import pytest
from docker.models.containers import Container

from testbed.worker_image import worker_image
from testbed.workers import image_files
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

TRAINS: Final = """
import signal, sys
def save(*_):
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
signal.pause()
"""
# The child leaves the group, and its parent ends: process 1 inherits it.
ORPHANS: Final = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
    os._exit(0)
os.wait()
time.sleep(2.5)
zombies = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    zombies += open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
print("zombies", zombies, flush=True)
raise SystemExit(5)
"""


@contextmanager
def contained(client: docker.DockerClient, directory: Path, argv: Sequence[str], *options: str) -> Iterator[Container]:
    (directory / "host").write_text("host1\n")
    container = client.containers.run(
        worker_image(client, extra=image_files()),
        ["run", "--name", "train", *options, "--", *argv],
        entrypoint=["python3", "-m", "gpuwarden"],
        environment={"GPUWARDEN_RUNTIME_DIR": "/run/gpuwarden"},
        volumes={str(directory): {"bind": "/run/gpuwarden", "mode": "rw"}},
        network_mode="none",
        detach=True,
    )
    try:
        yield container
    finally:
        container.remove(force=True)


def said(container: Container) -> str:
    found: bytes = container.logs()
    return found.decode()


def test_docker_stop_reaches_the_command_and_its_exit_code_comes_back(
    client: docker.DockerClient, tmp_path: Path
) -> None:
    with contained(client, tmp_path, ["python3", "-c", TRAINS], "--restart", "always") as container:
        eventually(lambda: "ready\n" in said(container), "the command runs", log=lambda: said(container))

        container.stop(timeout=20)

        assert "saved\n" in said(container)
        assert container.wait()["StatusCode"] == 7
        assert [path.name for path in (tmp_path / "train").glob("*.job.json")] == []


def test_exit_code_comes_through_and_orphans_are_reaped(client: docker.DockerClient, tmp_path: Path) -> None:
    with contained(client, tmp_path, ["python3", "-c", ORPHANS]) as container:
        assert container.wait(timeout=60)["StatusCode"] == 5

        assert "zombies 0\n" in said(container)


def test_command_that_is_not_in_the_image_is_127(client: docker.DockerClient, tmp_path: Path) -> None:
    with contained(client, tmp_path, ["nosuch"]) as container:
        assert container.wait(timeout=60)["StatusCode"] == 127

        assert "nosuch: command not found" in said(container)
