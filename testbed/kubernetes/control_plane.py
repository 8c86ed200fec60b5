"""Commands and configuration of a cluster's programs."""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from deploy.standalone import debian_packages
from testbed.kubernetes.images import full_name
from testbed.kubernetes.node import NAME, Node
from testbed.kubernetes.programs import Programs

PORT: Final = 443
_ETCD: Final = "http://127.0.0.1:2379"
_RUNTIME: Final = "unix:///run/containerd/containerd.sock"


def etcd(found: Programs, folder: Path) -> list[str]:
    """The database. It need not survive a crash of the machine."""
    urls = [f"--{kind}-client-urls={_ETCD}" for kind in ("listen", "advertise")]
    return [
        found["etcd"],
        f"--data-dir={folder}/etcd",
        *urls,
        "--listen-peer-urls=http://127.0.0.1:0",
        "--unsafe-no-fsync",
    ]


def api_server(found: Programs, folder: Path, node: Node) -> list[str]:
    """The API server, with RBAC. As on GKE, critical pods need a quota of their namespace."""
    pki = folder / "pki"
    critical = ["system-node-critical", "system-cluster-critical"]
    scope = {"scopeName": "PriorityClass", "operator": "In", "values": critical}
    quota = {
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "ResourceQuotaConfiguration",
        "limitedResources": [{"resource": "pods", "matchScopes": [scope]}],
    }
    admission = {
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "AdmissionConfiguration",
        "plugins": [{"name": "ResourceQuota", "configuration": quota}],
    }
    (folder / "admission.json").write_text(json.dumps(admission))
    options = {
        "admission-control-config-file": folder / "admission.json",
        "etcd-servers": _ETCD,
        "secure-port": PORT,
        "advertise-address": node.address,
        "service-cluster-ip-range": node.services,
        "allow-privileged": "true",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "client-ca-file": pki / "ca.crt",
        "tls-cert-file": pki / "kube-apiserver.crt",
        "tls-private-key-file": pki / "kube-apiserver.key",
        "kubelet-certificate-authority": pki / "ca.crt",
        "kubelet-client-certificate": pki / "kube-apiserver.crt",
        "kubelet-client-key": pki / "kube-apiserver.key",
        "kubelet-preferred-address-types": "InternalIP",
        "service-account-key-file": pki / "tokens.crt",
        "service-account-signing-key-file": pki / "tokens.key",
        "service-account-issuer": "https://kubernetes.default.svc",
    }
    return [found["kube-apiserver"], *(f"--{name}={value}" for name, value in options.items())]


def client(found: Programs, folder: Path, name: str) -> list[str]:
    """The scheduler, or the controller-manager."""
    argv = [found[name], f"--kubeconfig={folder}/pki/{name}.kubeconfig", "--leader-elect=false", "--secure-port=0"]
    if name == "kube-controller-manager":
        argv += [
            f"--root-ca-file={folder}/pki/ca.crt",
            f"--service-account-private-key-file={folder}/pki/tokens.key",
            "--use-service-account-credentials",
        ]
    return argv


def kubelet(found: Programs, folder: Path, node: Node) -> list[str]:
    """The kubelet, which never evicts for want of the host's memory or disk."""
    pki = folder / "pki"
    (folder / "node/resolv.conf").touch()
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet.key"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.group}",
        "staticPodPath": str(folder / "manifests"),
        "resolvConf": str(folder / "node/resolv.conf"),
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {f"{kind}.available": "0%" for kind in ("memory", "nodefs", "imagefs")},
        "nodeStatusUpdateFrequency": "2s",
    }
    if found.version >= (1, 31):
        config["failCgroupV1"] = False
    (folder / "node/kubelet.json").write_text(json.dumps(config))
    argv = [
        found["kubelet"],
        f"--config={folder}/node/kubelet.json",
        f"--kubeconfig={pki}/kubelet.kubeconfig",
        f"--node-ip={node.address}",
        f"--hostname-override={NAME}",
        f"--container-runtime-endpoint={_RUNTIME}",
    ]
    if found.version < (1, 24):
        argv.append("--container-runtime=remote")
    return argv


def containerd(folder: Path, node: Node, plugins: Path, pause_image: str) -> list[str]:
    """containerd, with a bridge for the pods."""
    file_system = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True, check=True
    ).stdout.strip()
    # The kernel refuses overlayfs on overlayfs.
    snapshotter = "native" if file_system == "overlayfs" else "overlayfs"
    cri = "plugins.'io.containerd.grpc.v1.cri'"
    (folder / "node/containerd.toml").write_text(f"""version = 2
[{cri}]
sandbox_image = '{full_name(pause_image)}'
disable_apparmor = true
restrict_oom_score_adj = true
[{cri}.containerd]
snapshotter = '{snapshotter}'
[{cri}.cni]
bin_dir = '{plugins}'
conf_dir = '{folder}/node/cni'
""")
    (folder / "node/cni").mkdir()
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": node.pods}]]},
    }
    (folder / "node/cni/pods.conflist").write_text(
        json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]})
    )
    return [str(debian_packages.find("containerd")), f"--config={folder}/node/containerd.toml"]
