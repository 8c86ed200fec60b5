"""Errors of the Kubernetes API, and where its address and credentials come from."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import CoreV1Api

from gpuwarden.errors import GpuwardenError
from gpuwarden.kube import api
from gpuwarden.kube.api import KubeError


class Server:
    """Answers as a test says."""

    def __init__(self) -> None:
        self.url = ""
        self.status, self.body, self.headers = 200, b"{}", dict[str, str]()
        self.hangs = threading.Event()
        self.hangs.set()
        self.length: int | None = None


@pytest.fixture
def server() -> Iterator[Server]:
    its = Server()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            its.hangs.wait(5)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(its.status)
            for name, value in its.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(its.length or len(its.body)))
            self.end_headers()
            self.wfile.write(its.body)

        do_GET = do_POST = respond  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    its.url = f"http://127.0.0.1:{http.server_port}"
    yield its
    its.hangs.set()
    http.shutdown()
    thread.join()
    http.server_close()


def kubeconfig(path: Path, url: str) -> Path:
    """A kubeconfig without credentials."""
    names = {"clusters": [{"name": "c", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}]}
    context = {"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "current-context": "c"}
    path.write_text(json.dumps(names | context))
    return path


def failure(server: Server, tmp_path: Path, **options: Any) -> KubeError:
    """The error of a list of pods."""
    client = api.connect(kubeconfig(tmp_path / "kubeconfig", server.url), **options)
    with pytest.raises(KubeError) as raised, api.request("list pods"):
        api.read_json(CoreV1Api(client).list_namespaced_pod("ml", _preload_content=False))
    return raised.value


def a_status(message: str, **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "message": message, "details": details}).encode()


ANSWERS: dict[str, tuple[int, bytes, str, bool]] = {
    "expired token": (401, a_status("Unauthorized"), "HTTP 401: Unauthorized; the token or certificate", False),
    "forbidden": (403, a_status("pods is forbidden"), "HTTP 403: pods is forbidden; grant the account", False),
    "unknown": (404, b"404 page not found", "HTTP 404: Not Found", False),
    "conflict": (409, a_status("the object has been modified"), "HTTP 409: the object has been modified", False),
    "gone": (410, a_status("too old resource version"), "HTTP 410: too old resource version; .*: list again", False),
    "too many": (429, a_status("slow down"), "HTTP 429: slow down; try again later", True),
    "failing": (500, b"\xff", "HTTP 500: Internal Server Error", True),
    "unavailable": (503, b"[1]", "HTTP 503: Service Unavailable", True),
}


@pytest.mark.parametrize(("status", "body", "message", "temporary"), ANSWERS.values(), ids=ANSWERS)
def test_refusal_says_what_failed_and_what_to_do(
    server: Server, tmp_path: Path, status: int, body: bytes, message: str, *, temporary: bool
) -> None:
    server.status, server.body = status, body

    error = failure(server, tmp_path)

    assert re.match(f"cannot list pods: {message}", str(error))
    assert (error.status, error.is_temporary) == (status, temporary)


def test_wait_of_a_refused_eviction_is_known(server: Server, tmp_path: Path) -> None:
    cause = {"reason": "DisruptionBudget", "message": "The disruption budget web needs 2 healthy pods"}
    server.status, server.body, server.headers = 429, a_status("Cannot evict", causes=[cause]), {"Retry-After": "10"}
    client = api.connect(kubeconfig(tmp_path / "kubeconfig", server.url))

    with pytest.raises(KubeError, match="cannot evict") as raised, api.request("evict pod ml/a"):
        CoreV1Api(client).create_namespaced_pod_eviction("a", "ml", {"metadata": {"name": "a"}})

    assert (raised.value.cause, raised.value.retry_after_s) == ("DisruptionBudget", 10.0)


@pytest.mark.parametrize(
    ("status", "conflicts", "tried", "fails"), [(409, 4, 5, False), (409, 5, 5, True), (429, 1, 1, True)]
)
def test_only_conflicts_are_tried_again(*, status: int, conflicts: int, tried: int, fails: bool) -> None:
    tries: list[int] = []

    def change() -> str:
        tries.append(status)
        if len(tries) <= conflicts:
            raise KubeError("cannot patch it", status=status)
        return "patched"

    with pytest.raises(KubeError) if fails else nullcontext():
        assert api.retry_conflicts(change) == "patched"
    assert len(tries) == tried


def test_slow_api_is_an_error_within_the_timeout(server: Server, tmp_path: Path) -> None:
    server.hangs.clear()

    error = failure(server, tmp_path, timeout_s=0.2)

    assert (error.status, error.is_temporary) == (None, True)
    assert "no answer from the Kubernetes API: " in str(error)


def test_half_an_answer_is_an_error(server: Server, tmp_path: Path) -> None:
    server.body, server.length = b'{"items": [', 100

    assert failure(server, tmp_path).is_temporary


def test_environment_names_the_kubeconfig(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", server.url)))

    assert api.connect().configuration.host == server.url


def test_missing_configuration_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "broken").write_text("a: [")

    for given in (None, *(tmp_path / name for name in ("empty", "none", "text", "broken"))):
        with pytest.raises(GpuwardenError, match=r"(?s)no access to a Kubernetes API: .*; run in a pod .*KUBECONFIG"):
            api.connect(given)


def test_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)

    with pytest.raises(GpuwardenError, match=r"pip install 'gpuwarden\[kubernetes\]'"):
        api.connect()
