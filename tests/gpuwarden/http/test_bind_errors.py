"""What to give instead where a program cannot listen."""

import errno
import socket

import pytest

from gpuwarden.http.bind_errors import hint


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EADDRINUSE, ""), "another --port"),
        (OSError(errno.EADDRNOTAVAIL, ""), "an address of this host"),
        (socket.gaierror(socket.EAI_NONAME, ""), "an address of this host"),
        (OSError(errno.EAFNOSUPPORT, ""), "this host has no IPv6"),
        (OSError(errno.EACCES, ""), "1024 or more"),
    ],
)
def test_each_refusal_says_what_to_give(error: OSError, says: str) -> None:
    assert says in (hint(error) or "")


def test_what_is_not_known_has_no_hint() -> None:
    assert hint(OSError(errno.ENOMEM, "")) is None
