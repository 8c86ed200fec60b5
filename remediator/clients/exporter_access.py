"""TLS and authentication of an HTTP client for an exporter."""

import ssl
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from gpuwarden.errors import GpuwardenError

PASSWORD_FILE_MAX: Final = 4096


class ExporterError(GpuwardenError):
    """The exporter gave no usable answer."""


@dataclass(frozen=True, kw_only=True)
class ExporterAuth:
    """TLS and authentication for an exporter with a web configuration (docs/how-to/secure.md). Files are PEM.

    Args:
        ca_file: trusted authorities; `None` for the system's.
        server_name: name in the exporter's certificate, if not the address.
        cert_file: client certificate.
        key_file: its key, without a password.
        basic_auth_file: one line `user:password`, read for every request.
    """

    ca_file: Path | None = None
    server_name: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    basic_auth_file: Path | None = None


def connect(access: ExporterAuth, *, timeout_s: float) -> httpx.Client:
    """Build an HTTP client for one exporter. Raises GpuwardenError if a file of `access` is invalid."""

    def by_name(request: httpx.Request) -> None:
        request.extensions["sni_hostname"] = access.server_name

    return httpx.Client(
        timeout=timeout_s,
        trust_env=False,
        verify=_tls(access),
        auth=None if access.basic_auth_file is None else _BasicAuth(access.basic_auth_file),
        event_hooks={"request": [] if access.server_name is None else [by_name]},
    )


class _BasicAuth(httpx.Auth):
    """User and password from a file, read for every request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        user, password = self._read()
        yield from httpx.BasicAuth(user, password).auth_flow(request)

    def _read(self) -> tuple[str, str]:
        try:
            with self._path.open(encoding="utf-8") as file:
                line = file.read(PASSWORD_FILE_MAX).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ExporterError(f"the exporter's basic auth file {self._path} cannot be read: {error}") from None
        user, colon, password = line.partition(":")
        if not (user and colon and password) or "\n" in line:
            raise ExporterError(f"the exporter's basic auth file {self._path} must have one line `user:password`")
        return user, password


def _tls(access: ExporterAuth) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
        if access.cert_file is not None:
            context.load_cert_chain(access.cert_file, access.key_file, _encrypted)
    except OSError as error:
        named = ", ".join(str(each) for each in (access.ca_file, access.cert_file, access.key_file) if each)
        raise GpuwardenError(f"invalid TLS files for the exporter, PEM expected: {named}: {error}") from None
    return context


def _encrypted() -> Any:
    raise GpuwardenError("the key of --exporter-key-file is encrypted: remove its password with `openssl pkey`")
