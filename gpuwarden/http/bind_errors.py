"""What to give instead where a program cannot listen, in the exporter's words and the remediator's alike."""

import errno
import socket


def hint(error: OSError) -> str | None:
    """What to do about an address or a port that cannot be bound; `None` where the error says no more than itself."""
    if error.errno == errno.EADDRINUSE:
        return "stop what listens there, or give another --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "give --listen an address of this host, or 0.0.0.0 for all of them"
    if error.errno == errno.EAFNOSUPPORT:
        return "this host has no IPv6: give --listen an address of IPv4, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return "give a --port of 1024 or more, which needs no root"
    return None
