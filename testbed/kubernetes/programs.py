"""Find the programs of a cluster and their version."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.standalone import debian_packages

VARIABLE: Final = "KUBEBUILDER_ASSETS"
"""Folder of the programs, as for envtest of Kubernetes' controller-runtime."""

NEEDED: Final = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet")

PLUGINS_ROOM: Final = "containernetworking-plugins"
_PLUGINS: Final = ("bridge", "host-local", "loopback")


class NoClusterError(Exception):
    """A cluster cannot run; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Programs of a cluster. `version` is that of the API server, such as (1, 20)."""

    folder: Path
    version: tuple[int, int]

    def __getitem__(self, name: str) -> str:
        """Path of a Kubernetes program."""
        return str(self.folder / name)


def find(environ: Mapping[str, str] = os.environ) -> Programs:
    """Find the Kubernetes programs.

    Raises:
        NoClusterError: the variable is not set, or a program is missing.
    """
    named = environ.get(VARIABLE)
    if not named:
        raise NoClusterError(f"{VARIABLE} is not set: name a folder with {', '.join(NEEDED)}")
    folder = Path(named).resolve()
    missing = [name for name in NEEDED if not os.access(folder / name, os.X_OK)]
    if missing:
        raise NoClusterError(f"{VARIABLE}={named} has no {', '.join(missing)}")
    said = subprocess.run([folder / "kube-apiserver", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"v(\d+)\.(\d+)", said)
    if version is None:
        raise NoClusterError(f"{folder}/kube-apiserver has an unknown version: {said.strip()!r}")
    return Programs(folder=folder, version=(int(version[1]), int(version[2])))


def network_plugins() -> Path:
    """Folder of the CNI plugins.

    Raises:
        NoClusterError: they cannot be fetched.
    """
    for folder in (Path("/usr/lib/cni"), Path("/opt/cni/bin")):
        if all((folder / name).exists() for name in _PLUGINS):
            return folder
    try:
        return debian_packages.unpack(PLUGINS_ROOM, [PLUGINS_ROOM], finish=_keep_needed) / "usr/lib/cni"
    except debian_packages.PartMissing as missing:
        raise NoClusterError(str(missing)) from missing


def _keep_needed(root: Path) -> None:
    for program in (root / "usr/lib/cni").iterdir():
        if program.name not in _PLUGINS:
            program.unlink()
    shutil.rmtree(root / "usr/share", ignore_errors=True)
