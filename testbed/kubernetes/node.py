"""The namespaces, network and control groups of a cluster's node."""

import os
import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from deploy.standalone import debian_packages
from testbed.kubernetes.programs import NoClusterError

NAME: Final = "node-1"
READY_S: Final = 20.0
_GROUP: Final = "gpuwarden-kube-"
"""Prefix of the control groups; the pid of the caller follows."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_REPLACED: Final = ("/run", "/var/run", "/var/lib", "/var/log")
"""Folders that the node has for itself."""

# The kubelet sets these for the whole machine unless they have its values. It sees files in their place.
_KUBELET_SYSCTLS: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

# The first process ignores SIGCHLD, so that the kernel reaps the orphans of the node.
_BOOT: Final = """set -e
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/lock /run/netns
mount --bind "$1/lib" /var/lib
mount --bind "$1/log" /var/log
cd "$1/sysctl"
for name in $2; do mount --bind "$name" "/proc/sys/$name"; done
cd /
hostname "$3"
touch "$1/ready"
trap '' CHLD
exec sleep infinity
"""


class Node:
    """Namespaces of a node. They end with the caller, or with `end`.

    `addresses` are those of the node and of the cluster's `kubernetes` service.
    """

    def __init__(self, folder: Path) -> None:
        for inside in (folder.resolve(), debian_packages.PARTS_DIR):
            if any(inside.is_relative_to(each) for each in _REPLACED):
                raise NoClusterError(f"{inside} is in a folder that the node replaces: choose another one")
        sweep_groups()
        self.folder = folder
        self.group = f"{_GROUP}{os.getpid()}"
        for name in ("lib", "log", "sysctl"):
            (folder / name).mkdir(parents=True)
        for name, value in _KUBELET_SYSCTLS.items():
            (folder / "sysctl" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "sysctl" / name).write_text(f"{value}\n")
        self._holder = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
                *("--propagation", "private", "--mount-proc"),
                *("sh", "-c", _BOOT, "sh", str(folder), " ".join(_KUBELET_SYSCTLS), NAME),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.pid = self._wait_for_first_process()
            self._network = self._connect()
        except BaseException:
            self.end()
            raise
        for hierarchy in hierarchies():
            (hierarchy / self.group).mkdir(exist_ok=True)

    @property
    def address(self) -> str:
        """Address of the node and of the API server."""
        return f"10.214.{self._network}.1"

    @property
    def host_address(self) -> str:
        """Address of this host for the node and its pods."""
        return f"10.214.{self._network}.126"

    @property
    def service_address(self) -> str:
        """Address of the service `kubernetes`. It is an address of the node, as kube-proxy does not run."""
        return f"10.214.{self._network}.129"

    @property
    def services(self) -> str:
        """Network of services."""
        return f"10.214.{self._network}.128/25"

    @property
    def pods(self) -> str:
        """Network of pods."""
        return f"10.214.{self._network + 1}.0/24"

    @property
    def enter(self) -> list[str]:
        """Command prefix to run in the node."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--uts", "--ipc", "--"]

    def end(self) -> None:
        """End all processes and remove the control groups."""
        self._holder.kill()
        self._holder.wait()
        if hasattr(self, "pid"):
            _until(lambda: not Path(f"/proc/{self.pid}").exists(), "end of the node's processes")
        for hierarchy in hierarchies():
            _remove_group(hierarchy / self.group)

    def _wait_for_first_process(self) -> int:
        _until(lambda: (self.folder / "ready").exists() or self._holder.poll() is not None, "namespaces of the node")
        if self._holder.poll() is not None:
            raise NoClusterError("the namespaces of the node could not be made")
        (first,) = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        return int(first)

    def _connect(self) -> int:
        """Join the node to this host by a cable; returns the third number of its network."""
        ip = ip_command()
        # The interface's name reserves the network.
        for number in random.sample(range(0, 256, 2), 5):
            cable, prefix = f"gwkube{number}", f"10.214.{number}"
            with suppress(subprocess.CalledProcessError):
                _run([*ip, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid)])
                break
        else:
            raise NoClusterError("no free network in 10.214.0.0/16: too many clusters run")
        for inside in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{prefix}.1/25", "dev", "eth0"],
            ["address", "add", f"{prefix}.129/32", "dev", "lo"],
            ["link", "set", "eth0", "up"],
        ):
            _run([*self.enter, *ip, *inside])
        _run([*ip, "address", "add", f"{prefix}.126/25", "dev", cable])
        _run([*ip, "link", "set", cable, "up"])
        _run([*ip, "route", "add", f"10.214.{number + 1}.0/24", "via", f"{prefix}.1"])
        return number


def ip_command() -> list[str]:
    """`ip` with its libraries."""
    ip = debian_packages.find("ip")
    if not ip.is_relative_to(debian_packages.PARTS_DIR):
        return [str(ip)]
    folders = debian_packages.library_folders(debian_packages.PARTS_DIR / debian_packages.PARTS["ip"].room)
    return ["env", f"LD_LIBRARY_PATH={os.pathsep.join(map(str, folders))}", str(ip)]


def sweep_groups() -> None:
    """Remove the control groups of killed callers."""
    for group in (group for hierarchy in hierarchies() for group in hierarchy.glob(f"{_GROUP}*")):
        if not Path("/proc", group.name.removeprefix(_GROUP)).exists():
            _remove_group(group)


def hierarchies() -> list[Path]:
    """Mount points of the control groups of either version."""
    if (_CGROUPS / "cgroup.procs").exists():
        return [_CGROUPS]
    return [each for each in sorted(_CGROUPS.iterdir()) if not each.is_symlink() and (each / "cgroup.procs").exists()]


def _remove_group(group: Path) -> None:
    def gone() -> bool:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):  # a process in it is still ending
                Path(folder).rmdir()
        return not group.exists()

    _until(gone, f"end of {group}")


def _until(is_true: object, what: str) -> None:
    until_s = time.monotonic() + READY_S
    while not is_true():  # type: ignore[operator]
        if time.monotonic() > until_s:
            raise NoClusterError(f"no {what} within {READY_S:g} s")
        time.sleep(0.02)


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=READY_S)
