"""Hosts as network namespaces: each has a cable to one switch, and so has this namespace.

    with network() as found:                     # or the reason why there is none
        left = found.host()
        subprocess.Popen(left.command(["gpuwarden", "gateway", "host", "--central", f"https://{found.address}:29838"]))
        left.cut()                               # packets vanish, as with a broken cable
        left.heal()

A process holds the switch and each host. The kernel removes all of it with these processes, which end with the caller.
Root only.
"""

import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from deploy.standalone import debian_packages

READY_S: Final = 10.0
_PREFIX: Final = "10.213"
_SWITCH: Final = "switch"
_HOSTS_MAX: Final = 200
_POLL_S: Final = 0.01
_OWN: Final = os.readlink("/proc/self/ns/net")  # noqa: PTH115


class NetworkFailed(Exception):  # noqa: N818 - it reads as what happened
    """A namespace or a cable could not be made."""


@dataclass(frozen=True, kw_only=True)
class NoNetwork:
    """Network namespaces are not available, with the reason."""

    reason: str


class Host:
    """A host of the network. `address` is its IPv4 address."""

    def __init__(self, network: "Network", holder: int, cable: str, address: str) -> None:
        self._network, self._holder, self._cable, self.address = network, holder, cable, address

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs a command in this host."""
        return _inside(self._holder, argv)

    def cut(self) -> None:
        """Pull the cable out of the switch: packets vanish, and no program sees an error."""
        self._network.switch("link", "set", self._cable, "nomaster")

    def heal(self) -> None:
        """Plug the cable in again."""
        self._network.switch("link", "set", self._cable, "master", _SWITCH)


class Network:
    """A switch. `address` is that of this namespace."""

    def __init__(self, stack: ExitStack, ip: Path, number: int) -> None:
        self._stack, self._ip, self._number = stack, ip, number
        self._hosts = 0
        self._holder = self._held()
        self.switch("link", "add", _SWITCH, "type", "bridge")
        self.switch("link", "set", _SWITCH, "up")
        self.address, _ = self._plug_in(os.getpid())

    def host(self) -> Host:
        """Add a host."""
        holder = self._held()
        address, cable = self._plug_in(holder)
        return Host(self, holder, cable, address)

    def switch(self, *arguments: str) -> None:
        """Run `ip` in the switch."""
        self._run_ip(self._holder, *arguments)

    def _held(self) -> int:
        """A namespace with `lo`; returns the pid of its holder."""
        argv = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "--", "sleep", "infinity"]
        holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        self._stack.callback(holder.wait)
        self._stack.callback(holder.kill)
        until_s = time.monotonic() + READY_S
        while os.readlink(f"/proc/{holder.pid}/ns/net") == _OWN:  # noqa: PTH115
            if holder.poll() is not None or time.monotonic() > until_s:
                raise NetworkFailed("a network namespace could not be made")
            time.sleep(_POLL_S)
        self._run_ip(holder.pid, "link", "set", "lo", "up")
        return holder.pid

    def _plug_in(self, pid: int) -> tuple[str, str]:
        """Lay a cable from the switch to this process's namespace; returns the address there, and the switch's end."""
        if self._hosts >= _HOSTS_MAX:
            raise NetworkFailed(f"a network has at most {_HOSTS_MAX} hosts")
        self._hosts += 1
        name, end = f"gpuw{self._number}-{self._hosts}", f"port{self._hosts}"
        address = f"{_PREFIX}.{self._number}.{self._hosts}"
        self.switch("link", "add", end, "type", "veth", "peer", "name", name, "netns", str(pid))
        self.switch("link", "set", end, "master", _SWITCH, "up")
        run = partial(self._run_ip, None if pid == os.getpid() else pid)
        run("address", "add", f"{address}/24", "dev", name)
        run("link", "set", name, "up")
        return address, end

    def _run_ip(self, pid: int | None, *arguments: str) -> None:
        argv = [str(self._ip), *arguments]
        env = debian_packages.env_for_parts()
        room = debian_packages.PARTS_DIR / debian_packages.PARTS["ip"].room
        if self._ip.is_relative_to(room):
            env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, debian_packages.library_folders(room)))
        done = subprocess.run(
            argv if pid is None else _inside(pid, argv),
            env=env,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise NetworkFailed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def network() -> Iterator[Network | NoNetwork]:
    """Yield a network without hosts, or the reason why there is none."""
    with ExitStack() as stack:
        try:
            made: Network | NoNetwork = _made(stack)
        except (debian_packages.PartMissing, NetworkFailed) as problem:
            made = NoNetwork(reason=str(problem))
        yield made


def _made(stack: ExitStack) -> Network:
    if os.geteuid() != 0:
        raise NetworkFailed("only root may make network namespaces")
    ip = debian_packages.find("ip")
    # Another network of this host may have the number: then the name of this namespace's end is taken.
    for number in random.sample(range(256), 5):
        try:
            return Network(stack, ip, number)
        except NetworkFailed as problem:
            if "File exists" not in str(problem):
                raise
    raise NetworkFailed(f"no free network of {_PREFIX}.0.0/16: too many tests run")


def _inside(pid: int, argv: Sequence[str]) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *argv]
