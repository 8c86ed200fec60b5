"""The address of a central gateway, and what checks its certificate."""

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from gpuwarden.errors import GpuwardenError


def checked_address(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        GpuwardenError: it is invalid, or would show the token.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise GpuwardenError(f"invalid address {url!r}: use https://HOST:PORT")
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise GpuwardenError(f"{url} is not encrypted, and would show the token: use https")
    return url.rstrip("/")


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """What checks a server's certificate: these authorities, or those of the system.

    Raises:
        GpuwardenError: the file is invalid.
    """
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ValueError) as error:
        raise GpuwardenError(f"cannot read {ca_file}: {error}") from None
