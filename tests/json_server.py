"""A real HTTP server that keeps the JSON bodies it receives."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def json_server(answer_s: float = 0.0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a server that answers after some seconds; yields its URL for Apprise and the bodies."""
    bodies: list[dict[str, Any]] = []

    class Keep(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(answer_s)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Keep) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"json://127.0.0.1:{server.server_port}/hook", bodies
        finally:
            server.shutdown()
            thread.join()
