"""The image of exporter and remediator: built by its Dockerfile without a registry or a network, and run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from docker.utils import build as build_context

from deploy.standalone import debian_packages
from gpuwarden import __version__
from testbed.docker_engine import Engine
from testbed.worker_image import worker_image
from tests.deploy.test_compose import Host
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.slow]

CHECKOUT = Path(debian_packages.__file__).resolve().parents[2]
PACKAGE = "gpuwarden[exporter,remediator,postgresql,evidence,kubernetes]"
NAME = "gpuwarden-dockerfile-test"
NOTIFY = "ntfys://ntfy.example.com/ops"
PROBE = "import sys, urllib.request as web; print(web.urlopen(sys.argv[1]).read().decode())"


LOOK = """
import json, subprocess, sys, time
from remediator.capture import capture, probe
request = {"until_s": time.monotonic() + 20, "pids": [int(sys.argv[1])], "worker_pid": None, "cgroup": None,
           "process_group": None,
           "py_spy": str(capture.find_py_spy()), "log_files": [], "container": None, "engine": None}
subprocess.run([sys.executable, "-IS", probe.__file__, json.dumps(request)], check=True)
"""


@pytest.fixture(scope="module")
def docker_client(engine: Engine) -> Iterator[docker.DockerClient]:
    """A client of the engine for the whole module."""
    client = docker.DockerClient(base_url=engine.base_url, timeout=120)
    yield client
    client.close()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build context with a wheel of every package, as in docs/how-to/install.md."""
    folder = tmp_path_factory.mktemp("context")
    for name in ("Dockerfile", ".dockerignore", "requirements.lock"):
        shutil.copy(CHECKOUT / name, folder)
    locked = re.findall(r"^[a-z0-9._-]+==\S+", (CHECKOUT / "requirements.lock").read_text(), re.MULTILINE)
    (folder / "constraints.txt").write_text("\n".join(locked))
    wheels = folder / "wheels"
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels))
    (ours,) = wheels.glob("gpuwarden-*.whl")
    (pip,) = (line for line in locked if line.startswith("pip=="))
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels),
         "--constraint", str(folder / "constraints.txt"), PACKAGE.replace("gpuwarden", str(ours)), pip],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if fetched.returncode:
        pytest.skip(f"the packages that the image installs cannot be fetched: {fetched.stderr.strip()[-300:]}")
    return folder


@pytest.fixture(scope="module")
def image(context: Path, docker_client: docker.DockerClient) -> Iterator[str]:
    """The image, built from a base of Debian packages."""
    (pip,) = (context / "wheels").glob("pip-*.whl")
    docker_client.images.build(
        path=str(context),
        tag=NAME,
        network_mode="none",
        rm=True,
        buildargs={
            "BASE": worker_image(docker_client, extra={}),
            "PACKAGE": PACKAGE,
            "PIP": f"/src/wheels/{pip.name}/pip",
            "PIP_OPTIONS": "--no-index --find-links /src/wheels",
            "VERSION": __version__,
        },
    )
    yield NAME
    docker_client.images.remove(NAME, force=True)


def test_image_runs_gpuwarden_without_root(image: str, docker_client: docker.DockerClient) -> None:
    said = docker_client.containers.run(image, network_mode="none", remove=True, stderr=True)
    config = docker_client.images.get(image).attrs["Config"]

    assert b"usage: gpuwarden" in said
    assert b"exporter" in said
    assert b"remediator" in said
    assert config["User"] == "65532:65532"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__


