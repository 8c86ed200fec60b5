"""Start and stop a cluster."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.standalone import debian_packages
from gpuwarden.kube import api
from testbed import worker_image
from testbed.kubernetes import certificates, control_plane, images, programs
from testbed.kubernetes.node import NAME, Node
from testbed.kubernetes.programs import NoClusterError, Programs

READY_S: Final = 60.0
END_S: Final = 5.0
_STATE: Final = "cluster.json"
_KEPT: Final = ("log",)


@dataclass(frozen=True, kw_only=True)
class NoCluster:
    """No cluster, with the reason."""

    reason: str


class Cluster:
    """A running cluster in `folder`. Any process of this host may use it.

    `enter` is the command prefix to run in the node, `kubeconfig` the administrator's. Pods reach this host by
    `host_address`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = json.loads((folder / _STATE).read_text())
        self.url: str = state["url"]
        self.enter: list[str] = state["enter"]
        self.group: str = state["group"]
        self.host_address: str = state["host_address"]
        self.version: tuple[int, int] = (state["version"][0], state["version"][1])
        self.node = NAME
        self.kubeconfig = folder / "pki" / "admin.kubeconfig"
        self.manifests = folder / "manifests"
        self.pod_resources = folder / "node/lib/kubelet/pod-resources/kubelet.sock"
        self._started: list[subprocess.Popen[bytes]] = []

    def begin(self, program: str, argv: Sequence[str] | None = None) -> None:
        """Start a program again, or for the first time with its command."""
        record = self.folder / "programs" / f"{program}.json"
        if argv is None:
            argv = json.loads(record.read_text())["argv"]
        with (self.folder / "log" / f"{program}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.enter, *argv],
                env=debian_packages.env_for_parts() | {"HOME": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        record.write_text(json.dumps({"argv": argv, "pid": process.pid}))

    def end(self, program: str) -> None:
        """End a program by SIGTERM, or SIGKILL after 5 s: with open watches the API server takes a minute."""
        pid = self.pid(program)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            until_s = time.monotonic() + END_S
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
                while Path(f"/proc/{pid}").exists() and time.monotonic() < until_s:
                    time.sleep(0.05)
        for process in self._started:
            process.poll()

    def restart(self, program: str) -> None:
        """End and start a program. It is not awaited, see `wait`."""
        self.end(program)
        self.begin(program)

    def pid(self, program: str) -> int:
        """Pid of a program on the host."""
        starter = json.loads((self.folder / "programs" / f"{program}.json").read_text())["pid"]
        children = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
        if not children:
            raise NoClusterError(f"{program} does not run: read {self.folder}/log/{program}.log")
        return int(children[0])

    def add_image(self, name: str, root: Path, command: Sequence[str] = ("/bin/sh",)) -> None:
        """Import a root file system as an image. With the tag `latest` the kubelet would ask a registry."""
        archive = self.folder / "image.tar"
        digest = images.write_archive(archive, name, root, command)
        self.load_image(archive)
        archive.unlink()
        self.wait(lambda: digest in self._ctr("images", "list", "-q"), f"image {name}")

    def load_image(self, archive: Path) -> None:
        """Import the images of an archive that `docker save` wrote."""
        self._ctr("images", "import", str(archive))

    def has_runtime(self) -> bool:
        """Whether containerd answers."""
        try:
            self._ctr("version")
        except NoClusterError:
            return False
        return True

    def _ctr(self, *arguments: str) -> str:
        argv = [*self.enter, "ctr", "--namespace", "k8s.io", *arguments]
        done = subprocess.run(
            argv, env=debian_packages.env_for_parts(), capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise NoClusterError(f"ctr {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, path: str) -> Any:
        """Read a page of the API as the administrator.

        Raises:
            OSError: no answer, or an HTTP error.
        """
        pki = self.folder / "pki"
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        web = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        with closing(web.open(f"{self.url}{path}", timeout=5)) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def wait(self, holds: Callable[[], object], what: str) -> None:
        """Wait until `holds` returns a true value. Connection errors count as no."""
        until_s = time.monotonic() + READY_S
        while True:
            with suppress(OSError):
                if holds():
                    return
            if time.monotonic() > until_s:
                raise NoClusterError(f"no {what} within {READY_S:g} s: read {self.folder}/log")
            time.sleep(0.1)

    def wait_until_ready(self) -> None:
        """Wait until the API server answers and the node is ready."""
        self.wait(lambda: self.get("/readyz") == "ok", "API server")
        self.wait(self._node_is_ready, "ready node")

    def wait_for_account(self, namespace: str) -> None:
        """Wait for the service account of a new namespace, without which it refuses pods."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        # Servers before 1.24 keep its token in a secret.
        self.wait(lambda: self.get(path).get("secrets") or self.version >= (1, 24), f"service account in {namespace}")

    def api(self) -> Any:
        """A new `kubernetes.client.ApiClient` of the administrator."""
        return api.connect(self.kubeconfig)

    def new_namespace(self) -> str:
        """Make a namespace that accepts pods; returns its name."""
        from kubernetes.client import CoreV1Api  # noqa: PLC0415 - slow, and most processes have no cluster

        metadata = {"metadata": {"generateName": "test-"}}
        name: str = CoreV1Api(self.api()).create_namespace(metadata).metadata.name
        self.wait_for_account(name)
        return name

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace and wait until its pods have ended."""
        from kubernetes.client import CoreV1Api  # noqa: PLC0415 - slow, and most processes have no cluster

        core = CoreV1Api(self.api())
        core.delete_collection_namespaced_pod(name, grace_period_seconds=0)
        core.delete_namespace(name)
        self.wait(lambda: not self.get(f"/api/v1/namespaces/{name}/pods")["items"], f"end of the pods in {name}")

    def _node_is_ready(self) -> bool:
        node = self.get(f"/api/v1/nodes/{self.node}")
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])
        return ready and not node["spec"].get("taints")

    def reap(self) -> None:
        """Wait for the ended programs that this process started."""
        for process in self._started:
            process.wait(timeout=READY_S)


@contextmanager
def kubernetes_cluster(folder: Path) -> Iterator[Cluster | NoCluster]:
    """Yield a cluster, or the reason why there is none. At the end only the logs stay in `folder`."""
    if os.geteuid() != 0:
        yield NoCluster(reason="only root may start a cluster")
        return
    try:
        found, plugins = programs.find(), programs.network_plugins()
        for part in ("containerd", "containerd-shim-runc-v2", "runc"):
            debian_packages.find(part)
        root = worker_image.base_root()
    except (NoClusterError, debian_packages.PartMissing) as missing:
        yield NoCluster(reason=str(missing))
        return
    remove(folder)
    node = cluster = None
    try:
        node = Node(folder / "node")
        cluster = _start(folder, node, found, plugins, root)
        yield cluster
    finally:
        if node:
            node.end()
        if cluster:
            cluster.reap()
        remove(folder)


def remove(folder: Path) -> None:
    """Remove all but the logs, also after a start that was killed."""
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / "node").is_dir() and not (folder / "log").is_dir():
        raise NoClusterError(f"{folder} holds other files: name an empty folder")
    for inside in folder.iterdir():
        if inside.name not in _KEPT:
            shutil.rmtree(inside) if inside.is_dir() else inside.unlink()


def _start(folder: Path, node: Node, found: Programs, plugins: Path, root: Path) -> Cluster:
    url = f"https://{node.address}:{control_plane.PORT}"
    (folder / _STATE).write_text(
        json.dumps(
            {
                "url": url,
                "enter": node.enter,
                "group": node.group,
                "version": found.version,
                "host_address": node.host_address,
            }
        )
    )
    for name in ("log", "programs", "manifests"):
        (folder / name).mkdir(exist_ok=True)
    addresses = [node.address, node.service_address, "127.0.0.1"]
    certificates.make_all(folder / "pki", node=NAME, addresses=addresses, url=url)
    cluster = Cluster(folder)
    cluster.begin("etcd", control_plane.etcd(found, folder))
    cluster.begin("containerd", control_plane.containerd(folder, node, plugins, images.BASE))
    cluster.begin("kube-apiserver", control_plane.api_server(found, folder, node))
    cluster.wait(cluster.has_runtime, "containerd")
    cluster.add_image(images.BASE, root, ("/bin/sleep", "infinity"))
    cluster.wait(lambda: cluster.get("/readyz") == "ok", "API server")
    for name in ("kube-scheduler", "kube-controller-manager"):
        cluster.begin(name, control_plane.client(found, folder, name))
    cluster.begin("kubelet", control_plane.kubelet(found, folder, node))
    cluster.wait_until_ready()
    cluster.wait_for_account("default")
    return cluster
