"""The worker image: Python and a shell from Debian packages, without a registry."""

import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import docker
import pytest

from testbed.worker_image import REPOSITORY, worker_image
from testbed.workers import image_files

pytestmark = [pytest.mark.needs_docker, pytest.mark.nightly]


def run(
    client: docker.DockerClient, name: str, *command: str, user: str = "root", volumes: dict[str, Any] | None = None
) -> str:
    output: bytes = client.containers.run(
        name, list(command), network_mode="none", remove=True, user=user, volumes=volumes or {}
    )
    return output.decode().strip()


def greeting(folder: Path, text: str = "hello") -> Path:
    """Make a package that prints `text`, with a __pycache__."""
    (folder / "__pycache__").mkdir(parents=True, exist_ok=True)
    (folder / "__pycache__/stale.pyc").touch()
    (folder / "__init__.py").write_text(f"print({text!r})\n")
    return folder


def test_added_module_is_importable_without_caches(client: docker.DockerClient, tmp_path: Path) -> None:
    module = greeting(tmp_path / "module")
    module.chmod(0o700)
    (module / "__init__.py").chmod(0o600)

    name = worker_image(client, extra={"/app/salute": module, "/opt/one/file": module / "__init__.py"})

    assert run(client, name, "python3", "-c", "import salute", user="nobody") == "hello"
    assert run(client, name, "sh", "-c", "find /app -name 'stale.pyc'; cat /opt/one/file") == "print('hello')"


def test_modules_of_a_worker_are_compiled_in_the_image(client: docker.DockerClient) -> None:
    name = worker_image(client, extra=image_files())
    theirs = run(client, name, "python3", "-c", "import sys; print(sys.implementation.cache_tag)")
    if theirs != sys.implementation.cache_tag:
        pytest.skip(f"the image's Python is {theirs}, and compiles for itself")

    said = run(
        client,
        name,
        *("python3", "-c"),
        "import gpuwarden.worker.worker, sys; from pathlib import Path;"
        "print([name for name, module in sys.modules.items()"
        " if getattr(module, '__cached__', None) and not Path(module.__cached__).exists()]);"
        "print(gpuwarden.worker.worker.Worker.run.__code__.co_filename)",
        user="nobody",
    )

    assert said.splitlines() == ["[]", "/app/gpuwarden/worker/worker.py"]


def test_equal_content_has_one_tag(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worker_image(client, extra={"/app/salute": greeting(tmp_path)})
    os.utime(tmp_path / "__init__.py", (0, 0))
    with monkeypatch.context() as forbidden:
        forbidden.setattr(tarfile, "open", None)
        again = worker_image(client, extra={"/app/salute": tmp_path})
    other = worker_image(client, extra={"/app/salute": greeting(tmp_path, "goodbye")})

    assert first == again
    assert first.startswith(f"{REPOSITORY}:")
    assert other != first
    assert run(client, other, "python3", "-c", "import salute") == "goodbye"


def test_missing_file_is_named(client: docker.DockerClient, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is missing: source of /app/lost"):
        worker_image(client, extra={"/app/lost": tmp_path / "nowhere"})
