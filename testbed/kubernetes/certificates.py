"""Certificates and kubeconfigs of a cluster, from openssl."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Final

SUBJECTS: Final = {
    "kube-apiserver": "/O=system:masters/CN=kube-apiserver",
    "tokens": "/CN=tokens",
    "admin": "/O=system:masters/CN=admin",
    "kube-scheduler": "/CN=system:kube-scheduler",
    "kube-controller-manager": "/CN=system:kube-controller-manager",
    "kubelet": "/O=system:nodes/CN=system:node:{node}",
}
"""Subjects by the name of the file; the API server takes users and groups from them."""

_DAYS: Final = "30"


def make_all(folder: Path, *, node: str, addresses: list[str], url: str) -> None:
    """Write `ca.crt`, and for each subject NAME.crt, NAME.key and NAME.kubeconfig."""
    folder.mkdir()
    (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = name\n[name]\n")
    _request(folder, "ca", "/CN=testbed", "basicConstraints=critical,CA:TRUE")
    names = [f"IP:{address}" for address in addresses] + [f"DNS:{node}", "DNS:kubernetes.default.svc"]
    for name, subject in SUBJECTS.items():
        signed_by = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
        _request(folder, name, subject.format(node=node), f"subjectAltName={','.join(names)}", *signed_by)
        (folder / f"{name}.kubeconfig").write_text(json.dumps(_kubeconfig(folder, name, url)))


def _request(folder: Path, name: str, subject: str, extension: str, *more: str) -> None:
    argv = ["openssl", "req", "-x509", "-config", str(folder / "openssl.cnf"), "-days", _DAYS, "-nodes"]
    argv += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", subject, "-addext", extension]
    argv += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"), *more]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


def _kubeconfig(folder: Path, name: str, url: str) -> dict[str, object]:
    cluster = {"server": url, "certificate-authority-data": _encoded(folder / "ca.crt")}
    user = {
        "client-certificate-data": _encoded(folder / f"{name}.crt"),
        "client-key-data": _encoded(folder / f"{name}.key"),
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": name}}],
        "current-context": "testbed",
    }


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
