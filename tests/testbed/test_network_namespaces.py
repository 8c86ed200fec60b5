"""A network of namespaces ends with the process that made it."""

import signal
import socket
import subprocess
import sys

import pytest

from testbed.network_namespaces import Network
from tests.waiting import eventually

pytestmark = pytest.mark.needs_network

CALLER = """
import time
from testbed.network_namespaces import network
with network() as found:
    found.host()
    print(found.address, flush=True)
    time.sleep(600)
"""


def addresses_of(network_of: str) -> bool:
    """Whether this namespace still has an address of the network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((network_of, 0))
        except OSError:
            return False
    return True


def test_network_of_a_killed_caller_is_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        address = caller.stdout.readline().strip()
        assert addresses_of(address)
        caller.send_signal(signal.SIGKILL)

    eventually(lambda: not addresses_of(address), "the kernel has removed the network")


def test_cut_host_hears_nothing_until_it_is_healed(network: Network) -> None:
    host, other = network.host(), network.host()
    hears = "import socket; s = socket.socket(2, 2); s.bind(('', 9)); print('ready', flush=True)\n"
    hears += "while True: print(s.recv(9).decode(), flush=True)"
    argv = host.command([sys.executable, "-c", hears])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as heard, socket.socket(2, 2) as here:

        def say(word: str) -> None:
            here.sendto(word.encode(), (host.address, 9))

        def hear() -> str:
            assert heard.stdout is not None
            return heard.stdout.readline().strip()

        assert hear() == "ready"
        say("before")
        assert hear() == "before"
        host.cut()
        say("while")
        host.heal()
        other.cut()
        say("after")
        assert hear() == "after"
        heard.kill()
