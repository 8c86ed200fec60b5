"""HTTP requests of tests, and a mark for IPv6.

httpx loads all CA certificates for each `httpx.get`, which takes 25 ms of CPU time. With `verify=PLAIN` it loads none
and trusts no TLS server.
"""

import socket
import ssl
from typing import Final

import pytest

PLAIN: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _speaks_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6: Final = pytest.mark.skipif(not _speaks_ipv6(), reason="no IPv6 here: nothing can listen on ::1")
