"""A real Prometheus for tests, with the project's own rules, and a host for it to scrape."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from deploy.standalone import debian_packages, package_data
from tests.remediator.builders import HOST
from tests.remediator.listening import listening

Series = Mapping[tuple[str, str], float | str]
"""Published series: values by name and labels."""


class Answering:
    """An HTTP server on loopback. `answer` returns the status and body of each request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        its = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                its.asked.append(f"{self.path} {self.rfile.read(length).decode()}")
                with suppress(ConnectionError):  # the client closed the connection
                    its.reply(self)

            do_POST = do_GET  # noqa: N815 - http.server's own names

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.address}"

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        status, body = self.answer(request.path)
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def answer(self, path: str) -> tuple[int, bytes]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Scraped(Answering):
    """A host that publishes `series`, or answers nothing while they are `None`."""

    series: Series | None = None

    def answer(self, _: str) -> tuple[int, bytes]:
        if self.series is None:
            return 503, b"down"
        lines = [f"{name}{{{labels}}} {value}\n" for (name, labels), value in self.series.items()]
        return 200, "".join(lines).encode()


@contextmanager
def prometheus(
    folder: Path, *scraped: str, host_label: str = "host", alertmanager: str = "", **job: Any
) -> Iterator[str]:
    """Run a Prometheus with short intervals. Yields its URL.

    Args:
        folder: keeps its data; a later run in the same folder reads them.
        scraped: addresses of targets.
        host_label: the label that names the host.
        alertmanager: address that gets the alerts.
        job: more fields of the scrape config.
    """
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in package_data.rules()],
        "scrape_configs": [
            {"job_name": "host", "static_configs": [{"targets": list(scraped), "labels": {host_label: HOST}}], **job}
        ],
    }
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        *(str(debian_packages.find("prometheus")), f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0", "--log.format=json"),
    ]
    with listening(command, folder / "log") as url:
        yield url
