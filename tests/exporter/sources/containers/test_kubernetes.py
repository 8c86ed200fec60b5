"""Pods of a Kubernetes node: a gRPC server as the kubelet, an HTTP server as the API, and a host's cgroups."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given as any_of
from hypothesis import strategies as st
from kubernetes.client import ApiClient, Configuration
from pydantic import ValidationError
from pydantic_settings import CliApp

from exporter.main import make_pods
from exporter.model.container import Container, VramBudget
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.settings import Settings
from exporter.sources.containers import kubelet, kubernetes
from exporter.sources.containers.kubernetes import Api, Pods, running_containers
from exporter.sources.containers.poller import Listing
from gpuwarden import cgroup, clock
from gpuwarden.kube.budget import BudgetSources
from tests.exporter import builders as build
from tests.exporter.golden import scraped
from tests.exporter.sources.containers.test_cgroups import Host
from tests.exporter.test_sampler import Docker
from tests.waiting import eventually

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UID = "5d0c1f4e-0000-4000-8000-000000000001"
GROUP = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
VRAM = "gpuwarden/vram-mib"
HAMI = "nvidia.com/gpumem"


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def resources(*containers: tuple[str, str, str, dict[str, list[str]]]) -> bytes:
    """A ListPodResourcesResponse, with fields of newer versions."""
    out = b""
    for namespace, pod, name, devices in containers:
        entries = b"".join(
            field(2, field(1, resource.encode()) + b"".join(field(2, each.encode()) for each in ids)
                  + field(3, field(1, field(1, 1))))
            for resource, ids in devices.items()
            if "/" in resource
        )  # fmt: skip
        entries += b"".join(
            field(5, field(2, b"claim") + field(4, field(2, driver.encode()) + field(4, each.encode())))
            for driver, ids in devices.items()
            if "/" not in driver
            for each in ids
        )
        container = field(1, name.encode()) + entries + field(3, 7) + field(4, field(2, 1 << 40))
        out += field(1, field(1, pod.encode()) + field(2, namespace.encode()) + field(3, container))
    return out


@contextmanager
def a_kubelet(path: Path, answer: Callable[[], bytes], *, method: str = "List") -> Iterator[Path]:
    """A gRPC server at a socket."""

    def respond(_: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return answer()
        except RuntimeError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {method: grpc.unary_unary_rpc_method_handler(respond)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield path
    finally:
        server.stop(0).wait()


class Cluster:
    """The API of a cluster."""

    def __init__(self) -> None:
        self.pods: Any = {"items": []}
        self.status = self.node_status = 200
        self.node: Any = {"status": {"allocatable": {VRAM: "14k"}}}
        self.asked: list[str] = []
        self.url = ""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with a_cluster() as found:
        yield found


@contextmanager
def a_cluster() -> Iterator[Cluster]:
    """An API that answers as a test says. The true one is in test_pods_of_a_cluster.py."""
    found = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            about_node = "/nodes/" in self.path
            body = json.dumps(found.node if about_node else found.pods).encode()
            self.send_response(found.node_status if about_node else found.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def a_pod(
    full_id: str = ID, *, restarts: int = 0, limits: dict[str, str] | None = None, **state: Any
) -> dict[str, Any]:
    """A pod with one container that runs (Kubernetes API, Pod v1)."""
    return {
        "metadata": {"namespace": "ml", "name": "llm-0", "uid": UID},
        "spec": {"containers": [{"name": "server", "image": "llm:1", "resources": {"limits": limits}}]},
        "status": {
            "containerStatuses": [
                {
                    "name": "server",
                    "containerID": f"containerd://{full_id}",
                    "restartCount": restarts,
                    "state": state or {"running": {"startedAt": "2024-05-01T10:00:00Z"}},
                }
            ]
        },
    }


@pytest.fixture(params=[False, True], ids=["version 2", "version 1"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path, version_1=request.param)


def link(logs: Path, full_id: str = ID, *, restarts: int = 0) -> Path:
    """The log link which the kubelet makes when it starts a container."""
    logs.mkdir(exist_ok=True)
    made = logs / f"llm-0_ml_server-{full_id}.log"
    made.symlink_to(f"/var/log/pods/ml_llm-0_{UID}/server/{restarts}.log")
    return made


def on(host: Host, **sources: Any) -> Pods:
    given: dict[str, Any] = {"api": None, "pod_resources": None, "logs": host.proc.parent / "logs"}
    return Pods(**(given | sources), proc=host.proc, root=host.root)


def of(cluster: Cluster, **changes: Any) -> Api:
    given: dict[str, Any] = {"node": "node-1", "budgets": BudgetSources()}
    return Api(client_of(cluster.url), **(given | changes))


def client_of(url: str) -> ApiClient:
    configuration = Configuration(host=url)
    configuration.retries = False
    return ApiClient(configuration)


def only(source: Pods) -> Container:
    (found,) = source.list_now().containers.values()
    return found


# The kubelet's socket


def test_kubelet_lists_the_devices_of_each_container(short_path: Path) -> None:
    answer = resources(
        ("ml", "llm-0", "server", {"nvidia.com/gpu": ["GPU-1", "GPU-2"], "example.com/nic": ["nic0"]}),
        ("ml", "llm-0", "sidecar", {}),
        ("video", "enc", "main", {"nvidia.com/mig-1g.10gb": ["MIG-1"]}),
    )
    with a_kubelet(short_path / "k.sock", lambda: answer) as path:
        found = kubelet.read_devices(path)

    assert found == {
        ("ml", "llm-0", "server"): {"nvidia.com/gpu": ("GPU-1", "GPU-2"), "example.com/nic": ("nic0",)},
        ("ml", "llm-0", "sidecar"): {},
        ("video", "enc", "main"): {"nvidia.com/mig-1g.10gb": ("MIG-1",)},
    }


def test_kubelet_without_pods_lists_no_devices(short_path: Path) -> None:
    with a_kubelet(short_path / "k.sock", lambda: b"") as path:
        assert kubelet.read_devices(path) == {}


def test_long_answer_is_read_completely(short_path: Path) -> None:
    """Longer than any frame, and than the first window of HTTP/2."""
    many = [("ml", f"pod-{number}", "c" * 60, {"nvidia.com/gpu": [f"GPU-{number}"]}) for number in range(3000)]
    with a_kubelet(short_path / "k.sock", lambda: resources(*many)) as path:
        found = kubelet.read_devices(path)

    assert len(found) == 3000
    assert found["ml", "pod-2999", "c" * 60] == {"nvidia.com/gpu": ("GPU-2999",)}


def refuse() -> bytes:
    raise RuntimeError("rate limit exceeded")


@pytest.mark.parametrize(
    ("answer", "method"),
    [pytest.param(refuse, "List", id="refused"), pytest.param(lambda: b"", "Get", id="unknown call")],
)
def test_kubelet_that_refuses_is_an_error(short_path: Path, answer: Callable[[], bytes], method: str) -> None:
    with (
        a_kubelet(short_path / "k.sock", answer, method=method) as path,
        pytest.raises(OSError, match=r"RESOURCE_EXHAUSTED: rate limit|UNIMPLEMENTED: Method not found"),
    ):
        kubelet.read_devices(path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE", id="no HTTP/2"),
        pytest.param(b"", "UNAVAILABLE", id="closed without an answer"),
        pytest.param(b"\x00\x00\x04\x04\x00\x00\x00\x00\x00" + b"\x00" * 2, "UNAVAILABLE", id="half a frame"),
    ],
)  # fmt: skip
def test_other_server_is_an_error(short_path: Path, said: bytes, message: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_path / "k.sock"))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match=message):
            kubelet.read_devices(short_path / "k.sock")
        thread.join()


def test_kubelet_without_an_answer_times_out(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet, "TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_path / "k.sock"))
        listening.listen()
        with pytest.raises(OSError, match="DEADLINE_EXCEEDED"):
            kubelet.read_devices(short_path / "k.sock")


def test_missing_kubelet_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"UNAVAILABLE: .*No such file"):
        kubelet.read_devices(tmp_path / "none.sock")


@any_of(st.binary(max_size=200))
def test_any_message_is_read_or_rejected(message: bytes) -> None:
    try:
        found = kubelet.parse(message)
    except ValueError:
        return

    assert all(len(key) == 3 for key in found)


@any_of(st.integers(min_value=0, max_value=60))
def test_truncated_message_is_rejected_or_has_less(size: int) -> None:
    whole = resources(("ml", "llm-0", "server", {"nvidia.com/gpu": ["GPU-1"]}))
    if 0 < size < len(whole):
        with pytest.raises(ValueError, match="kubelet's answer"):
            kubelet.parse(whole[:size])


# Containers of pods


def test_container_of_a_pod_has_its_name_and_budget_from_the_api(host: Host, cluster: Cluster) -> None:
    host.process(41, f"{GROUP}/cri-containerd-{ID}.scope", ticks=5)
    host.process(42, f"{GROUP}/cri-containerd-{ID}.scope", ticks=4)
    cluster.pods = {"items": [a_pod(restarts=2, limits={VRAM: "3k", "nvidia.com/gpu": "1"})]}

    found = only(on(host, api=of(cluster)))

    assert found == Container(
        kind="kubernetes",
        id=ID,
        name="ml/llm-0/server",
        incarnation=f"{UID}@{ID}@2",
        pid=42,
        gpu_request=("nvidia.com/gpu",),
        image="llm:1",
        vram_budget=VramBudget(budget_bytes=3000 * build.MIB),
        managed=False,
        namespace="ml",
        pod="llm-0",
        group=f"{host.top}/{GROUP}/cri-containerd-{ID}.scope",
    )
    assert cluster.asked == [
        "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-1&resourceVersion=0",
        "/api/v1/nodes/node-1",
    ]


def test_container_of_a_pod_has_its_name_from_the_kubelets_links_without_the_api(host: Host) -> None:
    host.process(41, f"kubepods/burstable/pod{UID}/{ID}", gpus="GPU-1")
    host.process(51, f"kubepods/burstable/pod{UID}/{OTHER}")  # its sandbox, which has no log
    logs = host.proc.parent / "logs"
    link(logs, restarts=3)
    link(logs, "ab" * 32)  # ended, its log still there
    (logs / "README").write_text("")
    (logs / f"x_y_z-{'cd' * 32}.log").write_text("no link")

    found = only(on(host))

    assert (found.name, found.namespace, found.pod) == ("ml/llm-0/server", "ml", "llm-0")
    assert (found.incarnation, found.pid) == (f"{UID}@{ID}@3", 41)
    assert (found.gpu_request, found.vram_budget) == (("GPU-1",), VramBudget())


@pytest.mark.parametrize("length", [12, 30, 63])
def test_log_link_of_a_long_pod_name_names_its_container_by_the_start_of_the_id(host: Host, length: int) -> None:
    host.process(41, f"kubepods/burstable/pod{UID}/{ID}", gpus="GPU-1")
    pod = "p" * (255 - len(f"_ml_server-{ID[:length]}.log"))
    link(host.proc.parent / "logs").unlink()
    cut = f"{pod}_ml_server-{ID}"[:251]
    (host.proc.parent / "logs" / f"{cut}.log").symlink_to(f"/var/log/pods/ml_{pod}_{UID}/server/0.log")
    pods = on(host)

    found = [only(pods) for _ in range(2)]

    assert [(each.id, each.name, each.gpu_request) for each in found] == [(ID, f"ml/{pod}/server", ("GPU-1",))] * 2


@pytest.mark.parametrize(
    ("devices", "request_"),
    [
        pytest.param({"nvidia.com/gpu": ["GPU-1", "GPU-2"]}, ("GPU-1", "GPU-2"), id="GPUs"),
        pytest.param({"nvidia.com/gpu": ["GPU-1::0", "GPU-1::3"]}, ("GPU-1",), id="time-sliced shares of one GPU"),
        pytest.param({"nvidia.com/mig-1g.10gb": ["MIG-1"]}, ("MIG-1",), id="MIG instance"),
        pytest.param({"nvidia.com/gpu.shared": ["GPU-1::0"]}, ("GPU-1",), id="shares under the shared resource name"),
        pytest.param({"amd.com/gpu": ["0000:03:00.0"]}, ("0000:03:00.0",), id="AMD"),
        pytest.param({"amd.com/cpx_nps4": ["amdgpu_xcp_30"]}, ("amdgpu_xcp_30",), id="AMD partition"),
        pytest.param({"gpu.intel.com/xe": ["card0-0", "card0-1", "card1-0"]}, ("card0", "card1"), id="Intel"),
        pytest.param({"nvidia.com/gpu": ["nvidia0/vgpu1", "nvidia1/gi3"]}, ("0", "1/gi3"), id="GKE"),
        pytest.param({"aliyun.com/gpu-mem": [f"{UUID}-_-0", f"{UUID}-_-1"]}, (UUID,), id="Aliyun"),
        pytest.param({"volcano.sh/vgpu-number": [f"{UUID}-3"]}, (UUID,), id="HAMi"),
        pytest.param({"gpu.nvidia.com": ["gpu-0", "gpu-3"]}, ("0", "3"), id="NVIDIA's DRA driver"),
        pytest.param({"compute-domain.nvidia.com": ["channel-0"]}, None, id="another DRA driver"),
        pytest.param({"example.com/gpu": ["a", "b"]}, ("example.com/gpu",), id="GPUs with other names"),
        pytest.param({"gpu.intel.com/i915_monitoring": ["all"]}, None, id="Intel monitoring"),
        pytest.param({"nvidia.com/hostdev": ["0000:3b:00.2"]}, None, id="NVIDIA network card"),
        pytest.param({"example.com/nic": ["nic0"]}, None, id="other devices"),
        pytest.param({}, None, id="no devices"),
    ],
)
def test_gpus_of_a_pod_are_those_listed_by_the_kubelet(
    host: Host, short_path: Path, devices: dict[str, list[str]], request_: tuple[str, ...] | None
) -> None:
    host.process(41, f"{GROUP}/crio-{ID}.scope/container", gpus="all")
    link(host.proc.parent / "logs")
    with a_kubelet(short_path / "k.sock", lambda: resources(("ml", "llm-0", "server", devices))) as path:
        assert only(on(host, pod_resources=path)).gpu_request == request_


@pytest.mark.parametrize(
    ("limits", "request_"), [({"nvidia.com/gpu": "1"}, ("nvidia.com/gpu",)), ({"cpu": "1"}, None), (None, None)]
)
def test_limit_without_the_kubelets_socket_shows_only_whether_it_has_gpus(
    host: Host, cluster: Cluster, limits: dict[str, str] | None, request_: tuple[str, ...] | None
) -> None:
    host.process(41, f"{GROUP}/crio-{ID}.scope", gpus="GPU-1")
    cluster.pods = {"items": [a_pod(limits=limits)]}

    assert only(on(host, api=of(cluster))).gpu_request == request_


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(a_pod(waiting={"reason": "CrashLoopBackOff"}), id="waits for a restart"),
        pytest.param(a_pod(terminated={"exitCode": 1}), id="ended"),
        pytest.param({**a_pod(), "status": {}}, id="not started yet"),
        pytest.param({**a_pod(), "status": {"containerStatuses": [{"name": "server", "state": {}}]}}, id="no id yet"),
    ],
)
def test_pod_container_that_does_not_run_is_ignored(pod: dict[str, Any]) -> None:
    assert running_containers(pod, BudgetSources()) == []


def test_init_and_ephemeral_containers_belong_to_the_pod() -> None:
    pod = a_pod()
    for kind, full_id in (("init", "ab" * 32), ("ephemeral", "cd" * 32)):
        pod["spec"][f"{kind}Containers"] = [{"name": kind, "image": f"{kind}:1"}]
        status = {**pod["status"]["containerStatuses"][0], "name": kind, "containerID": f"cri-o://{full_id}"}
        pod["status"][f"{kind}ContainerStatuses"] = [status]

    assert {(each.name, each.image) for each in running_containers(pod, BudgetSources())} == {
        ("server", "llm:1"),
        ("init", "init:1"),
        ("ephemeral", "ephemeral:1"),
    }


def test_first_container_with_a_gpu_has_the_budget_of_the_pod() -> None:
    def budgets(*gpus: str) -> dict[str, int | None]:
        pod = a_pod(limits={VRAM: "1000"})
        (status,) = pod["status"]["containerStatuses"]
        pod["status"]["containerStatuses"] = [status, {**status, "name": "other", "containerID": f"docker://{OTHER}"}]
        pod["spec"]["containers"].append(
            {"name": "other", "resources": {"limits": {VRAM: "500"} | dict.fromkeys(gpus, "1")}}
        )
        found = running_containers(pod, BudgetSources())
        return {each.name: each.vram_budget.budget_bytes for each in found}

    assert budgets() == {"server": 1500 * build.MIB, "other": None}
    assert budgets("nvidia.com/gpu") == {"server": None, "other": 1500 * build.MIB}


def test_restarted_container_is_another_incarnation_with_the_same_name(host: Host, cluster: Cluster) -> None:
    host.process(41, f"{GROUP}/cri-containerd-{ID}.scope")
    cluster.pods = {"items": [a_pod()]}
    listing = on(host, api=of(cluster))
    first = only(listing)
    host.remove(f"{GROUP}/cri-containerd-{ID}.scope")
    host.process(41, f"{GROUP}/cri-containerd-{OTHER}.scope", ticks=99)
    cluster.pods = {"items": [a_pod(OTHER, restarts=1)]}

    second = only(listing)

    assert first.name == second.name
    assert second.incarnation == f"{UID}@{OTHER}@1"


# Repeated listings


@contextmanager
def asked(source: Pods) -> Iterator[Pods]:
    source.start()
    try:
        yield source
    finally:
        source.close()


def test_container_without_its_group_is_removed_before_the_api_removes_it(host: Host, cluster: Cluster) -> None:
    host.process(41, f"{GROUP}/cri-containerd-{ID}.scope")
    cluster.pods = {"items": [a_pod()]}
    with asked(on(host, api=of(cluster))) as source:
        before = list(source.latest().containers)
        host.remove(f"{GROUP}/cri-containerd-{ID}.scope")

        assert (before, source.latest().containers) == ([ID], {})
        assert source.latest().ids == {ID}  # so that it does not count as unlisted


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        pytest.param(403, {}, "list the pods of this node: HTTP 403: Forbidden; grant the account", id="forbidden"),
        pytest.param(500, {}, "HTTP 500", id="server error"),
        pytest.param(200, {"kind": "Status"}, "KeyError", id="no list"),
        pytest.param(200, ["nonsense"], "TypeError", id="nonsense"),
        pytest.param(
            200,
            {"items": [{**a_pod(), "status": {"containerStatuses": ["x"]}}]},
            "AttributeError",
            id="container is a text",
        ),
    ],
)
def test_failing_api_is_reported(host: Host, cluster: Cluster, status: int, answer: Any, message: str) -> None:
    cluster.status, cluster.pods = status, answer
    with asked(on(host, api=of(cluster))) as source, pytest.raises(OSError, match=message):
        source.latest()


@pytest.mark.usefixtures("hasty")
def test_api_with_an_invalid_answer_is_listed_again(host: Host, cluster: Cluster) -> None:
    host.process(41, f"{GROUP}/cri-containerd-{ID}.scope")
    cluster.pods = {"items": [{**a_pod(), "status": {"containerStatuses": ["x"]}}]}
    with asked(on(host, api=of(cluster))) as source:
        with pytest.raises(OSError, match="cannot be listed"):
            source.latest()
        cluster.pods = {"items": [a_pod()]}

        assert list(eventually(lambda: listing_of(source)).containers) == [ID]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often."""
    monkeypatch.setattr(kubernetes, "REFRESH_S", 0.05)


