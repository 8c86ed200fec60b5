"""Certificates from openssl: an authority, a server, a client."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class Authority:
    """An authority, and its certificates for a server and a client."""

    own: Pair
    server: Pair
    client: Pair


def openssl(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Run openssl, with these variables too."""
    env = {**os.environ, **(environment or {})}
    subprocess.run(["openssl", *arguments], env=env, check=True, capture_output=True, timeout=60)


def authority(folder: Path, address: str = "127.0.0.1", *, environment: Mapping[str, str] | None = None) -> Authority:
    """Make a new authority. `address` is the server's, and openssl gets the variables of `environment` too."""
    folder.mkdir()
    own = Pair(cert=folder / "ca.pem", key=folder / "ca.key")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        "req",
        "-x509",
        *ec,
        "-subj",
        f"/CN={folder.name}",
        "-keyout",
        own.key,
        "-out",
        own.cert,
        environment=environment,
    )

    def signed(name: str, *extensions: str) -> Pair:
        pair, request = Pair(cert=folder / f"{name}.pem", key=folder / f"{name}.key"), folder / "request"
        openssl("req", *ec, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", request)
        (folder / "extensions").write_text("\n".join(extensions))
        by = ("-CA", own.cert, "-CAkey", own.key, "-CAcreateserial", "-extfile", folder / "extensions")
        openssl("x509", "-req", "-in", request, *by, "-out", pair.cert, environment=environment)
        return pair

    return Authority(
        own=own,
        server=signed("server", f"subjectAltName=IP:{address},DNS:box-1.test", "extendedKeyUsage=serverAuth"),
        client=signed("client", "extendedKeyUsage=clientAuth"),
    )
