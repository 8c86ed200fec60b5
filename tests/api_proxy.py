"""A proxy in front of a real Kubernetes API server that refuses, delays or cuts answers as a test says."""

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from testbed.kubernetes.cluster import Cluster

_PER_CONNECTION: Final = frozenset({"connection", "transfer-encoding", "content-length", "host"})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to requests whose method and path match the pattern `to`, such as `^GET .*/pods`.

    Args:
        status: answer with this status, and send nothing to the API server.
        after: the API server gets the request, and its answer is lost or only half of it arrives.
        hangs: there is no answer.
    """

    to: str = ""
    status: int = 0
    body: str = '{"kind": "Status", "message": "as the test says"}'
    headers: Mapping[str, str] = field(default_factory=dict)
    after: Literal["", "lost", "half"] = ""
    hangs: bool = False


class Proxy(ThreadingHTTPServer):
    """The proxy. Requests without a token have the rights of the administrator."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        pki = cluster.folder / "pki"
        self.upstream = urlsplit(cluster.url).netloc
        self.faults: list[Fault] = []
        self.silent = False
        """Whether watches stay open without an event."""

        self.passed: list[str] = []
        """Requests that the API server answered, as method and path."""

        self.ends = threading.Event()
        self.anonymous = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self.admin = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self.admin.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self.kubeconfig = folder / "proxy.kubeconfig"
        found = json.loads(cluster.kubeconfig.read_text())
        found["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.server_address[1]}"}
        found["users"][0]["user"] = {}
        self.kubeconfig.write_text(json.dumps(found))

    def evictions(self) -> int:
        """How many evictions, without dry runs, the API server answered."""
        return sum("/eviction" in each and "dryRun" not in each for each in self.passed)

    def handle_error(self, *_: object) -> None:
        """Ignore clients that closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_PATCH(self) -> None:
        self._forward()

    def _forward(self) -> None:
        named = f"{self.command} {self.path}"
        fault = next((each for each in self.server.faults if re.search(each.to, named)), None)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is not None and fault.hangs:
            self.server.ends.wait(60)
        elif fault is not None and fault.status:
            self._answer(fault.status, fault.headers, fault.body.encode())
        else:
            self._pass(named, sent, fault)

    def _pass(self, named: str, sent: bytes, fault: Fault | None) -> None:
        context = self.server.anonymous if "Authorization" in self.headers else self.server.admin
        upstream = http.client.HTTPSConnection(self.server.upstream, context=context, timeout=300)
        with closing(upstream), suppress(OSError, http.client.HTTPException):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _PER_CONNECTION}
            upstream.request(self.command, self.path, sent or None, headers)
            answer = upstream.getresponse()
            self.server.passed.append(named)
            if "watch=" in self.path:
                self._stream(answer, fault)
                return
            body = answer.read()
            if fault is not None and fault.after == "lost":
                self.close_connection = True
                return
            keep = body[: len(body) // 2] if fault is not None and fault.after == "half" else body
            self._answer(answer.status, dict(answer.getheaders()), keep)

    def _stream(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        """Forward a watch until either side ends it. While the proxy is silent, events are lost."""
        self.send_response(answer.status)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while line := answer.readline():
            if fault is not None and fault.after == "half":
                self.wfile.write(line[: len(line) // 2] + b"\n")
                return
            if not self.server.silent:
                self.wfile.write(line)
                self.wfile.flush()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _PER_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def api_proxy(cluster: Cluster, folder: Path) -> Iterator[Proxy]:
    """Serve a proxy, and write a kubeconfig that leads to it."""
    with Proxy(cluster, folder) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield proxy
        proxy.ends.set()
        proxy.shutdown()
        thread.join()