def listing_of(source: Pods) -> Listing | None:
    with suppress(OSError):
        return source.latest()
    return None


def test_missing_api_or_folder_of_links_is_reported(host: Host) -> None:
    unreachable = Api(client_of("http://127.0.0.1:1"), node="node-1", budgets=BudgetSources())
    for sources, message in (
        ({"api": unreachable}, "no answer from the Kubernetes API"),
        ({}, "the kubelet's logs in"),
    ):
        with asked(on(host, **sources)) as source, pytest.raises(OSError, match=message):
            source.latest()


def test_node_without_the_kubelets_socket_has_its_pods(host: Host, short_path: Path) -> None:
    host.process(41, f"{GROUP}/crio-{ID}.scope", gpus="GPU-1")
    link(host.proc.parent / "logs")
    answer = resources(("ml", "llm-0", "server", {"nvidia.com/gpu": ["GPU-2"]}))
    source = on(host, pod_resources=short_path / "k.sock", pod_resources_wanted=False)

    without = source.list_now()
    with a_kubelet(short_path / "k.sock", lambda: answer):
        with_socket = source.list_now()
    (short_path / "k.sock").unlink(missing_ok=True)
    gone = source.list_now()

    assert [gpus_of(each) for each in (without, with_socket, gone)] == [("GPU-1",), ("GPU-2",), ("GPU-2",)]
    assert [[part.success for part in each.other_sources] for each in (without, with_socket, gone)] == [
        [],
        [True],
        [False],
    ]


