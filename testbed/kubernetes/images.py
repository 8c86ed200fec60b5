"""Archives of images, as `docker save` writes them."""

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

BASE: Final = "local/base:1"
"""An image of every cluster: Debian's Python 3 and busybox, as in the worker image."""

_PATH: Final = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def full_name(name: str) -> str:
    """The name as the kubelet asks for it: docker.io/library/shell:1 for shell:1."""
    first, slash, _ = name.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def write_archive(archive: Path, name: str, root: Path, command: Sequence[str]) -> str:
    """Write a root file system as an image of one layer; returns the digest of its configuration."""
    with tempfile.TemporaryFile() as layer:
        with tarfile.open(fileobj=layer, mode="w") as files:
            files.add(root, arcname=".", filter=_numeric)
        size = layer.tell()
        layer.seek(0)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Cmd": list(command), "Env": [_PATH]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
            }
        ).encode()
        manifest = json.dumps([{"Config": "config.json", "RepoTags": [full_name(name)], "Layers": ["layer.tar"]}])
        layer.seek(0)
        with tarfile.open(archive, mode="w") as whole:
            for path, content in (("manifest.json", manifest.encode()), ("config.json", config)):
                whole.addfile(_member(path, len(content)), io.BytesIO(content))
            whole.addfile(_member("layer.tar", size), layer)
    return f"sha256:{hashlib.sha256(config).hexdigest()}"


def _digest(file: IO[bytes]) -> str:
    found = hashlib.sha256()
    while block := file.read(2**20):
        found.update(block)
    return found.hexdigest()


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _numeric(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uname = member.gname = ""
    return member
