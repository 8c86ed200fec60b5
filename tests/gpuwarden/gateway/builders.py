"""A central gateway, and requests of a host to it."""

import gzip
import http.client
import json
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.certificates import Authority
from tests.gpuwarden.worker.builders import Spawn
from tests.waiting import eventually

PAGE: Final = Path(__file__).parents[3] / "docs" / "reference" / "metrics-gateway.md"


def documented() -> dict[str, tuple[str, str]]:
    """Type and meaning of each documented series of `/metrics`; those of `/reports` are about hosts."""
    rows = re.findall(r"^\| `(gpuwarden_gateway_\w+)` \| (\w+) \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (kind, meaning) for name, kind, meaning in rows if "_gateway_host_" not in name}


def described(page: str) -> dict[str, tuple[str, str]]:
    """Type and meaning of each series of a page."""
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE))
    return {name: (kinds[name], meaning) for name, meaning in re.findall(r"^# HELP (\w+) (.*)$", page, re.MULTILINE)}


class Reply(NamedTuple):
    """An answer."""

    status: int
    content: Any

    @property
    def kind(self) -> str:
        """The kind of error."""
        return str(self.content["error"]["kind"])


class CentralDoor:
    """A central gateway on loopback, with TLS if an authority is given."""

    def __init__(self, spawn: Spawn, folder: Path, url: str, *options: str, ours: Authority | None = None) -> None:
        self._spawn, self._url, self._options, self.ours, self.port = spawn, url, options, ours, 0
        if ours is not None:
            web = folder / "web.yml"
            web.write_text(f"tls_server_config: {{cert_file: {ours.server.cert}, key_file: {ours.server.key}}}\n")
            self._options = (*options, "--web-config-file", str(web))
        self.log = folder / "central.log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start it, on the same port as before."""
        its = ["--queue-db", self._url, "--port", str(self.port), *self._options]
        self.process = self._spawn("-m", "gpuwarden", "gateway", "central", *its, stderr=self.log)
        eventually(lambda: "gateway ready" in self.log.read_text(), "the gateway is ready", log=self.log.read_text)
        found = re.search(r'"port": (\d+)', self.log.read_text())
        assert found is not None
        self.port = int(found[1])
        return self.process

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'http' if self.ours is None else 'https'}://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection."""
        if self.ours is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        context = ssl.create_default_context(cafile=str(self.ours.own.cert))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)

    def post(self, path: str, body: bytes | str | dict[str, Any], token: str | None = None, **headers: str) -> Reply:
        """A request as any program can make it."""
        its = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            its["Authorization"] = f"Bearer {token}"
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        connection = self.connect()
        try:
            connection.request("POST", path, sent, its)
            answer = connection.getresponse()
            return Reply(answer.status, json.loads(answer.read()))
        finally:
            connection.close()

    def report(self, page: str, token: str, **headers: str) -> Reply:
        """A report with an exporter's page."""
        return self.post("/api/v1/report", gzip.compress(page.encode()), token, Content_Encoding="gzip", **headers)

    def get(self, path: str) -> str:
        """A page."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()
        finally:
            connection.close()

    def published(self) -> set[str]:
        """The published series, without the ages of reports, and without when hosts were heard."""
        about = ("gpuwarden_report_age_", "gpuwarden_gateway_host_")
        return {line for line in self.get("/reports").splitlines() if not line.startswith(about)}

    def refusals(self) -> dict[tuple[str, str], float]:
        """Refused requests, by caller and reason."""
        found = re.findall(
            r'^gpuwarden_gateway_refused_requests_total\{caller="(.*)",reason="(.*)"\} (.*)$',
            self.get("/metrics"),
            re.MULTILINE,
        )
        return {(caller, reason): float(count) for caller, reason, count in found}