@pytest.mark.parametrize("answer", ["none", "garbage"])
def test_silent_kubelet_does_not_affect_pods(host: Host, short_path: Path, tmp_path: Path, answer: str) -> None:
    path = short_path / "k.sock"
    host.process(41, f"{GROUP}/crio-{ID}.scope", gpus="GPU-1")
    link(host.proc.parent / "logs")
    with a_kubelet(path, lambda: b"\xff") if answer == "garbage" else nullcontext():
        source = on(host, pod_resources=path)
        with asked(source):
            sampler = Sampler(
                host="box-1", directory=tmp_path, containers={"kubernetes": source}, gpus=None, thresholds=Thresholds()
            )
            snapshot = sampler.sample()

    by_source = {each.source: each for each in snapshot.sources}
    assert [each.container.name for each in snapshot.containers] == ["ml/llm-0/server"]
    assert snapshot.containers[0].container.gpu_request == ("GPU-1",)  # as without the socket
    assert (by_source["kubernetes"].success, by_source["pod_resources"].success) == (True, False)
    assert f"the kubelet at {path}: " in (by_source["pod_resources"].message or "")
    assert by_source["pod_resources"].succeeded_unix_s is None


def gpus_of(listing: Listing) -> tuple[str, ...] | None:
    (found,) = listing.containers.values()
    return found.gpu_request


