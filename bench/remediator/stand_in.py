"""An exporter whose workers have all stalled. Run as a program, so that its work is not measured.

`python -m bench.remediator.stand_in PORT PID COUNT`: all its workers are the process PID.
"""

import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, urlsplit

from gpuwarden import clock
from gpuwarden.evidence import render
from gpuwarden.procfs import ProcessId
from tests.remediator.builders import evidence

_NAME: Final = re.compile(r"worker-(\d{4})")


def _main(port: int, pid: int, count: int) -> None:
    found = ProcessId.of(pid)
    incarnation = f"process:{found.pid}:{found.start_ticks}@{clock.boot_id()}"
    names = [f"worker-{each:04}" for each in range(count)]
    page = "".join(f'gpuwarden_worker_alive{{worker="{name}",container="{name}"}} 1\n' for name in names)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path != "/evidence":
                self._answer(200, page)
                return
            worker = parse_qs(url.query).get("worker", [""])[0]
            number = _NAME.fullmatch(worker)
            if number is None or worker not in names:
                self._answer(404, "no such worker")
                return
            place = {"container_kind": "process", "container": worker, "container_incarnation": incarnation}
            job = {"job_id": int(number[1]), "worker_incarnation": f"{int(number[1]):032x}"}
            self._answer(200, render(evidence(host="bench", worker=worker, worker_pid=pid, **place, **job)))

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    _main(*(int(each) for each in sys.argv[1:]))
