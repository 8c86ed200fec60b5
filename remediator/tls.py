"""The webhook behind TLS: its files are looked at before anything listens, and what is wrong is said in a sentence."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gpuwarden.errors import GpuwardenError


def options(*, cert_file: Path | None, key_file: Path | None, client_ca_file: Path | None) -> dict[str, Any]:
    """What uvicorn is told: nothing where there is no certificate.

    Args:
        cert_file: the certificate, and those between it and its authority, in PEM.
        key_file: its key, in PEM and not encrypted.
        client_ca_file: the authorities one of which must have signed a caller's certificate.

    Raises:
        GpuwardenError: a file cannot be used, and why.
    """
    if cert_file is None or key_file is None:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = f"the TLS certificate file {cert_file}", f"the TLS key file {key_file}"
    _read(certificate, cert_file)
    _read(key, key_file)
    _in_pem(certificate, lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cert_file))

    def encrypted() -> NoReturn:
        raise GpuwardenError(f"{key} is encrypted: write it without a password (`openssl pkey`), mode 0600")

    try:
        context.load_cert_chain(cert_file, key_file, encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise GpuwardenError(
                f"{key} is not the key of the certificate in {cert_file}: give the two that belong together"
            ) from None
        raise GpuwardenError(
            f"{key} and {certificate} cannot be used ({error.reason or error}): PEM is wanted"
        ) from None
    found = {"ssl_certfile": cert_file, "ssl_keyfile": key_file}
    if client_ca_file is None:
        return found
    authorities = f"the TLS client CA file {client_ca_file}"
    _read(authorities, client_ca_file)
    _in_pem(authorities, lambda: context.load_verify_locations(client_ca_file))
    return {**found, "ssl_ca_certs": client_ca_file, "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _read(what: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise GpuwardenError(
            f"{what} cannot be read ({error.strerror}): is its path right, and may this account read it?"
        ) from None


def _in_pem(what: str, load: Callable[[], None]) -> None:
    try:
        load()
    except ssl.SSLError:
        raise GpuwardenError(
            f"{what} holds no certificate in PEM, which begins with -----BEGIN CERTIFICATE-----"
        ) from None
