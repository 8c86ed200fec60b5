"""An API server with one node that answers as a test says: errors, delays and broken events."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from remediator.seats import POLICIES, RESOURCE


@dataclass
class Failure:
    """An answer instead of the right one. With `hangs` there is none before the server ends."""

    status: int = 500
    body: str = '{"kind": "Status", "message": "as the test says"}'
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs: bool = False


class Api(ThreadingHTTPServer):
    """The API. `failures` are used up first, by verb: read, list, patch or watch."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = "node-1"
        self.capacity: dict[str, str] = {"cpu": "2"}
        self.labels: dict[str, str] = {"nvidia.com/gpu.present": "true"}
        self.taints: list[Mapping[str, str]] = []
        self.pods: list[dict[str, Any]] = []
        self.cached_pods: list[dict[str, Any]] | None = None
        """What it lists for the resource version 0, if that differs."""

        self.failures: dict[str, list[Failure]] = {}
        self.events: list[str] = []
        """Lines that the next watches send before they end."""

        self.policies = list(POLICIES)
        self.requests: list[str] = []
        self.ends = threading.Event()
        self.version = 1

    def node(self) -> dict[str, Any]:
        metadata = {"name": self.name, "labels": self.labels, "resourceVersion": str(self.version)}
        return {
            "kind": "Node",
            "metadata": metadata,
            "spec": {"taints": self.taints},
            "status": {"capacity": self.capacity, "allocatable": self.capacity},
        }

    def handle_error(self, *_: object) -> None:
        """Ignore clients that closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        path, asked = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if "watch" in asked:
            if not self._fails("watch"):
                lines, self.server.events = self.server.events, []
                if not lines:
                    self.server.ends.wait(min(0.2, float(asked["timeoutSeconds"][0])))
                self._send(200, "".join(lines))
        elif path.startswith("/api/v1/nodes/"):
            self._answer("read", self.server.node)
        else:
            cached = self.server.cached_pods if asked.get("resourceVersion") == ["0"] else None
            pods = self.server.pods if cached is None else cached
            items = pods if path.endswith("/pods") else [self.server.node()]
            if path.startswith("/apis/"):
                items = [{"spec": {"policyName": name}} for name in self.server.policies]
            self._answer("bindings" if path.startswith("/apis/") else "list", lambda: {"items": items})

    def do_PATCH(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def patch() -> dict[str, Any]:
            if "taints" in sent.get("spec", {}):
                self.server.taints = sent["spec"]["taints"] or []
            for key, value in sent.get("status", {}).get("capacity", {}).items():
                self.server.capacity.pop(key, None)
                if value is not None:
                    self.server.capacity[key] = value
            self.server.version += 1
            return self.server.node()

        self._answer("patch", patch)

    def _answer(self, verb: str, body: Callable[[], dict[str, Any]]) -> None:
        if not self._fails(verb):
            self._send(200, json.dumps(body()))

    def _fails(self, verb: str) -> bool:
        self.server.requests.append(verb)
        left = self.server.failures.get(verb)
        if not left:
            return False
        failure = left.pop(0)
        if failure.hangs:
            self.server.ends.wait(60)
        else:
            self._send(failure.status, failure.body, failure.headers)
        return True

    def _send(self, status: int, body: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def kubernetes_api(kubeconfig: Path) -> Iterator[Api]:
    """Serve the API, and write the kubeconfig that leads to it."""
    api = Api()
    thread = threading.Thread(target=api.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    host, port = api.server_address[:2]
    named = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": f"http://{host!s}:{port}"}}],
        "users": [{"name": "test", "user": {"token": "secret"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    kubeconfig.write_text(json.dumps(named))
    yield api
    api.ends.set()
    api.shutdown()
    api.server_close()
    thread.join()


def pod(mib: int | str, node: str = "node-1", *, phase: str = "Running") -> dict[str, Any]:
    """A pod with a budget."""
    resources = {"limits": {RESOURCE: str(mib)}, "requests": {RESOURCE: str(mib)}}
    return {
        "metadata": {"namespace": "n", "name": f"p{mib}"},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": resources}]},
        "status": {"phase": phase},
    }