def test_old_listing_expires(host: Host, cluster: Cluster) -> None:
    with asked(on(host, api=of(cluster))) as source:
        source.latest()
        source._fresh_s = 0.0

        with pytest.raises(OSError, match="cannot be listed"):
            source.latest()


def test_groups_of_ended_containers_are_not_searched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.process(41, f"{GROUP}/crio-{ID}.scope")
    logs = host.proc.parent / "logs"
    link(logs)
    link(logs, "ab" * 32)
    walks: list[Path] = []
    walk = cgroup.containers

    def count(root: Path) -> dict[str, Path]:
        walks.append(root)
        return walk(root)

    monkeypatch.setattr(cgroup, "containers", count)
    source = on(host)
    for _ in range(3):
        source.list_now()
    host.process(51, f"{GROUP}/crio-{OTHER}.scope")
    link(logs, OTHER)
    found = source.list_now()

    assert (len(walks), set(found.containers)) == (2, {ID, OTHER})


def test_hundreds_of_ended_pods_leave_no_state(host: Host, cluster: Cluster) -> None:
    source = on(host, api=of(cluster))
    for round_ in range(20):
        ids = [f"{round_ * 10 + number:064x}" for number in range(10)]
        for number, full_id in enumerate(ids):
            host.process(100 + number, f"{GROUP}/cri-containerd-{full_id}.scope", ticks=round_)
        cluster.pods = {"items": [a_pod(each) for each in ids]}

        assert sorted(source.list_now().containers) == ids
        for full_id in ids:
            host.remove(f"{GROUP}/cri-containerd-{full_id}.scope")
    cluster.pods = {"items": []}

    assert source.list_now().containers == {}
    assert (source._groups, source._absent) == ({}, frozenset())