def test_exporter_reads_the_folder_of_the_host(image: str, docker_client: docker.DockerClient, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("box1\n")
    volumes = {str(tmp_path): {"bind": "/run/gpuwarden", "mode": "ro"}}
    command = ["exporter", "--docker", "none"]
    with started(docker_client, image, command, volumes=volumes, user="0", pid_mode="host") as container:
        healthy(container)

        assert 'nodename="box1"' in page(container, "http://127.0.0.1:29835/metrics")


def test_remediator_is_healthy_without_root(image: str, docker_client: docker.DockerClient, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("box1\n")
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "ledger").mkdir()
    tmp_path.chmod(0o755)
    give(tmp_path / "ledger", mode=0o700)
    give(tmp_path / "token", mode=0o400)
    (tmp_path / "web.yml").write_text("bearer_token_file: token\n")
    volumes = {str(tmp_path): {"bind": "/data", "mode": "rw"}}
    command = ["remediator", "serve", "--runtime-dir", "/data", "--ledger", "sqlite:////data/ledger/ledger.db"]
    environment = {"GPUWARDEN_HEALTH_URL": "http://127.0.0.1:9836/-/ready"}
    with started(
        docker_client, image, [*command, "--web-config-file", "/data/web.yml"], volumes=volumes, environment=environment
    ) as container:
        healthy(container)

        assert "gpuwarden_remediator" in page(container, "http://127.0.0.1:9836/metrics")
    assert (tmp_path / "ledger" / "ledger.db").stat().st_uid == 65532


def test_executor_sees_a_process_of_the_host(image: str, docker_client: docker.DockerClient) -> None:
    with subprocess.Popen([sys.executable, "-c", "def hang():\n    input()\nhang()"], stdin=subprocess.PIPE) as target:
        eventually(lambda: "pipe" in Path(f"/proc/{target.pid}/wchan").read_text(encoding="ascii"), "it waits")
        said = docker_client.containers.run(
            image, ["-c", LOOK, str(target.pid)], entrypoint=["python3"], network_mode="none", remove=True,
            user="0", pid_mode="host", cap_add=["SYS_PTRACE"],
        )  # fmt: skip

    seen = [json.loads(line) for line in said.splitlines()]
    assert [each["kind"] for each in seen] == ["process", "thread", "python", "over"]
    assert "pipe" in seen[1]["wchan"]
    assert seen[2]["frames"][0]["function"] == "hang"


def test_services_of_compose_run_from_the_image(
    image: str, docker_client: docker.DockerClient, engine: Engine, tmp_path: Path
) -> None:
    services = Services(tmp_path, image, docker_client, engine.base_url.removeprefix("unix://"))
    with services.started("init", detach=False):
        pass
    names = ("executor", "remediator", "exporter")
    with ExitStack() as running:
        executor, remediator, exporter = (running.enter_context(services.started(name)) for name in names)
        healthy(exporter)
        healthy(remediator)
        metrics = page(exporter, f"http://127.0.0.1:{services.host.ports['exporter']}/metrics")
        assert 'gpuwarden_collector_success{collector="source_docker"} 1.0' in metrics
        metrics = page(remediator, f"http://127.0.0.1:{services.host.ports['remediator']}/metrics")
        assert "gpuwarden_remediator_notifications_waiting 0.0" in metrics
        command = ["python3", "-m", "gpuwarden", "status", "--prometheus=none", "--alertmanager=none"]

        def status() -> str:
            return bytes(executor.exec_run(command).output).decode()

        eventually(lambda: re.search(r"^executor box1 ok +alive", status(), re.MULTILINE), "it beats", log=status)
        assert "DOWN" not in status()
        command[3] = "doctor"
        found = executor.exec_run(command)
        assert found.exit_code == 0, found.output.decode()


class Services:
    """The services of deploy/compose that use our image, with the files and ports of a test."""

    def __init__(self, root: Path, image: str, client: docker.DockerClient, socket: str) -> None:
        self.host = Host(root)
        self._image, self._client, self._socket = image, client, socket

    @contextmanager
    def started(self, name: str, *, detach: bool = True) -> Iterator[Any]:
        """Run a service as Compose does."""
        its = self.host.services[name]
        environment: dict[str, str] = {}
        for file in its.get("env_file", ()):
            lines = Path(self.host.here(file)).read_text().splitlines()
            environment |= dict(line.split("=", 1) for line in lines if line and line[0] != "#")
        init = {"GPUWARDEN_INIT": f"--host box1 --notify {NOTIFY} {self.host.port_options()}"}
        test = its["healthcheck"].get("test", ["NONE"])
        container = self._client.containers.run(
            self._image,
            its["command"],
            entrypoint=its.get("entrypoint"),
            user=its["user"],
            network_mode=its["network_mode"],
            pid_mode=its.get("pid"),
            cgroupns=its.get("cgroup"),
            cap_add=its.get("cap_add"),
            cap_drop=its.get("cap_drop"),
            security_opt=its.get("security_opt"),
            read_only=its.get("read_only", False),
            tmpfs=dict.fromkeys(its.get("tmpfs", ()), ""),
            environment=environment | its.get("environment", {}) | init,
            volumes=list(self._mounts(its)),
            healthcheck={"test": [self.host.with_ports(each) for each in test], "interval": 10**9},
            detach=True,
        )
        try:
            if not detach:
                assert container.wait(timeout=60)["StatusCode"] == 0, container.logs().decode()
            yield container
        finally:
            container.remove(force=True)

    def _mounts(self, its: dict[str, Any]) -> Iterator[str]:
        for mount in its["volumes"]:
            source, rest = mount.split(":", 1)
            if source == "/var/run/docker.sock":
                source = self._socket
            elif source != "/sys/fs/cgroup":
                source = self.host.here(source)
            yield f"{source}:{rest}"
        for secret in its.get("secrets", ()):
            yield f"{self.host.here(self.host.secrets[secret['source']])}:{secret['target']}:ro"


def test_build_context_has_the_packages_and_no_private_files() -> None:
    patterns = [line for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    tops = {Path(name).parts[0] for name in build_context.exclude_paths(str(CHECKOUT), patterns) if name}

    assert {"gpuwarden", "exporter", "remediator", "deploy", "alerts", "dashboards", "pyproject.toml"} <= tops
    assert not {".git", ".venv", ".parts", ".work", "tests", "bench"} & tops


@contextmanager
def started(client: docker.DockerClient, image: str, command: list[str], **options: Any) -> Iterator[Container]:
    container = client.containers.run(
        image, command, detach=True, network_mode="none", healthcheck={"interval": 10**9}, **options
    )
    try:
        yield container
    finally:
        container.remove(force=True)


def healthy(container: Container) -> None:
    def status() -> bool:
        container.reload()
        return bool(container.attrs["State"]["Health"]["Status"] == "healthy")

    eventually(
        status,
        "the container is healthy",
        within_s=30,
        log=lambda: f"{container.logs().decode()}\n{json.dumps(container.attrs['State'], indent=1)}",
    )


def give(path: Path, *, mode: int) -> None:
    """Give a path to the image's user, as in docs/how-to/install.md, or without root to every user."""
    if os.geteuid() == 0:
        os.chown(path, 65532, 65532)
        path.chmod(mode)
    else:
        path.chmod(0o777)


def page(container: Container, url: str) -> str:
    code, output = container.exec_run(["python3", "-c", PROBE, url])
    assert code == 0, output
    assert isinstance(output, bytes)
    return output.decode()


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=CHECKOUT, capture_output=True, check=True)
