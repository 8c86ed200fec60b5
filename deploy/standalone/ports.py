"""Free ports of loopback."""

import random
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

PORTS_FROM: Final = 12_000
RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS: Final = 100


def free_ports(count: int) -> list[int]:
    """Return different free ports, below the range from which the kernel takes ports for connections.

    Raises:
        OSError: too few were free in `ATTEMPTS` attempts.
    """
    below = int(RANGE.read_text(encoding="ascii").split()[0])
    candidates = range(PORTS_FROM, below) if below > PORTS_FROM else range(1024, 2**16)
    found: list[int] = []
    for port in random.sample(candidates, k=min(ATTEMPTS, len(candidates))):
        with suppress(OSError):
            check(port)
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{len(found)} of {count} ports are free, of {ATTEMPTS} from {candidates[0]} to {candidates[-1]}")


def check(port: int) -> None:
    """Raise OSError if the port is taken."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