# Samples


def test_processes_and_ram_are_found_from_another_cgroup_namespace(host: Host, cluster: Cluster) -> None:
    """There the kernel reports paths relative to the exporter's cgroup, which do not exist below the root."""
    host.process(41, f"{GROUP}/cri-containerd-{ID}.scope")
    (host.proc / "41/cgroup").write_text(host.line.format(f"../../pod1/cri-containerd-{ID}.scope") + "\n")
    cluster.pods = {"items": [a_pod()]}

    pids, ram = host.places().read(only(on(host, api=of(cluster))))

    assert (set(pids or ()), ram.usage_bytes) == ({41}, 1000)


def test_node_without_a_memory_controller_has_unknown_ram(host: Host, cluster: Cluster) -> None:
    host.process(41, f"{GROUP}/cri-containerd-{ID}.scope")
    (host.top / f"{GROUP}/cri-containerd-{ID}.scope" / host.usage).unlink()
    cluster.pods = {"items": [a_pod()]}

    pids, ram = host.places().read(only(on(host, api=of(cluster))))

    assert (set(pids or ()), ram.usage_bytes) == ({41}, None)
    assert ram.unknown is not None
    assert ram.unknown.reason == "no_controller"


def test_container_of_a_pod_is_published(host: Host, cluster: Cluster, short_path: Path, tmp_path: Path) -> None:
    """Only under its pod's name, although Docker lists it too as the runtime of some clusters."""
    host.process(os.getpid(), f"{GROUP}/cri-containerd-{ID}.scope")
    cluster.pods = {"items": [a_pod(restarts=1, limits={VRAM: "100"})]}
    gpus = build.gpus(build.gpu(0, build.process(os.getpid(), 0.25, 200 * build.MIB)), build.gpu(1))
    dockers = Docker(build.container(id=ID, name="k8s_server_llm-0_ml"))
    answer = resources(("ml", "llm-0", "server", {"nvidia.com/gpu": ["GPU-0"]}))
    with (
        a_kubelet(short_path / "k.sock", lambda: answer) as path,
        asked(on(host, api=of(cluster), pod_resources=path)) as source,
    ):
        sampler = Sampler(
            host="box-1",
            directory=tmp_path,
            containers={"docker": dockers, "kubernetes": source},
            gpus=lambda: gpus,
            thresholds=Thresholds(),
            places=host.places(),
        )
        text = scraped(sampler.sample(), now=clock.stamp())

    name = 'container="ml/llm-0/server"'
    identity = rf'{name},container_id="{ID}",.*,kind="kubernetes",namespace="ml",pod="llm-0"'
    assert re.search(rf"gpuwarden_container_info{{{identity}}} 1.0", text)
    assert published(text, f'gpuwarden_container_gpu_memory_bytes{{{name},gpu="GPU-0"}}') == 200 * build.MIB
    assert published(text, f"gpuwarden_container_gpu_memory_budget_bytes{{{name}}}") == 100 * build.MIB
    assert published(text, f"gpuwarden_container_recyclable{{{name}}}") == 0
    assert published(text, f"gpuwarden_container_memory_bytes{{{name}}}") == 1000
    assert published(text, 'gpuwarden_collector_success{collector="source_kubernetes"}') == 1
    assert "k8s_server" not in text


