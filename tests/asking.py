"""How tests ask a server over plain HTTP, and over IPv6 where there is any.

httpx reads everybody's certificates for each client that it makes, so for each `httpx.get`: 25 ms of CPU time, which
polling takes from what is waited for. With `verify=PLAIN` it reads none, and by TLS it believes nobody.
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