def published(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, series
    return float(found.group(1))


# Settings


def settings(*options: str) -> Settings:
    return CliApp.run(Settings, cli_args=list(options))


def test_api_needs_the_name_of_the_node() -> None:
    with pytest.raises(ValidationError, match="--pods api needs --node-name"):
        settings("--pods=api")


def test_links_need_no_api_and_the_kubelets_socket_is_optional() -> None:
    source = make_pods(settings("--pods=logs", "--pod-resources=none"))

    assert (source._api, source._pod_resources) == (None, None)

    default, with_socket = make_pods(settings("--pods=logs")), make_pods(settings(f"--pod-resources={kubelet.SOCKET}"))
    assert (default._pod_resources, default._kubelet_wanted) == (kubelet.SOCKET, False)
    assert (with_socket._pod_resources, with_socket._kubelet_wanted) == (kubelet.SOCKET, True)


def test_program_lists_the_pods_of_its_node(cluster: Cluster, house: Path, short_path: Path) -> None:
    user = {"clusters": [{"name": "c", "cluster": {"server": cluster.url}}], "users": [{"name": "u", "user": {}}]}
    context = {"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "current-context": "c"}
    (short_path / "kubeconfig").write_text(json.dumps(user | context))
    with a_kubelet(short_path / "k.sock", lambda: b"") as path:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuwarden", "exporter", "--runtime-dir", str(house), "--docker=none", "--nvml=off",
             "--port=0", "--pods=api", f"--kubeconfig={short_path}/kubeconfig", "--node-name=node-1",
             f"--pod-resources={path}"],
            env={name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stderr
            ready = json.loads(next(line for line in process.stderr if "exporter ready" in line))
            wanted = 'gpuwarden_collector_success{collector="source_kubernetes"} 1.0'
            eventually(lambda: wanted in scrape(ready["port"]), "the pods are listed", within_s=20)
        finally:
            process.terminate()
            process.communicate(timeout=20)

    assert "spec.nodeName%3Dnode-1" in cluster.asked[0]


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        found: str = answer.read().decode()
    return found.splitlines()


@pytest.mark.behaviour("C1")
@pytest.mark.parametrize(
    ("status", "advertised_bytes"),
    [
        ({"allocatable": {"cpu": "2", VRAM: "14k"}}, 14000 * 2**20),
        ({"allocatable": {"cpu": "2"}}, 0),
        ({}, 0),
    ],
)
def test_memory_that_the_node_advertises_is_read(
    host: Host, cluster: Cluster, status: dict[str, Any], advertised_bytes: int
) -> None:
    cluster.node = {"status": status}

    listing = on(host, api=of(cluster)).list_now()

    assert listing.advertised_bytes == advertised_bytes
    assert [(each.source, each.success) for each in listing.other_sources] == [("node", True)]


@pytest.mark.behaviour("C1")
@pytest.mark.parametrize(
    ("limits", "allocatable", "declared_mib"),
    [
        ({VRAM: "1k"}, {VRAM: "14k"}, 1000),
        ({VRAM: "1k"}, {}, 1000),
        ({VRAM: "1k", HAMI: "2k"}, {HAMI: "0"}, 2000),
        ({HAMI: "2k"}, {VRAM: "14k"}, 0),
        ({HAMI: "2k"}, {}, 0),
        ({VRAM: "much"}, {VRAM: "14k"}, 0),
        (None, {}, 0),
    ],
)
def test_pods_declare_memory_in_the_resource_of_the_node(
    host: Host, cluster: Cluster, limits: dict[str, str] | None, allocatable: dict[str, str], declared_mib: int
) -> None:
    pod = a_pod(limits=limits)
    (status,) = pod["status"]["containerStatuses"]
    pod["status"]["containerStatuses"].append({**status, "name": "other", "containerID": f"containerd://{OTHER}"})
    pod["metadata"]["annotations"] = {"gpu-memory": "3000"}
    cluster.pods, cluster.node = {"items": [pod]}, {"status": {"allocatable": allocatable}}
    budgets = BudgetSources(resources=(VRAM, HAMI), annotations=("gpu-memory",))

    assert on(host, api=of(cluster, budgets=budgets)).list_now().declared_bytes == declared_mib * build.MIB


@pytest.mark.behaviour("C1")
def test_pods_declare_a_resource_of_another_name_that_the_node_lost(host: Host, cluster: Cluster) -> None:
    cluster.pods, cluster.node = {"items": [a_pod(limits={"acme/vram": "1k"})]}, {"status": {"allocatable": {}}}

    listing = on(host, api=of(cluster, budgets=BudgetSources(resources=("acme/vram",)))).list_now()

    assert (listing.declared_bytes, listing.advertised_bytes) == (1000 * build.MIB, 0)


@pytest.mark.behaviour("C1")
@pytest.mark.parametrize(("node_status", "node"), [(403, {"message": "no"}), (200, {"kind": "Node"}), (200, [])])
def test_node_that_cannot_be_read_costs_only_its_figure(
    host: Host, cluster: Cluster, node_status: int, node: Any
) -> None:
    cluster.pods = {"items": [a_pod()]}
    cluster.node_status, cluster.node = node_status, node

    listing = on(host, api=of(cluster)).list_now()

    assert listing.advertised_bytes is None
    assert [(each.source, each.success) for each in listing.other_sources] == [("node", False)]
    assert listing.ids == {ID}
